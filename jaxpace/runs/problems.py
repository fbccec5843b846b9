"""Sentences on what a recorded run lacks."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from jaxpace.core.words import plural
from jaxpace.files.reading import UnreadableError
from jaxpace.hosts.locality.tree import successive
from jaxpace.runs.run import Process, Run


def why_unreadable(error: OSError | UnreadableError) -> str:
  """The end of a sentence that begins with a file's name."""
  if isinstance(error, FileNotFoundError):
    return "is missing"
  return f"can't be read ({error.strerror or error})" if isinstance(error, OSError) else str(error)


def describe(run: Run, step_rows: int, collective_rows: int) -> list[str]:
  """Says what is missing, what was recorded twice and what the processes report themselves.

  Args:
    run: the run.
    step_rows: rows of the table `steps` on disk.
    collective_rows: rows of the table `collectives` on disk.
  """
  problems = []
  if not step_rows:
    problems.append("The table 'steps' is missing or empty: no phases, gaps and delays; all busy "
                    "time counts as compute.")
  if not collective_rows:
    problems.append(
        "The table 'collectives' is missing or empty: waiting can't be separated from computing.")
  if run.duplicates:
    problems.append(f"{plural(run.duplicates, 'row')} repeat a step of the same rank, as after a "
                    "restart: the last attempt counts.")
  if run.info and not run.plan:
    problems.append("run.json holds no plan of the step: collectives without timestamps, and what "
                    "was chosen when it was traced, are unknown.")
  problems += _missing_ranks(run)
  problems += _silent_processes(run)
  for process in run.processes:
    problems += _losses(process)
  open_ones = [p.process for p in run.processes if p.info.get("closed_cleanly") is False
               and not p.info.get("stopped")]
  if open_ones and len(open_ones) == len(run.processes):
    problems.append("No process has closed its recording: the job still runs, or was killed.")
  elif open_ones:
    problems.append(f"{plural(len(open_ones), 'process', 'processes')} did not close the "
                    f"recording, as if killed: {list_ranks(open_ones)}.")
  return problems


def _missing_ranks(run: Run) -> list[str]:
  problems = []
  present = run.attempt >= 0
  silent = run.silent
  unlisted = max(run.declared - run.ranks, 0)
  if silent.size + unlisted:
    problems.append(
        f"{plural(silent.size + unlisted, 'rank')} of {run.ranks_in_all} recorded nothing"
        + (f": {list_ranks(silent)}." if not unlisted else "."))
  last = np.where(present.any(axis=1),
                  present.shape[1] - 1 - np.argmax(present[:, ::-1], axis=1), -1)
  early = np.flatnonzero((last >= 0) & (int(last.max()) - last > max(2, 0.02 * len(run.steps))))
  if early.size:
    problems.append(f"{plural(early.size, 'rank')} stopped recording before the others, after step "
                    f"{int(run.steps[last[early].min()])}: {list_ranks(early)}. Did a process die?")
  return problems


def _silent_processes(run: Run) -> list[str]:
  declared = run.info.get("processes")
  known = {p.process for p in run.processes}
  expected = set(range(declared)) if declared and declared <= 1 << 16 else set()
  expected |= {int(p) for p in run.process_of_rank if p >= 0}
  silent = expected - known
  if not silent:
    return []
  unknown = "the host, the losses and the end of each are unknown"
  if not known:
    return ["The folder 'process' is missing or empty; it describes "
            f"{plural(len(silent), 'process', 'processes')}: {unknown}."]
  return [f"{plural(len(silent), 'process', 'processes')} of {len(expected | known)} left no file "
          f"in the folder 'process', so {unknown}: {list_ranks(silent)}."]


def _losses(process: Process) -> list[str]:
  info, said = process.info, []
  lost, holes = info.get("lost_rows"), info.get("holes")
  if lost:
    said.append(f"{_name(process)} lost {plural(lost, 'row')}"
                + (f" in {plural(holes, 'hole')}." if holes else "."))
  if info.get("ended_by"):
    said.append(f"{_name(process)} was ended by {info['ended_by'].rstrip('.')}.")
  return said + kept_from_recording(process)


def kept_from_recording(process: Process) -> list[str]:
  """Says what kept a process from recording all its steps, in its own words."""
  stopped = process.info.get("stopped")
  return [f"{_name(process)} stopped recording: {stopped.rstrip('.')}."] if stopped else []


def _name(process: Process) -> str:
  return f"Process {process.process}" + (f" ({process.host})" if process.host else "")


def clock_name(clock: str) -> str:
  """The clock of a run for people; runs keep the names of clocks that wrote timestamps as marks.

  >>> clock_name("marks"), clock_name("stream marks"), clock_name("callback")
  ('native', 'stream', 'callback')
  """
  return {"marks": "native", "stream marks": "stream"}.get(clock, clock)


def list_ranks(ranks: Iterable[int], most: int = 12) -> str:
  """Names ranks briefly.

  >>> list_ranks([9, 0, 1, 2, 5])
  '0-2, 5, 9'
  """
  runs = successive(map(int, ranks))
  words = [f"{r[0]}-{r[-1]}" if len(r) > 2 else ", ".join(map(str, r)) for r in runs]
  if len(words) <= most:
    return ", ".join(words)
  return ", ".join(words[:most]) + f" and {sum(len(r) for r in runs[most:])} more"


def duration(seconds: float) -> str:
  """Puts a duration into words.

  >>> duration(0.0123), duration(3.25), duration(75.0), duration(312), duration(16440)
  ('12 ms', '3.2 s', '75 s', '5 min 12 s', '4 h 34 min')
  >>> duration(200000)
  '2 d 7 h'
  """
  if seconds < 1.0:
    return f"{1e3 * seconds:.0f} ms"
  if seconds < 10.0:
    return f"{seconds:.1f} s"
  whole = round(seconds)
  if whole < 120:
    return f"{whole} s"
  if whole < 7200:
    return f"{whole // 60} min {whole % 60} s"
  hours = whole // 3600
  return f"{hours} h {whole % 3600 // 60} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"
