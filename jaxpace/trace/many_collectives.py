"""Reads the table `collectives` of an observed run: hundreds of collectives a step, of some of the
steps.

Each step has a row in the table `steps` with its sums; only some have the rows of their
collectives. Those are laid out over these steps alone, the step before each being told by the table
`steps`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxpace.core.detail import is_detailed
from jaxpace.core.fields import is_whole
from jaxpace.trace.cells import StepAxis
from jaxpace.trace.problems import plural
from jaxpace.trace.table_reader import TableFiles

MOST_CELLS = 32 << 20
"""Entries and exits that are laid out at most, 18 bytes each; of more, evenly spread steps are
taken."""
_ENOUGH = 40
"""Steps that were drawn to be written in full are enough by themselves from this number on."""
_FULL = 0.9
"""A step is written in full if it has this part of the rows of the usual one; others were so on
some ranks only."""


class Chosen(NamedTuple):
  """What is laid out of the table."""

  steps: np.ndarray  # [D] numbers of the steps, rising
  slots: np.ndarray  # [C] slots, rising
  left_out: tuple[str, ...]  # what a reader of the report must know, in sentences


def observed_slots(info: dict[str, Any]) -> dict[int, int] | None:
  """Program of each slot of an observed run; None where the run is not one."""
  plan = info.get("plan")
  entries = plan.get("collectives") if isinstance(plan, dict) else None
  entries = [e for e in entries or () if isinstance(e, dict) and is_whole(e.get("slot"), 0)]
  if not any(is_whole(entry.get("of"), 0) for entry in entries):
    return None
  return {entry["slot"]: entry["program"] if is_whole(entry.get("program"), 0) else 0
          for entry in entries}


def choose(info: dict[str, Any], table: TableFiles, axis: StepAxis,
           ranks: int) -> Chosen | None:
  """Finds out which steps and collectives are laid out.

  Args:
    info: `run.json`.
    table: `collectives`.
    axis: all steps of the run.
    ranks: R.

  Returns:
    The choice; None where the run is not an observed one, or none of its collectives were written.
  """
  planned = observed_slots(info)
  if planned is None or not table.rows or not axis.size:
    return None
  programs = sorted(set(planned.values()))
  rows, seen = _count(table, axis, planned, programs)
  if not rows.any():
    return None
  main = int(rows.sum(axis=1).argmax())
  own = rows[main]
  drawn = is_detailed(np.maximum(axis.steps, 0), _every(info))
  some = own[drawn & (own > 0)]
  usual = float(np.median(some if some.size else own[own > 0]))
  full = own >= _FULL * usual
  partly = int((own > 0).sum()) - int(full.sum())
  # Slow steps and the first ones are written in full as well: with those alone that are drawn, none
  # counts for more.
  alone = full & drawn
  steps = axis.steps[alone if alone.sum() >= _ENOUGH else full]
  slots = np.array(sorted(slot for slot in seen
                          if planned.get(slot, programs[main]) == programs[main]), np.int64)
  said = []
  if partly:
    said.append(f"{plural(partly, 'step')} detailed by some ranks only: not in the shares.")
  others = int((rows.sum(axis=0) > 0).sum()) - int((own > 0).sum())
  if others > 0:
    said.append(f"The step was compiled in {len(programs)} shapes: shares and lateness are of the "
                f"one that ran most, and the {plural(others, 'step')} of others that are "
                "detailed are not in them.")
  most = max(1, MOST_CELLS // max(1, ranks * len(slots)))
  if len(steps) > most:
    said.append(f"{len(steps):,} steps are detailed, more than fit into memory: {most:,} of "
                "them, evenly spread, were read. --steps reads all of a stretch.")
    steps = steps[np.linspace(0, len(steps) - 1, most).round().astype(int)]
  return Chosen(steps, slots, tuple(said))


def _every(info: dict[str, Any]) -> int:
  detail = info["plan"].get("detail")
  value = detail.get("every") if isinstance(detail, dict) else 1
  return value if is_whole(value, 1) else 1


def _count(table: TableFiles, axis: StepAxis, planned: dict[int, int], programs: Sequence[int]
           ) -> tuple[np.ndarray, set[int]]:
  """[programs, K] rows of each step, and the slots that have any."""
  rows = np.zeros((len(programs), axis.size), np.int64)
  highest = max(table.highest_slot, 0)
  where = np.full(highest + 1, 0, np.int64)
  for slot, program in planned.items():
    if slot <= highest:
      where[slot] = programs.index(program)
  seen = np.zeros(highest + 1, bool)
  for data in table.read(["step", "collective"], (int(axis.steps[0]), int(axis.steps[-1]))):
    at, inside = axis.index(data.column("step").to_numpy())
    slots = data.column("collective").to_numpy()
    sound = (slots >= 0) & (slots <= highest)
    keep = sound if inside is None else sound & inside
    at, slots = at[keep], slots[keep]
    seen[slots] = True
    flat = at if len(programs) == 1 else where[slots] * axis.size + at
    rows += np.bincount(flat, minlength=rows.size).reshape(rows.shape)
  return rows, set(np.flatnonzero(seen).tolist())
