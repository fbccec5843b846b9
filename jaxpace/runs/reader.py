"""Reads a recorded run, whatever state it is in, into dense arrays.

A run is read as a user finds it: killed processes, torn files, restarts, ranks that never wrote.
What can't be used is left out and named in `Run.problems`; only a directory with nothing to report
on is an error.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxpace.core.words import list_ranks, plural
from jaxpace.files.reading import UnreadableError, read_document, why_unreadable
from jaxpace.files.schemas import RANKS, RunFile
from jaxpace.hosts.locality.job import read_places
from jaxpace.runs import dense, ring_file
from jaxpace.runs.collectives import choose
from jaxpace.runs.columns import Axis
from jaxpace.runs.dense import Progress
from jaxpace.runs.groups import laid_out
from jaxpace.runs.loops import Loop, by_weight, loops_in
from jaxpace.runs.run import Process, Run, RunError
from jaxpace.runs.rundir import TOGETHER, read_processes, told_by
from jaxpace.runs.schema import SCHEMA_VERSION
from jaxpace.runs.table_reader import TableFiles, list_parts, open_table, outermost

_SPARSE = 4
"""Step numbers are laid out as they are unless that takes this many times as many cells as there
are rows."""


def read_run(path: str | pathlib.Path, *, window: tuple[int | None, int | None] = (None, None),
             progress: Progress | None = None) -> Run:
  """Reads a run directory.

  Args:
    path: run directory, the one that holds `run.json`.
    window: first step and one past the last step wanted; None leaves that side open. The step
      before the window is read as well, since the first step's arrival is measured from its exit.
    progress: called now and then with rows read and rows in all.

  Returns:
    The run; what was left out or looks wrong is in its `problems`.

  Raises:
    RunError: there is nothing to report on: no such directory, no run in it, no readable row, or a
      newer schema.
  """
  path = pathlib.Path(path)
  try:
    for _ in range(3):
      run, vanished = _read(path, window, progress)
      if not vanished:
        break
    return run
  except PermissionError as error:
    raise RunError(f"No permission to read {error.filename or path}. Ask its owner, or copy the "
                   "run to where you may read it.") from error


def _read(path: pathlib.Path, window: tuple[int | None, int | None],
          progress: Progress | None) -> tuple[Run, bool]:
  """Reads it once; says whether a job that still runs has merged parts while they were read."""
  check_directory(path)
  problems: list[str] = []
  info = _read_info(path, problems)
  run_id = _run_id(path, info, problems)
  processes = tuple(read_processes(path, run_id, problems))
  info = ring_file.with_all_groups(path, info or told_by(processes), processes)
  tables = [open_table(path, name, run_id) for name in ("steps", "collectives")]
  steps_table, collectives_table = tables
  if not steps_table.rows and not collectives_table.rows:
    raise RunError(nothing_read(path, tables, processes))

  firsts, lasts = zip(*(t.step_range for t in tables if t.rows), strict=True)
  low, high = min(firsts), max(lasts)
  axis = _lay_out_steps(tables, low, high, window)
  loops = _loops(info, steps_table, axis)
  if len(loops) > 1:
    axis = Axis(axis.numbers[loops[0].holds(axis.numbers)])
  if axis.size == 0:
    raise RunError(f"{path} has no step in the window asked for: it holds steps {low} to {high}.")
  declared = _declared_ranks(info, processes)
  ranks = dense.count_ranks(path, tables, declared, axis, problems)
  chosen = choose(info, collectives_table, axis, ranks) if steps_table.rows else None
  run = dense.build(path, info, processes, steps_table, collectives_table, axis, ranks,
                    declared=declared, window=window, chosen=chosen, progress=progress)
  for table in tables:
    problems.extend(table.problems)
  if not any((attempt >= 0).any() for attempt in (run.attempt,
                                                  *(c.attempt for c in run.collectives))):
    if any(table.torn for table in tables):
      raise RunError(nothing_read(path, tables, processes))
    raise RunError(f"{path} has no row in the window asked for: it holds steps {low} to {high}.")
  problems.extend(_describe(run, steps_table.rows, collectives_table.rows))
  attempt = run.attempt
  if chosen is not None:
    run = run.detailed(chosen.steps, chosen.others)
    problems.extend(chosen.left_out)
  places, unreadable = read_places(path, run_id)
  problems.extend(unreadable)
  samples = dense.read_host_samples(path, run_id, problems)
  listening = dense.read_listening(path, run_id, axis, attempt, problems)
  run = dataclasses.replace(run, id=run_id or path.name, problems=tuple(problems),
                            locality=tuple(places), host_samples=samples, listening=listening,
                            loops=loops)
  return run, any(table.vanished for table in tables)


def _lay_out_steps(tables: Sequence[TableFiles], low: int, high: int,
                   window: tuple[int | None, int | None]) -> Axis:
  """The steps from `low` to `high`, cut to the window and the step before it."""
  first, stop = window
  if first is not None:
    low = max(low, first - 1)
  if stop is not None:
    high = min(high, stop - 1)
  if high < low or (first is not None and high < first):
    return Axis(np.empty(0, np.int64))
  if high - low < _SPARSE * max(t.rows for t in tables) + 1000:
    return Axis(np.arange(low, high + 1, dtype=np.int64))
  steps = np.unique(np.concatenate([t.distinct("step") for t in tables]))
  return Axis(steps[(steps >= low) & (steps <= high)].astype(np.int64))


def _loops(info: dict[str, Any], table: TableFiles, axis: Axis) -> tuple[Loop, ...]:
  """The loops of these steps, the one to report on first, by their times on the lowest rank."""
  loops = loops_in(info, table.step_range[1]) if axis.size else []
  lowest, rows = RANKS, list[np.ndarray]()
  for data in table.read(["step", "rank", "start_ns", "end_ns"], axis.span) if loops else ():
    if not {"start_ns", "end_ns"} <= data.keys():
      return ()
    first = int(data["rank"].min(initial=RANKS))
    if first < lowest:
      lowest, rows = first, []
    own = (data["rank"] == lowest) & np.isin(data["step"], axis.numbers)
    rows.append(np.stack([data[name][own] for name in ("step", "start_ns", "end_ns")]))
  return by_weight(loop.timed(*np.concatenate(rows, axis=1)) for loop in loops) if rows else ()


def check_directory(path: pathlib.Path) -> None:
  """Checks that a directory holds a recorded run, readable or not; RunError, if it doesn't: the
  sentence says what to give instead."""
  if not path.exists():
    raise RunError(
        f"There is no run at {path}: no such directory. Give the directory a Recorder wrote to.")
  wrong = misplaced(path)
  if wrong:
    raise RunError(wrong)
  if _looks_like_run(path):
    return
  if not any(path.iterdir()):
    raise RunError(f"{path} is empty: nothing was recorded there. A Recorder writes its first rows "
                   "a few seconds after the first step.")
  if any((path / ring_file.FOLDER).glob("*.ring")):
    raise RunError(f"{path} holds a run that has only begun: its job ended within half a second of "
                   "its first step, before anything was written, or has not run for as long yet.")
  raise RunError(f"{path} holds no recorded run: it has neither run.json nor a folder 'steps'. "
                 "Give the directory a Recorder wrote to.")


def misplaced(path: pathlib.Path) -> str | None:
  """Says which directory must be meant where an existing path is not a run's and never will be;
  else None."""
  if not path.is_dir():
    if path.name == "run.json" or path.suffix == ".parquet":
      folder = path.parent if path.name == "run.json" else path.parent.parent
      return f"{path} is a file of a run, not the run. Give its directory: {folder}"
    return f"{path} is a file; a run is a directory. Give the directory a Recorder wrote to."
  if _looks_like_run(path):
    return None
  below = sorted(child for child in path.iterdir() if not child.name.startswith(".")
                 and child.is_dir()
                 and _looks_like_run(child))
  if below:
    shown = (", ".join(str(p) for p in below[:5])
             + (f" and {len(below) - 5} more" if len(below) > 5 else ""))
    if len(below) > 1 and _is_one_run(below):
      return (f"{path} is no run itself but holds parts of one: {shown}. Copy what these hold into "
              "one directory, and give that.")
    which = "one: give" if len(below) == 1 else "several: give one of"
    return f"{path} is no run itself but holds {which} {shown}"
  if (path.name in ("steps", "collectives", "hosts", "process", "locality")
      and _looks_like_run(path.parent)):
    return f"{path} is a part of a run. Give its directory: {path.parent}"
  return None


def _is_one_run(directories: Sequence[pathlib.Path]) -> bool:
  """Whether directories hold different processes of the same run, as of hosts without a shared
  disk."""
  found = [process for each in directories for process in read_processes(each, None, [])]
  runs = {process.info.get("run") for process in found}
  return (len(runs) == 1 and runs != {None} and len(found) >= len(directories)
          and len({process.process for process in found}) == len(found))


def _looks_like_run(path: pathlib.Path) -> bool:
  return (path / "run.json").is_file() or any(
      (path / table).is_dir() and any((path / table).glob("*.parquet"))
      for table in ("steps", "collectives"))


def _read_info(path: pathlib.Path, problems: list[str]) -> dict[str, Any]:
  file = path / "run.json"
  try:
    info, left_out = read_document(file, RunFile)
  except FileNotFoundError:
    problems.append(
        "run.json is missing: run id, ranks and clock are taken from the rows themselves.")
    return {}
  except PermissionError:
    raise
  except (OSError, UnreadableError) as error:
    problems.append(
        f"run.json {why_unreadable(error)}: run id, ranks and clock are taken from the rows "
        "themselves.")
    return {}
  problems.extend(f"run.json: {sentence}." for sentence in left_out)
  if info and not info.get("plan"):
    problems.append("run.json holds no plan of the step: collectives without timestamps, and what "
                    "was chosen when it was traced, are unknown.")
  version = info.get("schema_version", SCHEMA_VERSION)
  if version is not None and version > SCHEMA_VERSION:
    raise RunError(f"{path} was recorded with schema {version}, this jaxpace reads up to "
                   f"{SCHEMA_VERSION}. Upgrade jaxpace where you read it.")
  return info


def _run_id(path: pathlib.Path, info: dict[str, Any], problems: list[str]) -> str | None:
  """The id in `run.json`, else that of most parts; None if there are no parts either."""
  if info.get("run"):
    return info["run"]
  ids = Counter(part.run for table in ("steps", "collectives")
                for part in outermost(list_parts(path / table)[0]))
  if len(ids) > 1:
    problems.append(f"Parts of {len(ids)} runs lie here and no run.json says which one counts: "
                    f"the one with most parts, {ids.most_common(1)[0][0]}, was read.")
  return ids.most_common(1)[0][0] if ids else None


def _declared_ranks(info: dict[str, Any], processes: Sequence[Process]) -> int:
  """The number of ranks that the run has by its own word. The plan's are those along the data axis
  alone."""
  devices = info.get("devices") or 0
  candidates = [info.get("ranks"), (info.get("plan") or {}).get("ranks")]
  mesh = laid_out(info)
  candidates.append(None if mesh is None else mesh.size)
  candidates += [rank + 1 for process in processes for rank in process.ranks if rank < devices]
  return max(filter(None, candidates), default=0)


def nothing_read(path: pathlib.Path, tables: Sequence[TableFiles],
                 processes: Sequence[Process]) -> str:
  """Says it and why: what is wrong with the tables' files, else what the processes say."""
  said = list(dict.fromkeys(problem for table in tables for problem in table.problems))
  if said:
    more = f" (and {len(said) - 1:,} more like this)" if len(said) > 1 else ""
    hint = (" Was it copied completely?" if any(table.torn for table in tables)
            and re.search("torn|empty|corrupt", said[0]) else
            " Was run.json overwritten, or the directory used twice?"
            if any(" of other runs in " in problem for problem in said) else "")
    return f"No row of {path} can be read: {said[0].rstrip('.')}{more}.{hint}"
  kept = [reason for process in processes for reason in _kept_from_recording(process)]
  if kept:
    return f"{path} holds a run without a single recorded step. {' '.join(kept[:3])}"
  if why := _ran_bare(path, processes):
    return f"{path} holds a run without a single recorded step: {why}"
  over = bool(processes) and all(process.info.get("closed_cleanly") for process in processes)
  when = (", and its recording has ended: was" if over else
          " yet. Rows are written every few seconds: has the job finished its first step, and is")
  return (f"{path} holds a run without a single recorded step{when} `recorder.record()` called in "
          "the loop? Of `jaxpace run`, the step is what ran three times, of the programs with "
          "collectives over several devices; of training that is one program, such as a scan over "
          "all its steps, an iteration of its loop.")


