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
import json
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
from jaxpace.diagnose.diagnose import diagnose
from jaxpace.diagnose.links import read_links
from jaxpace.runs.reader import read_run

WAYS = judge.WAYS


@contextlib.contextmanager
def without(rule: Rule | None) -> Iterator[None]:
  """Takes a rule out of the diagnosis while it is open; None takes nothing out."""
  with contextlib.ExitStack() as open_now:
    for place, neutral in (rule.neutral if rule else {}).items():
      module, name = place.split(":")
      *within, last = name.split(".")
      target = functools.reduce(getattr, within,
                                importlib.import_module(f"jaxpace.diagnose.{module}"))
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
                else diagnose(run if how == "counters" else judge.without_counters(run)))
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


def chosen(names: Sequence[str]) -> list[Rule]:
  """The rules of these names; all of them where none is given.

  Raises:
    ValueError: one is no rule's.
  """
  known = {rule.name: rule for rule in RULES}
  if unknown := [name for name in names if name not in known]:
    raise ValueError(f"There is no rule {unknown[0]!r}: {', '.join(known)}.")
  return [known[name] for name in names] if names else list(RULES)


def _start(directories: Sequence[str], only: Sequence[str], ways: Sequence[str]) -> None:
  _ways[:] = ways
  _runs[:] = [judge.labelled(pathlib.Path(directory), only) for directory in directories]


def _one(name: str | None) -> dict[str, list[list[Judged]]]:
  rule = None if name is None else chosen([name])[0]
  seeds = [judged(runs, rule, _read, _ways) for runs in _runs]
  return {how: [seed[how] for seed in seeds] for how in _ways}


def ablate(directories: Sequence[str], only: Sequence[str], workers: int,
           ways: Sequence[str] = WAYS, names: Sequence[str] = ()) -> dict[str, Any]:
  """Judges all runs with all rules, and without each.

  Args:
    directories: one a seed.
    only: parts of names of runs; empty takes all.
    workers: processes to work with.
    ways: of judging.
    names: of the rules to take out; all of them by default.
  """
  rules = chosen(names)
  with concurrent.futures.ProcessPoolExecutor(
      workers, multiprocessing.get_context("spawn"), _start, (directories, only, ways)) as pool:
    waiting = [pool.submit(_one, rule and rule.name) for rule in (None, *rules)]
    answers = []
    for number, one in enumerate(waiting):
      answers.append(one.result())
      print(f"{number} of {len(rules)} rules taken out", file=sys.stderr, flush=True)
  whole = answers[0]
  rows = [row_of(rule, answer, whole)
          for rule, answer in zip((None, *rules), answers, strict=True)]
  return {"rows": rows, "ways": list(ways), "runs": [len(seed) for seed in whole[ways[0]]]}


def row_of(rule: Rule | None, answer: Mapping[str, Sequence[Sequence[Judged]]],
           whole: Mapping[str, Sequence[Sequence[Judged]]]) -> dict[str, Any]:
  """What a rule is worth.

  Args:
    rule: that was left out; None: none.
    answer: by way of judging, the runs of each seed without it.
    whole: the same with all rules.
  """
  seeds = len(next(iter(answer.values())))
  return {"rule": rule.name if rule else "", "says": rule.says if rule else "",
          "kept": rule.kept if rule else "", "seeds": [
              {how: figures_of(answer[how][seed], whole[how][seed] if rule else None)
               for how in answer} for seed in range(seeds)]}


