"""The collectives of a step as a run recorded them: their names, who meets in each, in what order
the step goes through them, and which of them are laid out.

Of an observed step there are hundreds. Each step has a row in the table `steps` with its sums; only
some have the rows of their collectives. Those are laid out over these steps alone, the step before
each described by the table `steps`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxpace.core.detail import is_detailed
from jaxpace.core.fields import is_whole
from jaxpace.core.words import plural
from jaxpace.runs.columns import Axis, Cells, whole_numbers
from jaxpace.runs.groups import read_groups, sends
from jaxpace.runs.run import MISSING, CollectiveTimes, HeldTimes
from jaxpace.runs.table_reader import Rows, TableFiles

_RANKS, _CELLS = 8, 1 << 20
"""Ranks that are asked of those that take part in the same collectives, and times that are read of
them."""


def in_order(enter: Sequence[np.ndarray], leave: Sequence[np.ndarray],
             attempt: Sequence[np.ndarray], by_exit: bool = False) -> list[int]:
  """Finds an order that agrees with the order on each rank.

  Only times of one rank are compared: clocks of two have nothing to do with each other, and ranks
  that share no collective may go through theirs at any time. What no rank's times order stays as
  it is given.

  Args:
    enter: [R, K] entries of each of C collectives, ns; `MISSING` where there is no row.
    leave: [R, K] exits.
    attempt: [R, K] attempt of each row.
    by_exit: whether exits tell the order, and entries only of what is left together; else the other
      way round.

  Returns:
    Positions of the C collectives.
  """
  takes_part = np.array([(one != MISSING).any(axis=1) for one in enter])  # [C, R]
  alike: dict[bytes, list[int]] = {}
  for rank in np.flatnonzero(takes_part.any(axis=0)).tolist():
    alike.setdefault(takes_part[:, rank].tobytes(), []).append(rank)
  chains = []
  for ranks in alike.values():
    own = np.flatnonzero(takes_part[:, ranks[0]])
    some = np.array(ranks[::-(-len(ranks) // _RANKS)])
    begin, end = _of_ranks([[of[c] for c in own.tolist()] for of in (enter, leave, attempt)], some)
    chains.append(own[np.lexsort((begin, end) if by_exit else (end, begin))].tolist())
  return _merged(chains, len(enter))


def _of_ranks(rows: Sequence[Sequence[np.ndarray]], ranks: np.ndarray
              ) -> tuple[np.ndarray, np.ndarray]:
  """Median entry and exit, [C] ns since the step's first entry, of ranks that take part in all of
  the collectives."""
  some = np.flatnonzero((rows[0][0][ranks] != MISSING).any(axis=0))
  most = max(16, _CELLS // (len(rows[0]) * len(ranks)))
  steps = some[::-(-len(some) // most)]
  enter, leave, attempt = (np.stack([one[np.ix_(ranks, steps)] for one in of]).reshape(len(of), -1)
                           for of in rows)
  there = (enter != MISSING) & (attempt == attempt.max(axis=0))
  whole = there.all(axis=0)
  there &= whole | ~whole.any()  # steps with all rows, if there are any
  first = np.where(there, enter, np.iinfo(np.int64).max).min(axis=0)
  begin, end = (np.ma.median(np.ma.array(times - first, mask=~there | (times == MISSING)),
                             axis=1).filled(0.0) for times in (enter, leave))
  return begin, end


def _merged(chains: Sequence[Sequence[int]], size: int) -> list[int]:
  """Positions from 0 to `size` in an order that all chains have, the lowest first where they leave
  it open; where two contradict each other the lowest of those left comes next."""
  behind: list[set[int]] = [set() for _ in range(size)]
  for chain in chains:
    for one, next_one in itertools.pairwise(chain):
      behind[one].add(next_one)
  ahead = np.bincount([at for after in behind for at in after], minlength=size).tolist()
  left, result = dict.fromkeys(range(size)), []
  while left:
    at = next((one for one in left if not ahead[one]), next(iter(left)))
    del left[at]
    result.append(at)
    for after in behind[at]:
      ahead[after] -= 1
  return result


def is_point_to_point(entry: dict[str, Any], name: str = "") -> bool:
  """Whether an entry of the plan is a transfer between pairs; `name` is its, where it has none."""
  return sends(entry.get("primitives") or [entry.get("name") or name])


def _planned(info: dict[str, Any]) -> dict[Any, dict[str, Any]]:
  """The plan's entries, by slot."""
  return {entry.get("slot"): entry for entry in (info.get("plan") or {}).get("collectives") or ()}


