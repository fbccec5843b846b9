// Charts over steps: one window of steps for all of them, chosen by dragging, by keys, by numbers, or from a finding.
const everyStep = {first: 0, last: 0};
let view = {first: 0, last: 0}, marked = null, showing = null;

function overSteps() {
  return [...charts.values()].filter(chart => chart.parts.overSteps);
}

function stepAxis() {
  return axis({type: "value", min: view.first - 0.5, max: view.last + 0.5, name: "step", nameGap: 28, splitLine: {show: false},
    minInterval: 1, axisLabel: {color: colour("muted"), fontSize: 12, formatter: value => Number.isInteger(value) ? whole(value) : "",
      hideOverlap: true, showMinLabel: false, showMaxLabel: false}});
}

/** Shows the steps from first to last in all charts; `mark` is what is shaded there, if anything. */
function showSteps(first, last, mark = marked) {
  first = Math.round(Math.max(everyStep.first, Math.min(first, everyStep.last)));
  last = Math.round(Math.min(everyStep.last, Math.max(last, first)));
  view = {first, last};
  marked = mark;
  document.getElementById("from").value = first;
  document.getElementById("to").value = last;
  const all = first === everyStep.first && last === everyStep.last;
  document.getElementById("window").textContent =
    (all ? "the whole run" : `${whole(last - first + 1)} of ${whole(everyStep.last - everyStep.first + 1)} steps`)
    + (marked ? ` · shaded: ${plain(marked.title)}, ${stepsFrom(marked.first, marked.last)}` : "");
  for (const chart of overSteps()) chart.draw();
}

function showWhole() {
  rowsInView = null;
  showSteps(everyStep.first, everyStep.last, null);
}

function zoomBy(factor, around) {
  const size = Math.min(Math.max((view.last - view.first) * factor, 1), everyStep.last - everyStep.first);
  const begin = (around ?? (view.first + view.last) / 2) - size / 2;
  const first = Math.max(everyStep.first, Math.min(begin, everyStep.last - size));
  showSteps(first, first + size);
}

/** Shades what is marked, and draws the window's edges. */
function shade(chart) {
  chart.over.replaceChildren();
  if (!marked || (marked.first <= everyStep.first && marked.last >= everyStep.last)) return;
  const {left, top, width, height} = chart.grid, from = chart.pixel(marked.first - 0.5, 0)[0], to = chart.pixel(marked.last + 0.5, 0)[0];
  const begin = Math.max(left, from), end = Math.min(left + width, to);
  if (end < begin) return;
  const mark = make("div", {class: "mark"});
  Object.assign(mark.style, {left: `${begin}px`, width: `${Math.max(end - begin, 2)}px`, top: `${top}px`, height: `${height}px`});
  chart.over.append(mark);
}

/** Points at the same step in all charts. */
function pointAt(chart, item) {
  const step = chart.parts.step(item, chart);
  for (const other of overSteps()) {
    if (other === chart) continue;
    const {left, top, width, height} = other.grid, x = other.pixel(step, 0)[0];
    other.cursor.hidden = x < left || x > left + width;
    Object.assign(other.cursor.style, {left: `${x}px`, top: `${top}px`, height: `${height}px`});
  }
}

