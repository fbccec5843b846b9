"""The page as text: what is on it equals the JSON, and nothing of a run is markup or can be
executed."""

import base64
import hashlib
import html.parser
import json
import os
import pathlib
import re

import pytest

from jaxpace.cli.main import main
from jaxpace.files import UserError
from jaxpace.show.console import write_file
from jaxpace.show.html import page
from jaxpace.show.html.markup import element, find, text
from tests.show.html.runs import NASTY, hostile, report, rich
from tests.synthetic import synthetic_runs
from tests.synthetic.synthetic_runs import SyntheticJob

VOID = {"meta", "br"}
SECTIONS = ["shares", "findings", "time", "ranks", "distribution", "pacing", "worth", "forecast",
            "places", "detail", "notes"]


class Document(html.parser.HTMLParser):
  """Elements in order, as (tag, attributes, text inside); checks that they are nested."""

  def __init__(self, source):
    super().__init__(convert_charrefs=True)
    self.elements, self.open = [], []
    self.feed(source)
    self.close()
    assert not self.open, f"left open: {self.open}"

  def handle_starttag(self, tag, attributes):
    self.elements.append([tag, dict(attributes), ""])
    if tag not in VOID:
      self.open.append(len(self.elements) - 1)

  def handle_endtag(self, tag):
    assert self.elements[self.open[-1]][0] == tag, (f"</{tag}> closes "
                                                    f"<{self.elements[self.open[-1]][0]}>")
    self.open.pop()

  def handle_data(self, data):
    for i in self.open:
      self.elements[i][2] += data

  def all(self, tag, **attributes):
    return [e for e in self.elements
            if e[0] == tag and all(e[1].get(name.rstrip("_")) == value
                                   for name, value in attributes.items())]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
  """A page, its source, and the JSON written beside it."""
  folder = tmp_path_factory.mktemp("page")
  target = folder / "report.html"
  more = ("--json", str(folder / "report.json"), "--series", "--without", "host:host0")
  assert report(rich(folder / "run"), target, *more) == 0
  source = target.read_text(encoding="utf-8")
  return Document(source), source, json.loads((folder / "report.json").read_text())


@pytest.fixture(scope="module")
def nasty(tmp_path_factory):
  folder = tmp_path_factory.mktemp("nasty")
  assert report(hostile(folder), folder / "report.html") == 0
  source = (folder / "report.html").read_text(encoding="utf-8")
  return Document(source), source


@pytest.mark.long
def test_every_section_is_there_under_a_heading(made):
  document, _, _ = made
  ids = [e[1]["id"] for e in document.all("section") if "id" in e[1]]
  assert ids == SECTIONS
  headings = {e[1].get("id") for e in document.all("h2")}
  assert all(e[1]["aria-labelledby"] in headings for e in document.all("section"))
  every = [e[1]["id"] for e in document.elements if "id" in e[1]]
  assert len(every) == len(set(every))
  assert {e[1]["href"][1:] for e in document.all("a")} <= set(every), "links lead somewhere"
  # The verdict is the first thing after the name.
  order = [e[1].get("class", "").split(" ")[0] for e in document.elements
           if e[0] in ("header", "section")]
  assert order[:2] == ["top", "verdict"]


def test_every_figure_is_that_of_the_json(made):
  document, _, report_json = made
  shown = document.all("data")
  assert len(shown) > 100
  for _, attributes, words in shown:
    value = find(report_json, attributes["data-json"])
    if value is None:
      assert words == "–" and attributes["value"] == ""
      continue
    assert float(attributes["value"]) == value
    number = float(re.search(r"[\d.,]+", words)[0].replace(",", ""))
    scale = 1e3 if words.endswith("ms") else 100 if words.endswith("%") else 1
    digits = len(words.split(".")[1].split(" ")[0].rstrip("×")) if "." in words else 0
    if not words.startswith("over"):
      assert abs(abs(value) * scale - number) <= 0.5000001 * 10**-digits
      assert words.startswith("−") <= (value < 0)


def test_the_data_are_the_json(made):
  document, _, report_json = made
  [data] = document.all("script", type="application/json")
  assert json.loads(data[2]) == report_json


