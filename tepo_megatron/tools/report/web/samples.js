// The tab of samples: prompts on the left, and the whole group of the chosen one side by side.

const ENTRY = 58;
const KINDS = { tokens: 'training, token by token', train: 'training, text', heldout: 'held out' };

const finder = { shown: [], at: 0 };

function keyOf(group) {
  return [DATA.runs[group.run].name, group.kind, group.step, group.source, group.problem || group.prompt.slice(0, 60), group.number].join('|');
}

/** What can be computed of a group once. */
function prepareSamples() {
  const seen = new Map();
  for (const group of SAMPLES.groups) {
    const place = [group.run, group.kind, group.step].join('|');
    group.number = seen.get(place) ?? 0;
    seen.set(place, group.number + 1);
    const rewards = group.responses.map((response) => response.reward).filter((reward) => reward !== null && reward !== undefined);
    group.reward = mean(rewards);
    group.mixed = new Set(rewards).size > 1;
    group.tokens = mean(group.responses.map((response) => response.tokens ?? 0));
    group.text = [group.prompt, group.answer, ...group.responses.map((response) => response.text ?? '')].join('\n').toLowerCase();
    if (group.kind === 'tokens') {
      const { pieces } = SAMPLES.tokens[group.run], { id } = tokensOf(group.run);
      for (const response of group.responses) {
        let text = '';
        for (let i = response.at; i < response.at + response.tokens; i++) text += pieces[id[i]];
        group.text += '\n' + text.toLowerCase();
      }
    }
  }
  const rewards = SAMPLES.groups.flatMap((group) => group.responses.map((response) => response.reward ?? 0));
  [finder.worst, finder.best] = extent(rewards, [0, 1]);
}

const SORTS = {
  step: ['newest first', (a, b) => b.step - a.step],
  first: ['oldest first', (a, b) => a.step - b.step],
  low: ['lowest reward', (a, b) => (a.reward ?? Infinity) - (b.reward ?? Infinity)],
  high: ['highest reward', (a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity)],
  long: ['longest', (a, b) => b.tokens - a.tokens],
};

/** Whether a response passes the filters that speak of responses. */
function passes(response) {
  const within = (value, low, high) => (low === '' || value >= Number(low)) && (high === '' || value <= Number(high));
  if ((see('rmin') || see('rmax')) && !within(response.reward ?? NaN, see('rmin'), see('rmax'))) return false;
  if (!within(response.tokens ?? 0, see('lmin'), see('lmax'))) return false;
  return !see('cut') || response.finish === 'length';
}

function chosenGroups() {
  const words = see('words').toLowerCase();
  const equal = (name, value) => !see(name) || see(name) === String(value);
  const found = SAMPLES.groups.filter((group) => equal('kind', group.kind) && equal('run', DATA.runs[group.run].name) && equal('step', group.step)
    && equal('source', group.source) && (!see('mixed') || group.mixed) && (!words || group.text.includes(words)) && group.responses.some(passes));
  return found.sort((SORTS[see('sort', 'step')] ?? SORTS.step)[1]);
}

function choice(name, label, options) {
  return el('label', {}, label, el('select', { 'data-name': name, on: { change: (event) => { keep(name, event.target.value); filtered(); } } },
    options.map(([value, text]) => el('option', { value, text, selected: see(name) === String(value) }))));
}

function range(label, low, high, step) {
  const field = (name, says) => el('input', { type: 'number', step, value: see(name), 'aria-label': `${label}, ${says}`, placeholder: says, on: { input: (event) => { keep(name, event.target.value); filtered(); } } });
  return el('label', {}, label, field(low, 'least'), '–', field(high, 'most'));
}

function flag(name, label) {
  return el('label', {}, el('input', { type: 'checkbox', checked: Boolean(see(name)), on: { change: (event) => { keep(name, event.target.checked); filtered(); } } }), label);
}

