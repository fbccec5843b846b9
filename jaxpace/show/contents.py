"""What a report says of its JSON document, in the terminal and on the page alike."""

from __future__ import annotations

from typing import Any

from jaxpace.core.words import plural, some_ranks
from jaxpace.diagnose.lateness import spell
from jaxpace.diagnose.words.names import named

_GAIN = 1.0005
"""Times as fast from which on it is shown what a run would be without something."""
_EACH = 5
"""Single ranks, and single hosts, that are shown."""
_CLOCK_NAMES = {"marks": "native", "stream marks": "stream"}
"""Of clocks that wrote timestamps as marks: runs keep their names."""


def facts(document: dict[str, Any]) -> list[str]:
  """What was recorded."""
  found = [plural(document["ranks"], "rank"), plural(document["processes"], "process", "processes")]
  if document["hosts"]:
    known = "" if all(row["host"] for row in document["per_rank"]) else "known "
    found.append(plural(len(document["hosts"]), f"{known}host"))
  steps = plural(document["steps"], "step")
  if document["steps_counted"] != document["steps"]:
    steps += f" ({document['steps_counted']:,} counted)"
  if document["steps_counted"] != document["steps_in_full"]:
    steps += f", {document['steps_in_full']:,} detailed"
  found.append(steps)
  first, stop = document["window"]
  if first is not None or stop is not None:
    found.append(f"only steps {document['first_step'] if first is None else first:,} to "
                 f"{document['last_step'] if stop is None else stop - 1:,} were looked at")
  if isinstance(document["clock"], str):
    found.append(f"{_CLOCK_NAMES.get(document['clock'], document['clock'])} clock")
  return found


def whom(finding: dict[str, Any]) -> list[str]:
  """Whom a finding is about, since when, and what the hosts' columns show."""
  ranks = finding["ranks"]
  found = [some_ranks(ranks) if ranks else "no rank in particular"]
  if finding["hosts"]:
    found.append("on " + named(finding["hosts"]))
  found.append(spell(finding["first_step"], finding["last_step"]))
  if finding["causes"]:
    found.append("cause: " + ", ".join(finding["causes"]).replace("_", " "))
  return found


def latest_first(rows: list[dict[str, Any]]) -> list[int]:
  """Positions of rows of ranks or hosts, the latest first, those of which nothing is known last."""
  return sorted(range(len(rows)),
                key=lambda i: (rows[i]["lateness"] is None, -(rows[i]["lateness"] or 0.0)))


def confidence(value: float) -> str:
  """A confidence, never shown as certainty."""
  return "over 99.9 %" if value > 0.999 else f"{100 * value:.1f} %"


def might_have_been(document: dict[str, Any]) -> list[tuple[str, tuple[str | int, ...]]]:
  """The run without what slows it down: what was asked for, then the most worthwhile first.

  Returns:
    In words what is taken out, and where in `what_if` of the document its answer stands.
  """
  found = document["what_if"]
  if not document["collectives"]:
    return []
  asked: list[tuple[str, tuple[str | int, ...]]] = [
      (f"without {answer['without']}", ("asked", i)) for i, answer in enumerate(found["asked"])]
  rows: list[tuple[str, tuple[str | int, ...]]] = [
      ("no late rank at all", ("without_late_ranks",))] if found.get("without_late_ranks") else []
  rows += [(f"rank {rank} as quick as the others", ("without_rank", rank))
           for rank in list(found["without_rank"])[:_EACH]]
  rows += [(f"without host {host}", ("without_host", host))
           for host in list(found["without_host"])[:_EACH]]
  if found["no_skew"]:
    rows.append(("all ranks arrive at the step's mean arrival", ("no_skew",)))
  rows += [(label, (name,)) for name, label in (
      ("no_contention", "no contention"), ("work_shared", "work shared by speed"),
      ("no_runtime_jitter", "every gap as long as that rank's median gap"))
           if found.get(name) and found[name]["speedup"] > _GAIN]
  return asked + sorted(rows, key=lambda row: float(answer_at(found, row[1])["step_time"]))


def answer_at(found: Any, place: tuple[str | int, ...]) -> dict[str, float]:
  """An answer of `what_if`."""
  for key in place:
    found = found[key]
  answer: dict[str, float] = found
  return answer
