'use strict';
// Helpers of the whole page. Text from a model or a file becomes a text node, never HTML.

/** An element. `props`: class, text, on (listeners by event), data, and attributes by name (null: none). */
function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  fill(node, props);
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

function svg(tag, props = {}, ...children) {
  const node = document.createElementNS('http://www.w3.org/2000/svg', tag);
  fill(node, props);
  node.append(...children);
  return node;
}

function fill(node, { class: name, text, on = {}, style = {}, ...attributes }) {
  if (name) node.setAttribute('class', name);
  if (text !== undefined) node.textContent = text;
  for (const [event, listener] of Object.entries(on)) node.addEventListener(event, listener);
  for (const [property, value] of Object.entries(style)) node.style.setProperty(property, value);
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) node.setAttribute(key, value === true ? '' : value);
  }
}

/** The JSON value in the page under this id. */
async function unpack(id) {
  if (typeof DecompressionStream === 'undefined') {
    throw new Error('this browser is too old for this page: it needs Chrome 80, Firefox 113 or Safari 16.4');
  }
  const bytes = bytesOf(document.getElementById(id).textContent);
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream('gzip'))).json();
}

function bytesOf(base64) {
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return bytes;
}

/** Integers whose bytes lie in planes, the lowest first; `width` bytes each. */
function integers(base64, width) {
  const bytes = bytesOf(base64), n = bytes.length / width;
  if (width === 1) return bytes;
  const values = new Uint32Array(n);
  for (let plane = 0; plane < width; plane++) {
    for (let i = 0, from = plane * n; i < n; i++) values[i] |= bytes[from + i] << (8 * plane);
  }
  return values;
}

/** bfloat16 as float32: the upper half of its bits. */
function floats(base64) {
  const bits = integers(base64, 2);
  for (let i = 0; i < bits.length; i++) bits[i] <<= 16;
  return new Float32Array(bits.buffer);
}

// The view is stored in the address, so that a reload or a link shows the same.
const view = new URLSearchParams(location.hash.slice(1));

function see(name, fallback = '') {
  return view.get(name) ?? fallback;
}

function keep(name, value) {
  if (value === null || value === undefined || value === '' || value === false) view.delete(name);
  else view.set(name, value === true ? '1' : value);
  history.replaceState(null, '', '#' + view);
}

/** Small values that a browser may refuse to store. */
const memory = {
  get(key) { try { return sessionStorage.getItem(key); } catch { return null; } },
  set(key, value) { try { sessionStorage.setItem(key, value); } catch { /* then it is not kept */ } },
};

function number(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return '–';
  const size = Math.abs(value);
  if (size === 0) return '0';
  if (!Number.isFinite(value)) return value > 0 ? '∞' : '−∞';
  if (size >= 1e6 || size < 1e-3) return value.toExponential(2).replace('e+', 'e').replaceAll('-', '−');
  if (size >= 1000) return value.toFixed(0).replace('-', '−');
  return String(Number(value.toPrecision(digits))).replace('-', '−');
}

function percent(value, digits = 1) {
  return value === null || value === undefined || Number.isNaN(value) ? '–' : (100 * value).toFixed(digits).replace('-', '−') + ' %';
}

function duration(seconds) {
  if (seconds === null || seconds === undefined) return '–';
  if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`;
  const all = Math.round(seconds), hours = Math.floor(all / 3600);
  const two = (value) => String(value).padStart(2, '0');
  return hours ? `${hours}:${two(Math.floor(all / 60) % 60)}:${two(all % 60)} h` : `${Math.floor(all / 60)}:${two(all % 60)} min`;
}

const mean = (values) => (values.length ? values.reduce((whole, value) => whole + value, 0) / values.length : null);
const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

const tip = {
  node: document.getElementById('tip'),
  /** Shows these children next to a point of the window. */
  show(x, y, ...children) {
    this.node.replaceChildren(...children);
    this.node.hidden = false;
    const { width, height } = this.node.getBoundingClientRect();
    const left = x + 14 + width > innerWidth - 6 ? x - 14 - width : x + 14;
    const top = y + 14 + height > innerHeight - 6 ? y - 14 - height : y + 14;
    this.node.style.left = `${Math.max(4, left)}px`;
    this.node.style.top = `${Math.max(4, top)}px`;
  },
  hide() { this.node.hidden = true; },
};
