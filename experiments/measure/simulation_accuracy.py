"""Measures how far `jaxpace simulate` is from playing every message of every rank.

    python -m experiments.measure.simulation_accuracy

The reference is `experiments.measure.message_reference`, which shares no code with the package;
where SimGrid's Python module can be imported (`pip install simgrid`) the same jobs run in it, too.
An error is the package's time over the reference's, less 1. With `--only WORDS` the cases that hold
these words are played, and the others stay as they are in the file.
"""

from __future__ import annotations

import collections
import itertools
import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from absl import app, flags

from experiments.lib import measured
from experiments.measure import message_reference as reference
from experiments.measure import simgrid_reference
from jaxpace.simulation import scenario, schedules, settings
from jaxpace.simulation.fabric import Fabric

OUT = pathlib.Path("docs/measurements/simulation_accuracy.json")
CARD = 12.5e9
LATENCIES = {"node_latency": 3e-6, "rack_latency": 8e-6, "spine_latency": 12e-6}
_STEPS, _COUNTED = 24, slice(2, 12)


class Case(NamedTuple):
  """One comparison."""

  group: str
  about: str
  package: Callable[[], list[float]]  # s
  reference: Callable[[Any], list[float]]  # of a module that plays jobs; s


def fabric(nodes: int, rack: int = 0, over: float = 1.0, per_node: int = 1) -> dict[str, Any]:
  """Fields of a fabric with a card for each rank; `over` to 1 at the spine."""
  return {"nodes": nodes, "per_node": per_node, "cards": per_node, "card_rate": CARD, "rack": rack,
          "uplink_rate": (rack * per_node * CARD / over) if rack else 0.0, **LATENCIES}


SINGLE_FABRICS = {
    "8 nodes, one switch": fabric(8), "16 nodes, one switch": fabric(16),
    "12 nodes, one switch": fabric(12), "16 nodes, racks of 8, 2:1": fabric(16, 8, 2),
    "16 nodes, racks of 8, 4:1": fabric(16, 8, 4), "32 nodes, racks of 8, 4:1": fabric(32, 8, 4),
    "18 nodes, racks of 6, 4:1": fabric(18, 6, 4), "24 nodes, racks of 6, 3:1": fabric(24, 6, 3),
    "12 nodes, racks of 3, 2:1": fabric(12, 3, 2), "20 nodes, racks of 5, 4:1": fabric(20, 5, 4)}
INSIDE_FABRICS = {"8 nodes of 4": fabric(8, per_node=4),
                  "8 nodes of 4, racks of 4, 4:1": fabric(8, 4, 4, 4)}
SIZES = {"1 MB": 1e6, "10 MB": 1e7, "100 MB": 1e8}
PLAIN = ("ring", "recursive_doubling", "halving_doubling")


def rounds(algorithm: str, ranks: tuple[int, ...], size: float, per_node: int) -> Any:
  """Of the reference."""
  if algorithm == "hierarchical":
    return reference.hierarchical(ranks, size, per_node)
  return getattr(reference, algorithm)(ranks, size)


def single(algorithm: str, size: str, where: str, fields: dict[str, Any]) -> Case:
  """One all-reduce with the fabric to itself."""
  ranks = tuple(range(fields["nodes"] * fields["per_node"]))

  def package() -> list[float]:
    made = schedules.rounds(algorithm, ranks, SIZES[size], fields["per_node"])
    return [schedules.load(made, Fabric(**fields)).seconds]

  def play(by: Any) -> list[float]:
    job = reference.Job(ranks, rounds(algorithm, ranks, SIZES[size], fields["per_node"]),
                        [dict.fromkeys(ranks, 0.0)])
    return [max(by.play(reference.Fabric(**fields), [job])[0][0].values())]

  return Case(f"one all-reduce, {algorithm}", f"{size}, {where}", package, play)


def tree(ranks: int, size: str) -> Case:
  """A double tree, in the number of pieces in which the reference is quickest."""
  fields = fabric(ranks)

  def package() -> list[float]:
    return [schedules.load(schedules.double_tree(range(ranks), SIZES[size]),
                           Fabric(**fields)).seconds]

  def play(by: Any) -> list[float]:
    if by is not reference:
      return []
    tried = [k for k in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64) if k * ranks <= 2500]
    return [min(reference.play_chunks(reference.Fabric(**fields),
                                      reference.double_tree(ranks, SIZES[size], k))
                for k in tried)]

  return Case("one all-reduce, double_tree", f"{size}, {ranks} nodes, one switch", package, play)


class Sending(NamedTuple):
  """A job of the comparison of several."""

  nodes: tuple[int, ...]
  size: float
  compute: float  # s
  start: float = 0.0
  noise: float = 0.0  # deviation, share of the compute


