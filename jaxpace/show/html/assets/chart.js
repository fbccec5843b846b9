// A chart on the page: drawn by the library, read with the mouse or the keyboard, its data as a table beside it.
const charts = new Map();
const tip = make("div", {id: "tip", hidden: true});
const said = make("div", {class: "unseen", "aria-live": "polite", id: "said"});
document.body.append(tip, said);

/** Margins of the drawing within its element; charts over steps have the same ones, so that they line up. */
function margins(width) {
  return width < 620 ? {left: 56, right: 14, top: 14, bottom: 44} : {left: 70, right: 92, top: 14, bottom: 44};
}

function axis(more) {
  const quiet = colour("muted"), line = colour("line");
  return {
    axisLine: {lineStyle: {color: line}}, axisTick: {lineStyle: {color: line}}, splitLine: {lineStyle: {color: line}},
    axisLabel: {color: quiet, fontSize: 12}, nameTextStyle: {color: quiet, fontSize: 12}, nameLocation: "middle", ...more,
  };
}

/** A logarithmic axis with ticks at 1, 2 and 5 times powers of ten. */
function logarithmic(low, high) {
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
    for (const step of high / low > 300 ? [1] : [1, 2, 5]) {
      const tick = +(step * 10 ** power).toPrecision(1);
      if (tick >= low && tick <= high) ticks.push(tick);
    }
  }
  return {type: "log", min: low, max: high, axisLabel: {color: colour("muted"), fontSize: 12, formatter: axisMs, customValues: ticks},
    axisTick: {customValues: ticks, lineStyle: {color: colour("line")}}};
}

class Chart {
  /**
   * parts: option(size, mode) -> the library's option without grid; items() -> how many can be read; at(x, y, chart) -> the
   * item there, or null; place(item, chart) -> pixels; read(item, mode) -> {title, rows: [[label, value, share?]]};
   * table(mode) -> {head, rows}; summary(mode) -> one sentence. overSteps: whether its x axis is the steps in view.
   */
  constructor(name, parts) {
    this.name = name;
    this.parts = parts;
    this.element = document.getElementById(`chart-${name}`);
    this.figure = this.element.closest("figure");
    this.switches = [...this.figure.querySelectorAll("button[data-mode]")];
    this.mode = this.switches.length ? this.switches[0].dataset.mode : null;
    this.item = null;
    this.element.replaceChildren();
    this.drawing = make("div", {class: "drawing"});
    this.cursor = make("div", {class: "cursor", hidden: true});
    this.over = make("div", {class: "over"});
    this.element.append(this.drawing, this.over, this.cursor);
    this.library = echarts.init(this.drawing, null, {renderer: "canvas", devicePixelRatio: Math.max(2, devicePixelRatio)});
    for (const button of this.switches) button.addEventListener("click", () => this.choose(button.dataset.mode));
    this.element.addEventListener("pointermove", event => this.hover(event));
    this.element.addEventListener("pointerleave", () => this.leave());
    this.element.addEventListener("blur", () => this.leave());
    this.element.addEventListener("keydown", event => this.key(event));
    const details = this.figure.querySelector("details.data");
    details.addEventListener("toggle", () => { if (details.open) this.fill(details); });
    charts.set(name, this);
    new ResizeObserver(() => this.resize()).observe(this.element);
    this.draw();
  }

  get grid() {
    const {width, height} = this;
    const {left, right, top, bottom} = {...margins(width), ...(this.parts.margins ? this.parts.margins(width) : {})};
    return {left, right, top, bottom, width: Math.max(width - left - right, 10), height: Math.max(height - top - bottom, 10)};
  }

  get width() {
    return this.printed ? this.printed.width : this.element.clientWidth;
  }

  get height() {
    return this.printed ? this.printed.height : this.element.clientHeight;
  }

  draw() {
    const {left, right, top, bottom} = this.grid;
    this.library.setOption({
      animation: false, textStyle: {fontFamily: getComputedStyle(document.body).fontFamily}, backgroundColor: "transparent",
      grid: {left, right, top, bottom, outerBoundsMode: "none"}, tooltip: {show: false}, ...this.parts.option(this.grid, this.mode, this),
    }, {notMerge: true});
    this.element.setAttribute("aria-label", `${this.figure.querySelector("h3").textContent}. ${this.parts.summary(this.mode)}`);
    if (this.parts.drawn) this.parts.drawn(this);
  }

  resize() {
    this.library.resize({width: this.width, height: this.height});
    this.draw();
  }

  choose(mode) {
    this.mode = mode;
    for (const button of this.switches) button.setAttribute("aria-pressed", String(button.dataset.mode === mode));
    this.draw();
    const details = this.figure.querySelector("details.data");
    if (details.open) this.fill(details);
  }

