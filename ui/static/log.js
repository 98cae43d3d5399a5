/* The log by byte offset: the latest 2,000 lines, progress lines collapsed, filter, search, follow, copy. */
const {el, setText, hear, filled} = window.MegaTrain;
const texts = props.texts, KEPT = 2000;
const box = el('div', {class: 'log-lines', role: 'log', tabindex: 0, 'aria-label': texts.log, 'aria-live': 'off'});
const search = el('input', {type: 'search', placeholder: texts.log_search, 'aria-label': texts.log_search});
const level = el('select', {'aria-label': texts.log_level},
  el('option', {value: '0'}, texts.log_all), el('option', {value: '1'}, texts.log_warning), el('option', {value: '2'}, texts.log_error));
const follow = el('input', {type: 'checkbox', checked: true});
const copy = el('button', {class: 'mt-button small', type: 'button'}, texts.log_copy);
const count = el('span', {class: 'log-count mt-num'});
element.querySelector('.log-bar').append(el('h3', {}, texts.log), search, level, el('label', {class: 'bar-item'}, follow, texts.log_follow), copy, count);
element.querySelector('.log-body').append(box);
let offset = -1, lines = [], shown = [];

const severity = line => (/\b(ERROR|CRITICAL|FATAL|Traceback)\b|\w+Error\b/.test(line) ? 2 : /\bWARN(ING)?\b/i.test(line) ? 1 : 0);
const matches = line => line.level >= Number(level.value) && (!search.value || line.text.toLowerCase().includes(search.value.toLowerCase()));
const drawn = line => el('div', {class: `line level-${line.level}`}, line.text || ' ');

function redraw() {
  shown = lines.filter(matches);
  box.replaceChildren(...shown.map(drawn));
  settle();
}
function settle() {
  if (!lines.length || !shown.length) box.replaceChildren(el('div', {class: 'line none'}, lines.length ? texts.log_no_match : texts.log_empty));
  setText(count, lines.length ? filled(texts.log_lines, {shown: shown.length, total: lines.length}) : '');
  if (follow.checked) box.scrollTop = box.scrollHeight;
}
function take(reply) {
  if (reply.restart) lines = [];
  offset = reply.offset;
  const fresh = reply.text.split('\n').slice(0, -1)
    .map(text => text.replace(/\r+$/, '').split('\r').pop()).map(text => ({text, level: severity(text)}));
  if (reply.restart) { lines = fresh.slice(-KEPT); return redraw(); }
  if (!fresh.length) return undefined;
  const dropped = Math.max(0, lines.length + fresh.length - KEPT);
  if (dropped || !shown.length) { lines = lines.concat(fresh).slice(-KEPT); return redraw(); }
  lines.push(...fresh);
  const visible = fresh.filter(matches);
  shown.push(...visible);
  box.append(...visible.map(drawn));
  return settle();
}
let top = 0;
box.addEventListener('scroll', () => {        // scrolling up means reading: stop following; the end means following again
  if (box.scrollHeight - box.scrollTop - box.clientHeight < 8) follow.checked = true;
  else if (box.scrollTop < top) follow.checked = false;
  top = box.scrollTop;
});
follow.addEventListener('change', settle);
search.addEventListener('input', redraw);
level.addEventListener('change', redraw);
copy.addEventListener('click', async () => {
  await navigator.clipboard.writeText(shown.map(line => line.text).join('\n'));
  setText(copy, texts.log_copied);
  setTimeout(() => setText(copy, texts.log_copy), 1500);
});
hear(element, 'megatrain:other-run', () => { offset = -1; lines = []; redraw(); });
hear(element, 'megatrain:ask', request => { request.log_offset = offset; });
hear(element, 'megatrain:run', reply => { if (reply.log) take(reply.log); });
redraw();