def jobs(group: str, about: str, algorithm: str, fields: dict[str, Any], given: tuple[Sending, ...],
         steps: int = _STEPS, selected: slice = _COUNTED) -> Case:
  """Jobs on one fabric: mean step of each. With noise, the reference computes for as long as the
  package drew."""
  per_node = fields["per_node"]
  config = {"steps": steps, "fabric": fields, "jobs": {
      f"job{j}": {"nodes": list(job.nodes), "forward": job.compute, "backward": 0.0, "update": 0.0,
                  "gap": 0.0, "gradient_bytes": job.size, "algorithm": algorithm,
                  "start": job.start, "overlap": False,
                  "noise": {"normal": {"deviation": job.noise}} if job.noise else {}}
      for j, job in enumerate(given)}}
  drawn: dict[int, np.ndarray] = {}

  def package() -> list[float]:
    times: dict[int, np.ndarray] = {}
    for part in scenario.run(settings.read(config, _no_pacer)):
      drawn[part.job] = np.asarray(part.steps.compute, np.float64)
      times[part.job] = np.asarray(part.steps.step_time, np.float64)
    return [float(times[j][selected].mean()) for j in range(len(given))]

  def play(by: Any) -> list[float]:
    made = []
    for j, job in enumerate(given):
      ranks = tuple(node * per_node + g for node in job.nodes for g in range(per_node))
      compute = [dict(zip(ranks, row.tolist(), strict=True)) for row in drawn[j]]
      made.append(reference.Job(ranks, rounds(algorithm, ranks, job.size, per_node), compute,
                                job.start))
    played = by.play(reference.Fabric(**fields), made)
    ends = [[max(step.values()) for step in job] for job in played]
    return [(own[selected.stop - 1] - own[selected.start - 1]) / (selected.stop - selected.start)
            for own in ends]

  return Case(group, about, package, play)


def _no_pacer(text: str) -> Any:
  raise ValueError(f"{text}: no pacer is simulated here.")


def halves(each: int, rack: int, count: int = 2) -> list[tuple[int, ...]]:
  """Nodes of jobs that have `each` nodes in both of two racks."""
  return [(*range(each * j, each * j + each), *range(rack + each * j, rack + each * j + each))
          for j in range(count)]


def several() -> Iterator[Case]:
  """Jobs that share a trunk."""
  group = "two jobs on a trunk"
  for algorithm, over in itertools.product(PLAIN, (2, 4, 8)):
    one, other = halves(4, 8)
    for words, second in {
        "alike": Sending(other, 1e8, 10e-3),
        "the second 7 ms later": Sending(other, 1e8, 10e-3, 7e-3),
        "the second half as large": Sending(other, 5e7, 10e-3),
        "the second computes 25 ms": Sending(other, 1e8, 25e-3),
    }.items():
      yield jobs(group, f"{algorithm}, {over}:1, {words}", algorithm, fabric(16, 8, over),
                 (Sending(one, 1e8, 10e-3), second))
  for algorithm in PLAIN:
    one, other = halves(3, 6)
    for over, words, start in ((4, "alike", 0.0), (8, "alike", 0.0),
                               (4, "the second 7 ms later", 7e-3)):
      yield jobs(group, f"{algorithm}, {over}:1, racks of 6, {words}", algorithm,
                 fabric(12, 6, over), (Sending(one, 1e8, 10e-3), Sending(other, 1e8, 10e-3, start)))
    one, other = halves(4, 8)
    yield jobs(group, f"{algorithm}, 4:1, 1 MB, alike", algorithm, fabric(16, 8, 4),
               (Sending(one, 1e6, 1e-3), Sending(other, 1e6, 1e-3)))
    yield jobs(group, f"{algorithm}, 4:1, noise of 5 %", algorithm, fabric(16, 8, 4),
               (Sending(one, 1e8, 10e-3, 0.0, 0.05), Sending(other, 1e8, 10e-3, 0.0, 0.05)), 60,
               slice(2, 40))
  for over in (2, 4):
    one, other = halves(2, 4)
    yield jobs(group, f"hierarchical, {over}:1, 4 ranks a node, alike", "hierarchical",
               fabric(8, 4, over, 4), (Sending(one, 1e8, 5e-3), Sending(other, 1e8, 5e-3)))
  for algorithm, each, start in itertools.product(PLAIN, (3, 4), (0.0, 7e-3)):
    words = f"each {start * 1e3:.0f} ms after the one before" if start else "alike"
    yield jobs("three jobs on a trunk", f"{algorithm}, 3:1, racks of {3 * each}, {words}",
               algorithm, fabric(6 * each, 3 * each, 3),
               tuple(Sending(nodes, 1e8, 10e-3, start * j)
                     for j, nodes in enumerate(halves(each, 3 * each, 3))))
  for algorithm in PLAIN:
    yield jobs("four jobs on a trunk", f"{algorithm}, 4:1, each 3 ms after the one before",
               algorithm, fabric(16, 8, 4), tuple(Sending(nodes, 1e8, 10e-3, 3e-3 * j)
                                                  for j, nodes in enumerate(halves(2, 8, 4))))


