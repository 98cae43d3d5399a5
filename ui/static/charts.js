/* The monitor's poll and its charts. One request a second brings the run, its figures and its log; other widgets hear about it. */
const {el, show, setText, poll, say, painted} = window.MegaTrain;
const texts = props.texts, stored = 'megatrain.charts';
const defaults = {axis: 'step', window: 'all', smoothing: 20, log: false};
const settings = {...defaults, ...saved()};
const slots = {};
let run = '', seen = '', zoom = null, drawing = 0, wish = 0;

/* All figures anew. What is on its way was asked for before, and is left out when it comes. */
function renew() {
  wish += 1;
  seen = '';
  refresh();
}

function saved() {
  try { return JSON.parse(localStorage.getItem(stored)) || {}; } catch { return {}; }
}
function changed(part, keepZoom) {
  Object.assign(settings, part);
  try { localStorage.setItem(stored, JSON.stringify(settings)); } catch { /* private window: the choice lasts until it is closed */ }
  if (!keepZoom) zoom = null;
  renew();
}

/* The bar above the charts. */
function choice(key, label, options) {
  const group = el('div', {class: 'mt-segments', role: 'radiogroup', 'aria-label': label});
  for (const [value, words] of options) {
    const button = el('button', {type: 'button', role: 'radio', 'data-value': value, 'aria-checked': String(settings[key] === value)}, words);
    button.addEventListener('click', () => {
      group.querySelectorAll('button').forEach(other => other.setAttribute('aria-checked', String(other === button)));
      changed({[key]: value});
    });
    group.append(button);
  }
  return group;
}
const slider = el('input', {type: 'range', min: 0, max: 100, step: 1, 'aria-label': texts.smoothing});
const sliderWords = el('output', {class: 'mt-num'});
const steps = position => (position <= 0 ? 0 : Math.round(500 ** (position / 100)));          // 0 (off), then 1 to 500 steps
const position = smoothing => (smoothing <= 0 ? 0 : Math.round(100 * Math.log(smoothing) / Math.log(500)));
slider.value = position(settings.smoothing);
function nameSmoothing() {
  setText(sliderWords, settings.smoothing ? window.MegaTrain.filled(texts.smoothing_unit, {steps: settings.smoothing}) : texts.smoothing_off);
}
slider.addEventListener('input', () => { changed({smoothing: steps(Number(slider.value))}, true); nameSmoothing(); });
nameSmoothing();
const log = el('input', {type: 'checkbox', checked: settings.log});
log.addEventListener('change', () => changed({log: log.checked}, true));
const unzoom = el('button', {class: 'mt-button small', type: 'button', disabled: true, title: texts.zoom_hint, onclick: () => setZoom(null)}, texts.reset_zoom);
element.querySelector('.chart-bar').append(
  choice('axis', texts.axis, [['step', texts.axis_choice_step], ['time', texts.axis_choice_time]]),
  choice('window', texts.window, [['all', texts.window_all], ['500', texts.window_500], ['10min', texts.window_10min]]),
  el('label', {class: 'bar-item'}, texts.smoothing, slider, sliderWords),
  el('label', {class: 'bar-item'}, log, texts.log), unzoom);

/* One card per chart. */
for (const name of props.names) {
  const plot = el('div', {class: 'plot', role: 'img', 'aria-label': texts[`title_${name}`]}), empty = el('p', {class: 'empty', hidden: true});
  const card = el('section', {class: 'chart', 'data-chart': name}, el('h3', {}, texts[`title_${name}`]), plot, empty);
  element.querySelector('.chart-grid').append(card);
  slots[name] = {card, plot, empty, drawn: false, inSight: false, waiting: null};
}

const config = {responsive: true, displaylogo: false, displayModeBar: false, doubleClick: false};

function setZoom(range) {                     // all charts share one x range; detail for it comes with the next reply
  zoom = range;
  unzoom.disabled = !zoom;
  renew();
}
function listen(plot) {
  plot.on('plotly_relayout', change => {
    const low = change['xaxis.range[0]'], high = change['xaxis.range[1]'];
    if (!drawing && typeof low === 'number' && typeof high === 'number') setZoom([low, high]);
  });
  plot.on('plotly_doubleclick', () => setZoom(null));
}

/* A chart out of sight is drawn when it comes into sight; until then its newest figure waits. */
async function paint(slot) {
  const figure = slot.waiting;
  if (!figure || !(slot.inSight || figure.empty)) return;
  slot.waiting = null;
  setText(slot.empty, figure.empty || '');
  slot.empty.hidden = !figure.empty;
  slot.plot.hidden = Boolean(figure.empty);
  if (figure.empty) {
    if (slot.drawn) window.Plotly.purge(slot.plot);
    slot.drawn = false;
    return;
  }
  slot.plot.setAttribute('aria-label', figure.label);
  drawing += 1;
  try {
    const {data, layout} = painted(figure, zoom ? {range: zoom} : {});
    const drawn = window.Plotly.react(slot.plot, data, layout, config);
    if (!slot.drawn) listen(slot.plot);
    slot.drawn = true;
    await drawn;
  } finally { drawing -= 1; }
}
async function draw(figures) {
  for (const [name, figure] of Object.entries(figures)) slots[name].waiting = figure;
  for (const slot of Object.values(slots)) await paint(slot);
}
const sight = new IntersectionObserver(entries => entries.forEach(entry => {
  const slot = slots[entry.target.dataset.chart];
  slot.inSight = entry.isIntersecting;
  paint(slot);
}), {rootMargin: '200px'});
Object.values(slots).forEach(slot => sight.observe(slot.card));

const selected = () => (props.value || {}).run || new URL(window.location.href).searchParams.get('run') || run;
const refresh = poll(element, async () => {
  const wanted = selected();
  if (!window.Plotly) return 100;
  if (wanted !== run && wanted) { run = wanted; seen = ''; zoom = null; unzoom.disabled = true; say('megatrain:other-run', {run}); }
  const request = {run, seen, ...settings, zoom};
  say('megatrain:ask', request);              // other widgets add what they want to know
  const asked = wish;
  const reply = await server.poll(request);
  element.classList.toggle('lost', !reply);
  if (!reply || reply.again || wanted !== selected()) return 1000;     // the run may have changed meanwhile
  say('megatrain:run', reply);
  if (!wanted) run = reply.run || '';       // nothing was chosen: the server took the live or the newest run
  if (reply.figures && asked === wish) {
    seen = reply.seen;
    await draw(reply.figures);
  }
  return reply.idle ? 5000 : 1000;
});
window.MegaTrain.hear(element, 'megatrain:refresh', refresh);
new MutationObserver(renew).observe(document.body, {attributes: true, attributeFilter: ['class']});
watch('value', renew);
