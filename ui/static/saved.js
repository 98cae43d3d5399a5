/* Named data sets: save what is open under a name; open one, use it in a new run, delete it. */
const {el, show, setText, filled, hear, poll, buttons} = window.MegaTrain;
const texts = props.texts;
const root = element.querySelector('.saved');
const name = el('input', {type: 'text', maxlength: 40, id: 'set-name', 'aria-describedby': 'set-name-help', autocomplete: 'off', spellcheck: 'false'});
const save = el('button', {class: 'mt-button primary', type: 'submit'}, texts.save);
const form = el('form', {}, el('label', {for: 'set-name'}, texts.set_name), el('span', {class: 'quiet', id: 'set-name-help'}, texts.set_name_help),
  el('span', {class: 'pair'}, name, save));
const notice = el('p', {class: 'note', role: 'status', hidden: true}), list = el('ul', {class: 'sets'});
root.append(el('h2', {class: 'mt-title'}, texts.sets), el('p', {class: 'quiet'}, texts.sets_text), form, notice, list);
root.classList.add('mt-card');
let open = false;

function tell(words, tone) {
  setText(notice, words);
  notice.className = `note mt-${tone}`;
  notice.hidden = !words;
}
function line(set) {
  const ask = filled(texts.set_delete_ask, {name: set.name});
  const specs = [{action: 'open', label: texts.set_open, enabled: !set.damaged}, {action: 'use', label: texts.set_use, enabled: !set.damaged},
    {action: 'delete', label: texts.set_delete, enabled: true, ask}];
  return el('li', {'data-set': set.name}, el('b', {}, set.name), el('span', {class: set.damaged ? 'note mt-bad' : 'quiet'}, set.words),
    el('span', {class: 'set-buttons'}, ...buttons(specs, texts, set.name, act)));
}
async function act(set, action) {
  if (action === 'open') { trigger('open', {name: set}); return; }
  if (action === 'use') { trigger('use', {name: set}); return; }
  const reply = await server.delete({name: set});
  if (!reply || reply.error) tell(reply ? `${reply.error} ${reply.hint}` : texts.no_answer, 'bad');
  else tell(filled(texts.set_deleted, {name: set}), 'ok');
  refresh();
}
form.addEventListener('submit', async event => {
  event.preventDefault();
  if (!open) { tell(texts.why_closed, 'warn'); return; }
  const reply = await server.save({name: name.value});
  if (!reply || reply.error) tell(reply ? `${reply.error} ${reply.hint}` : texts.no_answer, 'bad');
  else { tell(reply.said, 'ok'); name.value = ''; }
  refresh();
});
hear(element, 'megatrain:look', look => {
  open = look.stage === 'done';
  save.setAttribute('aria-disabled', String(!open));
  save.title = open ? '' : texts.why_closed;
});
const refresh = poll(element, async () => {
  const reply = await server.saved({});
  if (reply) show(list, reply.saved, () => (reply.saved.length ? reply.saved.map(line) : [el('li', {class: 'quiet'}, texts.sets_none)]));
  return 5000;
});
