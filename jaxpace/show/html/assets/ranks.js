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