def _ran_bare(path: pathlib.Path, processes: Sequence[Process]) -> str:
  """What an observed step had no timestamps for, where none of its programs has any; else empty."""
  for process in processes:
    with contextlib.suppress(OSError, UnreadableError):
      programs = ring_file.read_plan(path, process.process)[-1].programs
      if programs and all(program.bare for program in programs):
        last = programs[-1]
        return f"{last.name[:80]} ran unmodified: {last.bare[:400]}"
  return ""


# What a recorded run lacks, in sentences.

def _describe(run: Run, step_rows: int, collective_rows: int) -> list[str]:
  """Says what is missing, what was recorded twice and what the processes report themselves."""
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
  beside = [p.process for p in run.processes if p.info.get("closed_cleanly") and not p.ranks
            and not p.info.get("rows_written") and p.process not in run.process_of_rank]
  if beside:
    problems.append(f"{plural(len(beside), 'process', 'processes')} of {len(run.processes)} ran "
                    f"nothing of the step and left no rows: {list_ranks(beside)}.")
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
  apart = ("" if silent & {int(p) for p in run.process_of_rank} else
           f" Nothing else is here of {'it' if len(silent) == 1 else 'them'} either: {TOGETHER}.")
  return [f"{plural(len(silent), 'process', 'processes')} of {len(expected | known)} left no file "
          f"in the folder 'process', so {unknown}: {list_ranks(silent)}.{apart}"]


def _losses(process: Process) -> list[str]:
  info, said = process.info, []
  lost, holes = info.get("lost_rows"), info.get("holes")
  if lost:
    said.append(f"{_name(process)} lost {plural(lost, 'row')}"
                + (f" in {plural(holes, 'hole')}." if holes else "."))
  if info.get("ended_by"):
    said.append(f"{_name(process)} was ended by {info['ended_by'].rstrip('.')}.")
  return said + _kept_from_recording(process)


def _kept_from_recording(process: Process) -> list[str]:
  """Says what kept a process from recording all its steps, in its own words."""
  stopped = process.info.get("stopped")
  return [f"{_name(process)} stopped recording: {stopped.rstrip('.')}."] if stopped else []


def _name(process: Process) -> str:
  return f"Process {process.process}" + (f" ({process.host})" if process.host else "")
