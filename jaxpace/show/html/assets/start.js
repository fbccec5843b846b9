// Starts everything once the words are on the screen, a chart at a time.
function setTheme(theme) {
  if (theme === "auto") delete root.dataset.theme; else root.dataset.theme = theme;
  document.getElementById("theme").textContent = `Theme: ${theme}`;
  for (const chart of charts.values()) chart.draw();
}

function startButtons() {
  const themes = ["auto", "light", "dark"], button = document.getElementById("theme"), save = document.getElementById("save");
  let chosen = 0;
  button.hidden = save.hidden = false;
  button.addEventListener("click", () => setTheme(themes[chosen = (chosen + 1) % themes.length]));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { for (const chart of charts.values()) chart.draw(); });
  save.addEventListener("click", () => {
    const link = make("a", {href: URL.createObjectURL(new Blob([JSON.stringify(report, null, 1)], {type: "application/json"})), download: "report.json"});
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  });
}

/** Paper is white, and as wide as it is. Before it is printed the page still has the screen's sizes: page.css has these. */
function startPrinting() {
  let theme;
  const print = printed => {
    if (printed) {
      theme = root.dataset.theme;
      root.dataset.theme = "light";
    } else if (theme) root.dataset.theme = theme; else delete root.dataset.theme;
    for (const chart of charts.values()) {
      const {element, figure} = chart;
      chart.printed = printed ? {width: Math.min(element.clientWidth, figure.closest(".two") ? 330 : 690),
        height: element.classList.contains("tall") ? 320 : 200} : null;
      chart.resize();
    }
    tip.hidden = true;
  };
  addEventListener("beforeprint", () => print(true));
  addEventListener("afterprint", () => print(false));
}

function startAll() {
  const parts = [startButtons, startPrinting];
  if (series.over_time) parts.push(startControls, startSteps, startSkew, startRanks, startDistribution, startPacing);
  parts.push(startForecast, () => { root.dataset.ready = "yes"; });
  const next = () => {
    parts.shift()();
    if (parts.length) setTimeout(next);
  };
  next();
}

requestAnimationFrame(() => setTimeout(startAll));