def noisy() -> Iterator[Case]:
  """One job whose ranks come at times of their own."""
  for algorithm, over, noise in itertools.product(PLAIN, (1, 4), (0.02, 0.1)):
    yield jobs("one job with noise",
               f"{algorithm}, 16 nodes, racks of 8, {over}:1, noise of {noise:.0%} of 30 ms",
               algorithm, fabric(16, 8, over), (Sending(tuple(range(16)), 1e8, 30e-3, 0.0, noise),),
               60, slice(2, 60))


def cases() -> list[Case]:
  """All comparisons."""
  alone = [single(a, s, w, f) for a in PLAIN for s in SIZES for w, f in SINGLE_FABRICS.items()]
  alone += [single("hierarchical", s, w, f) for s in SIZES for w, f in INSIDE_FABRICS.items()]
  return [*alone, *(tree(p, s) for p in (4, 6, 8, 13, 16, 32) for s in SIZES), *several(), *noisy()]


def measure(chosen: list[Case]) -> list[dict[str, Any]]:
  """Compares every case."""
  say, rows = measured.progress("cases", len(chosen)), []
  for number, case in enumerate(chosen):
    package, expected = case.package(), case.reference(reference)
    others = case.reference(simgrid_reference) if simgrid_reference.there() else []
    rows.append({"group": case.group, "about": case.about, "package_s": package,
                 "reference_s": expected, "simgrid_s": others or None,
                 "error": _furthest(package, expected),
                 "simgrid_from_reference": _furthest(others, expected) if others else None})
    say(number + 1)
  return rows


def _kept(file: pathlib.Path) -> list[dict[str, Any]]:
  """The cases of a file, each with the day on which it was played."""
  earlier = json.loads(file.read_text(encoding="utf-8"))
  return [{"date": earlier["date"], **row} for row in earlier["cases"]]


def _furthest(found: list[float], expected: list[float]) -> float:
  """Of several jobs the error of the one that is farthest off."""
  return max((f / e - 1 for f, e in zip(found, expected, strict=True)), key=abs)


def page(figures: dict[str, Any]) -> list[str]:
  """The figures as a page."""
  rows = figures["cases"]
  compared = [abs(row["simgrid_from_reference"])
              for row in rows if row["simgrid_from_reference"] is not None]
  lines = measured.introduction("How far simulated steps are from playing every message", figures)
  lines += [
      "Errors of the mean step (of a single all-reduce, of its time): the package's over the "
      "reference's, less",
      "1, of several jobs that of the one farthest off. The reference plays every message of every "
      "rank, event",
      "by event, and shares no code with the package.",
      f"SimGrid played {len(compared)} of the {len(rows)} cases, too, and is within "
      f"{max(compared):.4%} of the reference." if compared else "SimGrid was not at hand.", ""]
  days = collections.Counter(row.get("date", figures["date"]) for row in rows)
  if len(days) > 1:
    played = ", ".join(f"{count} on {day}" for day, count in sorted(days.items()))
    lines += [f"Cases played: {played}.", ""]
  lines += ["## By kind", ""]
  groups = {name: [row for row in rows if row["group"] == name]
            for name in dict.fromkeys(r["group"] for r in rows)}
  lines += measured.table(
      ["kind", "cases", "errors"],
      [[name, len(own), _span([row["error"] for row in own])] for name, own in groups.items()])
  for name, own in groups.items():
    if name.startswith("one all-reduce") and "tree" not in name:
      continue
    lines += [f"## {name[0].upper()}{name[1:]}", ""]
    lines += measured.table(
        ["case", "reference, ms", "package, ms", "error"],
        [[row["about"], _ms(row["reference_s"]), _ms(row["package_s"]), _percent(row["error"])]
         for row in own])
  return lines


def _span(errors: list[float]) -> str:
  return f"{_percent(min(errors))} to {_percent(max(errors))}"


def _percent(error: float) -> str:
  return f"{error + 0.0:+.2%}".replace("%", " %").replace("-", "−")


def _ms(seconds: list[float]) -> str:
  return ", ".join(f"{second * 1e3:.3f}" for second in seconds)


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"Unknown arguments: {' '.join(argv[1:])}")
  out, only, chosen = pathlib.Path(flags.FLAGS.out), flags.FLAGS.only, cases()
  kept = {(row["group"], row["about"]): row for row in (_kept(out) if only else ())}
  again = [case for case in chosen if (case.group, case.about) not in kept
           or any(words in f"{case.group}: {case.about}" for words in only)]
  rows = kept | {(row["group"], row["about"]): row for row in measure(again)}
  figures = {**measured.circumstances("experiments.measure.simulation_accuracy"),
             "cases": [rows[case.group, case.about] for case in chosen]}
  measured.write(figures, page(figures), out)


def define_flags() -> None:
  """Defines this program's flags."""
  flags.DEFINE_multi_string("only", [], "Play the cases with these words alone, keep the others.")
  flags.DEFINE_string("out", str(OUT), "JSON file; a page is written beside it.")


if __name__ == "__main__":
  define_flags()
  app.run(main)
