// Colours and axes. Runs have the colours of Okabe and Ito, darker or lighter by theme; beyond eight, dashes tell them apart.
// Values of tokens go from nothing to blue, or from blue over nothing to orange: both can be told apart without seeing red or green.

const RUN_COLOURS = {
  light: ['#0072b2', '#d55e00', '#009e73', '#b5508c', '#b07d00', '#3d9fd6', '#5b4fa2', '#6b7280'],
  dark: ['#56a8e8', '#ff8a3d', '#2fc79a', '#e590c3', '#e8b021', '#8fd0ff', '#a99bf5', '#a9b3bf'],
};
const DASHES = ['', '6 3', '2 3', '8 3 2 3'];
const PHASES = [
  ['rollout', '#0072b2', 'sampling'], ['reward', '#7fbfe8', 'verifiers'], ['journal', '#5b4fa2', 'writing the journal'],
  ['score', '#009e73', 'old log-probs'], ['update', '#e69f00', 'optimizer steps'], ['sync', '#d55e00', 'weights to the servers'],
  ['eval', '#cc79a7', 'evaluation'], ['other', '#9aa3ad', 'in no phase'],
];
const BLUE = { light: [0, 94, 160], dark: [96, 178, 245] };
const ORANGE = { light: [193, 78, 0], dark: [255, 156, 70] };

function isDark() {
  return document.documentElement.dataset.theme === 'dark';
}

function theme() {
  return isDark() ? 'dark' : 'light';
}

function runColour(at) {
  return RUN_COLOURS[theme()][at % 8];
}

function runDash(at) {
  return DASHES[Math.floor(at / 8) % DASHES.length];
}

/** A short stroke as a run's lines have it. */
function runMark(at) {
  return svg('svg', { width: 20, height: 8, 'aria-hidden': 'true' },
    svg('line', { x1: 1, x2: 19, y1: 4, y2: 4, stroke: runColour(at), 'stroke-width': 2.5, 'stroke-dasharray': runDash(at) }));
}

/** Round numbers between low and high. */
function ticks(low, high, count) {
  const span = high - low;
  if (!(span > 0)) return [low];
  const raw = span / Math.max(1, count), power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].find((each) => each * power >= raw * 0.999) * power;
  const found = [];
  for (let value = Math.ceil(low / step - 1e-9) * step; value <= high + step * 1e-9; value += step) {
    found.push(Math.abs(value) < step * 1e-9 ? 0 : value);
  }
  return found;
}

/** Powers of ten, and twice and five times each if there are few. */
function logTicks(low, high) {
  const found = [], few = Math.log10(high / low) < 2;
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high) + 1; power++) {
    for (const each of few ? [1, 2, 5] : [1]) {
      const value = each * 10 ** power;
      if (value >= low * 0.999 && value <= high * 1.001) found.push(value);
    }
  }
  return found;
}

/** What a token shows by its colour. `floor`: colours are not at their strongest below it, so that rounding stays pale. */
const COLOURINGS = {
  logprob: { label: 'log-prob (sampler)', kind: 'low', unit: 'nats', says: 'blue: a token that the sampler gave little probability' },
  gap: { label: 'trainer − sampler', kind: 'both', unit: 'nats', floor: 1e-3, says: 'log-prob of the trainer before the update minus the sampler’s; orange: the trainer gives it more' },
  entropy: { label: 'entropy', kind: 'high', unit: 'nats', floor: 0.01, says: 'of the distribution that the token was drawn from; blue: the policy was undecided' },
  entropy_change: { label: 'ΔH', kind: 'both', unit: 'nats', floor: 1e-3, says: 'change of the entropy as the mask used it; blue: it falls' },
  advantage: { label: 'advantage', kind: 'both', unit: '', says: 'orange: made more probable; blue: made less probable' },
  ratio: { label: 'ratio − 1', kind: 'both', unit: '', floor: 1e-4, says: 'the ratio that the objective multiplied the advantage with; orange: above 1' },
  token_ratio: { label: 'token’s ratio − 1', kind: 'both', unit: '', floor: 1e-4, says: 'of the new to the old policy, of the token alone; orange: above 1' },
  divergence: { label: 'from the teacher', kind: 'high', unit: 'nats', floor: 0.01, says: 'divergence of the policy from its teacher; blue: they differ' },
  masked: { label: 'mask', kind: 'mask', unit: '', says: '' },
  version: { label: 'weights version', kind: 'version', unit: '', says: 'blue: drawn by older weights' },
  none: { label: 'no colour', kind: 'none', unit: '', says: '' },
};

/** Background and, if that is strong, ink for a share of −1 (blue) to 1 (orange). */
function paint(node, share) {
  const strength = Math.min(1, Math.abs(share));
  if (!(strength > 0.02)) return;
  node.style.backgroundColor = paintText(share);
  if (strength > 0.57) node.style.color = isDark() ? '#0b0e12' : '#ffffff';
}

function paintText(share) {
  const strength = Math.min(1, Math.abs(share));
  if (!(strength > 0.02)) return 'transparent';
  const [r, g, b] = (share < 0 ? BLUE : ORANGE)[theme()];
  return `rgba(${r}, ${g}, ${b}, ${(0.06 + 0.88 * strength).toFixed(3)})`;
}
