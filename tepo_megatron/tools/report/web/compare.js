// The tab of comparisons: one group of runs against each other group, seed by seed, with intervals.

const GREEDY = 'accuracy/greedy';

/** The first step with an evaluation of at least this; null: never. */
function stepsTo(run, metric, least) {
  const at = (run.columns[metric] ?? []).findIndex((value) => value !== null && value >= least);
  return at < 0 ? null : run.x[at];
}

/** The mean height of a curve: the area under straight lines between its points, over their steps. */
function areaUnder(run, metric) {
  const points = run.x.map((step, i) => [step, run.columns[metric]?.[i] ?? null]).filter(([, value]) => value !== null);
  if (points.length < 2) return null;
  let area = 0;
  for (let i = 1; i < points.length; i++) area += (points[i][0] - points[i - 1][0]) * (points[i][1] + points[i - 1][1]) / 2;
  return area / (points[points.length - 1][0] - points[0][0]);
}

/** Compared figures, as usualFigures(); `reached`: a number of steps to a value that may never be reached. */
function comparedFigures() {
  const least = reach(), chosen = see('figure');
  const own = [
    { name: `steps to ${number(100 * least)} %`, says: 'the first evaluation with that greedy accuracy', value: (run) => stepsTo(run, GREEDY, least), format: short, ratio: true, reached: true },
    { name: 'area', says: 'under the curve of greedy accuracy: its mean height', value: (run) => areaUnder(run, GREEDY), format: short },
  ];
  const usual = usualFigures().map(([name, says, value, format, ratio]) => ({ name, says, value, format, ratio }));
  const more = DATA.metrics.includes(chosen) ? [{ name: chosen, says: 'its last value', value: (run) => last(run, chosen), format: short }] : [];
  return [...more, ...own, ...usual].filter(({ value }) => DATA.runs.some((run) => value(run) !== null));
}

function reach() {
  const least = Number(see('reach', '0.8'));
  return least > 0 && least <= 1 ? least : 0.8;
}

/** A run's rows up to a step, as a run. */
function upTo(run, step) {
  const rows = run.x.filter((at) => at <= step).length;
  if (rows === run.x.length) return run;
  return { ...run, x: run.x.slice(0, rows), columns: Object.fromEntries(Object.entries(run.columns).map(([name, values]) => [name, values.slice(0, rows)])) };
}

/** By what runs of two rows belong together: all that differs, but for what divides the rows; of kinds of runs, the seed. */
function pairing() {
  if (drawing.by === 'each') return [];
  if (!dividing().some((row) => row.path === drawing.by)) return DATA.settings.filter((row) => row.path === 'seed');
  return DATA.settings.filter((row) => row.differs && !row.beside && row.path !== drawing.by);
}

/** [[run, run]] of two rows, each up to the last step that both have; repetitions of one seed in their order. */
function pairsOf(one, other) {
  const paths = pairing();
  const keyed = (each) => {
    const found = new Map();
    for (const run of each.runs) {
      const at = DATA.runs.indexOf(run), settings = JSON.stringify(paths.map((row) => row.values[at]));
      let count = 0;
      while (found.has(`${settings} ${count}`)) count += 1;
      found.set(`${settings} ${count}`, run);
    }
    return found;
  };
  const others = keyed(other);
  return [...keyed(one)].filter(([key]) => others.has(key)).map(([key, run]) => {
    const beside = others.get(key), step = Math.min(...[run, beside].map(({ x }) => x[x.length - 1] ?? 0));
    return [upTo(run, step), upTo(beside, step)];
  });
}

/** Mean with its 95 % interval by Student's t, for normal values; no interval for fewer than two. */
function estimate(values) {
  const n = values.length, middle = mean(values);
  if (n < 2) return { n, mean: middle, low: null, high: null };
  const deviation = Math.sqrt(values.reduce((sum, value) => sum + (value - middle) ** 2, 0) / (n - 1));
  const half = (DATA.t[n - 2] ?? 1.96) * deviation / Math.sqrt(n);
  return { n, mean: middle, low: middle - half, high: middle + half };
}

/**
 * The mean difference of the pairs, or the geometric mean of their ratio. For a number of steps that one of the two never got
 * to its last step stands: the true ratio lies further out (`never`: the row's, `theirs`: the other's).
 */
function against(figure, pairs) {
  let never = 0, theirs = 0;
  const values = [];
  for (const [one, other] of pairs) {
    let [a, b] = [figure.value(one), figure.value(other)];
    if ((a === null && b === null) || ((a === null || b === null) && !figure.reached)) continue;
    if (a === null) { never += 1; a = one.x[one.x.length - 1]; }
    if (b === null) { theirs += 1; b = other.x[other.x.length - 1]; }
    if (!figure.ratio) values.push(a - b);
    else if (a > 0 && b > 0) values.push(Math.log(a / b));
  }
  const found = estimate(values), nothing = figure.ratio ? 1 : 0;
  if (figure.ratio) for (const key of ['mean', 'low', 'high']) found[key] = found[key] === null ? null : Math.exp(found[key]);
  // Without spread the interval is a point, and only the sign test remains: below six pairs it cannot reach 5 %.
  const counts = found.n > 5 || (found.low !== null && found.high - found.low > 1e-9 * Math.abs(found.mean));
  const differs = counts && ((found.low > nothing && !theirs) || (found.high < nothing && !never));
  return { ...found, differs, never, theirs };
}

