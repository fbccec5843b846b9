"""Two judgements of the same lab runs side by side: what do two versions of the diagnosis say
otherwise?

    git worktree add --detach ../before COMMIT
    (cd ../before && python -m experiments.fault_lab --judge --runs=RUNS --out=old.json)    # by its own name then
    python -m experiments.labs.fault_lab --judge --runs=RUNS --out=new.json                 # and RUNS/judged.json
    python -m experiments.labs.compared --old=old.json --new=RUNS/judged.json

Every difference is listed by itself: a mode found by one alone, other ranks or hosts, another
share.
"""  # noqa: E501

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Mapping
from typing import Any

from absl import app, flags

from experiments.lib import measured

_SHARE = 1e-3
"""By which shares of the step must differ to be listed."""
_SAYS = {"all": "with hosts' counters, link probe and measured fabric",
         "counters": "with hosts' counters", "bare": "by the stamps alone"}


def read(path: pathlib.Path) -> dict[str, dict[str, Any]]:
  """Reads a judgement: the rows of `judged.json`, or the whole file of figures of versions that
  kept them there.

  Returns:
    The rows by name of the run.

  Raises:
    ValueError: it holds no such rows.
  """
  document = json.loads(path.read_text())
  rows = document.get("runs") if isinstance(document, dict) else document
  if not rows or not all(isinstance(row, dict) and {"name", "found"} <= row.keys() for row in rows):
    raise ValueError(
        f"{path} holds no judged runs: name the file that `fault_lab --judge` wrote run by run.")
  return {row["name"]: row for row in rows}


def differences(old: Mapping[str, Mapping[str, Any]], new: Mapping[str, Mapping[str, Any]],
                least: float = _SHARE) -> list[dict[str, Any]]:
  """Every difference between the findings of runs that both have.

  Args:
    old: rows by run.
    new: rows by run.
    least: by which shares must differ.

  Returns:
    Rows with `run`, `way` of judging, `mode`, `what` ("only old", "only new", "blame" or "share"),
    and what `old` and `new` say.
  """
  found = []
  for name in sorted(set(old) & set(new)):
    for way in (way for way in old[name]["found"] if way in new[name]["found"]):
      one, other = ({entry["mode"]: entry for entry in row["found"][way]}
                    for row in (old[name], new[name]))
      for mode in sorted({*one, *other}):
        what = _difference(one.get(mode), other.get(mode), least)
        if what:
          found.append({"run": name, "way": way, "mode": mode, "what": what,
                        "injected": _injected(new[name]), "old": _said(one.get(mode)),
                        "new": _said(other.get(mode))})
  return found


def _difference(one: Mapping[str, Any] | None, other: Mapping[str, Any] | None,
                least: float) -> str | None:
  if one is None or other is None:
    return "only new" if one is None else "only old"
  if ((sorted(one["ranks"]), sorted(one["hosts"]))
      != (sorted(other["ranks"]), sorted(other["hosts"]))):
    return "blame"
  return "share" if abs(one["share"] - other["share"]) > least else None


def _said(finding: Mapping[str, Any] | None) -> str:
  if finding is None:
    return "nothing"
  whom = (f"ranks {finding['ranks']} {finding['hosts']}" if finding["ranks"]
          or finding["hosts"] else "nobody")
  return f"{100 * finding['share']:.2f} %, {whom}"


def _injected(row: Mapping[str, Any]) -> str:
  return "; ".join(f"{fault['kind']} {100 * fault['cost']:.1f} %, ranks {list(fault['ranks'])}"
                   for fault in row["injected"]) or "nothing"


def compare(old: Mapping[str, Mapping[str, Any]],
            new: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
  """How many runs say the same, how far shares differ, and the differences."""
  both = sorted(set(old) & set(new))
  found = differences(old, new)
  ways = {}
  for way in _SAYS:
    pairs = [(old[name]["found"][way], new[name]["found"][way]) for name in both
             if way in old[name]["found"] and way in new[name]["found"]]
    findings = [(one, other) for before, after in pairs for one in before for other in after
                if one["mode"] == other["mode"]]
    ways[way] = {
        "runs": len(pairs), "findings_old": sum(len(before) for before, _ in pairs),
        "findings_new": sum(len(after) for _, after in pairs),
        **{kind: sum(entry["way"] == way and entry["what"] == kind for entry in found)
           for kind in ("only old", "only new", "blame", "share")},
        "largest_difference_of_shares":
        max((abs(one["share"] - other["share"]) for one, other in findings),
            default=None)}
  return {"runs": len(both), "only_old": sorted(set(old) - set(new)),
          "only_new": sorted(set(new) - set(old)), "ways": ways, "differences": found}


def page(figures: Mapping[str, Any]) -> list[str]:
  """The figures in Markdown."""
  lines = measured.introduction("The same runs judged by two versions", dict(figures))
  if figures["note"]:
    lines += [figures["note"], ""]
  for title, found in figures["compared"].items():
    lines += [f"## {title}", "", f"{found['runs']} runs that both judged, each in three ways.", ""]
    lines += measured.table(
        ("", "findings, old", "new", "found by old alone", "by new alone", "others blamed",
         f"share differs by over {100 * _SHARE:g} points", "largest difference of shares, points"),
        [(_SAYS[way], one["findings_old"], one["findings_new"], one["only old"], one["only new"],
          one["blame"], one["share"], None if one["largest_difference_of_shares"] is None else
          100 * one["largest_difference_of_shares"]) for way, one in found["ways"].items()])
    if found["differences"]:
      lines += measured.table(("run", "injected", "judged", "mode", "difference", "old", "new"), [
          (entry["run"], entry["injected"], _SAYS[entry["way"]], entry["mode"], entry["what"],
           entry["old"], entry["new"]) for entry in found["differences"]])
  return lines


def main(argv: list[str]) -> None:
  """Compares, one pair of files after the other."""
  args = flags.FLAGS
  if len(argv) > 1 or len(args.old) != len(args.new) or not args.old:
    raise app.UsageError(
        "Give as many files to --old as to --new, the same runs at the same place.")
  titles = args.titles or [f"Runs {number + 1}" for number in range(len(args.old))]
  figures = {**measured.circumstances("experiments.labs.compared"), "note": args.note,
             "compared": {}}
  try:
    for title, one, other in zip(titles, args.old, args.new, strict=True):
      figures["compared"][title] = compare(read(pathlib.Path(one)), read(pathlib.Path(other)))
  except (OSError, ValueError) as error:
    sys.exit(f"compared: {error}")
  measured.write(figures, page(figures), pathlib.Path(args.out))


if __name__ == "__main__":
  flags.DEFINE_list("old", [], "Files of the older judgements.")
  flags.DEFINE_list("new", [], "Files of the newer ones, of the same runs.")
  flags.DEFINE_list("titles", [], "What to call each pair.")
  flags.DEFINE_string("note", "", "A sentence on the circumstances, for the page.")
  flags.DEFINE_string("out", "docs/measurements/fault_lab_old_new.json",
                      "Where the figures go; a table beside it.")
  app.run(main)
