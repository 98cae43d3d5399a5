/* Helpers of all widgets: building elements from text (never from markup), one gated poll, links, buttons. */
window.MegaTrain = (() => {
  /** An element with attributes and children; strings become text, so data can never become markup. */
  function el(tag, attributes, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (value === null || value === undefined || value === false) continue;
      if (name === 'onclick') node.addEventListener('click', value);
      else node.setAttribute(name, value === true ? '' : value);
    }
    node.append(...children.filter(child => child !== null && child !== undefined && child !== ''));
    return node;
  }

  /** Replaces the children of `node` only when `key` says that something changed: no flicker, focus stays. */
  function show(node, key, build) {
    const wanted = JSON.stringify(key);
    if (node.dataset.shown === wanted) return;
    node.dataset.shown = wanted;
    node.replaceChildren(...build());
  }

  function setText(node, text) {
    if (node.textContent !== text) node.textContent = text;
  }

  function filled(template, values) {
    return template.replace(/\{(\w+)\}/g, (whole, name) => (name in values ? values[name] : whole));
  }

  /** Keeps the address current, so that a reload and a copied link show the same page and run. */
  function remember(part) {
    const address = new URL(window.location.href);
    for (const [name, value] of Object.entries(part)) {
      if (value) address.searchParams.set(name, value);
      else address.searchParams.delete(name);
    }
    window.history.replaceState(window.history.state, '', address);
  }

  function openPage(name) {
    settled = true;
    document.getElementById(`page-${name}-button`)?.click();
  }

  /*
   * The page that the address asks for. Gradio selects its first tab at a moment of its own, before or after the dashboard has answered:
   * until the wanted tab has stayed selected for a second, or somebody used the page, no other selection counts.
   */
  let landing = new URL(window.location.href).searchParams.get('view') || '';
  let settled = false, shownSince = 0;
  const isShown = button => button.getAttribute('aria-selected') === 'true';
  function hold() {
    const button = landing && document.getElementById(`page-${landing}-button`);
    if (settled || !button) shownSince = 0;
    else if (!isShown(button)) { shownSince = 0; button.click(); }
    else if (!shownSince) shownSince = Date.now();
    else if (Date.now() - shownSince > 1000) settle();
    if (!settled) setTimeout(hold, 50);
  }
  /** From now on the address follows the page that is shown. */
  function settle() {
    settled = true;
    const button = [...document.querySelectorAll('[role=tab][id^=page-]')].find(isShown);
    if (button) remember({view: button.id.replace(/^page-|-button$/g, '')});
  }
  /** The dashboard says which page the address means: it may name none, or one that does not exist. */
  function land(view) { if (!settled) landing = view; }
  /* Choosing another page always counts; any other use of the page does as soon as it is the one that the address means. */
  function used(event) {
    const button = landing && document.getElementById(`page-${landing}-button`);
    if (event.isTrusted && (!landing || (button && isShown(button)) || event.target.closest?.('[role=tab]'))) settled = true;
  }
  for (const use of ['pointerdown', 'keydown']) document.addEventListener(use, used, {capture: true});
  new MutationObserver(() => settled && settle()).observe(document, {subtree: true, attributeFilter: ['aria-selected']});
  hold();

  const seen = element => element.isConnected && element.getClientRects().length > 0 && document.visibilityState === 'visible';

  /**
   * Calls `tick` now and a second after it settled, as long as `element` is on the page; skips it while nobody can see it.
   * `tick` returns the milliseconds until the next one. Returns a function that asks for a tick at once.
   */
  function poll(element, tick) {
    let timer = 0, busy = false, again = false;
    async function turn() {
      clearTimeout(timer);
      if (!element.isConnected) {
        document.removeEventListener('visibilitychange', turn);
        return;
      }
      if (busy) { again = true; return; }
      let pause = 1000;
      if (seen(element)) {
        busy = true;
        try { pause = (await tick()) || 1000; } finally { busy = false; }
      }
      timer = setTimeout(turn, again ? 0 : pause);
      again = false;
    }
    document.addEventListener('visibilitychange', turn);
    turn();
    return turn;
  }

  /** Hears `name` on the document as long as `element` is on the page. */
  function hear(element, name, handler) {
    const wrapped = event => {
      if (element.isConnected) handler(event.detail);
      else document.removeEventListener(name, wrapped);
    };
    document.addEventListener(name, wrapped);
  }

  function say(name, detail) {
    document.dispatchEvent(new CustomEvent(name, {detail}));
  }

  /** A question with the consequence in words. Resolves to true when it was confirmed. */
  function confirmed(spec, texts) {
    return new Promise(resolve => {
      const dialog = el('dialog', {class: 'mt-dialog', 'aria-label': spec.label});
      const done = answer => { dialog.close(); dialog.remove(); resolve(answer); };
      const tone = ['stop_discard', 'force_quit', 'delete'].includes(spec.action) ? 'danger' : 'primary';
      dialog.append(
        el('h3', {}, spec.label), el('p', {}, spec.ask),
        el('div', {class: 'mt-dialog-buttons'},
          el('button', {class: 'mt-button', type: 'button', onclick: () => done(false)}, texts.cancel),
          el('button', {class: `mt-button ${tone}`, type: 'button', onclick: () => done(true)}, spec.label)));
      dialog.addEventListener('cancel', event => { event.preventDefault(); done(false); });
      document.body.append(dialog);
      dialog.showModal();
    });
  }

  const goes = ['resume', 'start', 'continue', 'halve_learning_rate', 'lower_vram', 'lower_ram'];
  const stops = ['stop', 'stop_discard', 'force_quit', 'delete'];

  /** The buttons of a run. Stopping asks first and says what it costs; a button that cannot be used says why. */
  function buttons(specs, texts, run, send) {
    const press = spec => async () => {
      if (spec.ask && !(await confirmed(spec, texts))) return;
      await send(run, spec.action);
    };
    return specs.map(spec => {
      if (spec.page) return el('button', {class: 'mt-button', type: 'button', onclick: () => openPage(spec.page)}, spec.label);
      if (spec.href) return el('a', {class: 'mt-button', href: spec.href, target: '_blank', rel: 'noreferrer noopener'}, spec.label);
      const tone = goes.includes(spec.action) ? 'primary' : stops.indexOf(spec.action) > 0 ? 'danger' : '';
      return el('button', {
        class: `mt-button ${tone}`, type: 'button', 'data-action': spec.action, 'aria-disabled': spec.enabled ? null : 'true',
        title: spec.why || null, onclick: spec.enabled ? press(spec) : null,
      }, spec.label, spec.why ? el('span', {class: 'mt-sr'}, ` (${spec.why})`) : null);
    });
  }

  /** The page's way to act on a run: `server.act`, with an answer in words when it fails. */
  function sender(server, texts, notice, refresh) {
    return async (run, action) => {
      const reply = await server.act({run, action});
      setText(notice, !reply ? texts.no_answer : reply.error ? `${texts.not_done}: ${reply.error}` : '');
      notice.hidden = !notice.textContent;
      refresh();
    };
  }

  /* Colours of figures are names of CSS variables, so one figure serves both themes. */
  function coloured(value, style) {
    if (Array.isArray(value)) return typeof value[0] === 'object' ? value.map(item => coloured(item, style)) : value;
    if (value && typeof value === 'object') return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, coloured(item, style)]));
    return typeof value === 'string' && value.startsWith('--mt-') ? style.getPropertyValue(value).trim() : value;
  }
  /** The data and layout that Plotly draws, in the colours of the theme; `xaxis` overrides the figure's own. */
  function painted(figure, xaxis) {
    const style = getComputedStyle(document.body), colour = name => style.getPropertyValue(name).trim();
    const axis = own => ({gridcolor: colour('--mt-grid'), linecolor: colour('--mt-line'), tickfont: {size: 11}, showspikes: false, ...own});
    const layout = {
      ...coloured(figure.layout, style), autosize: true, paper_bgcolor: 'rgba(0,0,0,0)', plot_bgcolor: 'rgba(0,0,0,0)',
      font: {family: style.fontFamily, size: 12, color: colour('--mt-muted')},
      hoverlabel: {bgcolor: colour('--mt-card'), bordercolor: colour('--mt-line'), font: {color: colour('--mt-text'), size: 12}},
      xaxis: axis({...figure.layout.xaxis, ...xaxis}), yaxis: axis(figure.layout.yaxis),
    };
    if (layout.yaxis2) layout.yaxis2 = axis(layout.yaxis2);
    return {data: coloured(figure.data, style), layout};
  }

  return {el, show, setText, filled, remember, land, openPage, poll, hear, say, seen, buttons, sender, painted};
})();
