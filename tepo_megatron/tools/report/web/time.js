// The tab of times: each step's seconds by phase, and who waited.

const MOST_COLUMNS = 180;
const MOST_RUNS_DRAWN = 24;

const sum = (values) => values.reduce((whole, value) => whole + value, 0);

/** Rows of the steps whose time is known. */
function timedRows(run) {
  return run.x.map((step, i) => i).filter((i) => run.x[i] > 0 && (run.columns['time/step']?.[i] ?? null) !== null);
}

/** Mean seconds of each phase over these rows. */
function meanSeconds(run, rows) {
  return PHASES.map(([name]) => mean(rows.map((i) => run.columns[`time/${name}`]?.[i] ?? 0)));
}

/** Seconds by phase, in at most so many columns; each is the mean of its steps. [{from, to, seconds}] */
function columnsOf(run) {
  const rows = timedRows(run), size = Math.max(1, Math.ceil(rows.length / MOST_COLUMNS));
  const found = [];
  for (let at = 0; at < rows.length; at += size) {
    const part = rows.slice(at, at + size);
    found.push({ from: run.x[part[0]], to: run.x[part[part.length - 1]], seconds: meanSeconds(run, part) });
  }
  return found;
}

function stacked(run, most, end) {
  const columns = columnsOf(run), width = 440, height = 150, left = 44, floor = height - 20;
  const x = (step) => left + ((step - 0.5) / Math.max(1, end)) * (width - left - 6);
  const y = (seconds) => floor - (Math.min(seconds, most) / most) * (floor - 10);
  const paths = PHASES.map(() => '');
  for (const column of columns) {
    let base = 0;
    column.seconds.forEach((seconds, at) => {
      const top = base + seconds;
      if (seconds > 0) paths[at] += `M${x(column.from).toFixed(1)} ${y(base).toFixed(1)}V${y(top).toFixed(1)}H${x(column.to + 1).toFixed(1)}V${y(base).toFixed(1)}Z`;
      base = top;
    });
  }
  const axis = ticks(0, most, 3).map((value) => [
    svg('line', { class: 'grid', x1: left, x2: width - 6, y1: y(value), y2: y(value) }),
    svg('text', { x: left - 6, y: y(value) + 4, 'text-anchor': 'end', text: `${number(value)} s` }),
  ]).flat();
  const cut = columns.filter((column) => sum(column.seconds) > most * 1.001).map((column) => {
    const middle = (x(column.from) + x(column.to + 1)) / 2;
    return svg('path', { class: 'over', d: `M${middle - 4} 7h8l-4 -6z` }, svg('title', { text: duration(sum(column.seconds)) }));
  });
  const under = ticks(1, end, 6).map((value) => svg('text', { x: x(value + 0.5), y: height - 5, 'text-anchor': 'middle', text: number(value) }));
  const drawing = svg('svg', { viewBox: `0 0 ${width} ${height}`, role: 'img', 'aria-label': `Seconds per step of ${run.name}` },
    ...axis, ...paths.map((d, at) => svg('path', { d, fill: PHASES[at][1] })), ...cut, ...under);
  drawing.addEventListener('pointermove', (event) => {
    const box = drawing.getBoundingClientRect(), at = (((event.clientX - box.left) / box.width) * width - left) / (width - left - 6) * end + 0.5;
    const column = columns.find((each) => at >= each.from && at < each.to + 1);
    if (!column) return tip.hide();
    const rows = PHASES.map(([name, colour], i) => [name, colour, column.seconds[i]]).filter(([, , seconds]) => seconds > 0).reverse();
    tip.show(event.clientX, event.clientY,
      el('div', { class: 'head', text: column.from === column.to ? `step ${column.from}` : `steps ${column.from} to ${column.to}, mean` }),
      el('table', {}, rows.map(([name, colour, seconds]) => el('tr', {}, el('td', {}, square(colour)), el('td', { text: name }), el('td', { class: 'n', text: duration(seconds) })))));
  });
  drawing.addEventListener('pointerleave', () => tip.hide());
  return el('div', { class: 'chart' }, el('div', { class: 'title' }, el('h3', { text: run.name })), drawing);
}

function square(colour) {
  return el('i', { class: 'swatch', style: { 'background-color': colour, 'border-color': colour, margin: '0' } });
}

