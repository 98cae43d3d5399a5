/* The list of runs. Filters act at once on what is here; a poll brings what is new; a row opens the detail below it. */
const {el, show, setText, poll} = window.MegaTrain;
const texts = props.texts, states = props.states;
const part = name => element.querySelector(`.${name}`);
const search = el('input', {type: 'search', placeholder: texts.search, 'aria-label': texts.search, class: 'run-search'});
const filter = el('select', {'aria-label': texts.filter_state}, el('option', {value: ''}, texts.all_states),
  ...Object.entries(states).map(([value, word]) => el('option', {value}, word)));
const count = el('span', {class: 'run-count mt-num', role: 'status'});
const notice = el('p', {class: 'notice', role: 'alert', hidden: true});
part('run-filters').append(search, filter, count, notice);
const box = el('td', {colspan: 11}), detailRow = el('tr', {class: 'run-detail'}, box);
const address = new URL(window.location.href).searchParams;
let runs = null, open = address.get('open') || '', detail = null, chosen = '', picked = '', type = props.types[0];

const columns = ['name', 'model', 'precision', 'best', 'last', 'curve', 'progress', 'time', 'size', 'started'];
const head = el('thead', {}, el('tr', {}, el('th', {scope: 'col'}, texts.column_state), ...columns.map(name =>
  el('th', {scope: 'col', class: `c-${name}`}, texts[`column_${name}`]))));
const body = el('tbody', {});
const table = el('table', {class: 'run-grid', 'aria-label': texts.table}, head, body);
const empty = el('div', {class: 'mt-empty', hidden: true});
part('run-list').append(table, empty);

function say(words, bad) {
  setText(notice, words || '');
  notice.className = `notice ${bad ? 'mt-bad' : 'mt-ok'}`;
  notice.hidden = !words;
}

function curve(values) {
  if (values.length < 2) return el('span', {class: 'none'}, '–');
  const low = Math.min(...values), span = Math.max(...values) - low || 1;
  const points = values.map((value, at) => `${(70 * at / (values.length - 1) + 1).toFixed(1)},${(19 - 17 * (value - low) / span).toFixed(1)}`);
  const svg = document.createElementNS('http://www.w3.org/2000/svg', 'svg'), line = document.createElementNS(svg.namespaceURI, 'polyline');
  for (const [name, value] of Object.entries({viewBox: '0 0 72 20', width: 72, height: 20, 'aria-hidden': 'true'})) svg.setAttribute(name, value);
  line.setAttribute('points', points.join(' '));
  svg.append(line);
  return svg;
}

function row(run) {
  const bar = el('span', {class: 'fill'});
  bar.style.width = `${100 * Math.min(1, run.progress || 0)}%`;
  const name = el('button', {class: 'run-name', type: 'button', 'aria-expanded': String(run.run === open)}, run.name);
  const cells = {
    name: [name, run.reason ? el('small', {class: 'reason'}, run.reason) : el('small', {}, run.data)],
    model: [run.model], precision: [run.precision], best: [run.best], last: [run.last], curve: [curve(run.line)],
    progress: [el('span', {class: 'mt-num'}, run.steps), run.progress === null ? null : el('span', {class: 'track'}, bar)],
    time: [run.time], size: [run.size], started: [run.started],
  };
  const line = el('tr', {'data-run': run.run, class: run.run === open ? 'open' : ''},
    el('td', {class: 'c-state'}, el('span', {class: `mt-badge mt-${run.tone}`}, run.word)),
    ...columns.map(column => el('td', {class: `c-${column} mt-num`, 'data-label': texts[`column_${column}`]},
      ...cells[column].filter(child => child !== null))));
  line.addEventListener('click', event => { if (!window.getSelection().toString() || event.target === name) toggle(run.run); });
  return line;
}

function draw() {
  if (!runs) return;
  const words = search.value.trim().toLowerCase();
  const shown = runs.filter(run => (!filter.value || run.state === filter.value)
    && (!words || [run.name, run.run, run.model, run.data, run.precision].some(value => value.toLowerCase().includes(words))));
  setText(count, window.MegaTrain.filled(texts.count, {shown: shown.length, all: runs.length}));
  if (open && !shown.some(run => run.run === open)) detailRow.remove();
  show(body, [shown, open], () => shown.flatMap(run => (run.run === open ? [row(run), detailRow] : [row(run)])));
  table.hidden = !shown.length;
  empty.hidden = Boolean(shown.length);
  show(empty, runs.length, () => (runs.length ? [el('h2', {}, texts.none_match)] : [el('h2', {}, texts.empty_title), el('p', {}, texts.empty_text),
    el('button', {class: 'mt-button primary', type: 'button', onclick: () => window.MegaTrain.openPage('new_run')}, texts.empty_button)]));
}

