/* The open data in numbers: what is used, lengths, what became of the rows. Hears the page's poll. */
const {el, show, filled, hear, say, painted} = window.MegaTrain;
const texts = props.texts;
const root = element.querySelector('.figures');
const button = (label, action) => el('button', {class: 'mt-button', type: 'button', onclick: action}, label);
const body = el('div', {class: 'figures-body'}), notice = el('p', {class: 'note mt-bad', role: 'alert', hidden: true});
root.append(el('h2', {class: 'mt-title'}, texts.figures), notice, body);
root.classList.add('mt-card');
let plot = null, figure = null;

const act = action => () => say('megatrain:look-act', {action});
function note(title, words, tone, ...further) {
  return el('div', {class: `note mt-${tone}`, role: tone === 'bad' ? 'alert' : null}, el('p', {}, el('b', {}, title)), ...words.filter(Boolean).map(line => el('p', {}, line)), ...further);
}
function tile(item) {
  return el('div', {class: 'tile', 'data-tile': item.key}, el('dt', {}, item.name), el('dd', {class: 'mt-num'}, item.value), el('dd', {class: 'quiet mt-num'}, item.detail));
}
function example(item, linked) {
  const place = `${texts.row} ${item.row}`;
  return el('li', {}, linked ? el('button', {class: 'mt-button small', type: 'button', onclick: () => say('megatrain:row', {row: item.row})}, place) : el('b', {}, place),
    el('span', {dir: 'auto'}, item.text));
}
function fate(item) {
  const head = [el('span', {}, item.name), el('span', {class: `mt-num count ${item.tone ? `mt-${item.tone}` : ''}`}, item.count)];
  if (!item.tone) return el('div', {class: 'fate none', 'data-fate': item.key}, ...head);
  return el('details', {class: 'fate', 'data-fate': item.key}, el('summary', {}, ...head), item.help ? el('p', {class: 'quiet'}, item.help) : '',
    item.examples.length ? el('ol', {class: 'examples', 'aria-label': texts.examples}, ...item.examples.map(shown => example(shown, item.linked)))
      : el('p', {class: 'quiet'}, texts.no_examples));
}
function mixture(sources) {
  const heads = ['name', 'weight', 'rows', 'tokens', 'share'];
  return [el('h3', {}, texts.sources), el('div', {class: 'scroll'}, el('table', {class: 'grid'},
    el('thead', {}, el('tr', {}, ...heads.map(name => el('th', {scope: 'col'}, texts[`source_${name}`])))),
    el('tbody', {}, ...sources.map(source => el('tr', {}, ...heads.map(name => el('td', {}, source[name]))))))) ];
}
function whole(found) {
  figure = found.histogram;
  plot = figure && el('div', {class: 'plot', role: 'img', 'aria-label': figure.label});
  return [
    ...found.warnings.map(words => el('p', {class: 'note mt-warn', role: 'alert'}, words)),
    el('dl', {class: 'tiles'}, ...found.tiles.map(tile)),
    ...(plot ? [el('h3', {}, texts.lengths), plot] : []),
    el('h3', {}, texts.fates), el('div', {class: 'fates'}, ...found.fates.map(fate)),
    ...(found.sources.length ? mixture(found.sources) : []),
    ...(found.notes.length ? [el('h3', {}, texts.notes), el('ul', {class: 'notes'}, ...found.notes.map(words => el('li', {}, words)))] : []),
  ];
}
function paint() {
  if (!plot || !plot.isConnected) return;
  if (!window.Plotly) { setTimeout(paint, 100); return; }
  const {data, layout} = painted(figure, {});
  window.Plotly.react(plot, data, layout, {responsive: true, displaylogo: false, displayModeBar: false});
}
function counting(job) {
  const fill = el('span', {class: 'fill'});
  if (job.fraction != null) fill.style.width = `${100 * job.fraction}%`;
  return [el('div', {role: 'status'}, el('p', {}, texts.counting), el('p', {class: 'quiet'}, texts.counting_text),
    el('span', {class: `track${job.fraction == null ? ' endless' : ''}`}, fill), el('p', {class: 'quiet mt-num'}, job.progress || '\u00a0'), button(texts.cancel, act('cancel')))];
}
function content(look) {
  const job = look.counting;
  if (job.figures) return whole(job.figures);
  if (job.stage === 'running') return counting(job);
  if (job.stage === 'stopped') return [note(texts.counting_stopped, [texts.counting_stopped_text], 'idle'), button(texts.count, act('count'))];
  if (job.stage === 'failed') return [note(job.nothing_trained ? texts.nothing_trained : texts.counting_failed, [job.error, job.hint], 'bad'), button(texts.again, act('count'))];
  return [el('p', {class: 'quiet'}, look.stage === 'done' && !look.tokens ? texts.figures_no_model : texts.figures_none)];
}
hear(element, 'megatrain:look', look => {
  const before = body.dataset.shown, old = plot;
  if (!look.counting.figures) plot = null;
  show(body, [look.counting, look.stage, look.tokens], () => content(look));
  if (body.dataset.shown === before) return;
  notice.hidden = true;
  if (old && window.Plotly) window.Plotly.purge(old);
  paint();
});
hear(element, 'megatrain:look-notice', detail => { notice.textContent = detail.text; notice.hidden = false; });
new MutationObserver(paint).observe(document.body, {attributes: true, attributeFilter: ['class']});
