"""The parts of the page that need no script: words, figures and tables."""

from __future__ import annotations

from typing import Any

from jaxpace.core.words import list_ranks
from jaxpace.diagnose.floor import MEANING, SHARES
from jaxpace.diagnose.words.names import milliseconds
from jaxpace.record.ring.plan import iterations_in_words
from jaxpace.show.contents import answer_at, facts, latest_first, might_have_been, whom
from jaxpace.show.html.markup import (
  UNKNOWN,
  DocumentFigures,
  Markup,
  bar,
  element,
  escaped,
  joined,
  prose,
  swatch,
  table,
)

TITLES = {"persistent_straggler": "Persistent straggler",
          "synchronization_amplification": "Ranks late in turn",
          "fabric_contention": "Fabric contention", "locality": "Locality",
          "runtime_jitter": "Runtime jitter"}
_WIDTH, _HEIGHT = 240, 34


def findings(figures: DocumentFigures) -> Markup:
  """All findings, or a sentence that there is none."""
  document = figures.document
  if not document["findings"]:
    return element("p", "No failure mode was found.")
  return joined([_finding(figures, i) for i in range(len(document["findings"]))])


def _finding(figures: DocumentFigures, i: int) -> Markup:
  finding = figures.document["findings"][i]
  where = figures.document["series"]["where"]
  place = where["findings"][i]
  who = " · ".join(whom(finding))
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
      "article", head, element("p", who[0].upper() + who[1:], class_="who"), evidence,
      element("p", element("strong", "Do: "), prose(finding["advice"]), class_="advice"),
      element("div", element("div", *buttons, class_="buttons"), spark, class_="foot"),
      class_="finding", id=f"finding-{i}")


def _button(label: str, steps: dict[str, Any], finding: dict[str, Any], title: str) -> Markup:
  return element("button", label, type="button", class_="go", data_first=steps["first_step"],
                 data_last=steps["last_step"], data_ranks=" ".join(map(str, finding["ranks"][:64])),
                 data_title=title)


def _spark(cost: list[float]) -> Markup:
  """A line of cost over blocks, drawn without script."""
  most = max(cost, default=0.0) or 1.0
  width = _WIDTH / max(len(cost), 1)
  points = "".join(f"L{i * width:.1f},{_HEIGHT - 2 - (_HEIGHT - 6) * value / most:.1f}h{width:.1f}"
                   for i, value in enumerate(cost))
  return element("svg", element("path", d=f"M0,{_HEIGHT}{points}V{_HEIGHT}Z"),
                 viewBox=f"0 0 {_WIDTH} {_HEIGHT}", preserveAspectRatio="none", width="100%",
                 height=_HEIGHT, aria_hidden="true")


RANKS_SHOWN, LONGEST_SHOWN, HANG_SHOWN = 64, 10, 20


def recorded(figures: DocumentFigures) -> Markup:
  """What was recorded, on one line."""
  return element("p", " · ".join(facts(figures.document)), class_="facts")


def key_figures(figures: DocumentFigures) -> Markup | None:
  """Step time, spread and what waiting costs."""
  if figures.document["step_time"]["mean"] is None:
    return None
  cells = [("mean step", figures.time("step_time/mean")),
           ("median", figures.time("step_time/median")),
           ("99th percentile", figures.time("step_time/p99")),
           ("variation", figures.share("step_time/cv"))]
  if figures.document["what_if"]["no_skew"]:
    cells.append(("waiting for late ranks", figures.share("what_if/no_skew/skew")))
  return element("dl", *(element("div", element("dt", name), element("dd", value))
                         for name, value in cells),
                 class_="key")


def shares(figures: DocumentFigures) -> Markup:
  """The stacked bar, and its legend, which is a table."""
  document = figures.document
  step, parts = document["step_time"]["mean"], document["shares"]
  described = ("Shares of the step: "
               + ", ".join(f"{name} {100 * parts[name]:.1f} %" for name in SHARES))
  rows: list[list[Any]] = []
  for name in SHARES:
    label = element("span", swatch(name), name, class_="named")
    rows.append([label, figures.share(f"shares/{name}"), milliseconds(parts[name] * step),
                 MEANING[name]])
  legend = table("Shares of the step", ("spent on", "share", "per step", "what it is"), rows,
                 texts=(0, 3), tight=True)
  return joined([bar(parts, described), legend])


