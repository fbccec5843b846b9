"""Collectives in the loops of an instrumented step: their marks, beside those at its stamps."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxpace.core import kinds
from jaxpace.core.observed import ObservedCollective, ObservedProgram
from jaxpace.core.plan import DELAY, GAP, SYNC, Collective, Plan
from jaxpace.record.decode import Columns
from jaxpace.record.ring.executions import Executions, exposed, occurrences
from jaxpace.record.ring.plan import Unrolled
from jaxpace.runs.groups import read_meeting, sends


class InsidePlan:
  """The plan of `run.json`: stamped collectives keep their slots, each turn of the others has one
  behind those."""

  def __init__(self, stamped: Plan, detail: dict[str, Any]):
    """Lays the slots out; `detail` says which steps have them in full."""
    assert stamped.program is not None, "a step with marks has a number"
    self.stamped, self.detail = stamped, detail
    self.clock, self.axis, self.ranks = stamped.clock, stamped.axis, stamped.ranks
    self.program = ObservedProgram(
        number=stamped.program, name="step", ranks=(), mesh_axes={},
        collectives=tuple(map(_observed, stamped.inside)))
    self.unrolled = Unrolled(self.program)
    self.first = max((one.slot for one in stamped.collectives), default=-1) + 1
    """Slot of the first one that has marks."""
    entries = [self._entry(slot) for slot in range(len(self.unrolled))]
    self.names = np.array([entry["name"] for entry in entries], np.str_)
    self.axes = np.array([entry["axis"] for entry in entries], np.str_)
    self.bytes = np.array([entry["bytes"] or 0 for entry in entries], np.int64)
    self.collectives = ([self._stamped_entry(place) for place in range(len(stamped.collectives))]
                        + entries)

  def _entry(self, slot: int) -> dict[str, Any]:
    one = self.stamped.inside[self.unrolled.slots[slot][0]]
    entry = self.unrolled.entry(slot, self.first + slot)
    del entry["groups"], entry["rank_pairs"]
    return entry | {"primitives": list(one.primitives), "axis": one.axis,
                    "pairs": [list(pair) for pair in one.pairs],
                    "index_groups": [list(group) for group in one.index_groups]}

  def _stamped_entry(self, place: int) -> dict[str, Any]:
    one = self.stamped.collectives[place]
    return one.to_json() | {
        "kind": kinds.of_primitives(one.primitives), "operation": None, "source": None, "loops": [],
        "conditional": False, "of": len(self.stamped.inside) + place,
        "program": self.program.number}

  def to_json(self) -> dict[str, Any]:
    """Returns plain lists, dicts and scalars: those of the stamped step, with all collectives."""
    plan = self.stamped.to_json()
    del plan["inside"]
    notices = list(plan["notices"])
    if self.unrolled.turns_kept is not None:
      notices.append("The step has more collectives in loops than can be written one by one: of "
                     f"each loop the first {self.unrolled.turns_kept} iterations are, all in the "
                     "sums.")
    return plan | {"collectives": self.collectives, "detail": self.detail, "notices": notices}

  @property
  def rows(self) -> int:
    """Collectives that a rank goes through in a step, each turn by itself."""
    return len(self.stamped.collectives) + len(self.unrolled)


def observed_program(plan: Plan, settings: dict[str, Any], ranks: int,
                     slot_tags: Sequence[tuple[int, int]]
                     ) -> ObservedProgram:
  """What the marks of an instrumented step mean, those at its stamps included: for who looks where
  ranks are in it.

  Args:
    plan: of the step.
    settings: the step's, with the mesh and the axis.
    ranks: of the job.
    slot_tags: tags of the marks at entry and exit stamp of each slot.
  """
  assert plan.program is not None
  found: list[ObservedCollective] = []
  stamped = {one.slot: one for one in plan.collectives}
  inside = sorted(plan.inside, key=lambda one: (one.after, one.slot))

  def add(one: ObservedCollective, entry: dict[str, Any]) -> None:
    meeting = read_meeting({"settings": settings}, entry, ranks, sends(entry["primitives"]))
    groups: tuple[tuple[int, ...], ...] = (tuple(range(ranks)),)
    if meeting is not None:
      groups = tuple(tuple(np.flatnonzero(meeting.groups == group).tolist())
                     for group in np.unique(meeting.groups[meeting.groups >= 0]).tolist())
    found.append(dataclasses.replace(one, index=len(found), groups=groups))

  at = 0
  for number in range(len(stamped) + 1):
    while at < len(inside) and inside[at].after <= number:
      add(_observed(inside[at]), inside[at].to_json())
      at += 1
    if number in stamped:
      one, (enter, leave) = stamped[number], slot_tags[number]
      add(ObservedCollective(
          index=0, name=one.name, kind=kinds.of_primitives(one.primitives), bytes=one.bytes,
          operands=one.operands, dtypes=one.dtypes, axes=tuple(one.axis.split(",")), groups=(),
          pairs=(), phase=one.phase, loops=(), source=None, operation=None, enter_tags=(enter,),
          exit_tags=(leave,)), one.to_json())
  return ObservedProgram(
      number=plan.program, name=str(settings.get("step") or "step"), ranks=tuple(range(ranks)),
      mesh_axes=dict(settings.get("mesh") or {}), collectives=tuple(found),
      unstamped=plan.unstamped)


def _observed(one: Collective) -> ObservedCollective:
  return ObservedCollective(
      index=one.slot, name=one.name, kind=kinds.of_primitives(one.primitives), bytes=one.bytes,
      operands=one.operands, dtypes=one.dtypes, axes=tuple(one.axis.split(",")), groups=(),
      pairs=(), phase=one.phase, loops=one.loops, source=one.source, operation=None,
      enter_tags=one.enter_tags, exit_tags=one.exit_tags, conditional=one.conditional)


class Joined(NamedTuple):
  """What one rank's marks add to its n steps; m of them have a slot."""

  # [n] int64 ns by phase: exposed time of collectives in it, which its stamps can't tell from
  # computing
  waiting: dict[str, np.ndarray]
  # [n] int64 ns, the latest exit of these; 0 where there was none
  last_exit: np.ndarray
  # [m] int64, place of the step, rising
  row: np.ndarray
  # [m] int64
  slot: np.ndarray
  # [m] int64
  enter_ns: np.ndarray
  # [m] int64
  exit_ns: np.ndarray