def test_findings_lead_to_their_steps(made):
  document, _, report_json = made
  buttons = [e for e in document.all("button") if e[1].get("class") == "go"]
  for place, finding in zip(report_json["series"]["where"]["findings"], report_json["findings"],
                            strict=True):
    wanted = {"data-first": str(place["first_step"]), "data-last": str(place["last_step"]),
              "data-ranks": " ".join(map(str, finding["ranks"]))}
    assert any(wanted.items() <= button[1].items() for button in buttons)
  for row in report_json["series"]["distribution"]["longest"][:10]:
    assert any(b[1]["data-first"] == b[1]["data-last"] == str(row["step"]) for b in buttons)


def hash_of(content):
  return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def test_only_known_scripts_and_styles_may_run_and_nothing_may_be_fetched(made):
  document, source, _ = made
  [policy] = [e[1]["content"] for e in document.all("meta")
              if e[1].get("http-equiv") == "Content-Security-Policy"]
  rules = {rule.split(" ")[0]: rule.split(" ")[1:] for rule in policy.split("; ")}
  assert (rules["default-src"] == ["'none'"] and rules["base-uri"] == ["'none'"]
          and rules["form-action"] == ["'none'"])
  hashes = {kind: {hash_of(e[2]) for e in document.all(kind)
                   if e[1].get("type") != "application/json"}
            for kind in ("script", "style")}
  assert set(rules["script-src"]) == hashes["script"] and len(hashes["script"]) == 2
  assert set(rules["style-src"]) == hashes["style"] and "unsafe" not in policy
  assert set(rules["img-src"]) == {"data:", "blob:"} and "http" not in policy
  # The policy comes before anything it is to hold for.
  assert source.index("Content-Security-Policy") < source.index("<style>") < source.index("<script")
  for tag, attributes, _ in document.elements:
    assert not any(name.startswith("on") or name in ("style", "src", "srcset",
                                                     "action") for name in attributes), tag
    assert attributes.get("href", "#").startswith("#")


def test_nothing_of_a_run_is_markup(nasty, made):
  document, source = nasty
  tags = {e[0] for e in document.elements}
  assert tags <= {e[0] for e in made[0].elements} | {"p"}
  assert len(document.all("script")) == 3 and "img" not in tags
  assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e\u2028\u2029]", "".join(
      source.split("<style>")[0:1]) + source.split("</style>")[1].split("<script>")[0])
  shown = " ".join(e[2] for e in document.all("main"))
  assert '</script><script>window.hacked=1</script><img src=x onerror="window.hacked=1">' in shown
  assert "\\x1b[2J\\u202e\\u2028&amp;" in shown
  [data] = document.all("script", type="application/json")
  assert NASTY in json.loads(data[2])["series"]["places"]["concerns"][0]["sentence"]
  assert "<" not in data[2] and ">" not in data[2] and "&" not in data[2]


@pytest.mark.parametrize("shown, expected", [
    ("a<b>&\"'", "a&lt;b&gt;&amp;&quot;&#x27;"), ("\x00\x1b\u202e", "\\x00\\x1b\\u202e"),
    ("\ud800", "\\ud800"), (3, "3")])
def test_text_is_text(shown, expected):
  assert text(shown) == expected
  assert element("p", shown, title=shown) == f'<p title="{expected}">{expected}</p>'


def test_tables_have_heads_and_charts_have_words(made):
  document, _, _ = made
  for table in document.all("caption"):
    assert table[2]
  assert all(e[1].get("scope") in ("row", "col") for e in document.all("th"))
  charts = [e for e in document.all("div") if (e[1].get("class") or "").split(" ")[0] == "chart"]
  assert [c[1]["id"] for c in charts] == [f"chart-{name}" for name in (
      "over-time", "step-time", "skew", "lateness", "histogram", "tail", "pairs", "effect",
      "forecast")]
  assert all(c[1]["tabindex"] == "0" and c[1]["aria-label"] and "JavaScript" in c[2]
             for c in charts)
  assert len(document.all("details", class_="data")) == len(charts)
  assert document.all("html")[0][1]["lang"] == "en"


def luminance(colour):
  parts = [int(colour[i:i + 2], 16) / 255 for i in (1, 3, 5)]
  parts = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
  return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


def contrast(one, other):
  """WCAG 2.2's contrast ratio."""
  light, dark = sorted((luminance(one), luminance(other)), reverse=True)
  return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("theme", [0, 1, 2], ids=["light", "dark by preference", "dark by choice"])