def ranks(figures: DocumentFigures) -> Markup:
  """The latest ranks."""
  rows = figures.document["per_rank"]
  order = latest_first(rows)
  shown = order[:RANKS_SHOWN]
  body = []
  for i in shown:
    row, at = rows[i], f"per_rank/{i}"
    body.append([row["rank"], row["host"] or UNKNOWN,
                 UNKNOWN if row["process"] is None else row["process"],
                 figures.time(f"{at}/lateness", signed=True),
                 figures.confidence(f"{at}/confidence"), figures.share(f"{at}/last_share", 0),
                 figures.share(f"{at}/cost_share"), figures.time(f"{at}/compute"),
                 figures.time(f"{at}/runtime"), figures.time(f"{at}/waiting"),
                 figures.number(f"{at}/steps")])
  made = table("Ranks, latest first",
               ("rank", "host", "process", "lateness", "confidence", "last", "cost", "compute",
                "gap", "waits", "steps"), body, texts=(1,),
               strong=[rows[i]["late"] for i in shown])
  left = len(rows) - len(shown)
  more = (element("p", f"{left:,} more ranks, all less late, are in the JSON.", class_="aside")
          if left else None)
  return joined([made, element(
      "p", "lateness: mean arrival after the typical rank · last: share of steps in which the job "
           "waited for this rank · cost: share of all time in which ranks waited for it",
      class_="aside"), *([more] if more else [])])


def longest(figures: DocumentFigures) -> Markup:
  """The longest steps: what each was spent on, whom it waited for, and a way to it."""
  rows = figures.document["series"]["distribution"]["longest"]
  first, last = figures.document["first_step"], figures.document["last_step"]
  body = []
  for i, row in enumerate(rows[:LONGEST_SHOWN]):
    at = f"series/distribution/longest/{i}"
    name = max(row["shares"], key=row["shares"].__getitem__)
    go = element("button", "Show", type="button", class_="go", data_first=max(first, row["step"]),
                 data_last=min(last, row["step"]), data_title=f"step {row['step']:,}",
                 data_ranks=row["last_rank"], aria_label=f"Show step {row['step']:,} in the charts")
    mostly = element("span", swatch(name), f"{name} ",
                     figures.share(f"{at}/shares/{escaped(name)}", 0), class_="named")
    body.append([figures.number(f"{at}/step"), figures.time(f"{at}/step_time"), mostly,
                 UNKNOWN if row["last_rank"] is None else f"rank {row['last_rank']}", go])
  return joined([element("h3", "The longest steps", class_="below"), table(
      "The longest steps", ("step", "took", "mostly", "waited for", "in the charts"), body,
      texts=(2, 3, 4), tight=True)])


def what_if(figures: DocumentFigures) -> Markup | None:
  """The run without what slows it down, the most worthwhile first."""
  document = figures.document
  body = []
  for label, place in might_have_been(document):
    at = "what_if/" + "/".join(escaped(str(key)) for key in place)
    step = answer_at(document["what_if"], place)["step_time"]
    body.append([label, figures.time(f"{at}/step_time"), figures.times(f"{at}/speedup"),
                 _meter(step / document["step_time"]["mean"])])
  return table("Steps that might have been",
               ("the run again, but", "step", "as fast", "step, of the recorded one"), body,
               texts=(0, 3)) if body else None


def _meter(share: float) -> Markup:
  wide = f"{100 * min(max(share, 0.0), 1.0):.1f}%"
  return element("svg", element("rect", width="100%", height=10, class_="track"),
                 element("rect", width=wide, height=10, class_="value"), class_="meter",
                 width="100%", height=10, role="img",
                 aria_label=f"{100 * share:.0f} % of the recorded step")


