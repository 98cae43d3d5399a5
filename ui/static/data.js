/* The open data: how far the opening is, one row as a conversation or as tokens, and search. Owns the page's only poll. */
const {el, show, setText, filled, poll, say, hear, remember} = window.MegaTrain;
const texts = props.texts;
const part = name => element.querySelector(`.look-${name}`);
const button = (label, action, kind = '') => el('button', {class: `mt-button ${kind}`, type: 'button', onclick: action}, label);
const wait = milliseconds => new Promise(done => setTimeout(done, milliseconds));
const address = new URL(window.location.href).searchParams;
const state = {number: Math.max(1, Number(address.get('row')) || 1), view: address.get('as') === 'tokens' ? 'tokens' : 'talk', words: address.get('find') || ''};
let look = {id: '', stage: 'none'}, opened = '', asked = 0, row = null;

/* The bar: which row, search, view. */
const number = el('input', {type: 'number', min: 1, step: 1, inputmode: 'numeric', 'aria-label': texts.row_number});
const of = el('span', {class: 'quiet mt-num'});
const previous = button('‹', () => go(state.number - 1), 'step'), next = button('›', () => go(state.number + 1), 'step');
for (const [step, label] of [[previous, texts.previous], [next, texts.next]]) { step.setAttribute('aria-label', label); step.title = label; }
const words = el('input', {type: 'search', placeholder: texts.search, 'aria-label': texts.search, maxlength: 500, value: state.words});
const search = el('form', {class: 'look-search', role: 'search'}, words, el('button', {class: 'mt-button', type: 'submit'}, texts.search_go));
const views = el('div', {class: 'mt-segments', role: 'radiogroup', 'aria-label': texts.view});
for (const name of ['talk', 'tokens']) {
  const choice = el('button', {type: 'button', role: 'radio', 'data-value': name}, texts[`view_${name}`]);
  choice.addEventListener('click', () => { state.view = name; keep(); fetchRow(); });
  views.append(choice);
}
const sources = el('div', {class: 'look-sources'}), hits = el('div', {class: 'look-hits', hidden: true});
const place = el('p', {class: 'look-place quiet', role: 'status'}), body = el('div', {class: 'look-row'});
part('open').append(sources, el('div', {class: 'look-bar'}, el('span', {class: 'look-steps'}, previous, number, of, next), views, search), hits, place, body);
part('open').classList.add('mt-card');

function keep() {
  remember({row: state.number > 1 ? state.number : '', as: state.view === 'tokens' ? 'tokens' : '', find: state.words});
  if (document.activeElement !== number) number.value = state.number;
  views.querySelectorAll('button').forEach(choice => choice.setAttribute('aria-checked', String(choice.dataset.value === state.view)));
  previous.disabled = state.number <= 1;
}

function go(wanted) {
  if (!Number.isInteger(wanted) || wanted < 1) return;
  state.number = wanted;
  number.value = wanted;
  keep();
  fetchRow();
}
number.addEventListener('change', () => go(Number(number.value)));

/* Answers that are not there yet are asked for again; what came of an older wish is left out. */
async function answer(call, current) {
  for (;;) {
    const reply = await call();
    if (!current()) return null;
    if (!reply) return {error: texts.no_answer, hint: ''};
    if (reply.again) return null;
    if (!reply.pending) return reply;
    if (look.stage !== 'done' && look.stage !== 'running') return null;
    await wait(150);
  }
}

async function fetchRow(whole = false) {
  const wish = ++asked, id = look.id, tokens = state.view === 'tokens';
  const fresh = () => wish === asked && id === look.id;
  const request = {id, number: state.number, whole, tokens};
  body.classList.add('loading');
  const [first, second] = await Promise.all([answer(() => server.row({...request, tokens: false}), fresh),
    tokens && look.tokens ? answer(() => server.row(request), fresh) : null]);
  if (!fresh() || !first) return;
  body.classList.remove('loading');
  row = first;
  next.disabled = first.more === false || Boolean(first.error);
  setText(place, first.error ? '' : `${texts.row} ${first.row} · ${first.place}`);
  show(body, [first, second, tokens], () => (first.error ? [problem(first)] : [
    first.problem ? el('p', {class: 'note mt-warn'}, filled(texts.not_used, {reason: first.problem})) : '',
    ...(tokens ? tokenView(second) : talkView(first))].filter(Boolean)));
}

