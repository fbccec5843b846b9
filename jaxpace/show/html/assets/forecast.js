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
