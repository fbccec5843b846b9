"""Collectives in the loops of an instrumented step: their timestamps, beside those at its
  timestamps."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxpace.core import observed
from jaxpace.core.observed import ObservedCollective, ObservedProgram
from jaxpace.core.plan import DELAY, GAP, SYNC, Collective, Plan
from jaxpace.record.decode import Columns
from jaxpace.record.ring.executions import Executions, exposed, occurrences
from jaxpace.record.ring.plan import Unrolled
from jaxpace.runs.groups import read_groups, sends


class NestedPlan:
  """The plan of `run.json`: timestamped collectives keep their slots, each iteration of the others
  has one behind those."""

  def __init__(self, timestamped: Plan, detail: dict[str, Any]):
    """Lays the slots out; `detail` says which steps have them in detail."""
    assert timestamped.program is not None, "a step with marks has a number"
    self.timestamped, self.detail = timestamped, detail
    self.clock, self.axis, self.ranks = timestamped.clock, timestamped.axis, timestamped.ranks
    self.program = ObservedProgram(
        number=timestamped.program, name="step", ranks=(), mesh_axes={},
        collectives=tuple(map(_observed, timestamped.inside)))
    self.unrolled = Unrolled(self.program)
    self.first = max((one.slot for one in timestamped.collectives), default=-1) + 1
    """Slot of the first one that has timestamps."""
    entries = [self._entry(slot) for slot in range(len(self.unrolled))]
    self.names = np.array([entry["name"] for entry in entries], np.str_)
    self.axes = np.array([entry["axis"] for entry in entries], np.str_)
    self.bytes = np.array([entry["bytes"] or 0 for entry in entries], np.int64)
    self.collectives = ([self._timestamped_entry(place)
                         for place in range(len(timestamped.collectives))]
                        + entries)

  def _entry(self, slot: int) -> dict[str, Any]:
    one = self.timestamped.inside[self.unrolled.slots[slot][0]]
    entry = self.unrolled.entry(slot, self.first + slot)
    del entry["groups"], entry["rank_pairs"]
    return entry | {"primitives": list(one.primitives), "axis": one.axis,
                    "pairs": [list(pair) for pair in one.pairs],
                    "index_groups": [list(group) for group in one.index_groups]}

  def _timestamped_entry(self, place: int) -> dict[str, Any]:
    one = self.timestamped.collectives[place]
    return one.to_json() | {
        "kind": observed.of_primitives(one.primitives), "operation": None, "source": None,
        "loops": [],
        "conditional": False, "of": len(self.timestamped.inside) + place,
        "program": self.program.number}

  def to_json(self) -> dict[str, Any]:
    """Returns plain lists, dicts and scalars: those of the timestamped step, with all
      collectives."""
    plan = self.timestamped.to_json()
    del plan["inside"]
    notices = list(plan["notices"])
    if self.unrolled.turns_kept is not None:
      notices.append("The step has more collectives in loops than can be written one by one: of "
                     f"each loop the first {self.unrolled.turns_kept} iterations are, all in the "
                     "sums.")
    return plan | {"collectives": self.collectives, "detail": self.detail, "notices": notices}

  @property
  def rows(self) -> int:
    """Collectives that a rank goes through in a step, each iteration by itself."""
    return len(self.timestamped.collectives) + len(self.unrolled)


def observed_program(plan: Plan, settings: dict[str, Any], ranks: int,
                     slot_tags: Sequence[tuple[int, int]]
                     ) -> ObservedProgram:
  """What the timestamps of an instrumented step mean, those at its timestamps included: for who
  looks where ranks are in it.

  Args:
    plan: of the step.
    settings: the step's, with the mesh and the axis.
    ranks: of the job.
    slot_tags: tags of the timestamps at entry and exit timestamp of each slot.
  """
  assert plan.program is not None
  found: list[ObservedCollective] = []
  timestamped = {one.slot: one for one in plan.collectives}
  inside = sorted(plan.inside, key=lambda one: (one.after, one.slot))

  def add(one: ObservedCollective, entry: dict[str, Any]) -> None:
    rank_groups = read_groups({"settings": settings}, entry, ranks, sends(entry["primitives"]))
    groups: tuple[tuple[int, ...], ...] = (tuple(range(ranks)),)
    if rank_groups is not None:
      groups = tuple(tuple(np.flatnonzero(rank_groups.groups == group).tolist())
                     for group in np.unique(rank_groups.groups[rank_groups.groups >= 0]).tolist())
    found.append(dataclasses.replace(one, index=len(found), groups=groups))

  at = 0
  for number in range(len(timestamped) + 1):
    while at < len(inside) and inside[at].after <= number:
      add(_observed(inside[at]), inside[at].to_json())
      at += 1
    if number in timestamped:
      one, (enter, leave) = timestamped[number], slot_tags[number]
      add(ObservedCollective(
          index=0, name=one.name, kind=observed.of_primitives(one.primitives), bytes=one.bytes,
          operands=one.operands, dtypes=one.dtypes, axes=tuple(one.axis.split(",")), groups=(),
          pairs=(), phase=one.phase, loops=(), source=None, operation=None, enter_tags=(enter,),
          exit_tags=(leave,)), one.to_json())
  return ObservedProgram(
      number=plan.program, name=str(settings.get("step") or "step"), ranks=tuple(range(ranks)),
      mesh_axes=dict(settings.get("mesh") or {}), collectives=tuple(found),
      unstamped=plan.unstamped)


def _observed(one: Collective) -> ObservedCollective:
  return ObservedCollective(
      index=one.slot, name=one.name, kind=observed.of_primitives(one.primitives), bytes=one.bytes,
      operands=one.operands, dtypes=one.dtypes, axes=tuple(one.axis.split(",")), groups=(),
      pairs=(), phase=one.phase, loops=one.loops, source=one.source, operation=None,
      enter_tags=one.enter_tags, exit_tags=one.exit_tags, conditional=one.conditional)


class Joined(NamedTuple):
  """What one rank's timestamps add to its n steps; m of them have a slot."""

  # [n] int64 ns by phase: exposed time of collectives in it, which its timestamps can't tell from
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


