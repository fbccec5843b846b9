// What a guard measured of pacing, pair by pair.
function startPacing() {
  if (!document.getElementById("chart-pairs")) return;
  const {pairs, effect, blocks} = series.pacing, size = pairs.on.length;
  const middle = pairs.first_step.map((first, i) => (first + pairs.last_step[i]) / 2);
  const highest = Math.max(...pairs.on, ...pairs.off), lowest = Math.min(...pairs.on, ...pairs.off), room = (highest - lowest) * 0.15 || highest * 0.01;
  const low = Math.max(0, 1e3 * (lowest - room)), high = 1e3 * (highest + room);
  const nearest = (values, x) => values.reduce((best, value, i) => Math.abs(value - x) < Math.abs(values[best] - x) ? i : best, 0);
  const dots = (values, name, symbol) => ({type: "line", data: middle.map((x, i) => [x, 1e3 * values[i]]), symbol, symbolSize: size > 80 ? 4 : 8,
    silent: true, showAllSymbol: true, lineStyle: {color: colour(name), width: 1.5}, itemStyle: {color: colour(name)}});
  const difference = i => (pairs.on[i] - pairs.off[i]) / pairs.off[i];

  draggable(new Chart("pairs", {
    overSteps: true, items: () => size, step: i => i === null ? null : middle[i],
    at: (x, y, chart) => nearest(middle, chart.data(x, y)[0]),
    place: (i, chart) => [chart.pixel(middle[i], low)[0], chart.grid.top + 8],
    option: () => ({
      xAxis: stepAxis(),
      yAxis: axis({type: "value", name: "ms", nameGap: 46, min: low, max: high, axisLabel: {color: colour("muted"), formatter: axisMs, showMinLabel: false, showMaxLabel: false}}),
      series: [{type: "custom", silent: true, clip: true, data: (blocks || []).map((_, i) => i), renderItem: ({dataIndex}, api) => {
        const block = blocks[dataIndex];
        if (!block.on) return null;
        const [x, y] = api.coord([block.first_step - 0.5, high]), [to, floor] = api.coord([block.last_step + 0.5, low]);
        return {type: "rect", shape: {x, y, width: to - x, height: floor - y}, style: {fill: colour("shade")}};
      }}, dots(pairs.off, "muted", "emptyCircle"), dots(pairs.on, "accent", "diamond")],
    }),
    drawn: chart => {
      shade(chart);
      if (chart.width < 620) return;
      const end = Math.max(0, middle.findLastIndex(x => x <= view.last)), {left, width} = chart.grid;
      for (const {name, y} of apart([["with pacing", pairs.on], ["without", pairs.off]].map(
        ([name, values]) => ({name, y: chart.pixel(view.last, 1e3 * values[end])[1]})))) label(chart, name, left + width + 6, y - 8, "end");
    },
    read: i => ({title: pairs.number[i] > 1 ? `${pairs.number[i]} pairs, ${stepsFrom(pairs.first_step[i], pairs.last_step[i])}`
      : `Pair ${i + 1}, ${stepsFrom(pairs.first_step[i], pairs.last_step[i])}`,
    rows: [["with pacing", ms(pairs.on[i])], ["without", ms(pairs.off[i])], ["effect", signedPercent(difference(i))]]}),
    table: () => ({head: ["steps", "pairs", "with pacing", "without", "effect"], rows: pairs.on.map((_, i) => [
      stepsFrom(pairs.first_step[i], pairs.last_step[i]), whole(pairs.number[i]), ms(pairs.on[i]), ms(pairs.off[i]), signedPercent(difference(i))])}),
    summary: () => `${whole(report.pacing.blocks)} blocks. Effect ${signedPercent(report.pacing.effect)}.`,
  }));

  const known = effect.pairs.map((n, i) => i).filter(i => effect.low[i] !== null);
  const inner = known.length ? known.slice(Math.floor(known.length / 4)) : [];
  const extent = 100 * Math.max(0.01, ...effect.effect.slice(Math.floor(effect.effect.length / 4)).map(Math.abs), ...inner.map(i => Math.abs(effect.low[i])),
    ...inner.map(i => Math.abs(effect.high[i])));
  new Chart("effect", {
    items: () => effect.pairs.length,
    at: (x, y, chart) => nearest(effect.pairs, chart.data(x, y)[0]),
    place: (i, chart) => [chart.pixel(effect.pairs[i], 0)[0], chart.grid.top + 8],
    option: () => ({
      xAxis: axis({type: "value", min: Math.min(1, effect.pairs[effect.pairs.length - 1] - 1), max: effect.pairs[effect.pairs.length - 1], minInterval: 1, name: "pairs compared", nameGap: 28, splitLine: {show: false}}),
      yAxis: axis({type: "value", min: -nice(extent), max: nice(extent), name: "effect, %", nameGap: 46, axisLabel: {color: colour("muted"), formatter: value => `${value > 0 ? "+" : ""}${+value.toPrecision(3)}`}}),
      series: [{type: "custom", silent: true, clip: true, data: [0], renderItem: (_, api) => ({type: "polygon", style: {fill: colour("band")},
        shape: {points: [...known.map(i => api.coord([effect.pairs[i], 100 * effect.high[i]])),
          ...[...known].reverse().map(i => api.coord([effect.pairs[i], 100 * effect.low[i]]))]}})},
      {type: "line", silent: true, symbol: "none", clip: true, data: effect.pairs.map((n, i) => [n, 100 * effect.effect[i]]),
        lineStyle: {color: colour("accent"), width: 2}},
      {type: "line", silent: true, symbol: "none", data: [[0, 0], [effect.pairs[effect.pairs.length - 1], 0]], lineStyle: {color: colour("ink"), width: 1, type: "dashed"}}],
    }),
    read: i => ({title: `After ${effect.pairs[i]} pair${effect.pairs[i] > 1 ? "s" : ""} (step ${whole(effect.last_step[i])})`, rows: [["effect", signedPercent(effect.effect[i])],
      ["95 % interval", effect.low[i] === null ? "not yet" : `${signedPercent(effect.low[i])} to ${signedPercent(effect.high[i])}`]]}),
    table: () => ({head: ["pairs", "to step", "effect", "low", "high"], rows: effect.pairs.map((n, i) => [whole(n), whole(effect.last_step[i]),
      signedPercent(effect.effect[i]), signedPercent(effect.low[i]), signedPercent(effect.high[i])])}),
    summary: () => `The effect after all pairs is ${signedPercent(report.pacing.effect)}.`,
  });
}