def test_words_and_charts_stand_out_in_both_themes(theme):
  style = page._asset("page.css")
  blocks = re.findall(r":root[^{]*\{([^}]*)\}", style)
  colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", blocks[0]))
  colours |= dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", blocks[theme]))
  for ground in ("card", "page", "soft"):
    assert contrast(colours["ink"], colours[ground]) >= 7
    assert contrast(colours["muted"], colours[ground]) >= 4.5
  for name, ground in (("bad", "bad-soft"), ("good", "good-soft"), ("bad", "card"),
                       ("accent", "card"), ("ink", "bad-soft")):
    assert contrast(colours[name], colours[ground]) >= 4.5, name
  for name in ("accent", "bar"):
    assert contrast(colours[name], colours["card"]) >= 3, name
  for name in ("skew", "contention", "runtime", "pacing", "compute"):
    assert contrast("#10151a", colours[name]) >= 4.5, "names on the bar"
  assert contrast("#ffffff", colours["transfer"]) >= 4.5


def test_the_library_is_the_one_it_says_it_is():
  library = page._asset(page.LIBRARY)
  assert f'version="{page.LIBRARY_VERSION}"' in library
  folder = pathlib.Path(page.__file__).parent / "assets"
  assert "Apache License" in (folder / "echarts.LICENSE").read_text()
  assert "</script" not in library and "<!--" not in library
  there = {file.name for file in folder.iterdir() if file.suffix in (".js", ".css")}
  assert there == {*page.SCRIPTS, "page.css", page.LIBRARY}


def test_runs_with_little_in_them_have_a_page(tmp_path):
  for name, job, why in (("one", SyntheticJob(ranks=1, steps=60, processes=1, hosts=1), "one rank"),
                         ("short", SyntheticJob(ranks=3, steps=2, processes=3, compile=0.1),
                          "stamped"),
                         ("quiet", SyntheticJob(ranks=4, steps=300, noise=0.01), "Nothing found")):
    synthetic_runs.write(tmp_path / name, job)
    target = tmp_path / f"{name}.html"
    assert report(tmp_path / name, target) == 0, why
    document = Document(target.read_text())
    there = {e[1].get("id") for e in document.elements}
    assert {e[1]["href"][1:] for e in document.all("a")} <= there and "pacing" not in there
    assert (why if why == "Nothing found" else "") in target.read_text()
    assert (document.all("section")
            and json.loads(document.all("script", type="application/json")[0][2]))


@pytest.mark.parametrize("option", ["--html", "--chrome"])
def test_where_it_cannot_be_written_is_told_before_the_work(tmp_path, capsys, monkeypatch, option):
  monkeypatch.setattr("jaxpace.runs.reader.read_run",
                      lambda *_, **__: pytest.fail("it read the run first"))
  (tmp_path / "folder").mkdir()
  for target, words in (("-", "takes the name of a file"), (tmp_path / "folder", "is a directory"),
                        (tmp_path / "no" / "report.html", "does not exist")):
    assert main(["report", str(tmp_path), option, str(target)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("jaxpace report: ") and words in said and said.count("\n") == 1


def test_it_is_written_as_a_whole_and_nowhere_else(tmp_path, made, monkeypatch):
  target = tmp_path / "report.html"
  target.write_text("old")
  write_file([page.page(made[2]).encode()], str(target))
  assert (sorted(f.name for f in tmp_path.iterdir()) == ["report.html"]
          and target.read_text() == made[1])

  def full(*_, **__):
    raise OSError(28, "No space left on device")

  monkeypatch.setattr(os, "replace", full)
  target.write_text("old")
  with pytest.raises(UserError, match="No space left"):
    write_file([page.page(made[2]).encode()], str(target))
  assert target.read_text() == "old" and [f.name for f in tmp_path.iterdir()] == ["report.html"]


def test_series_are_only_in_the_json_where_they_are_asked_for(tmp_path, made):
  synthetic_runs.write(tmp_path / "run", SyntheticJob(ranks=2, steps=60, processes=2))
  assert main(["report", str(tmp_path / "run"), "--json", str(tmp_path / "plain.json")]) == 0
  assert (main(["report", str(tmp_path / "run"), "--json", str(tmp_path / "more.json"), "--series"])
          == 0)
  plain, more = (json.loads((tmp_path / name).read_text()) for name in ("plain.json", "more.json"))
  assert "series" not in plain and set(more) == {*plain, "series"}
  assert {**more, "series": None} == {**plain, "series": None}
