// Line charts with one cross-hair for all: hover or arrow keys move it, a drag zooms all charts, Escape or a double click undoes it.

class Chart {
  /** `lines()` gives [{label, colour, dash, x, y, low, high}]; `marks()` the x of faults. Both are called at each drawing. */
  constructor({ title, says = '', lines, marks = () => [], unit = (value) => number(value) }) {
    Object.assign(this, { lines, marks, unit, title });
    this.value = el('span', { class: 'small quiet' });
    this.svg = svg('svg', { height: PLOT.height, tabindex: 0, role: 'img', 'aria-label': `${title}. Arrow keys read the values.` });
    this.node = el('div', { class: 'chart', 'data-chart': title },
      el('div', { class: 'title' }, el('h3', { text: title, title: says || null }), this.value), this.svg);
    const listeners = {
      pointermove: (event) => this.move(event), pointerleave: () => this.leave(), pointerdown: (event) => this.press(event),
      pointerup: (event) => this.release(event), dblclick: () => zoomTo(null, null), keydown: (event) => this.key(event),
      blur: () => this.leave(),
    };
    for (const [event, listener] of Object.entries(listeners)) this.svg.addEventListener(event, listener);
    this.seen = false;
    charts.add(this);
    watchSight.observe(this.node);
    watchSize.observe(this.node);
  }

  draw() {
    if (!this.seen || !this.node.isConnected) return;
    const width = this.svg.clientWidth;
    if (!width) return;
    this.drawn = this.lines().map((line) => prepared(line));
    const [x0, x1] = extent(this.drawn.flatMap((line) => line.x), [0, 1]);
    this.low = drawing.from ?? x0;
    this.high = drawing.to ?? x1;
    if (this.low === this.high) this.high = this.low + 1;
    this.scaleY();
    this.width = width;
    this.svg.setAttribute('viewBox', `0 0 ${width} ${PLOT.height}`);
    this.over = svg('g');
    this.svg.replaceChildren(...this.axes(), ...this.drawn.flatMap((line) => this.curve(line)), ...this.faults(), this.over);
    const [line] = this.drawn;
    this.value.textContent = this.drawn.length === 1 ? this.unit(line.shown.findLast((value) => value !== null)) : '';
    this.cross();
  }

  scaleY() {
    const values = [];
    for (const line of this.drawn) {
      line.x.forEach((x, i) => {
        if (x < this.low || x > this.high) return;
        for (const value of [line.y[i], line.shown[i], line.low?.[i], line.high?.[i]]) {
          if (value !== null && value !== undefined) values.push(value);
        }
      });
    }
    let [low, high] = extent(values, [0, 1]);
    this.log = drawing.log && low > 0;
    if (this.log) {
      [this.bottom, this.top] = low === high ? [low / 2, high * 2] : [low / 1.06, high * 1.06];
      return;
    }
    if (low === high) [low, high] = low === 0 ? [0, 1] : [low - Math.abs(low) * 0.05, high + Math.abs(high) * 0.05];
    const room = (high - low) * 0.06;
    this.bottom = low >= 0 && low < 0.35 * high ? 0 : low - room;
    this.top = high + room;
  }

  px(x) { return PLOT.left + ((x - this.low) / (this.high - this.low)) * (this.width - PLOT.left - PLOT.right); }

  py(y) {
    const share = this.log ? Math.log(y / this.bottom) / Math.log(this.top / this.bottom) : (y - this.bottom) / (this.top - this.bottom);
    return PLOT.height - PLOT.bottom - share * (PLOT.height - PLOT.top - PLOT.bottom);
  }