def join(times: np.ndarray, executions: Executions, plan: InsidePlan) -> Joined:
  """Finds the phase that the time in each collective was counted to.

  Args:
    times: [n, marks] int64 ns of the steps' stamps, both axes rising.
    executions: the same steps' on this rank's device.
    plan: what stamps and marks mean.
  """
  ran = occurrences(executions, plan.program.collectives)
  row = ran.execution
  last = np.zeros(len(times), np.int64)
  np.maximum.at(last, row, ran.exit_ns)
  slot = plan.unrolled.slot(ran.collective, ran.turn)
  placed = slot >= 0
  return Joined(_waiting(times, row, *exposed(row, ran.enter_ns, ran.exit_ns),
                         plan.stamped), last,
                row[placed], plan.first + slot[placed], ran.enter_ns[placed], ran.exit_ns[placed])


def _waiting(times: np.ndarray, row: np.ndarray, order: np.ndarray, begin: np.ndarray,
             leave: np.ndarray, plan: Plan
             ) -> dict[str, np.ndarray]:
  row = row[order]
  found: dict[str, np.ndarray] = {}
  for place, mark in enumerate(plan.marks):
    if place == 0 or mark.segment in (DELAY, GAP, SYNC):
      continue
    total = found.setdefault(mark.segment, np.zeros(len(times), np.int64))
    within = np.minimum(leave, times[row, place]) - np.maximum(begin, times[row, place - 1])
    np.add.at(total, row, np.maximum(within, 0))
  return found


def step_columns(columns: Columns, joined: Joined, times: np.ndarray, plan: Plan) -> Columns:
  """Columns of `steps` in which time in these collectives is `sync_ns`, no phase's."""
  changed = dict(columns)
  total = np.zeros(len(times), np.int64)
  for segment, waited in joined.waiting.items():
    name = f"{segment}_ns" if f"{segment}_ns" in columns else f"phase_{segment}_ns"
    changed[name] = columns[name] - waited
    total += waited
  stamped: Any = columns.get("sync_ns", np.zeros(len(times), np.int64))
  changed["sync_ns"] = stamped + total
  exits = [place for place, mark in enumerate(plan.marks) if mark.kind == "exit"]
  last = np.maximum(joined.last_exit, times[:, exits].max(axis=1) if exits else 0)
  changed["last_exit_ns"] = np.ma.masked_array(last, last == 0)
  return changed


def collective_columns(identity: Columns, joined: Joined, chosen: np.ndarray,
                       plan: InsidePlan) -> Columns:
  """Rows of `collectives` of the chosen steps.

  Args:
    identity: columns of `steps`, [n].
    joined: what the rank's marks say.
    chosen: [n] bool, steps to write in full.
    plan: what is in each slot.
  """
  kept = chosen[joined.row]
  row, slot = joined.row[kept], joined.slot[kept]
  own = slot - plan.first
  return {**{name: identity[name][row] for name in ("step", "rank", "process", "attempt")},
          "collective": slot.astype(np.int32), "name": plan.names[own], "axis": plan.axes[own],
          "bytes": plan.bytes[own], "enter_ns": joined.enter_ns[kept],
          "exit_ns": joined.exit_ns[kept]}