  /** Pixels of data. */
  pixel(x, y) {
    return this.library.convertToPixel({xAxisIndex: 0, yAxisIndex: 0}, [x, y]);
  }

  /** Data at pixels. */
  data(x, y) {
    return this.library.convertFromPixel({xAxisIndex: 0, yAxisIndex: 0}, [x, y]);
  }

  inside(x, y) {
    const {left, top, width, height} = this.grid;
    return x >= left && x <= left + width && y >= top && y <= top + height;
  }

  hover(event) {
    if (event.pointerType === "touch" && !event.isPrimary) return;
    const box = this.element.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
    const item = this.inside(x, y) ? this.parts.at(x, y, this) : null;
    if (item === null) this.leave(); else this.show(item, x, y);
  }

  show(item, x, y, aloud = false) {
    this.item = item;
    const {title, rows} = this.parts.read(item, this.mode), place = this.parts.place(item, this);
    tip.replaceChildren(make("strong", {}, title), make("table", {}, ...rows.map(([label, value, share]) => make(
      "tr", {}, make("th", {scope: "row"}, share ? swatch(share) : null, label), make("td", {}, value)))));
    tip.hidden = false;
    tip.dataset.chart = this.name;
    const box = this.element.getBoundingClientRect(), own = tip.getBoundingClientRect();
    const at = box.left + (x ?? place[0]), below = box.top + (y ?? place[1]);
    const right = at + 16 + own.width < document.documentElement.clientWidth;
    tip.style.left = `${Math.max(4, right ? at + 16 : at - 16 - own.width)}px`;
    tip.style.top = `${Math.max(4, Math.min(below + 12, window.innerHeight - own.height - 8))}px`;
    if (aloud) said.textContent = `${title}: ${rows.map(([label, value]) => `${label} ${value}`).join(", ")}`;
    this.cursor.hidden = false;
    const {top, height} = this.grid;
    Object.assign(this.cursor.style, {left: `${place[0]}px`, top: `${top}px`, height: `${height}px`});
    if (this.parts.overSteps) pointAt(this, item);
  }

  leave() {
    this.item = null;
    if (tip.dataset.chart === this.name) tip.hidden = true;
    for (const chart of this.parts.overSteps ? charts.values() : [this]) chart.cursor.hidden = true;
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const last = this.parts.items(this) - 1, far = event.shiftKey ? 10 : 1;
    let item = this.item;
    const [low, high] = this.parts.range ? this.parts.range(this) : [0, last];
    const move = by => Math.max(low, Math.min(high, item === null ? (by > 0 ? low : high) : item + by));
    switch (event.key) {
      case "ArrowRight": item = move(far); break;
      case "ArrowLeft": item = move(-far); break;
      case "ArrowDown": if (!this.parts.up) return; item = this.parts.up(item, 1, this); break;
      case "ArrowUp": if (!this.parts.up) return; item = this.parts.up(item, -1, this); break;
      case "Home": item = low; break;
      case "End": item = high; break;
      case "+": case "=": if (this.parts.overSteps) zoomBy(0.5, this.parts.step(item, this)); break;
      case "-": if (this.parts.overSteps) zoomBy(2, this.parts.step(item, this)); break;
      case "Escape": if (this.parts.overSteps) showWhole(); this.leave(); event.preventDefault(); return;
      default: return;
    }
    event.preventDefault();
    if (item !== null && item >= 0 && item <= last) this.show(item, undefined, undefined, true);
  }

  fill(details) {
    const {head, rows} = this.parts.table(this.mode);
    const table = make("table", {}, make("thead", {}, make("tr", {}, ...head.map(name => make("th", {scope: "col"}, name)))),
      make("tbody", {}, ...rows.map(row => make("tr", {}, ...row.map(cell => make("td", {}, cell))))));
    const title = `${this.figure.querySelector("h3").textContent}, as a table`;
    details.querySelector(".scroll")?.remove();
    details.append(make("div", {class: "scroll", tabindex: 0, role: "region", "aria-label": title}, table));
  }
}

/** The square of a share that stands in the legend. */
function swatch(name) {
  const known = document.querySelector(`#shares .swatch .fill-${CSS.escape(name)}`);
  return known ? known.closest("svg").cloneNode(true) : make("span", {class: `dot dot-${name}`});
}

/** A label on top of a drawing. */
function label(chart, text, x, y, name) {
  const element = make("span", {class: `label ${name || ""}`}, text);
  element.style.left = `${x}px`;
  element.style.top = `${y}px`;
  chart.over.append(element);
  return element;
}

/** Moves labels apart that would lie on each other. */
function apart(labels, height = 15) {
  labels.sort((a, b) => a.y - b.y);
  for (let i = 1; i < labels.length; i++) labels[i].y = Math.max(labels[i].y, labels[i - 1].y + height);
  return labels;
}