/** Lets a window be drawn over a chart with the mouse. */
function draggable(chart) {
  let from = null;
  const box = make("div", {class: "drag", hidden: true});
  chart.element.append(box);
  const position = event => {
    const own = chart.element.getBoundingClientRect(), {left, top, width, height} = chart.grid;
    return [Math.max(left, Math.min(left + width, event.clientX - own.left)),
      Math.max(top, Math.min(top + height, event.clientY - own.top))];
  };
  const extent = at => {
    const {top, height} = chart.grid, tall = chart.parts.rows && Math.abs(at[1] - from[1]) > 24;
    return {left: Math.min(at[0], from[0]), right: Math.max(at[0], from[0]), top: tall ? Math.min(at[1], from[1]) : top,
      bottom: tall ? Math.max(at[1], from[1]) : top + height, tall};
  };
  chart.element.addEventListener("pointerdown", event => {
    if (event.button !== 0 || event.pointerType === "touch") return;
    const own = chart.element.getBoundingClientRect();
    if (!chart.inside(event.clientX - own.left, event.clientY - own.top)) return;
    from = position(event);
    chart.element.setPointerCapture(event.pointerId);
  });
  chart.element.addEventListener("pointermove", event => {
    if (!from) return;
    const {left, right, top, bottom} = extent(position(event));
    box.hidden = right - left < 4;
    Object.assign(box.style, {left: `${left}px`, width: `${right - left}px`, top: `${top}px`, height: `${bottom - top}px`});
  });
  const end = event => {
    if (!from) return;
    const {left, right, top, bottom, tall} = extent(position(event)), wide = right - left >= 6;
    from = null;
    box.hidden = true;
    if (event.type !== "pointerup" || !(wide || tall)) return;
    const [first, high] = chart.data(left, top), [last, low] = chart.data(right, bottom);
    if (tall) chart.parts.rows(high, low);
    if (wide) showSteps(Math.ceil(first - 0.5), Math.floor(last + 0.5)); else showSteps(view.first, view.last);
  };
  chart.element.addEventListener("pointerup", end);
  chart.element.addEventListener("pointercancel", end);
  chart.element.addEventListener("dblclick", showWhole);
}

/** Columns of steps: where they are, and which of them lie in view. */
class Columns {
  constructor({first, last, number}) {
    Object.assign(this, {first, last, number, size: first.length});
    this.middle = first.map((step, i) => (step + last[i]) / 2);
  }

  at(step) {
    const i = lastAtMost(this.first, step + 0.5);
    if (i < 0) return 0;
    return i + 1 < this.size && this.first[i + 1] - step < step - this.last[i] ? i + 1 : i;
  }

  get shown() {
    return [this.at(view.first), this.at(view.last)];
  }

  title(i) {
    const steps = stepsFrom(this.first[i], this.last[i]);
    const text = steps[0].toUpperCase() + steps.slice(1);
    return this.number[i] > 1 ? `${text} (${whole(this.number[i])} count)` : text;
  }
}

/** What charts over columns of steps have in common. */
function columnParts(columns, parts) {
  return {
    overSteps: true, items: () => columns.size, range: () => columns.shown, step: item => item === null ? null : columns.middle[item],
    at: (x, y, chart) => columns.at(chart.data(x, y)[0]),
    place: (item, chart) => [chart.pixel(columns.middle[item], 0)[0], chart.grid.top + 8], ...parts,
  };
}

