// Shared by all charts: styles of curves, position of the cross-hair, smoothing and scales.

const PLOT = { left: 50, right: 10, top: 8, bottom: 22, height: 188 };
const charts = new Set();
const hover = { x: null };

/** How curves are drawn. `by`: what runs are drawn together by, '' for all but their seed; `from` and `to` on the x axis, null for all. */
const drawing = { smooth: 0.6, time: false, log: false, by: '', from: null, to: null };

function redraw() {
  for (const chart of charts) chart.draw();
}

/** A moving mean that forgets, without the bias of its start; what is missing stays missing. */
function smoothed(values, weight) {
  if (!weight) return values;
  let sum = 0, scale = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    scale = weight * scale + (1 - weight);
    return sum / scale;
  });
}

/** Curves have many points; evaluations few, which are drawn as they are. */
function isDense(values) {
  const known = values.filter((value) => value !== null).length;
  return known > 20 && known > 0.6 * values.length;
}

function prepared(line) {
  const dense = isDense(line.y), weight = dense ? drawing.smooth : 0;
  return {
    ...line, dense, shown: smoothed(line.y, weight),
    low: line.low && smoothed(line.low, weight), high: line.high && smoothed(line.high, weight),
  };
}

function said(line, at, unit) {
  if (line.low) return `${unit(line.low[at])} to ${unit(line.high[at])}`;
  return line.dense && drawing.smooth > 0 ? unit(line.y[at]) : '';
}

function swatch(line) {
  return svg('svg', { width: 16, height: 8, 'aria-hidden': 'true' },
    svg('line', { x1: 0, x2: 16, y1: 4, y2: 4, stroke: line.colour, 'stroke-width': 2.5, 'stroke-dasharray': line.dash }));
}

function closest(xs, values, x) {
  let best = -1;
  xs.forEach((each, i) => {
    if (values[i] !== null && (best < 0 || Math.abs(each - x) < Math.abs(xs[best] - x))) best = i;
  });
  return best;
}

function extent(values, fallback) {
  let low = Infinity, high = -Infinity;
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return low <= high ? [low, high] : fallback;
}

function zoomTo(from, to) {
  Object.assign(drawing, { from, to });
  document.dispatchEvent(new Event('zoomed'));
  redraw();
}