function filterTools() {
  const different = (value) => [...new Set(SAMPLES.groups.map(value))];
  const kinds = different((group) => group.kind), runs = different((group) => DATA.runs[group.run].name), sources = different((group) => group.source).filter(Boolean);
  const steps = different((group) => group.step).sort((a, b) => b - a);
  const tools = el('div', { class: 'tools', role: 'search' },
    el('input', { type: 'search', id: 'words', class: 'wide', placeholder: 'find in prompts and responses', 'aria-label': 'Find in prompts and responses', value: see('words'), on: { input: (event) => { keep('words', event.target.value); filtered(); } } }),
    kinds.length > 1 ? choice('kind', 'of', [['', 'all'], ...kinds.map((kind) => [kind, KINDS[kind]])]) : null,
    runs.length > 1 ? choice('run', 'run', [['', 'all'], ...runs.map((name) => [name, name])]) : null,
    choice('step', 'step', [['', 'all'], ...steps.map((step) => [step, step])]),
    sources.length ? choice('source', 'set', [['', 'all'], ...sources.map((name) => [name, name])]) : null,
    range('reward', 'rmin', 'rmax', 'any'), range('tokens', 'lmin', 'lmax', 1),
    flag('mixed', 'rewards differ'), flag('cut', 'cut off'),
    choice('sort', 'order', Object.entries(SORTS).map(([name, [label]]) => [name, label])));
  return el('details', { class: 'filters', open: innerWidth > 760 }, el('summary', { text: 'filters' }), tools);
}

function pips(group) {
  return el('span', { class: 'pips', 'aria-hidden': 'true' }, group.responses.slice(0, 16).map((response) => {
    const share = response.reward === null || response.reward === undefined ? 0 : (response.reward - finder.worst) / (finder.best - finder.worst || 1);
    const pip = el('i', { class: passes(response) ? '' : 'out' });
    pip.style.background = `linear-gradient(to top, currentColor ${Math.round(100 * share)}%, transparent 0)`;
    return pip;
  }));
}

function entry(group, at) {
  const several = DATA.runs.length > 1 ? ` · ${DATA.runs[group.run].name}` : '';
  const node = el('div', { class: 'entry', role: 'option', id: `entry-${at}`, 'aria-selected': String(at === finder.at), on: { click: () => choose(at) } },
    el('div', { class: 'one' }, el('span', { class: 'prompt', text: visibleText(tailOf(group.prompt)) }), el('b', { text: number(group.reward) })),
    el('div', { class: 'two' }, pips(group), el('span', { text: `step ${group.step}${group.kind === 'heldout' ? ' · held out' : ''}${several}` })));
  node.style.top = `${at * ENTRY}px`;
  return node;
}

/** The end of a prompt, which differs between prompts with the same beginning. */
function tailOf(prompt) {
  const text = prompt.trim();
  return text.length > 90 ? `… ${text.slice(-88)}` : text;
}

/** Creates only the visible entries. */
function drawList() {
  const { list } = finder, from = Math.max(0, Math.floor(list.scrollTop / ENTRY) - 4), to = Math.min(finder.shown.length, from + Math.ceil(list.clientHeight / ENTRY) + 9);
  finder.space.replaceChildren(...finder.shown.slice(from, to).map((group, i) => entry(group, from + i)));
  list.setAttribute('aria-activedescendant', `entry-${finder.at}`);
}

function choose(at, scroll = false) {
  if (!finder.shown.length) return;
  finder.at = clamp(at, 0, finder.shown.length - 1);
  keep('group', keyOf(finder.shown[finder.at]));
  if (scroll) {
    const top = finder.at * ENTRY, { list } = finder;
    if (top < list.scrollTop) list.scrollTop = top;
    else if (top + ENTRY > list.scrollTop + list.clientHeight) list.scrollTop = top + ENTRY - list.clientHeight;
  }
  drawList();
  drawGroup();
}

function filtered() {
  finder.shown = chosenGroups();
  const responses = finder.shown.reduce((sum, group) => sum + group.responses.filter(passes).length, 0);
  finder.count.textContent = `${finder.shown.length} prompts, ${responses} responses`;
  finder.space.style.height = `${finder.shown.length * ENTRY}px`;
  const wanted = finder.shown.findIndex((group) => keyOf(group) === see('group'));
  finder.at = Math.max(0, wanted);
  if (!finder.shown.length) {
    finder.space.replaceChildren();
    finder.detail.replaceChildren(el('p', { class: 'quiet', text: 'No sample passes these filters.' }));
    return;
  }
  finder.list.scrollTop = clamp(finder.list.scrollTop, Math.max(0, (finder.at + 1) * ENTRY - finder.list.clientHeight), finder.at * ENTRY);
  drawList();
  drawGroup();
}

