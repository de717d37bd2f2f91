// Tokens of a response, coloured by one of their values, and that value's scale.

let SAMPLES = null;
const decoded = new Map();

/** The columns of a run's tokens, decoded once. */
function tokensOf(run) {
  if (!decoded.has(run)) {
    const { pieces, columns } = SAMPLES.tokens[run];
    const found = { pieces, id: integers(columns.id, 4), version: integers(columns.version, 4), flags: integers(columns.flags, 1) };
    for (const name of ['logprob', 'gap', 'entropy', 'entropy_change', 'advantage', 'ratio', 'token_ratio', 'divergence']) if (columns[name]) found[name] = floats(columns[name]);
    decoded.set(run, found);
  }
  return decoded.get(run);
}

/** The colourings that the recorded values allow. */
function colouringsThere() {
  const runs = Object.values(SAMPLES.tokens);
  return Object.keys(COLOURINGS).filter((name) => ['masked', 'version', 'none'].includes(name) || runs.some((run) => run.columns[name]));
}

const scales = new Map();

/** `limit`: the 99th percentile of the absolute values of the page's tokens, at which colours are strongest; and the distribution. */
function scaleOf(name) {
  if (!scales.has(name)) {
    const values = [];
    for (const run of Object.keys(SAMPLES.tokens)) {
      const column = tokensOf(run)[name];
      if (column) for (const value of column) if (!Number.isNaN(value)) values.push(value);
    }
    const sizes = Float32Array.from(values, Math.abs).sort();
    const limit = Math.max(sizes[Math.floor(0.99 * (sizes.length - 1))] ?? 1, COLOURINGS[name].floor ?? 1e-6);
    const bins = new Array(52).fill(0), both = COLOURINGS[name].kind === 'both';
    for (const value of values) {
      const share = shareOf(name, value, limit);
      bins[clamp(Math.floor((both ? (share + 1) / 2 : Math.abs(share)) * 52), 0, 51)]++;
    }
    scales.set(name, { limit, bins, known: values.length });
  }
  return scales.get(name);
}

/** From −1 to 1, by the square root, so that small values can be told apart too. */
function shareOf(name, value, limit) {
  const size = Math.sqrt(Math.min(1, Math.abs(value) / limit));
  return COLOURINGS[name].kind === 'both' && value > 0 ? size : -size;
}

/** Colour of token `i`, −1 to 1; NaN if its value was not measured. `newest` and `oldest`: versions of the group. */
function shareOfToken(tokens, name, i, { newest, oldest }) {
  const kind = COLOURINGS[name].kind;
  if (kind === 'none') return 0;
  if (kind === 'mask') return tokens.flags[i] & 2 ? 0.75 : 0;
  if (kind === 'version') return newest > oldest ? -(newest - tokens.version[i]) / (newest - oldest) : 0;
  return tokens[name] ? shareOf(name, tokens[name][i], scaleOf(name).limit) : NaN;
}

function scaleLegend(name) {
  const { kind, unit, says } = COLOURINGS[name];
  const other = el('span', {}, el('span', { class: 'token other text', text: 'italic' }), ' written by the environment');
  if (kind === 'none') return el('div', { class: 'scale' }, other);
  if (kind === 'mask' || kind === 'version') {
    const sample = el('span', { class: 'swatch' });
    paint(sample, kind === 'mask' ? 0.75 : -1);
    return el('div', { class: 'scale' }, el('span', {}, sample, kind === 'mask' ? 'singled out by the objective: held back by TEPO’s KL mask' : 'oldest weights in the group; none: the newest'), other);
  }
  const { limit, bins, known } = scaleOf(name);
  const canvas = el('canvas', { width: 520, height: 68, 'aria-hidden': 'true' });
  canvas.style.width = '260px';
  canvas.style.height = '34px';
  const pen = canvas.getContext('2d'), most = Math.max(...bins, 1);
  bins.forEach((count, at) => {
    const share = kind === 'both' ? (at + 0.5) / 26 - 1 : -(at + 0.5) / 52;
    pen.fillStyle = paintText(share);
    pen.fillRect(at * 10, 46, 10, 22);
    pen.fillStyle = getComputedStyle(document.documentElement).getPropertyValue('--quiet');
    const tall = count ? Math.max(2, 40 * Math.sqrt(count / most)) : 0;
    pen.fillRect(at * 10 + 1, 44 - tall, 8, tall);
  });
  const sign = kind === 'low' ? -1 : 1;
  const ends = kind === 'both' ? [-limit, 0, limit] : [0, (sign * limit) / 4, sign * limit];
  return el('div', { class: 'scale' },
    el('div', {}, canvas, el('div', { class: 'ends' }, ends.map((value, at) => el('span', { text: (at === 2 ? (sign < 0 ? '≤ ' : '≥ ') : '') + number(value) + (at === 2 && unit ? ` ${unit}` : '') })))),
    el('span', { text: `${says}. Bars: how ${number(known)} tokens are spread.` }),
    el('span', {}, el('span', { class: 'swatch token unknown' }), 'not measured'), other);
}

