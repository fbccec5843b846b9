"""The page in a real browser: it fetches nothing and has no complaint; hover, zoom and keys work;
figures are right."""

import json
import re

import pytest

from jaxpace.diagnose.words.names import milliseconds as milli
from jaxpace.show.html.markup import late
from tests.show import chromium
from tests.show.html.runs import hostile, report, rich

CHARTS = ["over-time", "step-time", "skew", "lateness", "histogram", "tail", "pairs", "effect",
          "forecast"]
OVER_STEPS = ["over-time", "step-time", "skew", "pairs"]

pytestmark = chromium.needed()


@pytest.fixture(scope="module")
def browser():
  with chromium.opened() as opened:
    yield opened


@pytest.fixture(scope="module")
def made(tmp_path_factory):
  """A page, and the JSON written beside it."""
  folder = tmp_path_factory.mktemp("browser")
  assert (report(rich(folder / "run"), folder / "report.html", "--json",
                 str(folder / "report.json"), "--series") == 0)
  return folder / "report.html", json.loads((folder / "report.json").read_text())


class Opened:
  """A page, with all that it said and asked for."""

  def __init__(self, browser, path, **more):
    self.context = browser.new_context(viewport={"width": 1280, "height": 900},
                                       reduced_motion="reduce", **more)
    self.page = self.context.new_page()
    self.page.set_default_timeout(120_000)
    self.said, self.asked = [], []
    self.page.on("console", lambda message: self.said.append(message.text))
    self.page.on("pageerror", lambda error: self.said.append(str(error)))
    self.page.on("dialog", lambda dialog: (self.said.append("dialog"), dialog.dismiss()))
    self.page.on("request", lambda request: self.asked.append(request.url))
    self.page.goto(path.as_uri())
    self.page.wait_for_selector("html[data-ready=yes]")

  def box(self, chart):
    """The rectangle in which a chart draws its data: x, y, width, height."""
    self.page.locator(f"#chart-{chart}").scroll_into_view_if_needed()
    return self.page.evaluate("""name => {
      const element = document.getElementById(`chart-${name}`), box = element.getBoundingClientRect();
      return [box.x, box.y, box.width, box.height];
    }""", chart)  # noqa: E501

  def at(self, chart, x, y):
    """Moves the mouse to a place between 0 and 1 within the drawing, whose margins are known."""
    left, top, width, height = self.box(chart)
    margins = {"skew": (70, 92, 14, 76), "lateness": (70, 14, 14, 50),
               "histogram": (70, 18, 14, 44), "tail": (70, 18, 14, 44),
               "forecast": (70, 40, 14, 44)}.get(chart, (70, 92, 14, 44))
    place = (left + margins[0] + x * (width - margins[0] - margins[1]),
             top + margins[2] + y * (height - margins[2] - margins[3]))
    self.page.mouse.move(*place)
    return place

  def tip(self):
    """Title and rows of what is shown at the mouse."""
    assert self.page.locator("#tip").is_visible()
    return self.page.locator("#tip strong").inner_text(), dict(self.page.evaluate(
        "[...document.querySelectorAll('#tip tr')].map(row => [row.cells[0].textContent, "
        "row.cells[1].textContent])"))

  def window(self):
    return tuple(int(self.page.locator(f"#{name}").input_value()) for name in ("from", "to"))

  def shown(self, chart):
    """What a chart shows, as a picture."""
    return self.page.evaluate("name => document.querySelector(`#chart-${name} canvas`).toDataURL()",
                              chart)


@pytest.fixture(scope="module")
def opened(browser, made):
  page = Opened(browser, made[0])
  yield page
  page.context.close()


@pytest.fixture
def page(opened):
  """The page as it opens."""
  opened.page.mouse.move(2, 2)
  opened.page.locator("#whole").click()
  yield opened
  assert opened.said == []


def column_of(title, columns):
  """The column whose steps a title names."""
  numbers = [int(n.replace(",", ""))
             for n in re.findall(r"[Ss]teps? ([\d,]+)(?: to ([\d,]+))?", title)[0] if n]
  i = columns["first"].index(numbers[0])
  assert columns["last"][i] == numbers[-1]
  return i


def test_it_is_drawn_without_a_word_or_a_request(page, made):
  assert page.asked == [made[0].as_uri()] and page.said == []
  for chart in CHARTS:
    colours = page.page.evaluate("""name => {
      const canvas = document.querySelector(`#chart-${name} canvas`), copy = document.createElement('canvas');
      [copy.width, copy.height] = [canvas.width, canvas.height];
      const brush = copy.getContext('2d', {willReadFrequently: true});
      brush.drawImage(canvas, 0, 0);
      return new Set(new Uint32Array(brush.getImageData(0, 0, copy.width, copy.height).data.buffer)).size;
    }""", chart)  # noqa: E501
    assert colours > 10, chart
  label = page.page.locator("#chart-skew").get_attribute("aria-label")
  assert label.startswith("Lateness of every rank. A map of 6 ranks by steps. Late: rank 4")


