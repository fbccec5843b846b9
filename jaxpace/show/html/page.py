"""Puts the page together. Nothing of a run can be executed in it: only two scripts run, known by
their hashes.

What a run holds goes in as escaped text and as JSON data that scripts show as text. The page may
fetch nothing.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import re
from importlib import resources
from typing import Any

from jaxpace.core.words import plain, plural
from jaxpace.diagnose.floor import SHARES
from jaxpace.diagnose.words.codes import Verdict
from jaxpace.diagnose.words.names import milliseconds
from jaxpace.show.html import sections
from jaxpace.show.html.markup import (
  DocumentFigures,
  Markup,
  element,
  joined,
  patterns,
  prose,
  swatch,
)
from jaxpace.show.html.sections import findings

LIBRARY, LIBRARY_VERSION = "echarts.min.js", "6.1.0"
SCRIPTS = ("base.js", "chart.js", "steps.js", "skew.js", "whole.js", "start.js")
_POLICY = ("default-src 'none'; script-src {scripts}; style-src {style}; img-src data: blob:; "
           "base-uri 'none'; form-action 'none'")


def page(document: dict[str, Any]) -> str:
  """The page of a report."""
  figures = DocumentFigures(document)
  style, library, script = _asset("page.css"), _asset(LIBRARY), _script()
  policy = _POLICY.format(scripts=f"{_hash(library)} {_hash(script)}", style=_hash(style))
  title = f"{plain(document['run'])} · jaxpace report"
  head = element("head", element("meta", charset="utf-8"),
                 element("meta", http_equiv="Content-Security-Policy", content=policy),
                 element("meta", name="viewport", content="width=device-width, initial-scale=1"),
                 element("meta", name="color-scheme", content="light dark"),
                 element("meta", name="referrer",
                         content="no-referrer"),
                 element("title", title), element("style", Markup(style)))
  data = element("script", _data(document), type="application/json", id="report")
  main = element("main", *_main(figures), id="main")
  body = element("body", patterns(), _bar(main), main,
                 _footer(document), data, element("script", Markup(library)),
                 element("script", Markup(script)))
  return "<!DOCTYPE html>\n" + element("html", head, body, lang="en")


_NOT_LASTING = (Verdict.FEW_PAUSES, Verdict.OTHER_SHAPES, Verdict.UNNAMED_WAITING,
                Verdict.DATA_WAITS, Verdict.SLOW_TRANSFERS, Verdict.IDLE_BETWEEN)
"""What takes time and is no finding."""


def _bar(main: Markup) -> Markup:
  links = [element("a", name, href=f"#{place}") for place, name in (
      ("shares", "Shares"), ("findings", "Findings"), ("time", "Over time"),
      ("ranks", "Who is late"), ("distribution", "Step times"), ("pacing", "Pacing"),
      ("worth", "Worth"), ("forecast", "Forecast"), ("places", "Places"), ("notes", "Notes"))
           if f'id="{place}"' in main]
  buttons = [element("button", "Theme: auto", type="button", id="theme", hidden=True),
             element("button", "Save JSON", type="button", id="save", hidden=True)]
  return joined([element("a", "Skip to the report", href="#main", class_="skip"),
                 element("nav", element("span", "jaxpace", class_="brand"),
                         element("div", *links, class_="links"), *buttons, aria_label="Sections")])


def _main(figures: DocumentFigures) -> list[Markup]:
  document = figures.document
  series = document["series"]
  measured = document["shares"] is not None
  found = document["findings"]
  healthy = document["verdict_code"] == Verdict.HEALTHY
  state = "attention" if found else "healthy" if healthy else "unknown"
  word = ("Needs attention" if found else "Nothing found" if healthy else
          "No lasting fault" if document["verdict_code"] in _NOT_LASTING else "Can't be judged")
  parts = [element("header", element("h1", document["path"].rstrip("/").rsplit("/", 1)[-1]
                                     or document["path"]),
                   element("p", f"run {plain(document['run'])}", class_="aside"),
                   sections.recorded(figures), class_="top"),
           element("section", element("h2", word, id="verdict"),
                   element("p", prose(document["verdict"])), class_=f"verdict {state}",
                   aria_labelledby="verdict")]
  hang = sections.hang(figures)
  if hang:
    parts.append(_section("hang", document["hang"]["title"], hang))
  key = sections.key_figures(figures)
  parts += [key] if key else []
  if measured:
    parts.append(_section("shares", "Where the step goes", sections.shares(figures)))
    parts.append(_section("findings", "Findings", findings(figures)))
    parts.append(_section("time", "Over time", _time(series)))
    if series["skew"]:
      parts.append(_section("ranks", "Who is late", _chart(
          "lateness", "Lateness by rank and host", "Mean arrival after the typical rank.",
          switch=("latest first", "in order", "by host")), sections.ranks(figures)))
    parts.append(_section("distribution", "How long steps take", _distribution(figures)))
  pacing = document["pacing"]
  if pacing["active_share"] or "work" in pacing or series["pacing"] is not None:
    parts.append(_section("pacing", "Pacing", _pacing(figures)))
  worth = sections.what_if(figures) if measured else None
  parts += [_section("worth", "What it would be worth", worth)] if worth else []
  parts.append(_section("forecast", "At more ranks", _forecast(series["forecast"])))
  parts.append(_section("places", "Where it ran", sections.places(figures)))
  detail = sections.collectives(figures)
  parts += [_section("detail", "Collectives and phases", detail)] if detail else []
  notes = sections.notes(figures)
  parts += [_section("notes", "Notes", notes)] if notes else []
  return parts


def _section(name: str, title: str, *body: Markup) -> Markup:
  return element("section", element("h2", title, id=f"{name}-title"), *body, id=name,
                 aria_labelledby=f"{name}-title")


def _time(series: dict[str, Any]) -> Markup:
  columns = series["over_time"]["columns"]
  first, last = columns["first"][0], columns["last"][-1]
  controls = element(
      "form", element("label", "Steps ",
                      element("input", type="number", id="from", value=first, min=first, max=last)),
      element("label", "to ",
              element("input", type="number", id="to", value=last, min=first, max=last)),
      element("button", "Show", type="submit"),
      element("button", "Whole run", type="button", id="whole"),
      element("span", id="window", class_="aside", role="status"), class_="controls",
      id="window-form")
  hint = element("p", "Drag over a chart to zoom in, double-click to zoom out. With the keyboard: "
                      "arrow keys read values, + and − zoom, Escape shows the whole run.",
                 class_="aside hint")
  band = (" The band is from the shortest to the longest of them." if max(columns["number"]) > 1
          else "")
  charts = [_chart("over-time", "Shares over time", "What the time of a step was spent on.",
                   switch=("share", "milliseconds"), legend=True),
            _chart("step-time", "Step time",
                   f"Mean over ranks{' and steps' if band else ''}.{band}")]
  if series["skew"]:
    many = series["skew"]["most"] is not None
    charts.append(_chart("skew", "Lateness of every rank",
                         "Each row is a rank. Colour is its arrival after that step's median rank.",
                         switch=("mean", "latest step") if many else None, tall=True))
  return joined([controls, hint, *charts])


def _chart(name: str, title: str, meaning: str, *, switch: tuple[str, ...] | None = None,
           tall: bool = False, legend: bool = False) -> Markup:
  """A place for a chart: drawn by script, with its data as a table beside it."""
  switches = element("span", *(element("button", label, type="button", data_mode=label,
                                       aria_pressed=str(not i).lower())
                               for i, label in enumerate(switch)), class_="switch", role="group",
                     aria_label=f"{title}: what is shown") if switch else None
  names = element("p", *(element("span", swatch(share), share, class_="named")
                         for share in SHARES),
                  class_="legend", aria_hidden="true") if legend else None
  caption = element("figcaption", element("div", element("h3", title), switches, class_="line"),
                    element("p", meaning), names)
  return element("figure", caption, element(
      "div", element("noscript",
                     "Charts need JavaScript, which is off; words, figures and tables don't."),
      id=f"chart-{name}", class_="chart tall" if tall else "chart", tabindex=0, role="group",
      aria_roledescription="chart", aria_label=title), element(
          "details", element("summary", "Data as a table"), class_="data", data_chart=name))


def _distribution(figures: DocumentFigures) -> Markup:
  found = figures.document["series"]["distribution"]
  beyond = (f" {plural(found['beyond'], 'step')} lie beyond, up to "
            f"{milliseconds(found['longest_step'])}.")
  charts = element("div",
                   _chart("histogram", "Distribution of step times", "How many steps took how long."
                          + (beyond if found["beyond"] else ""), switch=("steps", "logarithmic")),
                   _chart("tail", "The tail", "The share of steps that took longer than so much."),
                   class_="two")
  return joined([charts, sections.longest(figures)])


def _work(figures: DocumentFigures) -> Markup:
  work = figures.document["pacing"]["work"]
  parts = ["Work was shared by speed in ", figures.share("pacing/work/uneven_share"),
           " of the steps."]
  if work["effect"] is not None:
    parts += [" Effect on the mean step, by its own guard: ",
              figures.share("pacing/work/effect", signed=True)]
    if work["effect_interval"]:
      parts += _interval(figures, "pacing/work")
    parts.append(".")
  return element("p", *parts)


def _interval(figures: DocumentFigures, of: str) -> list[str]:
  return [" (95 % interval ", figures.share(f"{of}/effect_interval/0", signed=True), " to ",
          figures.share(f"{of}/effect_interval/1", signed=True), ")"]


def _pacing(figures: DocumentFigures) -> Markup:
  pacing, blocks = figures.document["pacing"], figures.document["series"]["pacing"]
  active = element("p", "Delays were active in ", figures.share("pacing/active_share"),
                   " of all steps of all ranks.")
  if "work" in pacing:
    active = joined([active, _work(figures)])
  if blocks is None:
    return joined([active, element("p", "No guard ran, so what pacing gained or cost was not "
                                        "measured: wrap the pacer in jaxpace.guard(...) to have "
                                        "blocks of steps with it and without compared.",
                                   class_="aside")])
  if pacing["effect"] is None:
    return joined([active, element("p", "A guard ran, and has not compared any blocks: no delay "
                                        "was asked for, or not for long enough.", class_="aside")])
  sure = _interval(figures, "pacing") if pacing["effect_interval"] else [
      " (too few pairs of blocks for an interval)"]
  end = {True: "At the end the guard lets pacing act.",
         False: "At the end the guard holds pacing back.", None: ""}[pacing["guard"]["on"]]
  sentence = element("p", "Effect on the mean step: ",
                     element("strong", figures.share("pacing/effect", signed=True)), *sure,
                     " over ", figures.number("pacing/blocks"), f" blocks. {end}", class_="effect")
  return joined([sentence, active, _chart("pairs", "With pacing and without",
                                          "Mean step time of each pair of blocks. Shaded: where "
                                          "the guard let pacing act."),
                 _chart("effect", "The effect as it became known",
                        "Below zero is faster with pacing. The interval holds however often "
                        "one looks.")])


def _forecast(found: dict[str, Any]) -> Markup:
  if found["silent"] is not None:
    return element("p", f"No forecast. {plain(found['silent'])}")
  # Reasons that differ in their numbers only are one: the first stands for them.
  reasons: dict[str, tuple[list[str], str]] = {}
  for point in found["forecasts"]:
    if point["silent"] is not None:
      alike = re.sub(r"\d[\d,]*", "0", point["silent"])
      reasons.setdefault(alike, ([], point["silent"]))[0].append(f"{point['ranks']:,}")
  known = [point for point in found["forecasts"] if point["silent"] is None]
  sample = f"the newest {found['steps']:,}" if found["newest"] else f"{found['steps']:,}"
  parts = [] if not known else [
      element("p", f"From {sample} steps in which every rank is known; each rank is taken to do "
                   "the same work as now. Intervals are for 90 %.", class_="aside"),
      _chart("forecast", "Step time at more ranks",
             "The recorded step, and forecasts with intervals.")]
  said = [element("li", element("strong", f"No forecast for {', '.join(ranks)} ranks. "),
                  prose(why))
          for ranks, why in reasons.values()]
  said += [element("li", prose(note)) for note in found["notes"] if known]
  return joined([*parts, *([element("ul", *said)] if said else [])])


def _footer(document: dict[str, Any]) -> Markup:
  return element("footer", element("p", f"{plain(document['path'])} · schema {document['schema']} "
                                        f"· charts by Apache ECharts {LIBRARY_VERSION} (Apache "
                                        "License 2.0), which is part of this file"))


def _data(document: dict[str, Any]) -> Markup:
  """JSON in which nothing can end the script element it is in, nor begin a comment."""
  encoded = json.dumps(document, allow_nan=False, separators=(",", ":"))
  for character in "<>&":
    encoded = encoded.replace(character, f"\\u{ord(character):04x}")
  return Markup(encoded)


@functools.cache
def _asset(name: str) -> str:
  return resources.files(__package__).joinpath("assets", name).read_text(encoding="utf-8")


@functools.cache
def _script() -> str:
  parts = [f"// {name}\n{_asset(name)}" for name in SCRIPTS]
  return '"use strict";\n(() => {\n' + "\n".join(parts) + "})();\n"


@functools.cache
def _hash(content: str) -> str:
  return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