  axes() {
    const found = [], right = this.width - PLOT.right, floor = PLOT.height - PLOT.bottom;
    for (const value of this.log ? logTicks(this.bottom, this.top) : ticks(this.bottom, this.top, 4)) {
      const y = this.py(value).toFixed(1);
      found.push(svg('line', { class: 'grid', x1: PLOT.left, x2: right, y1: y, y2: y }));
      found.push(svg('text', { x: PLOT.left - 6, y: Number(y) + 4, 'text-anchor': 'end', text: this.unit(value) }));
    }
    for (const value of ticks(this.low, this.high, Math.max(2, Math.floor(this.width / 90)))) {
      const x = this.px(value).toFixed(1);
      found.push(svg('text', { x, y: PLOT.height - 6, 'text-anchor': 'middle', text: number(value) }));
    }
    found.push(svg('line', { class: 'axis', x1: PLOT.left, x2: right, y1: floor, y2: floor }));
    return found;
  }

  curve(line) {
    const found = [];
    const stroke = { fill: 'none', stroke: line.colour, 'stroke-linejoin': 'round', 'stroke-dasharray': line.dash };
    if (line.low) found.push(svg('path', { d: this.band(line), fill: line.colour, opacity: Math.min(0.16, 0.6 / this.drawn.length).toFixed(3) }));
    else if (line.dense && drawing.smooth > 0) found.push(svg('path', { ...stroke, d: this.path(line, line.y), 'stroke-width': 1, opacity: 0.28 }));
    found.push(svg('path', { ...stroke, d: this.path(line, line.shown), 'stroke-width': 1.9 }));
    if (!line.dense) {
      line.x.forEach((x, i) => {
        if (line.shown[i] === null || x < this.low || x > this.high) return;
        found.push(svg('circle', { cx: this.px(x).toFixed(1), cy: this.py(line.shown[i]).toFixed(1), r: 2.6, fill: line.colour }));
      });
    }
    return found;
  }

  /** A missing number breaks a curve; evaluations are joined over the steps between them. */
  path(line, values) {
    let d = '', pen = false;
    for (let i = 0; i < values.length; i++) {
      if (values[i] === null || (this.log && values[i] <= 0)) { pen = pen && !line.dense; continue; }
      if (line.x[i + 1] < this.low) continue;
      if (line.x[i - 1] > this.high) break;
      const x = clamp(this.px(line.x[i]), -this.width, 2 * this.width);
      d += `${pen ? 'L' : 'M'}${x.toFixed(1)} ${this.py(values[i]).toFixed(1)}`;
      pen = true;
    }
    return d;
  }

  band(line) {
    const inside = line.x.map((x, i) => i).filter((i) => line.low[i] !== null && line.x[i] >= this.low && line.x[i] <= this.high);
    const point = (i, value) => `${this.px(line.x[i]).toFixed(1)} ${this.py(Math.max(value, this.log ? this.bottom : -Infinity)).toFixed(1)}`;
    const there = inside.map((i) => point(i, line.high[i])), back = [...inside].reverse().map((i) => point(i, line.low[i]));
    return inside.length ? `M${[...there, ...back].join('L')}Z` : '';
  }

  faults() {
    const floor = PLOT.height - PLOT.bottom;
    return this.marks().filter((x) => x >= this.low && x <= this.high).map((x) => {
      const at = this.px(x).toFixed(1);
      return svg('path', { class: 'fault', d: `M${at} ${floor - 1}l-3.5 6h7z` });
    });
  }

  /** The step next to the cross-hair, of all lines. */
  nearest() {
    let best = null;
    for (const line of this.drawn ?? []) {
      line.x.forEach((x, i) => {
        if (line.shown[i] === null || x < this.low || x > this.high) return;
        if (best === null || Math.abs(x - hover.x) < Math.abs(best - hover.x)) best = x;
      });
    }
    return best;
  }

  cross() {
    if (!this.over) return [];
    this.over.replaceChildren();
    if (hover.x === null || !this.drawn.length) return [];
    const x = this.nearest();
    if (x === null) return [];
    this.over.append(svg('line', { class: 'cross', x1: this.px(x), x2: this.px(x), y1: PLOT.top, y2: PLOT.height - PLOT.bottom }));
    const found = [];
    for (const line of this.drawn) {
      const at = closest(line.x, line.shown, x);
      if (at < 0 || Math.abs(line.x[at] - x) > 0.02 * (this.high - this.low) + 1e-9) continue;
      this.over.append(svg('circle', { cx: this.px(line.x[at]), cy: this.py(line.shown[at]), r: 3.2, fill: line.colour }));
      found.push({ line, at, value: line.shown[at] });
    }
    return found.sort((a, b) => b.value - a.value);
  }