def collectives(figures: DocumentFigures) -> Markup | None:
  """Every collective with timestamps, and the phases."""
  document = figures.document
  parts: list[Markup] = []
  if document["waits"]:
    body = [[f"{row['collective']}" + (f" ({row['source']})" if row["source"] else ""), row["axis"],
             f"{row['turns']:,}", figures.time(f"waits/{i}/waiting"),
             figures.time(f"waits/{i}/transfer"), figures.time(f"waits/{i}/contention"),
             _most_in(figures, i),
             "" if row["rank"] is None else f"rank {row['rank']} ({100 * row['rank_share']:.0f} %)"]
            for i, row in enumerate(document["waits"])]
    parts.append(table("Where the waits are", (
        "collective", "axis", "times per step", "waiting", "transfer", "contention", "most in",
        "mostly for"), body,
        texts=(0, 1, 6, 7), hidden_caption=False))
  elif document["collectives"]:
    body = [[f"{row['slot']}: {row['name']}",
             UNKNOWN if row["bytes"] is None else f"{row['bytes']:,}",
             figures.time(f"collectives/{i}/transfer"), figures.time(f"collectives/{i}/floor"),
             figures.time(f"collectives/{i}/contention"), figures.time(f"collectives/{i}/waiting")]
            for i, row in enumerate(document["collectives"])]
    parts.append(table("Collectives",
                       ("collective", "bytes", "transfer", "floor", "contention", "waiting"), body,
                       hidden_caption=False))
  found = document["overlap"]
  if found and (found["hidden"] or any(row["meanwhile"] is not None
                                       for row in found["collectives"])):
    at = "overlap/collectives"
    body = [[row["collective"], f"{row['times']:,}", figures.time(f"{at}/{i}/in_flight"),
             figures.time(f"{at}/{i}/exposed"), figures.time(f"{at}/{i}/hidden"),
             figures.time(f"{at}/{i}/behind_others"),
             figures.share(f"{at}/{i}/meanwhile")]
            for i, row in enumerate(found["collectives"])]
    parts.append(table("Computing while sending", (
        "collective", "times per step", "in flight", "exposed, at most", "hidden, at least",
        "behind others", "work meanwhile"), body, hidden_caption=False))
  if document["phases"]:
    body = [[name.removeprefix("phase_"), figures.time(f"phases/{escaped(name)}/median"),
             figures.time(f"phases/{escaped(name)}/slowest_median"), f"rank {row['slowest_rank']}"]
            for name, row in document["phases"].items()]
    parts.append(table("Phases, medians", ("phase", "typical rank", "slowest rank", "which"), body,
                       texts=(0, 3), hidden_caption=False))
  # Those of waits and of overlap are too wide to stand beside another.
  wide = document["waits"] or len(parts) > 2
  return element("div", *parts, class_=None if wide else "columns") if parts else None


def _most_in(figures: DocumentFigures, place: int) -> Markup | str:
  worst = figures.document["waits"][place]["worst_turn"]
  if not worst:
    return ""
  return element("span", f"{iterations_in_words(worst['loops'])}: ",
                 figures.time(f"waits/{place}/worst_turn/waiting"))


def places(figures: DocumentFigures) -> Markup:
  """Hosts, what hangs on what in them, and what is noteworthy of that."""
  places_ = figures.document["series"]["places"]
  hosts = places_["hosts"]
  order = latest_first(hosts)
  body = [[hosts[i]["host"] or "host not known", _some(hosts[i]["ranks"]),
           _some(hosts[i]["processes"]),
           figures.time(f"series/places/hosts/{i}/lateness", signed=True),
           UNKNOWN if hosts[i]["latest_rank"] is None else f"rank {hosts[i]['latest_rank']}"]
          for i in order[:RANKS_SHOWN]]
  parts = [table("Hosts, latest first",
                 ("host", "ranks", "processes", "lateness, mean", "latest"), body,
                 texts=(0, 1, 2, 4), tight=True)]
  if len(order) > RANKS_SHOWN:
    parts.append(element("p", f"{len(order) - RANKS_SHOWN:,} more hosts are in the JSON.",
                         class_="aside"))
  for concern in places_["concerns"]:
    warning = concern["level"] == "warning"
    where = f"{concern['host']}: " if concern["host"] else ""
    word = element("strong", "Warning: " if warning else "Note: ")
    parts.append(element("p", word, where, prose(concern["sentence"]),
                         class_="concern warning" if warning else "concern"))
  if places_["trees"]:
    parts.append(element("ul", *(_tree(tree, 0) for tree in places_["trees"]), class_="tree"))
  else:
    parts.append(element("p",
                         "The run does not say what its hosts are made of: it has no readable "
                         "locality/*.json.", class_="aside"))
  return joined(parts)


def _tree(tree: dict[str, Any], depth: int) -> Markup:
  if not tree["below"]:
    return element("li", tree["text"])
  below = element("ul", *(_tree(line, depth + 1) for line in tree["below"]))
  return element("li", element("details", element("summary", tree["text"]), below, open=True))


def hang(figures: DocumentFigures) -> Markup | None:
  """What the job waits for; None where it goes on."""
  found = figures.document.get("hang")
  if not found:
    return None
  sentences = ([sentence for cause in found["causes"] for sentence in cause["sentences"]]
               + found["left_out"])
  return element("ul", *(element("li", prose(sentence)) for sentence in sentences[:HANG_SHOWN]))


def notes(figures: DocumentFigures) -> Markup | None:
  """Everything noteworthy."""
  document = figures.document
  sentences = [*document["problems"], *document["notes"]]
  return (element("ul", *(element("li", prose(sentence)) for sentence in sentences)) if sentences
          else None)


def _some(numbers: list[int]) -> str:
  return list_ranks(numbers) if numbers else UNKNOWN
