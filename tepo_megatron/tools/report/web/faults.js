// The tab of faults: each run's state or end, what went wrong at which step, and what changed on resumption.

function faultCount() {
  return DATA.runs.filter((run) => run.events.length || run.hangs.length).length;
}

function timeline(run) {
  const width = 640, end = Math.max(1, run.steps ?? 0, run.x[run.x.length - 1] ?? 0);
  const x = (step) => 4 + (step / end) * (width - 8);
  const done = run.x[run.x.length - 1] ?? 0;
  const marks = run.events.map(([step, what, value]) => svg('path', { class: 'fault', d: `M${x(step)} 4v12l-3 5h6l-3-5z` }, svg('title', { text: `step ${step}: ${amount(what, value)}` })));
  return el('div', { class: 'timeline' }, svg('svg', { viewBox: `0 0 ${width} 24`, role: 'img', 'aria-label': `${done} of ${end} steps, faults marked` },
    svg('line', { class: 'grid', x1: x(0), x2: x(end), y1: 12, y2: 12, 'stroke-width': 4 }),
    svg('line', { x1: x(0), x2: x(done), y1: 12, y2: 12, stroke: 'currentColor', 'stroke-width': 3, opacity: 0.45 }), ...marks));
}

function amount(what, value) {
  return /^(in steps|until)/.test(what) ? `${duration(value)} lost ${what}` : `${number(value)} ${what}`;
}

function faultPanel(run) {
  const parts = [el('h3', {}, run.name, el('span', { class: run.goes_on ? 'good' : 'quiet', text: ` · ${run.said}` })), timeline(run)];
  parts.push(run.faults.length ? el('p', { class: 'warn', text: run.faults.join(' · ') }) : el('p', { class: 'quiet small', text: 'Nothing went wrong.' }));
  if (run.events.length) {
    parts.push(el('details', { open: run.events.length <= 12 }, el('summary', { class: 'small', text: `${run.events.length} rows with a fault` }),
      el('table', { class: 'data' }, el('tbody', {}, run.events.map(([step, what, value]) => el('tr', {}, el('th', { scope: 'row', text: `step ${step}` }), el('td', { class: 'words', text: amount(what, value) })))))));
  }
  run.changes.forEach((changed, at) => {
    const lines = changed.map(([path, before, after]) => `${path}: ${plain(before)} → ${plain(after)}`);
    parts.push(el('details', {}, el('summary', { class: 'small', text: `resumption ${at + 1} changed ${lines.length} ${lines.length === 1 ? 'setting' : 'settings'}` }), el('pre', { text: lines.join('\n') })));
  });
  for (const [name, text] of run.hangs) parts.push(el('details', {}, el('summary', { class: 'small warn', text: `report of a hang: ${name}` }), el('pre', { text })));
  return el('div', { class: 'panel' }, parts);
}

function faultsTab() {
  const bad = DATA.runs.filter((run) => run.events.length || run.hangs.length || run.changes.length);
  const rest = DATA.runs.filter((run) => !bad.includes(run));
  return el('div', {}, bad.map(faultPanel),
    rest.length ? el('h2', { text: 'Nothing went wrong' }) : null,
    rest.length ? el('div', { class: 'scroll' }, el('table', { class: 'data' }, el('tbody', {}, rest.map((run) => el('tr', {}, el('th', { scope: 'row', text: run.name }),
      el('td', { class: `words ${run.goes_on ? 'good' : ''}`, text: run.said })))))) : null);
}