function drawGroup() {
  tip.hide();
  const group = finder.shown[finder.at];
  const name = colouring();
  const facts = [['step', group.step], ['problem', group.problem], ['set', group.source], ['answer', group.answer], ['run', DATA.runs.length > 1 ? DATA.runs[group.run].name : ''], ['mean reward', number(group.reward)]];
  const head = el('div', { class: 'panel' },
    el('div', { class: 'facts' }, facts.filter(([, value]) => value !== '').map(([label, value]) => el('span', {}, `${label} `, el('b', { text: value })))),
    el('div', { class: 'prompt-box', text: group.prompt, tabindex: 0, 'aria-label': 'Prompt' }));
  const withTokens = group.kind === 'tokens';
  finder.detail.replaceChildren(head, ...(withTokens ? [scaleLegend(name)] : []), el('div', { class: 'cards' }, withTokens ? tokenCards(group, name) : group.responses.map(textCard)));
}

function tokenCards(group, name) {
  const tokens = tokensOf(group.run);
  let newest = 0, oldest = Infinity;
  for (const { at, tokens: n } of group.responses) {
    for (let i = at; i < at + n; i++) {
      newest = Math.max(newest, tokens.version[i]);
      oldest = Math.min(oldest, tokens.version[i]);
    }
  }
  return group.responses.map((response, at) => {
    const held = share(tokens, response, (i) => tokens.flags[i] & 2);
    const advantage = tokens.advantage?.[response.at];
    return el('section', { class: `response${passes(response) ? '' : ' out'}`, 'aria-label': `response ${at + 1}` },
      cardFacts(response, [
        advantage !== undefined && !Number.isNaN(advantage) ? ['adv', number(advantage, 3)] : null, held === null ? null : ['held back', percent(held, 0)], ['update', response.update || 'none'],
      ]),
      name === 'none' ? null : tokenStrip(tokens, response, name, { newest, oldest }),
      tokenText(tokens, response, name, { newest, oldest }, `Response ${at + 1}, reward ${number(response.reward)}`));
  });
}

/** Share of a response's trained tokens for which `f` is true; null if none is trained. */
function share(tokens, response, f) {
  let count = 0, trained = 0;
  for (let i = response.at; i < response.at + response.tokens; i++) {
    if (!(tokens.flags[i] & 1)) continue;
    trained++;
    if (f(i)) count++;
  }
  return trained ? count / trained : null;
}

function cardFacts(response, more = []) {
  const cut = response.finish === 'length' ? el('b', { class: 'warn', text: 'cut off' }) : null;
  const parts = [['reward', number(response.reward)], ...more.filter(Boolean), ['tokens', response.tokens ?? '–']];
  return el('div', { class: 'facts' }, response.name ? el('span', { text: response.name }) : null, parts.map(([label, value]) => el('span', {}, `${label} `, el('b', { text: value }))), cut);
}

function textCard(response) {
  const turns = response.turns?.map(([by, text]) => [el('div', { class: 'by', text: by }), el('div', { class: `text${by === 'model' ? '' : ' quiet'}`, text })]).flat();
  const parts = Object.entries(response.components ?? {}).map(([name, value]) => `${name} ${number(value)}`).join(' · ');
  return el('section', { class: `response${passes(response) ? '' : ' out'}` }, cardFacts(response, response.correct === undefined ? [] : [['', response.correct ? '✓ correct' : '✗ wrong']]),
    parts ? el('p', { class: 'small quiet', text: parts }) : null,
    turns ?? el('div', { class: 'text', text: response.text }), response.error ? el('p', { class: 'warn small', text: `failed: ${response.error}` }) : null);
}

function colouring() {
  const there = colouringsThere();
  return there.includes(see('colour')) ? see('colour') : there[0];
}