def join(times: np.ndarray, executions: Executions, plan: NestedPlan) -> Joined:
  """Finds the phase that the time in each collective was counted to.

  Args:
    times: [n, timestamps] int64 ns of the steps' timestamps, both axes rising.
    executions: the same steps' on this rank's device.
    plan: what timestamps and timestamps mean.
  """
  ran = occurrences(executions, plan.program.collectives)
  row = ran.execution
  last = np.zeros(len(times), np.int64)
  np.maximum.at(last, row, ran.exit_ns)
  slot = plan.unrolled.slot(ran.collective, ran.iteration)
  placed = slot >= 0
  return Joined(_waiting(times, row, *exposed(row, ran.enter_ns, ran.exit_ns),
                         plan.timestamped), last,
                row[placed], plan.first + slot[placed], ran.enter_ns[placed], ran.exit_ns[placed])


def _waiting(times: np.ndarray, row: np.ndarray, order: np.ndarray, begin: np.ndarray,
             leave: np.ndarray, plan: Plan
             ) -> dict[str, np.ndarray]:
  row = row[order]
  found: dict[str, np.ndarray] = {}
  for place, timestamp in enumerate(plan.marks):
    if place == 0 or timestamp.segment in (DELAY, GAP, SYNC):
      continue
    total = found.setdefault(timestamp.segment, np.zeros(len(times), np.int64))
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
  timestamped: Any = columns.get("sync_ns", np.zeros(len(times), np.int64))
  changed["sync_ns"] = timestamped + total
  exits = [place for place, timestamp in enumerate(plan.marks) if timestamp.kind == "exit"]
  last = np.maximum(joined.last_exit, times[:, exits].max(axis=1) if exits else 0)
  changed["last_exit_ns"] = np.ma.masked_array(last, last == 0)
  return changed


def collective_columns(identity: Columns, joined: Joined, chosen: np.ndarray,
                       plan: NestedPlan) -> Columns:
  """Rows of `collectives` of the chosen steps.

  Args:
    identity: columns of `steps`, [n].
    joined: what the rank's timestamps say.
    chosen: [n] bool, steps to write in detail.
    plan: what is in each slot.
  """
  kept = chosen[joined.row]
  row, slot = joined.row[kept], joined.slot[kept]
  own = slot - plan.first
  return {**{name: identity[name][row] for name in ("step", "rank", "process", "attempt")},
          "collective": slot.astype(np.int32), "name": plan.names[own], "axis": plan.axes[own],
          "bytes": plan.bytes[own], "enter_ns": joined.enter_ns[kept],
          "exit_ns": joined.exit_ns[kept]}
