// How step times are distributed: a histogram, and the tail by itself.
function startDistribution() {
  const {edges, steps, beyond, longest_step: longest, tail} = series.distribution;
  const total = steps.reduce((sum, n) => sum + n, beyond), most = Math.max(...steps);
  const bins = edges.slice(0, -1).map((edge, i) => [edge, edges[i + 1]]);
  const close = () => ({right: 18, left: 70});
  const values = name => axis({type: "value", name, nameGap: 28, splitLine: {show: false}, axisLabel: {color: colour("muted"), fontSize: 12,
    formatter: axisMs, hideOverlap: true, showMinLabel: false, showMaxLabel: false}});

  new Chart("histogram", {
    items: () => bins.length, margins: close,
    at: (x, y, chart) => {
      const i = lastAtMost(edges, chart.data(x, y)[0] / 1e3);
      return i >= 0 && i < bins.length ? i : null;
    },
    place: (i, chart) => [chart.pixel(500 * (bins[i][0] + bins[i][1]), 1)[0], chart.grid.top + 8],
    option: (size, mode) => {
      const log = mode !== "steps", base = log ? 0.5 : 0;
      return {
        xAxis: {...values("ms"), min: 1e3 * edges[0], max: 1e3 * edges[edges.length - 1]},
        yAxis: axis({type: log ? "log" : "value", min: base, max: log ? 10 ** Math.ceil(Math.log10(most + 1)) : nice(most),
          name: log ? "steps, logarithmic" : "steps", nameGap: 46, minInterval: 1, axisLabel: {color: colour("muted"),
            formatter: value => value < 1 && log ? "" : whole(value)}}),
        series: [{type: "custom", silent: true, clip: true, data: bins.map((bin, i) => i), renderItem: ({dataIndex: i}, api) => {
          if (!steps[i]) return null;
          const [x, y] = api.coord([1e3 * bins[i][0], steps[i]]), [to, floor] = api.coord([1e3 * bins[i][1], base]);
          return {type: "rect", shape: {x: x + 0.5, y, width: Math.max(to - x - 1, 1), height: Math.max(floor - y, 1)},
            style: {fill: colour("bar")}};
        }}],
      };
    },
    drawn: chart => {
      chart.over.replaceChildren();
      const {top, height, left, width} = chart.grid, marks = [["median", report.step_time.median], ["mean", report.step_time.mean],
        ["p99", report.step_time.p99]];
      const shown = marks.map(([name, value]) => ({name, value, x: chart.pixel(1e3 * value, 1)[0]}))
        .filter(({x}) => x >= left && x <= left + width).sort((a, b) => a.x - b.x);
      shown.forEach(({name, value, x}, i) => {
        const line = make("div", {class: "rule"});
        Object.assign(line.style, {left: `${x}px`, top: `${top}px`, height: `${height}px`});
        chart.over.append(line);
        const near = x > left + width - 120;
        label(chart, `${name} ${ms(value)}`, x + (near ? -4 : 4), top + 2 + 17 * i, near ? "far" : "");
      });
    },
    read: i => ({title: `${ms(bins[i][0])} to ${ms(bins[i][1])}`, rows: [["steps", whole(steps[i])],
      ["share", percent(steps[i] / total, 2)]]}),
    table: () => ({head: ["from", "to", "steps", "share"], rows: [...bins.map(([from, to], i) => [ms(from), ms(to), whole(steps[i]),
      percent(steps[i] / total, 2)]), ...(beyond ? [[ms(edges[edges.length - 1]), ms(longest), whole(beyond), percent(beyond / total, 2)]] : [])]}),
    summary: () => `Histogram of ${whole(total)} steps. Median ${ms(report.step_time.median)}, 99th percentile ${ms(report.step_time.p99)}, `
      + `longest ${ms(longest)}.`,
  });

  const times = tail.step_time, ratio = times[times.length - 1] / times[0];
  new Chart("tail", {
    items: () => times.length, margins: close,
    at: (x, y, chart) => {
      const value = chart.data(x, y)[0] / 1e3;
      let best = 0;
      for (let i = 1; i < times.length; i++) if (Math.abs(times[i] - value) < Math.abs(times[best] - value)) best = i;
      return best;
    },
    place: (i, chart) => chart.pixel(1e3 * times[i], 100 * tail.share[i]),
    option: () => ({
      xAxis: ratio > 4 ? axis({name: "ms, logarithmic", nameGap: 28, splitLine: {show: false}, ...logarithmic(1e3 * times[0], 1e3 * times[times.length - 1])})
        : {...values("ms"), min: 1e3 * times[0], max: 1e3 * times[times.length - 1]},
      yAxis: axis({type: "log", name: "% that took longer", nameGap: 46, max: 100, min: 10 ** Math.floor(Math.log10(100 / total)),
        axisLabel: {color: colour("muted"), formatter: value => String(+value.toPrecision(2))}}),
      series: [{type: "line", step: "end", symbol: "none", silent: true, lineStyle: {color: colour("accent"), width: 2},
        data: times.map((time, i) => [1e3 * time, 100 * tail.share[i]])}],
    }),
    read: i => ({title: `${percent(tail.share[i], tail.share[i] < 0.001 ? 3 : tail.share[i] < 0.01 ? 2 : 1)} of steps`, rows: [["took longer than", ms(times[i])]]}),
    table: () => ({head: ["share of steps", "took longer than"], rows: times.map((time, i) => [percent(tail.share[i], 3), ms(time)])}),
    summary: () => `Half of the steps took longer than ${ms(times[0])}, the longest ${ms(longest)}.`,
  });
}