function startSteps() {
  const {columns: of, step_time: times, shares} = series.over_time, columns = new Columns(of);
  Object.assign(everyStep, {first: columns.first[0], last: columns.last[columns.size - 1]});
  view = {...everyStep};

  /** Heights at which each share begins and ends, by column: one more than there are shares. */
  const stacked = mode => SHARES.reduce((all, name) => [...all, all[all.length - 1].map((below, i) =>
    below + shares[name][i] * (mode === "share" ? 100 : 1e3 * times.mean[i]))], [times.mean.map(() => 0)]);
  draggable(new Chart("over-time", columnParts(columns, {
    option: (size, mode) => {
      const [from, to] = columns.shown, tops = times.mean.slice(from, to + 1);
      const edges = stacked(mode);
      return {
        xAxis: stepAxis(), yAxis: axis({type: "value", name: mode === "share" ? "% of the step" : "ms", nameGap: 46, min: 0,
          max: mode === "share" ? 100 : nice(1e3 * Math.max(...tops)), axisLabel: {color: colour("muted"), formatter: axisMs}}),
        series: SHARES.map((name, i) => area(columns, edges[i], edges[i + 1], filling(name))),
      };
    },
    drawn: chart => {
      shade(chart);
      if (chart.width < 620) return;
      const i = columns.shown[1], edges = stacked(chart.mode);
      const at = SHARES.map((name, n) => ({name, y: chart.pixel(0, (edges[n][i] + edges[n + 1][i]) / 2)[1]}))
        .filter(({name}) => shares[name][i] >= 0.02);
      for (const {name, y} of apart(at)) label(chart, name, chart.grid.left + chart.grid.width + 8, y - 8, "end");
    },
    read: i => ({title: columns.title(i), rows: [...SHARES.map(name => [
      name, `${percent(shares[name][i])} · ${ms(shares[name][i] * times.mean[i])}`, name]).reverse(), ["step", ms(times.mean[i])]]}),
    table: () => ({head: ["steps", "mean step", ...SHARES], rows: columns.first.map((first, i) => [
      stepsFrom(first, columns.last[i]), ms(times.mean[i]), ...SHARES.map(name => percent(shares[name][i]))])}),
    summary: () => `Stacked areas over ${stepsFrom(view.first, view.last)}. Over the whole run: ${SHARES.map(
      name => `${name} ${percent(report.shares[name])}`).join(", ")}.`,
  })));

  draggable(new Chart("step-time", columnParts(columns, {
    option: () => {
      const [from, to] = columns.shown, low = times.low.slice(from, to + 1), high = times.high.slice(from, to + 1);
      const top = Math.max(...high), middle = [...times.mean.slice(from, to + 1)].sort((a, b) => a - b)[Math.floor((to - from) / 2)];
      const log = top > 6 * middle && Math.min(...low) > 0;
      const bottom = Math.min(...low), scaled = values => values.map(value => 1e3 * value);
      const scale = log ? logarithmic(900 * bottom, 1100 * top) : {type: "value", min: 0, max: nice(1e3 * top)};
      return {
        xAxis: stepAxis(), yAxis: axis({name: log ? "ms, logarithmic" : "ms", nameGap: 46, axisLabel: {color: colour("muted"), formatter: axisMs},
          ...scale}),
        series: [area(columns, scaled(times.low), scaled(times.high), colour("band")),
          stairs(columns, scaled(times.mean), {stroke: colour("accent"), lineWidth: 1.8, fill: "none"})],
      };
    },
    drawn: shade,
    read: i => ({title: columns.title(i), rows: columns.number[i] > 1 ? [["mean", ms(times.mean[i])], ["longest", ms(times.high[i])],
      ["shortest", ms(times.low[i])]] : [["step", ms(times.mean[i])]]}),
    table: () => ({head: ["steps", "mean", "shortest", "longest"], rows: columns.first.map((first, i) => [
      stepsFrom(first, columns.last[i]), ms(times.mean[i]), ms(times.low[i]), ms(times.high[i])])}),
    summary: () => `Mean ${ms(report.step_time.mean)}, median ${ms(report.step_time.median)}, 99th percentile ${ms(report.step_time.p99)}.`,
  })));
}

/** The area between two heights in each column. */
function area(columns, low, high, fill) {
  return {type: "custom", silent: true, clip: true, data: [0], renderItem: (_, api) => {
    const there = edge(columns, high, api), back = edge(columns, low, api);
    return {type: "polygon", shape: {points: there.concat(back.reverse())}, style: {fill}};
  }};
}

/** A line that is level over each column. */
function stairs(columns, values, style) {
  return {type: "custom", silent: true, clip: true, data: [0],
    renderItem: (_, api) => ({type: "polyline", shape: {points: edge(columns, values, api)}, style})};
}

function edge(columns, values, api) {
  return values.flatMap((value, i) => [api.coord([columns.first[i] - 0.5, value]), api.coord([columns.last[i] + 0.5, value])]);
}

/** A round number that is not below the value. */
function nice(value) {
  const power = 10 ** Math.floor(Math.log10(value || 1)), part = value / power;
  return power * ([1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10].find(step => step >= part * 1.02) || 12);
}

function startControls() {
  document.getElementById("window-form").addEventListener("submit", event => {
    event.preventDefault();
    const from = Number(document.getElementById("from").value), to = Number(document.getElementById("to").value);
    showSteps(Math.min(from, to), Math.max(from, to));
  });
  document.getElementById("whole").addEventListener("click", showWhole);
  for (const button of document.querySelectorAll("button.go")) {
    button.addEventListener("click", () => {
      const first = Number(button.dataset.first), last = Number(button.dataset.last), around = Math.max((last - first) * 0.15, 2);
      showing = button.dataset.ranks ? button.dataset.ranks.split(" ").map(Number) : [];
      showSteps(first - around, last + around, {first, last, title: button.dataset.title});
      const place = document.getElementById("time");
      place.scrollIntoView({behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth"});
      charts.get("over-time").element.focus({preventScroll: true});
    });
  }
}