  move(event) {
    if (!this.drawn) return;
    const box = this.svg.getBoundingClientRect();
    const share = (event.clientX - box.left - PLOT.left) / (box.width - PLOT.left - PLOT.right);
    hover.x = this.low + clamp(share, 0, 1) * (this.high - this.low);
    if (this.pressed !== undefined) {
      this.over.replaceChildren(svg('rect', {
        class: 'zoom', x: Math.min(event.clientX - box.left, this.pressed), width: Math.abs(event.clientX - box.left - this.pressed),
        y: PLOT.top, height: PLOT.height - PLOT.top - PLOT.bottom,
      }));
      return;
    }
    this.read(event.clientX, event.clientY);
  }

  read(x, y) {
    for (const chart of charts) if (chart !== this && chart.seen) chart.cross();
    const found = this.cross();
    if (!found.length) return tip.hide();
    const at = found[0].line.x[found[0].at];
    const rows = found.slice(0, 14).map(({ line, at, value }) => el('tr', {},
      el('td', {}, swatch(line)), el('td', { text: line.label }), el('td', { class: 'n', text: this.unit(value) }),
      el('td', { class: 'n quiet', text: said(line, at, this.unit), style: { 'padding-left': '8px' } })));
    const head = drawing.time ? `${number(at)} h` : `step ${number(at)}`;
    tip.show(x, y, el('div', { class: 'head', text: `${this.title} · ${head}` }), el('table', {}, rows),
      found.length > 14 ? el('div', { class: 'quiet', text: `and ${found.length - 14} more` }) : '');
  }

  leave() {
    hover.x = null;
    this.pressed = undefined;
    tip.hide();
    for (const chart of charts) if (chart.seen) chart.cross();
  }

  press(event) {
    if (event.pointerType === 'mouse') this.pressed = event.clientX - this.svg.getBoundingClientRect().left;
  }

  release(event) {
    if (this.pressed === undefined) return;
    const box = this.svg.getBoundingClientRect(), from = this.pressed, to = event.clientX - box.left;
    this.pressed = undefined;
    if (Math.abs(to - from) < 8) return;
    const at = (pixel) => this.low + clamp((pixel - PLOT.left) / (box.width - PLOT.left - PLOT.right), 0, 1) * (this.high - this.low);
    zoomTo(at(Math.min(from, to)), at(Math.max(from, to)));
  }

  key(event) {
    if (event.key === 'Escape') {
      if (hover.x === null) zoomTo(null, null);
      return this.leave();
    }
    const known = [...new Set(this.drawn.flatMap((line) => line.x.filter((x, i) => line.shown[i] !== null && x >= this.low && x <= this.high)))];
    known.sort((a, b) => a - b);
    const now = hover.x === null ? -1 : known.indexOf(this.nearest());
    const to = { ArrowRight: now + 1, ArrowLeft: now < 0 ? known.length - 1 : now - 1, Home: 0, End: known.length - 1 }[event.key];
    if (to === undefined || !known.length) return;
    event.preventDefault();
    hover.x = known[clamp(to, 0, known.length - 1)];
    const box = this.svg.getBoundingClientRect();
    this.read(box.left + this.px(hover.x), box.top + PLOT.top);
  }
}

const watchSight = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    const chart = [...charts].find((each) => each.node === target);
    if (!chart) continue;
    const first = isIntersecting && !chart.seen;
    chart.seen = isIntersecting;
    if (first) chart.draw();
  }
}, { rootMargin: '300px' });

const watchSize = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    const chart = [...charts].find((each) => each.node === target);
    if (chart && chart.width !== chart.svg.clientWidth) chart.draw();
  }
});

/** Removes a tab's charts. */
function forgetCharts() {
  for (const chart of charts) {
    watchSight.unobserve(chart.node);
    watchSize.unobserve(chart.node);
  }
  charts.clear();
}