const problem = reply => el('div', {class: 'note mt-bad', role: 'alert'}, el('p', {}, reply.error), reply.hint ? el('p', {}, reply.hint) : '');
const more = () => button(texts.show_whole, () => fetchRow(true));

function talkView(found) {
  const turns = found.turns.map(turn => el('li', {class: `turn ${turn.role}${turn.trained ? ' trained' : ''}`},
    el('span', {class: 'turn-head'}, el('b', {}, turn.name), turn.trained ? el('span', {class: 'mt-badge mt-ok'}, texts.trained) : '',
      turn.cut ? el('span', {class: 'quiet mt-num'}, filled(texts.characters, {length: turn.length})) : ''),
    turn.reasoning ? el('details', {open: true}, el('summary', {}, texts.reasoning), el('p', {class: 'words', dir: 'auto'}, turn.reasoning)) : '',
    turn.text ? el('p', {class: 'words', dir: 'auto'}, turn.text) : '',
    ...turn.calls.map(call => el('pre', {tabindex: 0, 'aria-label': texts.calls}, call))));
  return [turns.length ? el('ol', {class: 'turns'}, ...turns) : '',
    found.turns.length < found.num_turns ? el('p', {class: 'quiet'}, filled(texts.turns, {shown: found.turns.length, all: found.num_turns})) : '',
    found.cut ? more() : '',
    el('details', {class: 'found', open: Boolean(found.problem)}, el('summary', {}, texts.as_found), el('pre', {tabindex: 0}, found.values))];
}

function token([shown, kind, id]) {
  const classes = `tok${kind.includes('t') ? ' trained' : ''}${kind.includes('s') ? ' special' : ''}${shown ? '' : ' part'}`;
  return el('span', {class: classes, title: filled(texts.token_id, {id}) + (shown ? '' : `, ${texts.token_part}`)}, shown || '·');
}

function tokenView(found) {
  if (!look.tokens) return [el('p', {class: 'note mt-warn'}, texts.no_tokenizer)];
  if (!found) return [];
  if (found.error) return [problem(found)];
  const legend = ['trained', 'untrained', 'special'].map(name => el('span', {class: `tok ${name}`}, texts[`legend_${name}`]));
  return [
    found.problem && !row.problem ? el('p', {class: 'note mt-warn'}, filled(texts.not_used, {reason: found.problem})) : '',
    found.documents.length ? el('p', {class: 'look-legend'}, ...legend, el('span', {class: 'quiet mt-num'}, filled(texts.token_summary, found))) : '',
    found.change ? el('p', {class: 'note mt-warn'}, filled(texts.token_length, found)) : '',
    ...found.documents.flatMap((document, at) => [
      found.num_documents > 1 ? el('h4', {}, filled(texts.token_document, {number: at + 1, all: found.num_documents})) : '',
      el('p', {class: 'tokens', tabindex: 0}, ...document.map(token))]),
    found.hidden ? el('p', {class: 'quiet mt-num'}, filled(texts.token_hidden, {tokens: found.hidden})) : '', found.cut ? more() : ''];
}

/* Search: rows that hold a text, and further ones from where it stopped. */
let found = [], searched = 0;
async function find(start) {
  const wish = ++searched, id = look.id;
  if (start === 1) found = [];
  hits.hidden = false;
  drawHits(null);
  const reply = await answer(() => server.search({id, words: state.words, start}), () => wish === searched && id === look.id);
  if (!reply || wish !== searched) return;
  if (reply.hits) found.push(...reply.hits);
  drawHits(reply);
}
function drawHits(reply) {
  const lines = found.map(hit => el('li', {}, button([texts.row, hit.row].join(' '), () => go(hit.row), 'small'),
    el('span', {dir: 'auto'}, hit.around[0], el('mark', {}, hit.around[1]), hit.around[2], hit.problem ? el('em', {}, ` (${texts.hit_unused})`) : '')));
  const end = !reply ? el('p', {class: 'quiet'}, texts.searching) : reply.error ? problem(reply)
    : reply.next ? button(filled(texts.search_on, {row: reply.next}), () => find(reply.next), 'small')
      : el('p', {class: 'quiet'}, found.length ? texts.search_end : texts.search_none);
  hits.replaceChildren(el('ol', {}, ...lines), el('div', {class: 'hits-end'}, end, button(texts.search_close, stopSearch, 'small')));
}
function stopSearch() {
  searched += 1;
  state.words = words.value = '';
  hits.hidden = true;
  keep();
}
search.addEventListener('submit', event => {
  event.preventDefault();
  state.words = words.value.trim();
  keep();
  if (state.words) find(1); else stopSearch();
});