def _read_names(table: TableFiles | Rows, wanted: set[int]) -> dict[int, tuple[str, int | None]]:
  """Name and bytes of each slot, from the first rows that have them; rows in memory have none."""
  names: dict[int, tuple[str, int | None]] = {}
  columns = ["collective", "name", "bytes"]
  for data in table.tables(columns) if isinstance(table, TableFiles) and wanted else ():
    if "name" not in data.column_names:
      continue
    slots = whole_numbers(data.column("collective"))
    for slot in wanted - set(names):
      hits = np.flatnonzero(slots == slot)
      if hits.size:
        size = data.column("bytes")[int(hits[0])].as_py() if "bytes" in data.column_names else None
        size = size if isinstance(size, int) and size >= 0 else None
        names[slot] = str(data.column("name")[int(hits[0])].as_py() or "")[:4096], size
    if not wanted - set(names):
      break
  return names


def name_collectives(info: dict[str, Any], cells: Cells, table: TableFiles | Rows,
                     by_exit: bool = False) -> tuple[CollectiveTimes, ...]:
  """Collectives in the order in which a step goes through them, that of their entries or of their
  exits; name and bytes from the table where the plan does not say them.

  Of an observed step a collective may stay open while the device computes and goes through others:
  it is waited for after these, and only that time of it is exposed.
  """
  planned = _planned(info)
  slots = cells.slots.numbers.tolist()
  names = _read_names(table, {slot for slot in slots if not planned.get(slot, {}).get("name")
                              or "bytes" not in planned[slot]})
  result = []
  for place, slot in enumerate(slots):
    entry = planned.get(slot, {})
    name, size = names.get(slot, ("", None))
    times = {column: values[place] for column, values in cells.columns.items()}
    point_to_point = is_point_to_point(entry, name)
    held = HeldTimes(*(times[each] for each in HeldTimes._fields)) if "held_ns" in times else None
    result.append(CollectiveTimes(
        slot, str(entry.get("name") or name or f"collective {slot}"), entry.get("bytes", size),
        times["enter_ns"], times["exit_ns"], cells.attempt[place],
        read_groups(info, entry, cells.attempt.shape[1], point_to_point), point_to_point,
        entry.get("may_begin_early") is True, held))
  if len(result) < 2:
    return tuple(result)
  order = in_order([c.enter_ns for c in result], [c.exit_ns for c in result],
                   [c.attempt for c in result], by_exit)
  return tuple(result[at] for at in order)


MOST_CELLS = 32 << 20
"""Entries and exits that are laid out at most, 18 bytes each; of more, evenly spread steps are
taken."""
_ENOUGH = 40
"""Steps that were drawn to be written in detail are enough by themselves from this number on."""
_MOST = 0.5
"""Fraction of the steps of the program that ran most in which another ran, if it is a part of the
step."""
_FULL = 0.9
"""A step is written in detail if it has this part of the rows of the usual one; others were so on
some ranks only."""


class Chosen(NamedTuple):
  """What is laid out of the table."""

  steps: np.ndarray  # [D] numbers of the steps, rising
  slots: np.ndarray  # [C] slots, rising
  others: np.ndarray  # [K] bool, of all steps, those of other shapes
  left_out: tuple[str, ...]  # what a reader of the report must know, in sentences