/** A token's known values, as rows for the tip. */
function tokenFacts(tokens, i, place) {
  const rows = [['token', `${place + 1}`], ['weights', `version ${tokens.version[i]}`]];
  const add = (name, label, text) => { if (tokens[name]) rows.push([label, Number.isNaN(tokens[name][i]) ? 'not measured' : text(tokens[name][i])]); };
  add('logprob', 'log-prob', (value) => `${number(value)}  (${percent(Math.exp(value))})`);
  add('gap', 'trainer − sampler', number);
  add('entropy', 'entropy', number);
  add('entropy_change', 'ΔH', number);
  add('advantage', 'advantage', number);
  add('ratio', 'ratio − 1', number);
  add('token_ratio', 'token’s ratio − 1', number);
  add('divergence', 'from the teacher', number);
  rows.push(['mask', !(tokens.flags[i] & 1) ? 'not the model’s' : tokens.flags[i] & 2 ? 'held back' : 'free']);
  return rows;
}

function tokenTip(tokens, i, place, node) {
  const box = node.getBoundingClientRect();
  tip.show(box.left, box.bottom - 8, el('div', { class: 'head mono', text: visibleText(tokens.pieces[tokens.id[i]]) || '(no text)' }),
    el('table', {}, tokenFacts(tokens, i, place).map(([name, value]) => el('tr', {}, el('td', { class: 'quiet', text: name }), el('td', { class: 'n', text: value })))));
}

/** White space that can be seen. */
function visibleText(text) {
  return text.replaceAll('\n', '⏎').replaceAll('\t', '⇥').replaceAll(' ', '␣');
}

const MOST_TOKENS_SHOWN = 1500;

/** A response's tokens as text in colours. `group`: {newest, oldest}. */
function tokenText(tokens, response, name, group, label) {
  const node = el('div', { class: 'text', tabindex: 0, role: 'group', 'aria-label': `${label}. Arrow keys read its tokens.` });
  const spans = [];
  const put = (from, to) => {
    for (let place = from; place < to; place++) {
      const i = response.at + place, text = tokens.pieces[tokens.id[i]];
      const span = el('span', { class: 'token', text: text.replaceAll('\n', '⏎\n') });
      const share = shareOfToken(tokens, name, i, group);
      if (!(tokens.flags[i] & 1)) span.classList.add('other');
      if (Number.isNaN(share)) span.classList.add('unknown');
      else paint(span, share);
      spans.push(span);
      node.append(span);
    }
  };
  put(0, Math.min(response.tokens, MOST_TOKENS_SHOWN));
  if (response.tokens > MOST_TOKENS_SHOWN) {
    const more = el('button', { class: 'button', type: 'button', text: `all ${response.tokens} tokens`, on: { click: () => { more.remove(); put(MOST_TOKENS_SHOWN, response.tokens); } } });
    node.append(el('span', { text: ' ' }), more);
  }
  let at = -1;
  const look = (place) => {
    spans[at]?.classList.remove('at');
    at = place;
    if (at < 0 || !spans[at]) return tip.hide();
    spans[at].classList.add('at');
    tokenTip(tokens, response.at + at, at, spans[at]);
  };
  node.addEventListener('pointerover', (event) => { const place = spans.indexOf(event.target); if (place >= 0) look(place); });
  node.addEventListener('pointerleave', () => look(-1));
  node.addEventListener('blur', () => look(-1));
  node.addEventListener('keydown', (event) => {
    const to = { ArrowRight: at + 1, ArrowLeft: Math.max(0, at - 1), Home: 0, End: spans.length - 1, Escape: -1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    event.stopPropagation();
    look(Math.min(to, spans.length - 1));
    spans[at]?.scrollIntoView({ block: 'nearest' });
  });
  return node;
}

/** The same colours as one line, the whole response at a glance. */
function tokenStrip(tokens, response, name, group) {
  const canvas = el('canvas', { width: 600, height: 14, 'aria-hidden': 'true' });
  const pen = canvas.getContext('2d'), width = 600 / Math.max(1, response.tokens);
  for (let place = 0; place < response.tokens; place++) {
    const share = shareOfToken(tokens, name, response.at + place, group);
    if (Number.isNaN(share)) continue;
    pen.fillStyle = paintText(share);
    pen.fillRect(place * width, 0, Math.max(width, 0.8), 14);
  }
  return canvas;
}