/* Opening, and what can go wrong with it. */
async function act(action) {
  const reply = await server.act({action});
  if (!reply || reply.error) say('megatrain:look-notice', {text: reply ? reply.error : texts.no_answer});
  refresh();
}
const pressLook = () => document.getElementById('look-button')?.click();
function job() {
  if (look.stage === 'running') {
    const fill = el('span', {class: 'fill'});
    if (look.fraction !== null) fill.style.width = `${100 * look.fraction}%`;
    return [el('div', {class: 'look-card mt-card', role: 'status'}, el('h3', {}, texts.opening), el('p', {}, texts.opening_text),
      el('span', {class: `track${look.fraction === null ? ' endless' : ''}`}, fill),
      el('p', {class: 'quiet mt-num'}, look.progress || '\u00a0'), button(texts.cancel, () => act('cancel')))];
  }
  if (look.stage === 'stopped') return [el('div', {class: 'look-card mt-card'}, el('h3', {}, texts.stopped), el('p', {}, texts.stopped_text), button(texts.again, pressLook))];
  if (look.stage === 'failed') return [el('div', {class: 'look-card mt-card bad', role: 'alert'}, el('h3', {}, texts.failed), el('p', {}, look.error),
    look.hint ? el('p', {class: 'quiet'}, look.hint) : '', button(texts.again, pressLook))];
  return [];
}
function source(item) {
  const facts = [item.format, item.rows, item.weight].filter(Boolean);
  return el('div', {class: 'look-source'}, el('p', {}, el('b', {}, item.name), el('span', {class: 'quiet mt-num'}, ` ${facts.join(' · ')}`)),
    el('p', {class: 'quiet'}, filled(texts.columns, {columns: item.columns.join(', ')})), ...item.notes.map(words => el('p', {class: 'note mt-warn'}, words)));
}

function draw() {
  show(part('nothing'), look.stage, () => (look.stage !== 'none' ? [] : [el('div', {class: 'mt-empty'}, el('h2', {}, texts.nothing_title),
    el('p', {}, texts.nothing_text), button(texts.look, pressLook, 'primary'))]));
  show(part('job'), [look.stage, look.progress, look.fraction, look.error], job);
  part('open').hidden = look.stage !== 'done';
  if (look.stage !== 'done') return;
  const close = button(texts.close, () => act('close'), 'small');
  close.title = texts.close_help;
  show(sources, look.sources, () => [...look.sources.map(source), close]);
  setText(of, look.total ? filled(texts.of, {rows: look.total.toLocaleString('en')}) : '');
  const now = `${look.id} ${look.opened}`;
  if (now === opened) return;
  const another = opened && !opened.startsWith(`${look.id} `);
  opened = now;
  delete body.dataset.shown;
  if (another) { state.number = 1; number.value = 1; stopSearch(); }
  keep();
  fetchRow();
  if (state.words) find(1);
}

const refresh = poll(element, async () => {
  const reply = await server.look({});
  if (!reply) return 2000;
  look = reply;
  draw();
  say('megatrain:look', look);
  return look.stage === 'running' || look.counting.stage === 'running' ? 500 : 3000;
});
hear(element, 'megatrain:look-again', refresh);
hear(element, 'megatrain:look-act', detail => act(detail.action));
hear(element, 'megatrain:row', detail => { go(detail.row); element.scrollIntoView({block: 'nearest'}); });
