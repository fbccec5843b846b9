"""What each rule of the diagnosis is worth: recorded lab runs judged again with one rule taken out
at a time.

    python -m experiments.labs.ablation --runs=runs/seed5,runs/seed6

A rule is taken out by putting its neutral answer in its place, by name of module and function,
while the runs are judged; the package knows nothing of it. Runs are read once.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import importlib
import multiprocessing
import os
import pathlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

from absl import app, flags

from experiments.labs.faults import judge, scores
from experiments.labs.faults.judge import Labelled
from experiments.labs.faults.rules import RULES, Rule
from experiments.labs.faults.scores import Found, Judged
from experiments.lib import measured
from jaxpace.diagnosis.diagnose import diagnose
from jaxpace.live.probe.links import read_links
from jaxpace.trace.reader import read_run

WAYS = ("all", "bare")


@contextlib.contextmanager
def without(rule: Rule | None) -> Iterator[None]:
  """Takes a rule out of the diagnosis while it is open; None takes nothing out."""
  with contextlib.ExitStack() as open_now:
    for place, neutral in (rule.neutral if rule else {}).items():
      module, name = place.split(":")
      *within, last = name.split(".")
      target = functools.reduce(getattr, within,
                                importlib.import_module(f"jaxpace.diagnosis.{module}"))
      open_now.enter_context(mock.patch.object(target, last, neutral))
    yield


def judged(runs: Sequence[Labelled], rule: Rule | None, read: dict[pathlib.Path, Any],
           ways: Sequence[str] = WAYS
           ) -> dict[str, list[Judged]]:
  """Diagnoses all runs without a rule, by each of `ways`.

  Args:
    runs: with their labels.
    rule: to be left out; None: none.
    read: runs that were read before, by their directory; filled.
    ways: what a diagnosis may go by, see `judge.WAYS`.
  """
  found: dict[str, list[Judged]] = {how: [] for how in ways}
  with without(rule):
    for one in runs:
      if one.path not in read:
        read[one.path] = (read_run(one.path / "run"), read_links(one.path / "run"),
                          judge.fabric(one))
      run, links, fabric = read[one.path]
      for how in ways:
        told = (diagnose(run, fabric=fabric, links=links) if how == "all"
                else diagnose(judge.without_counters(run)))
        findings = tuple(Found(f.mode, f.share, f.confidence, tuple(f.ranks), tuple(f.hosts))
                         for f in told.findings)
        found[how].append(dataclasses.replace(judge.blank(one), found=findings))
  return found


def figures_of(runs: Sequence[Judged], whole: Sequence[Judged] | None = None) -> dict[str, Any]:
  """What an ablation is judged by; `changed` counts runs whose modes or blame differ from those of
  all rules."""
  told = scores.summary(runs)
  changed = (None if whole is None
             else sum(_said(one) != _said(other) for one, other in zip(runs, whole, strict=True)))
  return {"macro_f1": told["macro_f1"], "macro_f1_active": told["macro_f1_active"],
          "blamed_rightly":
          told["blame"]["right"], "to_blame": told["blame"]["of"],
          "controls_with_findings": len(told["controls_with_findings"]),
          "controls_blamed": len(told["controls_falsely_blamed"]),
          "blamed_for_nothing": len(told["nobody_to_blame"]["named"]),
          "share_error": {group: spread["p95_abs"]
                          for group, spread in told["share_error_points"].items()},
          "misjudged": len(scores.misjudged(runs)), "changed": changed}


def _said(run: Judged) -> list[Any]:
  return sorted((found.mode, found.ranks, found.hosts) for found in run.found)


_read: dict[pathlib.Path, Any] = {}
_runs: list[list[Labelled]] = []
_ways: list[str] = []


def _start(directories: Sequence[str], only: Sequence[str], ways: Sequence[str]) -> None:
  _ways[:] = ways
  _runs[:] = [judge.labelled(pathlib.Path(directory), only) for directory in directories]


def _one(place: int | None) -> dict[str, list[list[Judged]]]:
  rule = None if place is None else RULES[place]
  seeds = [judged(runs, rule, _read, _ways) for runs in _runs]
  return {how: [seed[how] for seed in seeds] for how in _ways}


def ablate(directories: Sequence[str], only: Sequence[str], workers: int,
           ways: Sequence[str] = WAYS) -> dict[str, Any]:
  """Judges all runs with all rules, and without each.

  Args:
    directories: one a seed.
    only: parts of names of runs; empty takes all.
    workers: processes to work with.
    ways: of judging.
  """
  with concurrent.futures.ProcessPoolExecutor(
      workers, multiprocessing.get_context("spawn"), _start, (directories, only, ways)) as pool:
    waiting = [pool.submit(_one, place) for place in (None, *range(len(RULES)))]
    answers = []
    for number, one in enumerate(waiting):
      answers.append(one.result())
      print(f"{number} of {len(RULES)} rules taken out", file=sys.stderr, flush=True)
  whole = answers[0]
  rows = [{"rule": rule.name if rule else "", "says": rule.says if rule else "", "seeds": [
      {how: figures_of(answer[how][seed], whole[how][seed] if rule else None) for how in ways}
      for seed in range(len(directories))]}
          for rule, answer in zip((None, *RULES), answers, strict=True)]
  return {"rows": rows, "ways": list(ways), "runs": [len(seed) for seed in whole[ways[0]]]}


def moves_nothing(row: Mapping[str, Any]) -> bool:
  """Whether taking the rule out changes no mode and nobody blamed in any run of any seed, however
  it is judged."""
  return bool(row["rule"]) and not any(one[how]["changed"] for one in row["seeds"] for how in one)


def page(figures: Mapping[str, Any]) -> list[str]:
  """The figures in Markdown."""
  lines = measured.introduction("What each rule of the diagnosis is worth", dict(figures))
  lines += [f"Runs of the fault lab, {' and '.join(map(str, figures['runs']))} of the seeds "
            f"{' and '.join(figures['seeds'])}, judged again with one rule taken out at a time. "
            "The first number of a cell is the first seed's, the second the second's. *Changed* "
            "are runs whose modes, ranks or hosts are others without the rule; *healthy* are "
            "controls with a finding; *blamed* counts faults with somebody to blame and the right "
            "rank or host named; *falsely* controls, and faults for which nobody is to blame, in "
            "which somebody is named.", ""]
  if figures["note"]:
    lines += [figures["note"], ""]
  whole = figures["rows"][0]
  for how in figures["ways"]:
    title = {"all": "With hosts' counters, link probe and measured fabric",
             "bare": "By the stamps alone"}[how]
    lines += [f"## {title}", ""]
    lines += measured.table(
        ("without", "macro-F1", "blamed", "healthy", "falsely", "misjudged", "changed"),
        [(row["says"] or "nothing: all rules", *_cells(row, how)) for row in (
            whole, *sorted(figures["rows"][1:], key=lambda row: _worth(row, how)))])
  idle = [row["says"] for row in figures["rows"] if moves_nothing(row)]
  lines += ["## Rules that move nothing", "", (
      "Taken out, these change no mode and nobody blamed in any of these runs, so they are what to "
      "look at first where the diagnosis is to become smaller. It is no proof that they are for "
      "nothing: what many of them are for (other programs on the processors, hosts without "
      "counters, ranks that take turns for long) does not occur in runs made with real-time "
      "priority and without hogs."), "",
            *(f"- {says}" for says in idle or ["none"]), ""]
  return lines


def _worth(row: Mapping[str, Any], how: str) -> tuple[float, int]:
  f1 = sum(one[how]["macro_f1"] for one in row["seeds"])
  return f1, -sum(one[how]["changed"] or 0 for one in row["seeds"])


def _cells(row: Mapping[str, Any], how: str) -> list[str]:
  seeds = [one[how] for one in row["seeds"]]

  def both(of: Any) -> str:
    return ", ".join(of(one) for one in seeds)

  return [both(lambda s: f"{s['macro_f1']:.3f}"),
          both(lambda s: f"{s['blamed_rightly']} of {s['to_blame']}"),
          both(lambda s: str(s["controls_with_findings"])),
          both(lambda s: str(s["controls_blamed"] + s["blamed_for_nothing"])),
          both(lambda s: str(s["misjudged"])),
          both(lambda s: "–" if s["changed"] is None else str(s["changed"]))]


def main(argv: list[str]) -> None:
  """Ablates, and writes the table."""
  args = flags.FLAGS
  if len(argv) > 1 or not args.runs:
    raise app.UsageError("Name the directories of the runs, one a seed, with --runs.")
  figures = measured.circumstances("experiments.labs.ablation")
  try:
    found = ablate(args.runs, args.only, args.workers, args.ways)
  except ValueError as error:
    sys.exit(f"ablation: {error}")
  figures |= {"note": args.note, "seeds": args.seeds or [str(n) for n in range(len(args.runs))],
              **found}
  measured.write(figures, page(figures), pathlib.Path(args.out))


if __name__ == "__main__":
  flags.DEFINE_list("runs", [], "Directories of recorded runs of the lab, one a seed.")
  flags.DEFINE_list("seeds", [], "Their seeds, for the page.")
  flags.DEFINE_list("only", [], "Only runs whose name holds one of these.")
  flags.DEFINE_list("ways", list(WAYS),
                    "Judged with all there is (all), by the stamps alone (bare), or both.")
  flags.DEFINE_integer("workers", os.cpu_count() or 1, "Processes to judge with.", lower_bound=1)
  flags.DEFINE_string("note", "", "A sentence on the circumstances, for the page.")
  flags.DEFINE_string("out", "docs/measurements/ablation.json",
                      "Where the figures go; a table beside it.")
  app.run(main)
