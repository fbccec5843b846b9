"""Why nothing of a run could be read, in a sentence."""

from __future__ import annotations

import contextlib
import pathlib
from collections import Counter
from collections.abc import Mapping, Sequence

from jaxpace.files.reading import UnreadableError
from jaxpace.trace.marks.plans import read_plan
from jaxpace.trace.problems import kept_from_recording, plural
from jaxpace.trace.run import Process

_SPLIT = " left out: "


def nothing_read(path: pathlib.Path, run: str | None, skipped: Mapping[str, int],
                 processes: Sequence[Process], problems: Sequence[str]) -> str:
  """Says it, and names the files that lie there.

  Args:
    path: run directory.
    run: id of the run.
    skipped: files left out, by reason.
    processes: what the processes said of themselves.
    problems: what was found while reading.
  """
  reasons = Counter(reason for problem in problems
                    for name, found, reason in [problem.partition(_SPLIT)]
                    if found and name.endswith(".parquet"))
  if reasons:
    (reason, number), *others = reasons.most_common()
    first = next(problem.partition(_SPLIT)[0]
                 for problem in problems if problem.endswith(_SPLIT + reason))
    which = first if number == 1 else f"{number:,} parts, {first} the first of them,"
    more = f" ({sum(count for _, count in others):,} more for other reasons)" if others else ""
    torn = reason.startswith(("torn", "empty"))
    because = f"{'it is ' if torn else ''}{reason.rstrip('.')}"
    return (f"No row of {path} can be read: {which} left out because {because}{more}."
            + (" Was it copied completely?" if torn else ""))
  if skipped.get("torn"):
    return (f"No row of {path} can be read: {plural(skipped['torn'], 'part')} torn or corrupt. "
            "Was it copied completely?")
  outside = [problem for problem in problems if "is not a number from" in problem
             or "holds rows without" in problem]
  if outside:
    return f"No row of {path} can be used: {outside[0]}"
  if skipped.get("foreign"):
    return (f"{path} has no rows of its own run {run}, only {plural(skipped['foreign'], 'part')} "
            "of other runs. Was run.json overwritten, or the directory used twice?")
  kept = [reason for process in processes for reason in kept_from_recording(process)]
  if kept:
    return f"{path} holds a run without a single recorded step. {' '.join(kept[:3])}"
  named = [problem for problem in problems if "not named as parts" in problem]
  if named:
    return f"{path} holds no part of a run: {named[0]}"
  if why := _ran_bare(path, processes):
    return f"{path} holds a run without a single recorded step: {why}"
  return (f"{path} holds a run without a single recorded step yet. Rows are written every few "
          "seconds: has the job finished its first step, and is `recorder.record()` called in "
          "the loop?")


def _ran_bare(path: pathlib.Path, processes: Sequence[Process]) -> str:
  """What an observed step had no marks for, where none of its programs has any; else empty."""
  for process in processes:
    with contextlib.suppress(OSError, UnreadableError):
      programs = read_plan(path, process.process).plan.programs
      if programs and all(program.bare for program in programs):
        last = programs[-1]
        return f"{last.name[:80]} ran unmodified: {last.bare[:400]}"
  return ""
