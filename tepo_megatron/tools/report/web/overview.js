// Runs and groups of seeds as lines and rows for curves and tables; and the first tab.

let DATA = null;

/** Hidden runs or groups, by label. */
const hidden = new Set();

/** Settings by whose value runs may be drawn together: those that differ, in few values. */
function dividing() {
  return DATA.settings.filter((row) => {
    const count = new Set(row.values).size;
    return row.differs && !row.beside && row.path !== 'seed' && count <= 12 && count < DATA.runs.length;
  });
}

/** [{label, runs}] by the page's choice: the same settings but for the seed, each run, or one setting's value. */
function together() {
  const row = dividing().find((each) => each.path === drawing.by);
  if (row) {
    return [...new Set(row.values)].map((value) => ({
      label: `${row.path.split('.').slice(-2).join('.')} ${plain(value)}`, runs: DATA.runs.filter((_, at) => row.values[at] === value),
    }));
  }
  if (drawing.by === 'each') return DATA.runs.map((run) => ({ label: run.name, runs: [run] }));
  return DATA.groups.map((group) => ({ label: group.label, runs: group.runs.map((at) => DATA.runs[at]) }));
}

/** What is compared: [{label, at, colour, dash, runs}], without what is hidden unless `all`. */
function compared(all = false) {
  const found = together();
  found.forEach((each, at) => Object.assign(each, { at, colour: runColour(at), dash: runDash(at) }));
  return all ? found : found.filter((each) => !hidden.has(each.label));
}

/** Hours since the first row, at each row of a run; undone steps, which have no row, count where they were repeated. */
function hours(run) {
  if (!run.hours) {
    const clock = ['time/step', 'lost/resume', 'lost/rollback'].map((metric) => run.columns[metric] ?? []);
    let seconds = 0;
    run.hours = run.x.map((_, i) => {
      for (const column of clock) seconds += column[i] ?? 0;
      return seconds / 3600;
    });
  }
  return run.hours;
}

/** Hours at rising steps, never falling: after its last row a run goes on at its mean pace. */
function hoursAt(run, steps) {
  const known = hours(run), pace = mean(ofSteps(run, 'time/step')) / 3600, end = run.x.length - 1;
  let i = 0;
  return steps.map((step) => {
    while (i < end && run.x[i + 1] <= step) i += 1;
    return known[i] + (i === end ? (step - run.x[i]) * pace : 0);
  });
}

/** The lines of one metric; row 0, a start that would dwarf all steps, has no place among times. */
function linesOf(metric) {
  return compared().map((each) => {
    const runs = each.runs.filter((run) => run.columns[metric]);
    if (!runs.length) return null;
    const first = metric.startsWith('time/') || metric.startsWith('idle/') ? 1 : 0;
    const line = runs.length === 1 ? lineOfRun(runs[0], metric, first) : lineOfGroup(runs, metric, first);
    return { ...line, label: each.runs.length > 1 ? `${each.label} (${runs.length})` : each.label, colour: each.colour, dash: each.dash };
  }).filter(Boolean);
}

function lineOfRun(run, metric, first) {
  const rows = run.x.map((step, i) => i).filter((i) => run.x[i] >= first);
  return { x: rows.map((i) => (drawing.time ? hours(run)[i] : run.x[i])), y: rows.map((i) => run.columns[metric][i]) };
}

/** Mean, least and largest of the runs that have a value at a step. */
function lineOfGroup(runs, metric, first) {
  const steps = new Map();
  for (const run of runs) {
    run.x.forEach((step, i) => {
      if (step < first) return;
      if (!steps.has(step)) steps.set(step, []);
      if (run.columns[metric][i] !== null) steps.get(step).push(run.columns[metric][i]);
    });
  }
  const rows = [...steps].sort((a, b) => a[0] - b[0]);
  const each = (f) => rows.map(([, values]) => (values.length ? f(values) : null)), x = rows.map(([step]) => step);
  const paced = runs.filter((run) => ofSteps(run, 'time/step').length), timed = (paced.length ? paced : runs).map((run) => hoursAt(run, x));
  return {
    x: drawing.time ? x.map((_, at) => mean(timed.map((known) => known[at]))) : x,
    y: each(mean), low: each((values) => Math.min(...values)), high: each((values) => Math.max(...values)),
  };
}

/** Where visible runs met a fault, on the x axis. */
function faultMarks() {
  const runs = compared().flatMap((each) => each.runs);
  return [...new Set(runs.flatMap((run) => run.events.map(([step]) => (drawing.time ? hours(run)[run.x.indexOf(step)] : step))))];
}

function legend(changed) {
  const chips = compared(true).map((each) => el('button', {
    class: 'chip', type: 'button', 'aria-pressed': String(!hidden.has(each.label)), title: each.runs.map((run) => `${run.folder}: ${run.said}`).join('\n'),
    on: {
      click: (event) => {
        if (event.altKey || event.shiftKey) {
          hidden.clear();
          for (const other of compared(true)) if (other.label !== each.label) hidden.add(other.label);
        } else if (!hidden.delete(each.label)) hidden.add(each.label);
        keep('hidden', [...hidden].join('\u001f'));
        changed();
      },
    },
  }, runMark(each.at), each.runs.length > 1 ? `${each.label} · ${each.runs.length} runs` : each.label));
  return el('div', { class: 'legend', role: 'group', 'aria-label': 'Runs; a click hides or shows one, with Shift it alone' }, chips);
}

const last = (run, metric) => (run.columns[metric] ?? []).findLast((value) => value !== null) ?? null;
const best = (run, metric) => {
  const values = (run.columns[metric] ?? []).filter((value) => value !== null);
  return values.length ? Math.max(...values) : null;
};
const ofSteps = (run, metric) => (run.columns[metric] ?? []).filter((value, i) => value !== null && run.x[i] > 0);

