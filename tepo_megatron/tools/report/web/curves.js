// The tab of curves: every metric that changes, by topic.

const KEY_METRICS = [
  'reward/mean', 'accuracy/greedy', 'accuracy/avg@k', 'entropy/mean', 'mask/fraction', 'kl/mean', 'grad_norm', 'response_len/mean', 'groups/zero_variance',
];
/** Whether a metric has this name; `accuracy/avg@k` is that of any k. */
const isCalled = (name, metric) => metric === name || (name.endsWith('@k') && metric.startsWith(name.slice(0, -1)));
const SECTIONS = [
  ['Reward and accuracy', /^(reward|accuracy|heldout|eval|source)\//],
  ['Policy', /^(entropy\/|mask\/|ratio|sequence_ratio|clip\/|kl\/|loss$|grad_norm$|lr$|update\/)/],
  ['Sampler and trainer', /^(mismatch|ess$|canary|staleness|weights_version)/],
  ['Responses and groups', /^(response|groups|sampling|environment)/],
  ['Experts', /^moe\//],
  ['Time', /^(time|idle|tokens\/s|lost)/],
  ['Everything else', /./],
];
const SHARES = /^(mask\/fraction|idle\/|clip\/|response_len\/truncated|groups\/zero_variance)/;

function curveTools() {
  const changed = (name, value, kept) => { drawing[name] = value; keep(kept, value); redraw(); };
  const check = (label, name, kept) => el('label', {}, el('input', {
    type: 'checkbox', checked: drawing[name], on: { change: (event) => { changed(name, event.target.checked, kept); if (name === 'time') zoomTo(null, null); } },
  }), label);
  const reset = el('button', { class: 'button', type: 'button', text: 'Whole range', hidden: drawing.from === null, on: { click: () => zoomTo(null, null) } });
  document.addEventListener('zoomed', () => { reset.hidden = drawing.from === null; });
  const amount = el('span', { class: 'mono', text: drawing.smooth.toFixed(2) });
  const tools = el('div', { class: 'tools' },
    el('label', {}, 'smoothing', el('input', {
      type: 'range', min: 0, max: 0.95, step: 0.05, value: drawing.smooth,
      on: { input: (event) => { amount.textContent = Number(event.target.value).toFixed(2); changed('smooth', Number(event.target.value), 'smooth'); keep('smooth', event.target.value); } },
    }), amount),
    check('hours in place of steps', 'time', 'time'), check('logarithmic', 'log', 'log'), reset,
    el('span', { class: 'quiet small mouse', text: 'drag to zoom · arrow keys read values' }));
  return [DATA.runs.length > 1 ? legend(showTab) : null, tools].filter(Boolean);
}

function chartGrid(metrics) {
  return el('div', { class: 'charts' }, metrics.map((metric) => new Chart({
    title: metric, lines: () => linesOf(metric), marks: faultMarks, unit: SHARES.test(metric) ? (value) => `${number(100 * value, 3)} %` : (value) => number(value),
  }).node));
}

/** The earlier metric that has the same values in every run, such as an accuracy where rewards are 0 or 1. */
function twinOf(metric, earlier) {
  const same = (one, other) => one === other || (one && other && one.every((value, i) => value === other[i]));
  return earlier.find((each) => DATA.runs.every((run) => same(run.columns[metric], run.columns[each])));
}

/** The one value that a metric has throughout, or undefined. */
function constantOf(metric) {
  let found;
  for (const run of DATA.runs) {
    for (const value of run.columns[metric] ?? []) {
      if (value === null) continue;
      if (found !== undefined && value !== found) return undefined;
      found = value;
    }
  }
  return found;
}

function curvesTab() {
  const wanted = see('find');
  const body = el('div');
  const search = el('input', {
    type: 'search', class: 'wide', placeholder: 'find a metric', value: wanted, 'aria-label': 'Find a metric',
    on: { input: () => { keep('find', search.value); forgetCharts(); fillIn(); } },
  });
  const tools = curveTools();
  tools[tools.length - 1].prepend(search);
  function fillIn() {
    const found = DATA.metrics.filter((metric) => metric.includes(search.value));
    const still = found.filter((metric) => constantOf(metric) !== undefined && metric !== 'accuracy/greedy');
    const moving = found.filter((metric) => !still.includes(metric));
    const twins = moving.map((metric, at) => [metric, twinOf(metric, moving.slice(0, at))]).filter(([, twin]) => twin);
    const left = new Set(moving.filter((metric) => !twins.some(([twin]) => twin === metric)));
    const parts = SECTIONS.map(([title, pattern]) => {
      const metrics = [...left].filter((metric) => pattern.test(metric));
      metrics.forEach((metric) => left.delete(metric));
      return metrics.length ? [el('h2', { text: title }), chartGrid(metrics)] : [];
    });
    body.replaceChildren(...parts.flat());
    if (still.length) {
      body.append(el('h2', { text: 'The same throughout' }),
        el('p', { class: 'small quiet', text: still.map((metric) => `${metric} ${number(constantOf(metric))}`).join(' · ') }));
    }
    if (twins.length) {
      body.append(el('h2', { text: 'The same as another' }), el('p', { class: 'small quiet', text: twins.map(([metric, twin]) => `${metric} = ${twin}`).join(' · ') }));
    }
    if (!found.length) body.append(el('p', { class: 'quiet', text: DATA.metrics.length ? 'No metric has this in its name.' : 'No row of metrics yet.' }));
  }
  fillIn();
  return el('div', {}, togetherTools(), ...tools, body);
}