function toggle(run) {
  open = run === open ? '' : run;
  chosen = picked = '';
  detail = null;
  say('');
  delete box.dataset.shown;
  box.replaceChildren(el('div', {class: 'facts skeleton'}));
  window.MegaTrain.remember({open});
  draw();
  refresh();
}

async function act(action) {
  const run = open;
  if (action === 'open') { trigger('open', {run}); return; }
  if (action === 'duplicate') { trigger('duplicate', {run}); return; }
  const reply = await server.act({run, action, checkpoint: chosen, type});
  if (!reply || reply.error) { say(reply ? reply.error : texts.no_answer, true); return; }
  if (action === 'delete') { toggle(run); runs = runs.filter(item => item.run !== run); draw(); }
  say(reply.said);
  if (action === 'resume' || action === 'start') trigger('open', {run});
  refresh();
}

function checkpoints() {
  if (!detail.checkpoints.length) return el('p', {class: 'quiet'}, texts.no_checkpoints);
  return el('table', {class: 'grid', 'aria-label': texts.checkpoints}, el('tbody', {}, ...detail.checkpoints.map(found => {
    const radio = el('input', {type: 'radio', name: 'checkpoint', value: found.name, checked: found.name === chosen, disabled: !found.complete});
    radio.addEventListener('change', () => { chosen = picked = found.name; drawDetail(); });
    return el('tr', {class: found.complete ? '' : 'grey'},
      el('td', {}, el('label', {}, radio, ` ${window.MegaTrain.filled(texts.at_step, {step: found.step})}`)),
      el('td', {class: 'mt-num'}, found.size), el('td', {class: 'mt-num'}, found.time), el('td', {}, found.state));
  })));
}

function exported() {
  const job = detail.export;
  if (!job) return null;
  const bar = el('span', {class: 'fill'});
  bar.style.width = `${100 * (job.fraction ?? 0)}%`;
  return el('div', {class: `note mt-${job.tone} export`, role: 'status'}, el('p', {}, `${texts.export_of} ${job.checkpoint}: ${job.text}`),
    job.fraction === null || job.state === 'finished' || job.state === 'failed' ? '' : el('span', {class: 'track'}, bar), el('code', {}, job.target));
}

function buttons() {
  const step = (detail.checkpoints.find(found => found.name === chosen) || {}).step;
  const specs = Object.values(detail.buttons).map(spec => {
    const label = spec.action === 'resume' && spec.enabled && step ? window.MegaTrain.filled(texts.do_resume_from, {step}) : spec.label;
    return {...spec, label};
  });
  const select = el('select', {'aria-label': texts.export_type}, ...props.types.map(name => el('option', {value: name, selected: name === type}, texts[`type_${name}`])));
  select.addEventListener('change', () => { type = select.value; });
  const made = window.MegaTrain.buttons(specs, texts, open, (_, action) => act(action));
  return el('div', {class: 'run-buttons'}, ...made.flatMap(button => (button.dataset.action === 'export' ? [el('span', {class: 'pair'}, button, select)] : [button])));
}

function drawDetail() {
  if (!detail) return;
  show(box, [detail, chosen], () => [
    detail.explanation ? el('div', {class: 'explanation', role: 'alert'}, el('h3', {}, detail.explanation.title), el('p', {}, detail.explanation.text),
      detail.explanation.hint ? el('p', {class: 'hint'}, detail.explanation.hint) : '') : '',
    buttons(),
    detail.buttons.resume?.enabled ? el('p', {class: 'quiet'}, window.MegaTrain.filled(texts.resume_note, {
      step: (detail.checkpoints.find(found => found.name === chosen) || {}).step || '', steps: detail.steps})) : '',
    exported(),
    el('div', {class: 'run-halves'},
      el('section', {}, el('h4', {}, texts.checkpoints), checkpoints(), el('p', {class: 'quiet'}, texts.folder, ' ', el('code', {}, detail.folder))),
      el('section', {}, el('h4', {}, texts.configuration), detail.yaml ? el('pre', {class: 'yaml', tabindex: 0}, detail.yaml) : el('p', {class: 'quiet'}, texts.no_configuration))),
  ].filter(Boolean));
}

async function look() {
  if (!open) return;
  const run = open, reply = await server.detail({run});
  if (!reply || run !== open) return;
  if (reply.error) { open = ''; window.MegaTrain.remember({open}); say(reply.error, true); draw(); return; }
  detail = reply;
  const usable = detail.checkpoints.filter(found => found.complete).map(found => found.name);     // the newest first
  chosen = usable.includes(picked) ? picked : usable[0] || '';
  drawDetail();
}

const refresh = poll(element, async () => {
  const found = await server.runs({});
  if (!found) return 2000;
  runs = found;
  draw();
  await look();
  return runs.some(run => run.active) || (detail && detail.export && !['finished', 'failed'].includes(detail.export.state)) ? 1000 : 3000;
});
search.addEventListener('input', draw);
filter.addEventListener('change', draw);
/* The events that this widget raises: 'open', 'duplicate'. */
