/* The status strip: one line about the run that matters, and the title of the browser tab. Its own poll, on every page. */
const {el, show, setText, poll} = window.MegaTrain;
const texts = props.texts;
const dot = el('span', {class: 'mt-badge mt-idle'});
const name = el('button', {class: 'strip-name', type: 'button', title: texts.open_monitor});
const facts = el('span', {class: 'strip-facts mt-num'});
const actions = el('span', {class: 'strip-actions'});
const notice = el('span', {class: 'strip-notice', role: 'alert', hidden: true});
const bar = el('span', {class: 'strip-bar', 'aria-hidden': 'true'});
const announcer = el('span', {class: 'mt-sr', role: 'status', 'aria-live': 'polite'});
const lost = el('div', {class: 'strip-lost', role: 'alert', hidden: true}, texts.unreachable);
element.querySelector('.strip').append(dot, name, facts, notice, actions, bar, announcer, lost);
let current = '', announced = '', announcedAt = 0;

function announce(reply) {                    // a screen reader hears a change of state, else one line a minute
  const line = `${reply.name}: ${reply.word}. ${reply.facts.join(', ')}`;
  if (reply.word !== announced || Date.now() - announcedAt > 60000) {
    announced = reply.word;
    announcedAt = Date.now();
    setText(announcer, line);
  }
}

function draw(reply) {
  current = reply.run || '';
  dot.className = `mt-badge mt-${reply.tone}`;
  setText(dot, reply.word);
  setText(name, reply.name);
  name.disabled = !current;
  show(facts, reply.facts, () => reply.facts.map(fact => el('span', {}, fact)));
  show(actions, [current, reply.buttons], () => window.MegaTrain.buttons(reply.buttons, texts, current, send));
  bar.style.width = `${100 * (reply.progress || 0)}%`;
  bar.hidden = reply.progress === null;
  if (document.title !== reply.title) document.title = reply.title;
  if (current) announce(reply);
}

/* After a restart the page goes on by itself, as its elements have the same numbers (gradio loads it anew if it was waiting for an
   event). A dashboard of another version has others: it answers, and knows none of our functions. Then only a reload helps. */
const served = window.gradio_config?.app_id;
let unanswered = 0;
const ask = () => server.status({run: (props.value || {}).run || ''});
async function reloadIfRenewed() {
  const reply = await fetch('/gradio_api/app_id').then(found => found.json()).catch(() => null);
  if (reply && served !== undefined && reply.app_id !== served && !(await ask())) window.location.reload();
}

const refresh = poll(element, async () => {
  const reply = await ask();
  lost.hidden = Boolean(reply);
  unanswered = reply ? 0 : unanswered + 1;
  if (unanswered >= 3) await reloadIfRenewed();
  if (reply && !reply.again) draw(reply);
  return reply && reply.idle ? 3000 : 1000;
});
const send = window.MegaTrain.sender(server, texts, notice, refresh);
name.addEventListener('click', () => trigger('open', {run: current}));
watch('value', refresh);

/* Keys: g and a letter for a page, p pauses or continues, ? shows this list. Never while somebody types. */
const pages = {n: 'new_run', m: 'monitor', r: 'runs', d: 'data'};
let leader = -Infinity;
const typing = event => event.ctrlKey || event.metaKey || event.altKey
  || event.target.closest('input, textarea, select, [contenteditable], dialog') !== null;
function keyList() {
  const row = (key, words) => el('li', {}, el('kbd', {}, key), ' ', words);
  const dialog = el('dialog', {class: 'mt-dialog', 'aria-label': texts.keys}, el('h3', {}, texts.keys), el('ul', {class: 'key-list'},
    row('g n', texts.page_new_run), row('g m', texts.page_monitor), row('g r', texts.page_runs), row('g d', texts.page_data),
    row('p', texts.key_pause), row('?', texts.keys)),
  el('div', {class: 'mt-dialog-buttons'}, el('button', {class: 'mt-button', type: 'button', onclick: () => dialog.close()}, texts.close)));
  dialog.addEventListener('close', () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}
function onKey(event) {
  if (!element.isConnected) { document.removeEventListener('keydown', onKey); return; }
  if (typing(event)) return;
  const key = event.key.toLowerCase();
  if (event.timeStamp - leader < 1000 && pages[key])   // when the keys were pressed: a busy page hears of them late
    window.MegaTrain.openPage(pages[key]);
  else if (key === 'p') actions.querySelector("[data-action='pause'], [data-action='continue']")?.click();
  else if (key === '?') keyList();
  leader = key === 'g' ? event.timeStamp : -Infinity;
}
document.addEventListener('keydown', onKey);
