/* What happened in the run, newest first. */
const {el, show, hear} = window.MegaTrain;
const texts = props.texts;
const list = el('ol', {class: 'event-list'});
element.querySelector('.events').append(el('h3', {}, texts.events), list);
hear(element, 'megatrain:run', reply => {
  if (!reply.events) return;
  show(list, reply.events, () => (reply.events.length ? reply.events.map(event => el('li', {},
    el('time', {class: 'mt-num', title: event.day}, event.time), el('span', {class: `event-dot mt-${event.tone}`, 'aria-hidden': 'true'}),
    el('span', {}, event.text))) : [el('li', {class: 'none'}, texts.no_events)]));
});