const short = (value) => number(value, 3);
/** Figures of an accuracy for each k: of other samples it is another figure. */
const ofEachK = (name) => DATA.metrics.filter((metric) => isCalled(name, metric)).map((metric) => [metric.split('/')[1], 'held out, last', (run) => last(run, metric), short]);
/** Name, explanation, value of a run, its format, and whether two runs are compared by ratio. */
const usualFigures = () => [
  ['reward', 'mean of the last ten steps', (run) => mean(ofSteps(run, 'reward/mean').slice(-10)), short],
  ['greedy', 'held out, last', (run) => last(run, 'accuracy/greedy'), short],
  ['best greedy', 'held out', (run) => best(run, 'accuracy/greedy'), short],
  ...ofEachK('accuracy/avg@k'), ...ofEachK('accuracy/pass@k'),
  ['entropy', 'nats, mean of the last ten steps', (run) => mean(ofSteps(run, 'entropy/mean').slice(-10)), short],
  ['masked', 'of the last ten steps', (run) => mean(ofSteps(run, 'mask/fraction').slice(-10)), percent],
  ['grad norm', 'mean of the last ten steps', (run) => mean(ofSteps(run, 'grad_norm').slice(-10)), short, true],
  ['s/step', 'median, without evaluation', (run) => middle(stepSeconds(run)), short, true],
  ['tokens/s', 'median', (run) => middle(ofSteps(run, 'tokens/s')), short, true],
];

function stepSeconds(run) {
  const step = run.columns['time/step'] ?? [], evaluation = run.columns['time/eval'] ?? [];
  return step.map((value, i) => (value === null || !run.x[i] ? null : value - (evaluation[i] ?? 0))).filter((value) => value !== null);
}

function middle(values) {
  if (!values.length) return null;
  const sorted = [...values].sort((a, b) => a - b);
  return (sorted[Math.floor((sorted.length - 1) / 2)] + sorted[Math.ceil((sorted.length - 1) / 2)]) / 2;
}

/** Mean over the seeds, and their range if there are several. */
function cell(values, format) {
  const known = values.filter((value) => value !== null);
  if (!known.length) return el('td', { class: 'quiet', text: '–' });
  const node = el('td', { text: format(mean(known)) });
  if (known.length > 1) node.append(el('div', { class: 'spread', text: `${format(Math.min(...known))} – ${format(Math.max(...known))}` }));
  return node;
}

function stepsCell(runs) {
  const text = runs.map((run) => {
    const done = run.x.length ? run.x[run.x.length - 1] : 0;
    return run.steps ? `${done} of ${run.steps}` : String(done);
  });
  return el('td', { text: new Set(text).size === 1 ? text[0] : runs.map((run) => run.x[run.x.length - 1] ?? 0).join(', ') });
}

function overviewTab() {
  const shown = usualFigures().filter(([, , value]) => DATA.runs.some((run) => value(run) !== null));
  const rows = compared(true).map((each) => {
    const going = each.runs.filter((run) => run.goes_on).length, faults = each.runs.flatMap((run) => run.faults);
    return el('tr', {},
      el('th', { scope: 'row' }, el('div', { class: 'name' }, runMark(each.at), ` ${each.label}`, el('div', { class: 'state' }, stateText(each.runs, going)),
        faults.length ? el('div', { class: 'state' }, el('span', { class: 'warn', text: faults.join(' · ') })) : null)),
      stepsCell(each.runs),
      ...shown.map(([, , value, format]) => cell(each.runs.map(value), format)));
  });
  const several = compared(true).some((each) => each.runs.length > 1);
  return el('div', {},
    togetherTools(),
    el('div', { class: 'scroll' }, el('table', { class: 'data' },
      el('thead', {}, el('tr', {},
        el('th', { scope: 'col', class: 'left', text: several ? 'runs together: their mean, and their range' : DATA.runs.length > 1 ? 'runs' : 'run' }),
        el('th', { scope: 'col', text: 'step' }),
        ...shown.map(([name, says]) => el('th', { scope: 'col', title: says, text: name })))),
      el('tbody', {}, rows))),
    el('h2', { text: 'Key curves' }), ...curveTools(), chartGrid(KEY_METRICS.flatMap((name) => DATA.metrics.filter((metric) => isCalled(name, metric)))));
}

function stateText(runs, going) {
  if (runs.length === 1) return el('span', { class: going ? 'good' : '', text: runs[0].said });
  const ended = runs.length - going;
  return el('span', { class: going ? 'good' : '', text: [going ? `${going} running` : '', ended ? `${ended} ended` : ''].filter(Boolean).join(', ') });
}

/** Chooses the setting that groups runs; nothing for one run. */
function togetherTools() {
  const same = DATA.groups.length < DATA.runs.length, others = dividing();
  if (!same && !others.length) return null;
  const options = [['', same ? 'the same settings, all seeds' : 'each run'], ...(same ? [['each', 'each run']] : []), ...others.map((row) => [row.path, row.path])];
  return el('div', { class: 'tools' }, el('label', {}, 'drawn together', el('select', {
    on: { change: (event) => { drawing.by = event.target.value; keep('by', drawing.by); hidden.clear(); keep('hidden', ''); showTab(); } },
  }, options.map(([value, text]) => el('option', { value, text, selected: drawing.by === value })))),
  el('span', { class: 'quiet small', text: compared(true).some((each) => each.runs.length > 1) ? 'line: mean; band: range of the runs' : '' }));
}