/** A difference, with its sign. */
function signed(value, format) {
  return value > 0 ? `+${format(value)}` : format(value);
}

function againstCell(figure, pairs) {
  const found = against(figure, pairs), write = (value) => (figure.ratio ? number(value, 3) : signed(value, figure.format));
  if (!found.n) return el('td', { class: 'quiet', text: '–' });
  const notes = [found.n < pairs.length ? `${found.n} of ${pairs.length} pairs` : '', found.never ? `≥, as never there in ${found.never}` : '', found.theirs ? `≤, the other never in ${found.theirs}` : ''].filter(Boolean);
  const between = found.low === null ? 'one pair' : `${write(found.low)} to ${write(found.high)}`;
  return el('td', { class: found.differs ? 'differs' : '', text: `${figure.ratio ? '× ' : ''}${write(found.mean)}` },
    el('div', { class: 'spread', text: between }), notes.map((note) => el('div', { class: 'spread', text: note })));
}

function ownCell(figure, runs) {
  const known = runs.map(figure.value).filter((value) => value !== null);
  if (!known.length) return el('td', { class: 'quiet', text: figure.reached ? 'never' : '–' });
  const { low, high, mean: middle } = estimate(known);
  return el('td', { text: figure.format(middle) },
    low === null ? null : el('div', { class: 'spread', text: `${figure.format(low)} to ${figure.format(high)}` }),
    known.length < runs.length ? el('div', { class: 'spread', text: `${known.length} of ${runs.length}` }) : null);
}

function compareTools(rows, baseline) {
  const choose = (name) => (event) => { keep(name, event.target.value); showTab(); };
  const select = (name, options) => el('select', { on: { change: choose(name) } }, options.map(([value, text, selected]) => el('option', { value, text, selected })));
  return el('div', { class: 'tools' },
    el('label', {}, 'beside', select('beside', rows.map(({ label }) => [label, label, label === baseline.label]))),
    DATA.metrics.includes(GREEDY) ? el('label', {}, 'steps to a greedy accuracy of', el('input', { type: 'number', min: 0.05, max: 1, step: 0.05, value: reach(), on: { change: choose('reach') } })) : null,
    el('label', {}, 'also the last', select('figure', [['', '–', !see('figure')], ...DATA.metrics.map((metric) => [metric, metric, metric === see('figure')])])));
}

function compareTab() {
  const rows = compared();
  if (rows.length < 2) return el('div', {}, togetherTools(), DATA.runs.length > 1 ? legend(showTab) : null, el('p', { class: 'quiet', text: 'There is nothing here to compare it with.' }));
  const baseline = rows.find(({ label }) => label === see('beside')) ?? rows[0];
  const figures = comparedFigures();
  const name = (each) => el('th', { scope: 'row' }, el('div', { class: 'name' }, runMark(each.at), ` ${each.label}`));
  const head = (text) => el('thead', {}, el('tr', {}, el('th', { scope: 'col', class: 'left', text }),
    el('th', { scope: 'col', text: text === 'by itself' ? 'runs' : 'pairs' }), ...figures.map(({ name, says, ratio }) => el('th', { scope: 'col', title: says, text: text !== 'by itself' && ratio ? `${name}, ratio` : name }))));
  return el('div', {}, togetherTools(), legend(showTab), compareTools(rows, baseline),
    el('h2', { text: `Beside ${baseline.label}` }),
    el('div', { class: 'scroll' }, el('table', { class: 'data', 'data-table': 'against' }, head('difference, or ratio'), el('tbody', {}, rows.filter((each) => each !== baseline).map((each) => {
      const pairs = pairsOf(each, baseline);
      return el('tr', {}, name(each), el('td', { text: String(pairs.length) }), figures.map((figure) => againstCell(figure, pairs)));
    })))),
    el('p', { class: 'quiet small', style: { margin: '8px 0 0' }, text: 'Means over pairs of runs with the same seed, up to the last step that both have, with 95 % intervals by Student\u2019s t. Marked: the interval leaves no room for \u201cno difference\u201d; of twenty figures without any difference about one is marked all the same.' }),
    el('h2', { text: 'Each by itself' }),
    el('div', { class: 'scroll' }, el('table', { class: 'data', 'data-table': 'own' }, head('by itself'), el('tbody', {}, rows.map((each) =>
      el('tr', {}, name(each), el('td', { text: String(each.runs.length) }), figures.map((figure) => ownCell(figure, each.runs))))))));
}