function colourTools() {
  if (!Object.keys(SAMPLES.tokens).length) return null;
  return el('div', { class: 'tools colours', role: 'group', 'aria-label': 'Colour of tokens' }, el('span', { class: 'quiet', text: 'colour by' }),
    colouringsThere().map((name) => el('button', {
      class: 'button', type: 'button', 'data-colour': name, 'aria-pressed': String(colouring() === name), text: COLOURINGS[name].label,
      on: { click: () => setColour(name) },
    })));
}

function setColour(name) {
  keep('colour', name);
  for (const button of document.querySelectorAll('[data-colour]')) button.setAttribute('aria-pressed', String(button.dataset.colour === name));
  if (finder.shown.length) drawGroup();
}

function samplesTab() {
  const some = SAMPLES.groups.length, { recorded } = SAMPLES;
  const none = Object.keys(recorded).filter((kind) => recorded[kind] && !SAMPLES.groups.some((group) => group.kind === kind));
  const tooLarge = none.map((kind) => el('p', { class: 'hint', text: `${recorded[kind]} responses are recorded (${KINDS[kind]}), none fits: raise --size or --samples.` }));
  const hint = recorded.tokens ? null : el('p', { class: 'hint' }, 'No per-token values were recorded. ', el('code', { class: 'mono', text: 'log.token_samples=8' }),
    ' writes the tokens of eight groups of a step with their log-probs, entropies, advantages and masks, and this page colours them.', some ? ' Below are the samples as text.' : '');
  if (!some) return el('div', {}, hint, tooLarge.length ? tooLarge : el('p', { class: 'quiet', text: 'No sample yet. A run writes some at each evaluation (data.heldout, evaluate.show), and of training with log.train_samples.' }));
  finder.count = el('span', { class: 'quiet small' });
  finder.space = el('div', { class: 'space' });
  finder.list = el('div', { class: 'list', role: 'listbox', tabindex: 0, 'aria-label': 'Prompts', on: { scroll: drawList, keydown: listKey } }, finder.space);
  finder.detail = el('div', { class: 'detail', 'aria-live': 'off' });
  const node = el('div', {}, hint, tooLarge, filterTools(), colourTools(),
    el('p', { class: 'small quiet', style: { 'margin-bottom': '8px' } }, finder.count, leftOut(), el('span', { class: 'mouse' }, ' · keys: ', ...['j', 'k'].map((key) => el('kbd', { text: key })), ' next and previous prompt, ', el('kbd', { text: 'c' }), ' next colour, ', el('kbd', { text: '/' }), ' find')),
    el('div', { class: 'samples' }, finder.list, finder.detail));
  requestAnimationFrame(() => {
    filtered();
    node.querySelector('[data-colour][aria-pressed="true"]')?.scrollIntoView({ inline: 'center', block: 'nearest' });
  });
  return node;
}

/** How many samples the page had no room for. */
function leftOut() {
  const there = { tokens: 0, train: 0, heldout: 0 };
  for (const group of SAMPLES.groups) there[group.kind] += group.responses.length;
  const lacking = Object.entries(SAMPLES.recorded).filter(([kind, count]) => count > there[kind]);
  return lacking.length ? ` · of ${lacking.map(([kind, count]) => `${count} recorded (${KINDS[kind]})`).join(', ')}; whole groups, evenly over the steps` : '';
}

function listKey(event) {
  const page = Math.max(1, Math.floor(finder.list.clientHeight / ENTRY) - 1);
  const to = { ArrowDown: finder.at + 1, ArrowUp: finder.at - 1, PageDown: finder.at + page, PageUp: finder.at - page, Home: 0, End: finder.shown.length - 1 }[event.key];
  if (to === undefined) return;
  event.preventDefault();
  choose(to, true);
}

/** Keys of the whole tab, except while typing. */
function samplesKey(event) {
  if (event.key === '/') {
    event.preventDefault();
    document.getElementById('words')?.focus();
  } else if (event.key === 'j' || event.key === 'k') choose(finder.at + (event.key === 'j' ? 1 : -1), true);
  else if (event.key === 'c' && Object.keys(SAMPLES.tokens).length) {
    const there = colouringsThere();
    setColour(there[(there.indexOf(colouring()) + 1) % there.length]);
  }
}