def added(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
  """What was found before, and beside it, or in its place, what was found now of the same runs.

  Raises:
    ValueError: the runs are others.
  """
  if old["runs"] != new["runs"] or old["seeds"] != new["seeds"]:
    raise ValueError(f"The figures to add to are of {old['runs']} runs of the seeds "
                     f"{', '.join(old['seeds'])}, these of {new['runs']} of "
                     f"{', '.join(new['seeds'])}: name the same runs.")
  before = {row["rule"]: row for row in old["rows"]}
  for row in new["rows"]:
    earlier = before.get(row["rule"], {}).get("seeds") or [{} for _ in row["seeds"]]
    before[row["rule"]] = {**row, "seeds": [{**one, **other} for one, other in
                                            zip(earlier, row["seeds"], strict=True)]}
  ways = [how for how in WAYS if how in {*old["ways"], *new["ways"]}]
  return {**new, "rows": list(before.values()), "ways": ways}


def moves_nothing(row: Mapping[str, Any]) -> bool:
  """Whether taking the rule out changes no mode and nobody blamed in any run of any seed, however
  it is judged."""
  return bool(row["rule"]) and not any(one[how]["changed"] for one in row["seeds"] for how in one)


def page(figures: Mapping[str, Any]) -> list[str]:
  """The figures in Markdown."""
  lines = measured.introduction("What each rule of the diagnosis is worth", dict(figures))
  lines += [f"Runs of the fault lab, {_listed(figures['runs'])} of the seeds "
            f"{_listed(figures['seeds'])}, judged again with one rule taken out at a time. The "
            "numbers of a cell are the seeds', in this order. *Changed* "
            "are runs whose modes, ranks or hosts are others without the rule; *healthy* are "
            "controls with a finding; *blamed* counts faults with somebody to blame and the right "
            "rank or host named; *falsely* controls, and faults for which nobody is to blame, in "
            "which somebody is named.", ""]
  if figures["note"]:
    lines += [figures["note"], ""]
  whole = figures["rows"][0]
  for how in figures["ways"]:
    title = {"all": "With hosts' counters, link probe and measured fabric",
             "counters": "With hosts' counters", "bare": "By the stamps alone"}[how]
    tried = [row for row in figures["rows"][1:] if how in row["seeds"][0]]
    lines += [f"## {title}", "", f"Rules taken out by themselves: {len(tried)}.", ""]
    lines += measured.table(
        ("without", "macro-F1", "blamed", "healthy", "falsely", "misjudged", "changed"),
        [(row["says"] or "nothing: all rules", *_cells(row, how)) for row in (
            whole, *sorted(tried, key=lambda row: _worth(row, how)))])
  idle = [row for row in figures["rows"] if moves_nothing(row)]
  lines += ["## Rules that move nothing", "", (
      "Taken out, these change no mode and nobody blamed in any of these runs, in none of the ways "
      "of judging that they were tried in. The lab doesn't make everything that a diagnosis meets: "
      "what each is kept for, and what shows that."), ""]
  lines += measured.table(("rule", "kept for"),
                          [(row["says"], row.get("kept") or "–") for row in idle])
  return lines


def _listed(values: Sequence[Any]) -> str:
  *most, last = map(str, values)
  return f"{', '.join(most)} and {last}" if most else last


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
    found = ablate(args.runs, args.only, args.workers, args.ways, args.rules)
    figures |= {"note": args.note, "seeds": args.seeds or [str(n) for n in range(len(args.runs))],
                **found}
    if args.add:
      figures = added(json.loads(pathlib.Path(args.out).read_text()), figures)
  except (OSError, ValueError) as error:
    sys.exit(f"ablation: {error}")
  measured.write(figures, page(figures), pathlib.Path(args.out))


if __name__ == "__main__":
  flags.DEFINE_list("runs", [], "Directories of recorded runs of the lab, one a seed.")
  flags.DEFINE_list("seeds", [], "Their seeds, for the page.")
  flags.DEFINE_list("rules", [], "Names of the rules to take out; all by default.")
  flags.DEFINE_bool("add", False, "Keep what --out has of other rules and ways of judging.")
  flags.DEFINE_list("only", [], "Only runs whose name holds one of these.")
  flags.DEFINE_list("ways", list(WAYS),
                    "Judged with all there is (all), without link probe and measured fabric "
                    "(counters), by the stamps alone (bare).")
  flags.DEFINE_integer("workers", os.cpu_count() or 1, "Processes to judge with.", lower_bound=1)
  flags.DEFINE_string("note", "", "A sentence on the circumstances, for the page.")
  flags.DEFINE_string("out", "docs/measurements/ablation.json",
                      "Where the figures go; a table beside it.")
  app.run(main)