@pytest.mark.parametrize("x", [0.01, 0.4, 0.77, 0.99])
def test_hovering_over_steps_reads_the_json(page, made, x):
  series = made[1]["series"]
  over, skew = series["over_time"], series["skew"]
  page.at("over-time", x, 0.5)
  title, rows = page.tip()
  i = column_of(title, over["columns"])
  assert i == pytest.approx(x * len(over["columns"]["first"]), abs=1.5)
  mean = over["step_time"]["mean"][i]
  for name, shares in over["shares"].items():
    share, time = rows[name].split(" · ")
    assert float(share.split(" ")[0]) == pytest.approx(100 * shares[i], abs=0.051)
    assert float(time.split(" ")[0]) == pytest.approx(1e3 * shares[i] * mean, abs=0.051)
  assert rows["step"] == milli(mean)
  # The same step is pointed at in all charts over steps.
  assert page.page.evaluate(
      "names => names.map(n => document.querySelector(`#chart-${n} .cursor`).hidden)",
      OVER_STEPS) == [False] * 4
  page.at("step-time", x, 0.5)
  title, rows = page.tip()
  i = column_of(title, over["columns"])
  assert rows == {"mean": milli(over["step_time"]["mean"][i]),
                  "longest": milli(over["step_time"]["high"][i]),
                  "shortest": milli(over["step_time"]["low"][i])}
  for rank in (0, 4, 5):
    page.at("skew", x, (rank + 0.5) / 6)
    title, rows = page.tip()
    assert title.startswith(f"Rank {rank}, steps ")
    i = column_of(title, skew["columns"])
    assert rows == {"mean": late(skew["mean"][rank][i] * skew["unit"]), "host": f"host{rank // 2}",
                    "latest step": late(skew["most"][rank][i] * skew["unit"])}