/** Share of the steps' time, without evaluations, that one side had nothing to do. */
function idle(run, side) {
  const values = run.columns[`idle/${side}`];
  if (!values) return null;
  let waited = 0, whole = 0;
  run.x.forEach((step, i) => {
    if (!step || values[i] === null) return;
    const seconds = Math.max(0, (run.columns['time/step']?.[i] ?? 0) - (run.columns['time/eval']?.[i] ?? 0));
    waited += values[i] * seconds;
    whole += seconds;
  });
  return whole ? waited / whole : null;
}

function meter(share) {
  const bar = el('span');
  bar.style.width = `${(100 * share).toFixed(1)}%`;
  return el('span', { class: 'meter', 'aria-hidden': 'true' }, bar);
}

function timeRow(each) {
  const timed = each.runs.filter((run) => timedRows(run).length).map((run) => meanSeconds(run, timedRows(run)));
  const means = PHASES.map((_, at) => mean(timed.map((seconds) => seconds[at])) ?? 0);
  const whole = sum(means);
  const bar = el('div', { class: 'share' }, PHASES.map(([, colour], at) => {
    const part = el('span', { style: { 'background-color': colour } });
    part.style.width = `${(100 * means[at]) / (whole || 1)}%`;
    return means[at] > 0 ? part : null;
  }));
  const shareCell = (side) => {
    const known = each.runs.map((run) => idle(run, side)).filter((value) => value !== null);
    return known.length ? el('td', {}, percent(mean(known)), meter(mean(known))) : el('td', { class: 'quiet', text: '–' });
  };
  return el('tr', {}, el('th', { scope: 'row' }, runMark(each.at), ` ${each.label}`), el('td', { class: 'left' }, bar), el('td', { text: duration(whole) }),
    ...means.map((value) => el('td', {}, number(value, 3), el('div', { class: 'spread', text: percent(value / (whole || 1)) }))), shareCell('trainer'), shareCell('servers'));
}

function timeTab() {
  if (!DATA.runs.some((run) => run.columns['time/step'])) return el('p', { class: 'quiet', text: 'No step has its times yet.' });
  const visible = compared().flatMap((each) => each.runs).filter((run) => run.columns['time/step']);
  const tops = visible.flatMap((run) => columnsOf(run).map((column) => sum(column.seconds))).sort((a, b) => a - b);
  // One step that waited a minute for a server must not flatten all others: it is cut off, and marked.
  const most = Math.max(1e-9, Math.min(tops[tops.length - 1] ?? 0, 1.8 * (tops[Math.floor(0.95 * tops.length)] ?? 0)));
  const end = Math.max(1, ...visible.map((run) => run.x[run.x.length - 1] ?? 1));
  const idleMetrics = ['idle/trainer', 'idle/servers'].filter((metric) => DATA.metrics.includes(metric));
  return el('div', {}, togetherTools(), DATA.runs.length > 1 ? legend(showTab) : null,
    el('h2', { text: 'Seconds per step, mean' }),
    el('div', { class: 'scroll' }, el('table', { class: 'data' },
      el('thead', {}, el('tr', {}, el('th', { scope: 'col', class: 'left', text: 'run' }), el('th', { scope: 'col', class: 'left', text: 'shares' }), el('th', { scope: 'col', text: 'step' }),
        ...PHASES.map(([name, colour, says]) => el('th', { scope: 'col', title: says }, square(colour), ` ${name}`)),
        el('th', { scope: 'col', text: 'trainer idle', title: 'of the steps without their evaluations' }), el('th', { scope: 'col', text: 'servers idle' }))),
      el('tbody', {}, compared().map(timeRow)))),
    el('h2', { text: 'Step by step' }),
    el('div', { class: 'keys' }, PHASES.map(([name, colour, says]) => el('span', {}, square(colour), ` ${name}: ${says}`)), tops[tops.length - 1] > most ? el('span', { text: '▲ higher than the picture' }) : null),
    el('div', { class: 'charts' }, visible.slice(0, MOST_RUNS_DRAWN).map((run) => stacked(run, most, end))),
    visible.length > MOST_RUNS_DRAWN ? el('p', { class: 'quiet small', text: `The first ${MOST_RUNS_DRAWN} of ${visible.length} runs; hide some above to see others.` }) : null,
    idleMetrics.length ? [el('h2', { text: 'Idle' }), ...curveTools().slice(-1), chartGrid(idleMetrics)] : null);
}
