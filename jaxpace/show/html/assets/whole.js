// Charts of the run as a whole: who is late, how long steps take, what pacing gained, more ranks.

// Bars of lateness, by rank or by host.
function startRanks() {
  if (!document.getElementById("chart-lateness")) return;
  const hosts = series.places.hosts;
  const ranks = report.per_rank.filter(row => row.lateness !== null);
  const latest = (a, b) => b.lateness - a.lateness;
  const entries = mode => {
    if (mode === "by host") {
      return hosts.filter(row => row.lateness !== null).sort(latest).map(row => ({
        name: row.host || "not known", lateness: row.lateness, late: row.ranks.some(rank => report.per_rank[rank].late),
        rows: [["mean lateness", lateBy(row.lateness)], ["ranks", whole(row.ranks.length)],
          ["latest", row.latest_rank === null ? "–" : `rank ${row.latest_rank}, ${lateBy(report.per_rank[row.latest_rank].lateness)}`]],
      }));
    }
    return (mode === "in order" ? ranks : [...ranks].sort(latest)).map(row => ({
      name: String(row.rank), lateness: row.lateness, late: row.late, title: `Rank ${row.rank}`,
      rows: [["lateness", lateBy(row.lateness)], ["confidence", row.confidence === null ? "–" : percent(row.confidence)],
        ["last in", `${percent(row.last_share, 0)} of steps`], ["cost", percent(row.cost_share)], ["host", row.host || "–"],
        ["process", row.process === null ? "–" : String(row.process)]],
    }));
  };
  new Chart("lateness", {
    items: chart => entries(chart.mode).length,
    margins: width => ({right: 14, bottom: width < 620 ? 50 : 50}),
    at: (x, y, chart) => {
      const i = Math.round(chart.data(x, y)[0]);
      return i >= 0 && i < entries(chart.mode).length ? i : null;
    },
    place: (i, chart) => [chart.pixel(i, 0)[0], chart.grid.top + 8],
    option: (size, mode) => {
      const all = entries(mode), few = all.length <= 40;
      return {
        xAxis: axis({type: "category", data: all.map(row => plain(row.name)), name: mode === "by host" ? "host" : "rank", nameGap: 32,
          axisTick: {show: false}, axisLabel: {color: colour("muted"), fontSize: 12, hideOverlap: true, overflow: "truncate",
            width: Math.max(40, size.width / Math.max(Math.min(all.length, 20), 1) - 6), interval: few ? 0 : "auto"}}),
        yAxis: axis({type: "value", name: "ms", nameGap: 46, axisLabel: {color: colour("muted"), formatter: axisMs}}),
        series: [{type: "bar", barMaxWidth: 56, barCategoryGap: few ? "30%" : "8%", silent: true, data: all.map(row => ({
          value: 1e3 * row.lateness, itemStyle: {color: row.late ? filling("skew") : colour("bar")}})),
          label: {show: all.length <= 16, position: "top", color: colour("ink"), formatter: ({dataIndex}) => lateBy(all[dataIndex].lateness)}}],
      };
    },
    read: (i, mode) => {
      const row = entries(mode)[i];
      return {title: `${row.title || row.name}${row.late ? " (late)" : ""}`, rows: row.rows};
    },
    table: mode => ({head: mode === "by host" ? ["host", "mean lateness", "ranks", "latest"] : ["rank", "lateness", "confidence",
      "last in", "cost", "host", "process"], rows: entries(mode).map(row => [row.name, ...row.rows.map(([, value]) => value)])}),
    summary: mode => {
      const first = entries(mode)[0];
      return first ? `Bars. ${mode === "in order" ? "First" : "Latest"}: ${first.title || first.name}, ${lateBy(first.lateness)}.` : "";
    },
  });
}

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

// The step time at more ranks, with its interval.
function startForecast() {
  if (!document.getElementById("chart-forecast")) return;
  const {ranks, recorded, forecasts} = series.forecast;
  const points = [{ranks, step_time: {estimate: recorded.step_time, low: null, high: null}, efficiency: {estimate: recorded.efficiency}, change: null},
    ...forecasts.filter(point => point.silent === null)];
  const high = Math.max(...points.map(point => point.step_time.high ?? point.step_time.estimate));
  const low = Math.min(...points.map(point => point.step_time.low ?? point.step_time.estimate));
  new Chart("forecast", {
    items: () => points.length, margins: () => ({right: 40}),
    at: (x, y, chart) => {
      const i = Math.round(chart.data(x, y)[0]);
      return i >= 0 && i < points.length ? i : null;
    },
    place: (i, chart) => chart.pixel(i, 1e3 * points[i].step_time.estimate),
    option: () => ({
      xAxis: axis({type: "category", data: points.map((point, i) => i ? whole(point.ranks) : `${whole(point.ranks)} (recorded)`), name: "ranks", nameGap: 28}),
      yAxis: axis({name: "ms a step", nameGap: 46, ...(high > 4 * low ? {...logarithmic(900 * low, 1100 * high), name: "ms a step, logarithmic"}
        : {type: "value", min: 0, max: nice(1e3 * high), axisLabel: {color: colour("muted"), formatter: axisMs}})}),
      series: [{type: "custom", silent: true, data: points.map((_, i) => i), renderItem: ({dataIndex: i}, api) => {
        const {low, high} = points[i].step_time;
        if (low === null) return null;
        const [x, top] = api.coord([i, 1e3 * high]), bottom = api.coord([i, 1e3 * low])[1], style = {stroke: colour("accent"), lineWidth: 2};
        const line = (x1, y1, x2, y2) => ({type: "line", shape: {x1, y1, x2, y2}, style});
        return {type: "group", children: [line(x, top, x, bottom), line(x - 7, top, x + 7, top), line(x - 7, bottom, x + 7, bottom)]};
      }}, {type: "line", silent: true, data: points.map(point => 1e3 * point.step_time.estimate), symbol: "circle", symbolSize: 9,
        lineStyle: {color: colour("accent"), width: 1.5, type: "dashed"}, itemStyle: {color: colour("accent")},
        label: {show: true, position: "right", distance: 8, offset: [0, -12], color: colour("ink"), formatter: ({dataIndex}) => ms(points[dataIndex].step_time.estimate)}}],
    }),
    read: i => {
      const {step_time: step, change, efficiency} = points[i];
      return {title: `${whole(points[i].ranks)} ranks${i ? "" : ", recorded"}`, rows: [["step", ms(step.estimate)],
        ...(step.low === null ? [] : [["90 % interval", `${ms(step.low)} to ${ms(step.high)}`]]),
        ...(change ? [["change", signedPercent(change.estimate)]] : []), ["efficiency", percent(efficiency.estimate)]]};
    },
    table: () => ({head: ["ranks", "step", "low", "high", "change", "efficiency"], rows: points.map(point => [whole(point.ranks), ms(point.step_time.estimate),
      ms(point.step_time.low), ms(point.step_time.high), point.change ? signedPercent(point.change.estimate) : "–", percent(point.efficiency.estimate)])}),
    summary: () => `Recorded ${ms(recorded.step_time)} at ${whole(ranks)} ranks. ${points.slice(1).map(
      point => `${whole(point.ranks)}: ${ms(point.step_time.estimate)}`).join(", ")}.`,
  });
}