def test_hovering_over_the_others_reads_the_json(page, made):
  document, series = made[1], made[1]["series"]
  latest = sorted(document["per_rank"], key=lambda row: -row["lateness"])
  for i in (0, 3):
    page.at("lateness", (i + 0.5) / 6, 0.5)
    title, rows = page.tip()
    assert (title.startswith(f"Rank {latest[i]['rank']}")
            and ("(late)" in title) == latest[i]["late"])
    assert rows["lateness"] == late(latest[i]["lateness"]) and rows["host"] == latest[i]["host"]
  page.page.get_by_role("button", name="by host").click()
  page.at("lateness", 0.5 / 3, 0.5)
  title, rows = page.tip()
  assert (title == "host2 (late)" and rows["ranks"] == "2"
          and rows["latest"] == f"rank 4, {late(latest[0]['lateness'])}")
  page.page.get_by_role("button", name="latest first").click()
  spread = series["distribution"]
  bins = len(spread["steps"])
  for i in (0, bins // 3, bins - 1):
    page.at("histogram", (i + 0.5) / bins, 0.5)
    title, rows = page.tip()
    assert title == f"{milli(spread['edges'][i])} to {milli(spread['edges'][i + 1])}"
    assert rows["steps"] == f"{spread['steps'][i]:,}"
  page.at("tail", 0.5, 0.5)
  title, rows = page.tip()
  i = [milli(seconds) for seconds in spread["tail"]["step_time"]].index(rows["took longer than"])
  assert float(title.split(" ")[0]) == pytest.approx(100 * spread["tail"]["share"][i], rel=0.2)
  pairs, effect = series["pacing"]["pairs"], series["pacing"]["effect"]
  page.at("pairs", 0.5, 0.5)
  title, rows = page.tip()
  i = pairs["first_step"].index(int(re.search(r"steps ([\d,]+)", title)[1].replace(",", "")))
  assert (rows["with pacing"], rows["without"]) == (milli(pairs["on"][i]), milli(pairs["off"][i]))
  page.at("effect", 0.999, 0.5)
  title, rows = page.tip()
  assert title.startswith(f"After {effect['pairs'][-1]} pairs")
  assert float(rows["effect"].replace("−", "-").rstrip(" %")) == pytest.approx(
      100 * document["pacing"]["effect"], abs=0.051)
  points = [p for p in series["forecast"]["forecasts"] if p["silent"] is None]
  assert len(points) >= 3
  page.at("forecast", 1.5 / (len(points) + 1), 0.5)
  title, rows = page.tip()
  assert (title == f"{points[0]['ranks']} ranks"
          and rows["step"] == milli(points[0]["step_time"]["estimate"]))


def test_dragging_zooms_all_charts_over_steps(page, made):
  before = {chart: page.shown(chart) for chart in CHARTS}
  first, last = page.window()
  page.at("step-time", 0.25, 0.5)
  page.page.mouse.down()
  page.at("step-time", 0.5, 0.5)
  assert page.page.locator("#chart-step-time .drag").is_visible()
  page.page.mouse.up()
  begin, end = page.window()
  size = last - first + 1
  assert (begin == pytest.approx(first + size / 4, abs=3)
          and end == pytest.approx(first + size / 2, abs=3))
  after = {chart: page.shown(chart) for chart in CHARTS}
  assert {chart for chart in CHARTS if after[chart] != before[chart]} == set(OVER_STEPS)
  page.at("over-time", 0.001, 0.5)
  columns = made[1]["series"]["over_time"]["columns"]
  i = column_of(page.tip()[0], columns)
  assert columns["first"][i] <= begin + 2 and columns["last"][i] >= begin - 2
  # Over the map, ranks are chosen as well: here ranks 3 to 5.
  page.at("skew", 0.3, 0.55)
  page.page.mouse.down()
  page.at("skew", 0.6, 0.95)
  page.page.mouse.up()
  page.at("skew", 0.5, 0.5)
  assert page.tip()[0].startswith("Rank 4,") and page.window()[1] - page.window()[0] < 110
  place = page.at("skew", 0.5, 0.5)
  page.page.mouse.dblclick(*place)
  assert page.window() == (first, last)
  page.at("skew", 0.5, 0.5 / 6)
  assert page.tip()[0].startswith("Rank 0,")
  page.page.mouse.move(2, 2)
  assert {chart: page.shown(chart) for chart in CHARTS} == before


def test_a_finding_leads_to_its_steps(page, made):
  row = made[1]["series"]["distribution"]["longest"][3]
  page.page.get_by_role("button", name=f"Show step {row['step']:,} in the charts").click()
  first, last = page.window()
  assert first <= row["step"] <= last and last - first <= 6
  assert f"step {row['step']:,}" in page.page.locator("#window").inner_text()
  assert page.page.locator(".mark").count() == len(OVER_STEPS)
  assert page.page.evaluate("document.activeElement.id") == "chart-over-time"
  assert (page.page.locator("#time").evaluate("e => e.getBoundingClientRect().top")
          == pytest.approx(64, abs=80))
  assert page.page.locator("#chart-skew .strong").inner_text() == f"◂ rank {row['last_rank']}"
  page.page.locator("#whole").click()
  assert page.page.locator(".mark").count() == 0


def test_keys_read_and_zoom(page, made):
  over = made[1]["series"]["over_time"]
  chart, said = page.page.locator("#chart-over-time"), page.page.locator("#said")
  chart.focus()
  chart.press("Home")
  chart.press("ArrowRight")
  i = 1
  assert said.inner_text().startswith(
      f"Steps {over['columns']['first'][i]:,} to {over['columns']['last'][i]:,}")
  assert f"step {milli(over['step_time']['mean'][i])}" in said.inner_text()
  chart.press("Shift+ArrowRight")
  first, last = page.window()
  chart.press("+")
  begin, end = page.window()
  assert (end - begin == pytest.approx((last - first) / 2, abs=2)
          and begin <= over["columns"]["first"][11] <= end)
  chart.press("-")
  chart.press("Escape")
  assert page.window() == (first, last) and not page.page.locator("#tip").is_visible()
  skew = page.page.locator("#chart-skew")
  skew.focus()
  skew.press("ArrowDown")
  skew.press("ArrowDown")
  skew.press("End")
  assert said.inner_text().startswith("Rank 1, ")
  assert f"{made[1]['last_step']:,}" in said.inner_text()


def test_what_a_hostile_run_holds_is_text(browser, tmp_path_factory):
  folder = tmp_path_factory.mktemp("hostile")
  assert report(hostile(folder), folder / "report.html") == 0
  nasty = Opened(browser, folder / "report.html")
  assert nasty.page.locator("h1").inner_text() == "<img src=x onerror=alert(1)>"
  assert "</script><script>window.hacked=1</script>" in nasty.page.locator(".verdict").inner_text()
  nasty.at("skew", 0.5, 0.5)
  assert "onerror=" in nasty.tip()[1]["host"] and "\\u{1b}[2J\\u{202e}" in nasty.tip()[1]["host"]
  nasty.page.get_by_role("button", name="by host").click()
  nasty.at("lateness", 0.5 / 3, 0.5)
  assert nasty.tip()[0].startswith("host1</script>")
  nasty.page.locator("details[data-chart=lateness] summary").click()
  nasty.page.locator("button.go").first.click()
  assert nasty.page.locator("img").count() == 0 and nasty.page.evaluate("window.hacked") is None
  assert nasty.said == [] and len(nasty.asked) == 1
  nasty.context.close()
