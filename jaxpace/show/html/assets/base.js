// What all parts use: the report, words and numbers as the rest of the page writes them, colours of the theme.
const report = JSON.parse(document.getElementById("report").textContent);
const series = report.series;
const SHARES = ["compute", "skew", "transfer", "contention", "runtime", "pacing"];
const root = document.documentElement;

/** Text that others wrote, with control characters and changes of direction shown as what they are. */
function plain(text) {
  return String(text).replace(/[\p{C}\p{Zl}\p{Zp}]/gu, c => `\\u{${c.codePointAt(0).toString(16)}}`);
}

/** An element; children are elements, or text, which is never taken for markup. */
function make(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children) {
    if (child !== null) element.append(child instanceof Node ? child : plain(child));
  }
  return element;
}

function fixed(value, digits) {
  return value.toLocaleString("en-US", {minimumFractionDigits: digits, maximumFractionDigits: digits});
}

/** Seconds in milliseconds, as everywhere on the page. */
function ms(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const value = seconds * 1e3, size = Math.abs(value);
  return `${fixed(value, size < 10 ? 2 : size < 1000 ? 1 : 0)} ms`;
}

function lateBy(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const shown = ms(Math.abs(seconds));
  return parseFloat(shown) === 0 ? shown : (seconds > 0 ? "+" : "−") + shown;
}

function percent(share, digits = 1) {
  return share === null || share === undefined ? "–" : `${fixed(100 * share, digits)} %`;
}

function signedPercent(share) {
  if (share === null || share === undefined) return "–";
  return (share > 0 ? "+" : share < 0 ? "−" : "") + percent(Math.abs(share));
}

function whole(number) {
  return number.toLocaleString("en-US");
}

function stepsFrom(first, last) {
  return first === last ? `step ${whole(first)}` : `steps ${whole(first)} to ${whole(last)}`;
}

/** A short number of milliseconds for an axis. */
function axisMs(value) {
  return Math.abs(value) >= 1000 ? whole(Math.round(value)) : String(+value.toPrecision(4));
}

function colour(name) {
  return getComputedStyle(root).getPropertyValue(`--${name}`).trim();
}

/** The colour and pattern of a share, for areas on a canvas. */
function filling(name) {
  const path = document.querySelector(`#pattern-${name} path`);
  if (!path) return colour(name);
  const scale = Math.max(1, Math.round(window.devicePixelRatio || 1)), canvas = document.createElement("canvas");
  canvas.width = canvas.height = 10 * scale;
  const brush = canvas.getContext("2d");
  brush.scale(scale, scale);
  brush.fillStyle = colour(name);
  brush.fillRect(0, 0, 10, 10);
  brush.strokeStyle = colour("pattern");
  brush.stroke(new Path2D(path.getAttribute("d")));
  return {image: canvas, repeat: "repeat", scaleX: 1 / scale, scaleY: 1 / scale};
}

/** Last index at which the rising values are not above x; -1 if none is. */
function lastAtMost(values, x) {
  let low = -1, high = values.length - 1;
  while (low < high) {
    const middle = Math.ceil((low + high) / 2);
    if (values[middle] <= x) low = middle; else high = middle - 1;
  }
  return low;
}
