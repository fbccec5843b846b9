"""Findings as articles: whom they are about, what speaks for them, what to do, and buttons that
lead to the steps."""

from __future__ import annotations

from typing import Any

from jaxpace.diagnose.codes import milliseconds, named
from jaxpace.diagnose.lateness import spell
from jaxpace.runs.problems import list_ranks
from jaxpace.show.html.figures import DocumentFigures
from jaxpace.show.html.markup import Markup, element, joined, prose

TITLES = {"persistent_straggler": "Persistent straggler",
          "synchronization_amplification": "Ranks late in turn",
          "fabric_contention": "Fabric contention", "locality": "Locality",
          "runtime_jitter": "Runtime jitter"}
_WIDTH, _HEIGHT = 240, 34


def findings(figures: DocumentFigures) -> Markup:
  """All findings, or a sentence that there is none."""
  document = figures.document
  if not document["findings"]:
    return element("p",
                   "Nothing was found that needs mending. The sections below show the run as "
                   "recorded.")
  return joined([_finding(figures, i) for i in range(len(document["findings"]))])


def _finding(figures: DocumentFigures, i: int) -> Markup:
  finding = figures.document["findings"][i]
  where = figures.document["series"]["where"]
  place = where["findings"][i]
  title = TITLES.get(finding["mode"], finding["mode"].replace("_", " ").capitalize())
  head = element("header", element("h3", title), element("p", element(
      "strong", figures.share(f"findings/{i}/share")), " of the step",
      element("span", "confidence ", figures.confidence(f"findings/{i}/confidence"),
              class_="aside"), class_="cost"))
  evidence = element("ul", *(element("li", prose(sentence)) for sentence in finding["evidence"]),
                     class_="evidence")
  whole = finding["first_step"] is None and finding["last_step"] is None
  buttons = [_button("Show the whole run" if whole
                     else f"Show steps {place['first_step']:,} to {place['last_step']:,}",
                     place, finding, title)]
  if place["costliest"]:
    costliest = place["costliest"]
    buttons.append(_button(
        f"Costliest stretch: {costliest['first_step']:,} to {costliest['last_step']:,}", costliest,
        finding, f"{title}: costliest stretch"))
  spark = element("figure", _spark(place["cost"]), element(
      "figcaption", "what it cost over the run, up to ",
      milliseconds(max(place["cost"], default=0.0)), " per step"),
      class_="spark")
  return element(
      "article", head, element("p", _who(finding), class_="who"), evidence,
      element("p", element("strong", "Do: "), prose(finding["advice"]), class_="advice"),
      element("div", element("div", *buttons, class_="buttons"), spark, class_="foot"),
      class_="finding", id=f"finding-{i}")


def _button(label: str, steps: dict[str, Any], finding: dict[str, Any], title: str) -> Markup:
  return element("button", label, type="button", class_="go", data_first=steps["first_step"],
                 data_last=steps["last_step"], data_ranks=" ".join(map(str, finding["ranks"][:64])),
                 data_title=title)


def _who(finding: dict[str, Any]) -> str:
  ranks, hosts = finding["ranks"], finding["hosts"]
  facts = [("Ranks " if len(ranks) > 1 else "Rank ") + list_ranks(ranks) if ranks
           else "No rank in particular"]
  if hosts:
    facts.append("on " + named(hosts))
  facts.append(spell(finding["first_step"], finding["last_step"]))
  if finding["causes"]:
    facts.append("cause: " + ", ".join(finding["causes"]).replace("_", " "))
  return " · ".join(facts)


def _spark(cost: list[float]) -> Markup:
  """A line of cost over blocks, drawn without script."""
  most = max(cost, default=0.0) or 1.0
  width = _WIDTH / max(len(cost), 1)
  points = "".join(f"L{i * width:.1f},{_HEIGHT - 2 - (_HEIGHT - 6) * value / most:.1f}h{width:.1f}"
                   for i, value in enumerate(cost))
  return element("svg", element("path", d=f"M0,{_HEIGHT}{points}V{_HEIGHT}Z"),
                 viewBox=f"0 0 {_WIDTH} {_HEIGHT}", preserveAspectRatio="none", width="100%",
                 height=_HEIGHT, aria_hidden="true")