def choose(info: dict[str, Any], table: TableFiles, axis: Axis,
           ranks: int) -> Chosen | None:
  """Finds out which steps and collectives are laid out; None where the run is not an observed one,
  or none of its collectives were written."""
  entries = _planned(info)
  if (not table.rows or not axis.size
      or all(entry.get("of") is None for entry in entries.values())):
    return None
  planned = {slot: entry.get("program") or 0 for slot, entry in entries.items()
             if slot is not None}
  programs = sorted(set(planned.values()))
  rows, seen = _count(table, axis, planned, programs)
  if not rows.any():
    return None
  main = int(rows.sum(axis=1).argmax())
  # Programs that run in the same steps are parts of one; the shapes of a program never do.
  parts = (rows[:, rows[main] > 0] > 0).mean(axis=1) > _MOST
  own, other = rows[parts].sum(axis=0), (rows[~parts] > 0).any(axis=0)
  every = (info["plan"].get("detail") or {}).get("every")
  drawn = is_detailed(np.maximum(axis.numbers, 0), every if is_whole(every, 1) else 1)
  some = own[drawn & (own > 0)]
  usual = float(np.median(some if some.size else own[own > 0]))
  full = own >= _FULL * usual
  partly = int(((own > 0) & ~full & ~other).sum())
  # Slow steps and the first ones are written in detail as well: with those alone that are drawn,
  # none counts for more.
  alone = full & drawn
  steps = axis.numbers[alone if alone.sum() >= _ENOUGH else full]
  kept = {programs[at] for at in np.flatnonzero(parts).tolist()}
  slots = np.array(sorted(slot for slot in seen
                          if planned.get(slot, programs[main]) in kept), np.int64)
  said = []
  if partly:
    said.append(f"{plural(partly, 'step')} detailed by some ranks only: not in the shares.")
  most = max(1, MOST_CELLS // max(1, ranks * len(slots)))
  if len(steps) > most:
    said.append(f"{len(steps):,} steps are detailed, more than fit into memory: {most:,} of "
                "them, evenly spread, were read. --steps reads all of a stretch.")
    steps = steps[np.linspace(0, len(steps) - 1, most).round().astype(int)]
  others = other & ~full
  if not _all_known(others, drawn):
    said.append("The step was compiled in several shapes: shares and lateness are of the one that "
                "ran most, step times of all, since only some steps say which they are of.")
    others[:] = False
  return Chosen(steps, slots, others, tuple(said))


def _all_known(some: np.ndarray, drawn: np.ndarray) -> bool:
  """Whether of all steps of a kind practically each is detailed, as slow ones are, by how many of
  those that are drawn are of it: all [K] bool."""
  seen = int(some[drawn].sum())
  return int(some.sum()) * int(drawn.sum()) >= (seen - 2 * math.sqrt(seen)) * some.size


def _count(table: TableFiles, axis: Axis, planned: dict[int, int], programs: Sequence[int]
           ) -> tuple[np.ndarray, set[int]]:
  """[programs, K] rows of each step, and the slots that have any."""
  rows = np.zeros((len(programs), axis.size), np.int64)
  highest = max(table.highest_slot, 0)
  where = np.full(highest + 1, 0, np.int64)
  for slot, program in planned.items():
    if slot <= highest:
      where[slot] = programs.index(program)
  seen = np.zeros(highest + 1, bool)
  for data in table.read(["step", "collective"], axis.span):
    at, inside = axis.index(data["step"])
    slots = data["collective"]
    sound = (slots >= 0) & (slots <= highest)
    keep = sound if inside is None else sound & inside
    at, slots = at[keep], slots[keep]
    seen[slots] = True
    flat = at if len(programs) == 1 else where[slots] * axis.size + at
    rows += np.bincount(flat, minlength=rows.size).reshape(rows.shape)
  return rows, set(np.flatnonzero(seen).tolist())
