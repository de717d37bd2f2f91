// The tab of settings: what differs between the runs, what differs from the defaults, and every setting.

function settingsTab() {
  if (!DATA.settings.length) return el('p', { class: 'quiet', text: 'No run here has a resolved.yaml: nothing is known of its settings.' });
  const runs = DATA.runs.length > 1;
  const choices = [runs ? ['differ', 'what differs between the runs'] : null, ['unusual', 'what is not the default'], ['all', 'everything']].filter(Boolean);
  const choice = () => see('settings', choices[0][0]);
  const body = el('div', { class: 'scroll' });
  const search = el('input', { type: 'search', class: 'wide', placeholder: 'find a setting', 'aria-label': 'Find a setting', value: see('setting'), on: { input: () => { keep('setting', search.value); draw(); } } });
  const buttons = choices.map(([name, label]) => el('button', { class: 'button', type: 'button', text: label, on: { click: () => { keep('settings', name); draw(); } } }));
  function draw() {
    buttons.forEach((button, at) => button.setAttribute('aria-pressed', String(choice() === choices[at][0])));
    body.replaceChildren(settingsTable(choice(), search.value));
  }
  draw();
  return el('div', {}, el('div', { class: 'tools' }, search, ...buttons), body);
}

/** A column for each run; with many, one for each group of runs that differ in their seed alone. */
function settingsColumns() {
  if (DATA.runs.length <= 8 || DATA.groups.length === DATA.runs.length) return DATA.runs.map((run, at) => ({ label: run.name, runs: [at] }));
  return DATA.groups;
}

function settingsTable(choice, wanted) {
  const columns = settingsColumns();
  const valueIn = (row, column) => {
    const values = [...new Set(column.runs.map((at) => row.values[at]))];
    return values.length === 1 ? plain(values[0]) : values.map(plain).join(', ');
  };
  const rows = DATA.settings.filter((row) => {
    const kind = choice === 'all' || (choice === 'differ' ? row.differs && row.path !== 'output' : !row.usual);
    return kind && (row.path.includes(wanted) || row.values.some((value) => value?.includes(wanted)));
  });
  if (!rows.length) return el('p', { class: 'quiet', style: { padding: '12px' }, text: wanted ? 'No setting fits.' : 'Nothing: the settings are the same.' });
  return el('table', { class: 'data' },
    el('thead', {}, el('tr', {}, el('th', { scope: 'col', class: 'left', text: 'setting' }), ...columns.map((column) => el('th', { scope: 'col', class: 'left', text: column.label })))),
    el('tbody', {}, rows.map((row) => {
      const values = columns.map((column) => valueIn(row, column)), usual = mode(values);
      return el('tr', {}, el('th', { scope: 'row', class: 'mono' }, row.path.split('.').flatMap((part, at) => (at ? [el('wbr'), `.${part}`] : [part]))),
        ...values.map((value) => el('td', { class: `words mono${columns.length > 2 && value !== usual ? ' differs' : ''}`, text: value })));
    })));
}

function mode(values) {
  const counts = new Map();
  for (const value of values) counts.set(value, (counts.get(value) ?? 0) + 1);
  return [...counts].sort((a, b) => b[1] - a[1])[0][0];
}

/** A value of JSON without the quotes of a text. */
function plain(value) {
  if (value === null || value === undefined) return '–';
  return /^"[^"\\]*"$/.test(value) ? value.slice(1, -1) : value;
}
