// The head, the tabs, the theme, and reloading the page while a run is in progress.

const TABS = [['overview', 'Overview', overviewTab], ['curves', 'Curves', curvesTab], ['compare', 'Compare', compareTab], ['time', 'Time', timeTab], ['settings', 'Settings', settingsTab], ['faults', 'Faults', faultsTab], ['samples', 'Samples', samplesTab]];

function tabNow() {
  return TABS.find(([name]) => name === see('tab')) ?? TABS[0];
}

async function showTab() {
  const [name, , make] = tabNow();
  forgetCharts();
  tip.hide();
  for (const button of document.querySelectorAll('[role="tab"]')) {
    const selected = button.dataset.tab === name;
    button.setAttribute('aria-selected', String(selected));
    button.tabIndex = selected ? 0 : -1;
  }
  if (name === 'samples' && !SAMPLES) {
    SAMPLES = await unpack('samples');
    prepareSamples();
  }
  document.getElementById('main').replaceChildren(make(), footer());
  document.body.dataset.shown = name;
}

function footer() {
  const paths = DATA.runs.slice(0, 6).map((run) => run.folder).join(' · ');
  return el('footer', {}, `Made ${new Date(DATA.made * 1000).toLocaleString()} of ${paths}${DATA.runs.length > 6 ? ` and ${DATA.runs.length - 6} more` : ''}. Names of metrics: docs/reference/metrics.md.`);
}

function head() {
  const bad = faultCount(), count = { faults: bad || '' };
  const tabs = TABS.map(([name, label]) => el('button', {
    role: 'tab', type: 'button', 'data-tab': name, text: label,
    on: { click: () => { keep('tab', name === 'overview' ? '' : name); showTab(); scrollTo(0, 0); } },
  }, count[name] ? el('span', { class: 'count warn', text: count[name] }) : null));
  const nav = el('nav', { role: 'tablist', 'aria-label': 'Parts of the report', on: { keydown: (event) => {
    const at = TABS.findIndex(([name]) => name === tabNow()[0]), to = { ArrowRight: at + 1, ArrowLeft: at - 1 }[event.key];
    if (to === undefined) return;
    const next = tabs[(to + tabs.length) % tabs.length];
    next.click();
    next.focus();
  } } }, tabs);
  const going = DATA.runs.filter((run) => run.goes_on).length;
  document.getElementById('head').append(
    el('div', { class: 'bar' }, el('h1', { text: DATA.title }), el('div', { class: 'state' },
      going ? el('span', { class: 'good', text: `● ${going} running` }) : null, refreshState(), themeButton())),
    nav);
}

function themeButton() {
  const names = ['auto', 'light', 'dark'], label = { auto: '◐ auto', light: '○ light', dark: '● dark' };
  const button = el('button', { class: 'button', type: 'button', title: 'Colours of the page', text: label[themeChoice()] });
  button.addEventListener('click', () => {
    const next = names[(names.indexOf(themeChoice()) + 1) % 3];
    keep('theme', next === 'auto' ? '' : next);
    button.textContent = label[next];
    applyTheme();
    showTab();
  });
  return button;
}

function themeChoice() {
  return ['light', 'dark'].includes(see('theme')) ? see('theme') : 'auto';
}

const prefersDark = matchMedia('(prefers-color-scheme: dark)');

function applyTheme() {
  const dark = themeChoice() === 'auto' ? prefersDark.matches : themeChoice() === 'dark';
  document.documentElement.dataset.theme = dark ? 'dark' : 'light';
}

// While a run is in progress the page is rewritten repeatedly; it reloads with the same view unless somebody uses it.
const QUIET_S = 4;

function refreshState() {
  if (!DATA.refresh) return null;
  const node = el('span');
  let left = DATA.refresh, touched = -Infinity, paused = Boolean(see('paused'));
  for (const event of ['pointermove', 'keydown', 'wheel', 'touchmove']) addEventListener(event, () => { touched = performance.now(); }, { passive: true });
  const tick = () => {
    if (!paused && !document.hidden) left = Math.max(0, left - 1);
    if (!paused && !document.hidden && left === 0 && performance.now() - touched > QUIET_S * 1000) again();
    node.textContent = paused ? 'paused' : `again in ${left} s`;
  };
  setInterval(tick, 1000);
  tick();
  const pause = el('button', { class: 'button', type: 'button', 'aria-pressed': String(paused), text: 'pause', on: { click: () => {
    paused = !paused;
    keep('paused', paused);
    pause.setAttribute('aria-pressed', String(paused));
    tick();
  } } });
  return el('span', {}, node, ' ', pause);
}

function again() {
  memory.set('tepo-scroll', JSON.stringify([scrollY, finder.list?.scrollTop ?? 0]));
  location.reload();
}

async function begin() {
  DATA = await unpack('figures');
  drawing.smooth = Number(see('smooth', '0.6'));
  drawing.time = Boolean(see('time'));
  drawing.log = Boolean(see('log'));
  drawing.by = see('by');
  for (const label of see('hidden').split('\u001f').filter(Boolean)) hidden.add(label);
  applyTheme();
  prefersDark.addEventListener('change', () => { applyTheme(); showTab(); });
  head();
  await showTab();
  const [top, list] = JSON.parse(memory.get('tepo-scroll') ?? '[0,0]');
  memory.set('tepo-scroll', '[0,0]');
  requestAnimationFrame(() => requestAnimationFrame(() => {
    scrollTo(0, top);
    if (finder.list) finder.list.scrollTop = list;
    document.body.dataset.ready = Math.round(performance.now());
  }));
}

addEventListener('keydown', (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
  if (see('tab') === 'samples' && SAMPLES) samplesKey(event);
});
document.querySelector('.skip').addEventListener('click', (event) => {
  event.preventDefault(); // the part of the address behind # is the page's state
  document.getElementById('main').focus();
});
addEventListener('hashchange', () => {
  for (const name of [...view.keys()]) view.delete(name);
  new URLSearchParams(location.hash.slice(1)).forEach((value, name) => view.set(name, value));
  showTab();
});

begin().catch((error) => {
  document.getElementById('main').replaceChildren(el('p', { class: 'warn', text: `The page cannot be shown: ${error.message}` }));
  document.body.dataset.failed = error.stack ?? error.message;
});
