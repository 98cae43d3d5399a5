/* The top of the monitor: which run, its buttons, why it failed, the chain of stages and the six numbers. */
const {el, show, setText, hear, say} = window.MegaTrain;
const texts = props.texts;
const part = name => element.querySelector(`.${name}`);
const picker = el('select', {'aria-label': texts.run});
const state = el('span', {class: 'mt-badge mt-idle'}), chips = el('span', {class: 'chips'});
const actions = el('span', {class: 'actions'});
const notice = el('p', {class: 'notice mt-bad', role: 'alert', hidden: true}), pending = el('p', {class: 'notice mt-warn', hidden: true});
part('top').append(picker, state, chips, actions);
part('notes').append(pending, notice);
const send = window.MegaTrain.sender(server, texts, notice, () => say('megatrain:refresh'));
let run = '';

async function fillPicker() {
  const {runs} = (await server.runs({})) || {};
  if (!runs) return;
  show(picker, [runs, run], () => runs.map(item => el('option', {value: item.run, selected: item.run === run}, `${item.name} · ${item.started}`)));
}
picker.addEventListener('change', () => trigger('pick', {run: picker.value}));
picker.addEventListener('focus', fillPicker);

function chain(links) {
  return links.map(link => {
    const fill = el('span', {class: 'fill'});
    fill.style.width = `${100 * (link.fraction ?? (link.status === 'done' ? 1 : 0))}%`;
    return el('li', {class: `link ${link.status}${link.fraction === null && link.status === 'now' ? ' endless' : ''}`, 'data-phase': link.name,
        'aria-current': link.status === 'now' ? 'step' : null},
      el('span', {class: 'link-name'}, texts[`phase_${link.name}`], el('span', {class: 'mt-sr'}, ` (${texts[`phase_${link.status}`]})`)),
      el('span', {class: 'link-text mt-num'}, link.text), el('span', {class: 'track'}, fill));
  });
}
const arrows = {falling: '↓', rising: '↑', steady: '→'};
function number(item) {
  return el('div', {class: 'number', 'data-number': item.key},
    el('span', {class: 'label'}, texts[`number_${item.key}`]),
    el('span', {class: 'value mt-num'}, item.value,
      item.trend ? el('span', {class: `arrow ${item.trend}`, 'aria-hidden': 'true'}, arrows[item.trend]) : null,
      item.unit ? el('span', {class: 'unit'}, item.unit) : null),
    el('span', {class: 'detail mt-num'}, item.detail || '\u00a0'));
}
function card(error) {
  const copy = el('button', {class: 'mt-button', type: 'button'}, texts.copy_diagnostics);
  copy.addEventListener('click', async () => {
    const reply = await server.diagnostics({run});
    if (!reply || reply.error) return;
    await navigator.clipboard.writeText(reply.text);
    setText(copy, texts.log_copied);
    setTimeout(() => setText(copy, texts.copy_diagnostics), 1500);
  });
  return [el('div', {class: 'explanation', role: 'alert'}, el('h3', {}, error.title), el('p', {}, error.text),
    error.hint ? el('p', {class: 'hint'}, error.hint) : null,
    error.details ? el('details', {}, el('summary', {}, texts.details), el('pre', {}, error.details)) : null,
    el('div', {class: 'ways'}, ...window.MegaTrain.buttons(error.buttons, texts, run, send), copy))];
}

hear(element, 'megatrain:other-run', detail => { run = detail.run; notice.hidden = true; fillPicker(); });
hear(element, 'megatrain:run', reply => {
  const none = !reply.run;
  part('nothing').hidden = !none;
  part('something').hidden = none;
  if (none) return;
  if (run !== reply.run) { run = reply.run; fillPicker(); }
  state.className = `mt-badge mt-${reply.tone}`;
  setText(state, reply.word);
  show(chips, reply.chips, () => reply.chips.map(chip => el('span', {class: 'chip', title: chip}, chip)));
  show(actions, [run, reply.buttons], () => window.MegaTrain.buttons(reply.buttons, texts, run, send));
  setText(pending, reply.pending);
  pending.hidden = !reply.pending;
  show(part('why'), reply.error, () => (reply.error ? card(reply.error) : []));
  show(part('chain'), reply.phases, () => chain(reply.phases));
  show(part('numbers'), reply.numbers, () => reply.numbers.map(number));
});
part('nothing').append(el('h2', {}, texts.empty_title), el('p', {}, texts.empty_text),
  el('button', {class: 'mt-button primary', type: 'button', onclick: () => window.MegaTrain.openPage('new_run')}, texts.empty_button));
fillPicker();
