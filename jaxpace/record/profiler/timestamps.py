"""Executions of a program as timestamps of its steps: what an instrumented step would have left."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from jaxpace.core.plan import COMPUTE, GAP, SYNC, Collective, Plan, Timestamp
from jaxpace.core.ring_layout import slot_tags
from jaxpace.record.profiler.executions import Execution
from jaxpace.record.ring.executions import Executions

MAX_SLOTS = 256
"""Nothing is put into the step, so there is room for what loops repeat; each slot is a row of every
rank and step."""
CLOCK = "profiler"

Groups = tuple[tuple[str, ...], ...]
"""Names of collectives by slot, in the order in which they run."""


def group(steps: Sequence[Execution], most: int = MAX_SLOTS) -> Groups:
  """Forms slots: collectives that run at once are one, and then, while there are too many, those
  nearest in time.

  Args:
    steps: executions of one device.
    most: slots at most.
  """
  times = _times(steps)
  spans = sorted(((*times[name], (name,)) for name in times), key=lambda span: span[:2])
  slots: list[tuple[float, float, tuple[str, ...]]] = []
  for begin, end, members in spans:
    if slots and _at_once(steps, slots[-1][2], members[0]):
      slots[-1] = slots[-1][0], max(end, slots[-1][1]), slots[-1][2] + members
    else:
      slots.append((begin, end, members))
  while len(slots) > most:
    i = min(range(len(slots) - 1), key=lambda i: slots[i + 1][0] - slots[i][1])
    slots[i:i + 2] = [(slots[i][0], slots[i + 1][1], slots[i][2] + slots[i + 1][2])]
  return tuple(members for _, _, members in slots)


def between(steps: Sequence[Execution], groups: Groups) -> float:
  """Share of the steps that lies between collectives of the same slot, and so counts as waiting; 0
  to 1."""
  lost = total = 0
  for step in steps:
    total += step.end_ns - step.begin_ns
    for members in groups:
      reached: int | None = None
      for begin, end in sorted(step.collectives[name]
                               for name in members if name in step.collectives):
        lost += max(0, begin - reached) if reached is not None else 0
        reached = end if reached is None else max(end, reached)
  return lost / total if total > 0 else 0.0


def _times(steps: Sequence[Execution]) -> dict[str, tuple[float, float]]:
  """Entry and exit by name, ns from the step's beginning: of the step with most collectives, else
  the mean."""
  fullest = max(steps, key=lambda step: len(step.collectives), default=None)
  own: dict[str, list[tuple[int, int]]] = {}
  for step in (fullest, *steps) if fullest is not None else ():
    for name, (begin, end) in step.collectives.items():
      if fullest is None or step is fullest or name not in fullest.collectives:
        own.setdefault(name, []).append((begin - step.begin_ns, end - step.begin_ns))
  return {name: (sum(t[0] for t in found) / len(found), sum(t[1] for t in found) / len(found))
          for name, found in own.items()}


def _at_once(steps: Sequence[Execution], members: Sequence[str], name: str) -> bool:
  """Whether a collective begins before others have ended, in most of the steps in which both
  ran."""
  found = []
  for step in steps:
    ends = [step.collectives[member][1] for member in members if member in step.collectives]
    if ends and name in step.collectives:
      found.append(step.collectives[name][0] < max(ends))
  return 2 * sum(found) > len(found)


def plan(program: str, groups: Groups, axis: str, ranks: int, notices: Sequence[str] = ()) -> Plan:
  """Says what the timestamps mean: start, entry and exit of each slot, end. What lies between is
  compute."""
  marks = [Timestamp("start", GAP)]
  for slot in range(len(groups)):
    marks += [Timestamp("enter", COMPUTE, slot), Timestamp("exit", SYNC, slot)]
  marks.append(Timestamp("end", COMPUTE))
  collectives = tuple(
      Collective(slot, _name(members), tuple(sorted({_kind(member) for member in members})), axis,
                 None, len(members), (), COMPUTE) for slot, members in enumerate(groups))
  notice = (f"Entries and exits are those of {program} in sampled traces of JAX's profiler: no "
            "phases, sizes, pacing or sharing.")
  return Plan(axis, ranks, CLOCK, tuple(marks), collectives, notices=(notice, *notices))


def events(steps: Sequence[Execution], groups: Groups) -> Executions:
  """Returns what one device's executions would have left in the ring, with the timestamps that
  `plan` tells of.

  Args:
    steps: executions, in order.
    groups: slots.
  """
  marks: list[tuple[int, int, int]] = []
  for k, step in enumerate(steps):
    for slot, members in enumerate(groups):
      known = [step.collectives[name] for name in members if name in step.collectives]
      if known:
        enter, leave = slot_tags(slot)
        marks += [(k, enter, min(begin for begin, _ in known)),
                  (k, leave, max(end for _, end in known))]
  of, tag, ns = np.array(marks, np.int64).reshape(-1, 3).T
  return Executions(np.arange(len(steps)), np.array([step.begin_ns for step in steps], np.int64),
                    np.array([step.end_ns for step in steps], np.int64), of, tag.astype(np.uint32),
                    ns)


def ranks_of(ordinals: Sequence[int], local: Sequence[tuple[int, int | None]],
             everyone: Sequence[int]) -> dict[int, int]:
  """Ranks of the devices in a trace: their places in the whole job, by their number in the trace.

  A trace of the CPU numbers devices by their id in the job, one of another backend may by their
  number on the host.

  Args:
    ordinals: as in the trace.
    local: id and number on the host of each of this process's devices.
    everyone: ids of all devices of the job, in order.
  """
  rank = {device: place for place, device in enumerate(everyone)}
  by_id = {device: rank[device] for device, _ in local}
  by_number = {i if number is None else number: rank[device]
               for i, (device, number) in enumerate(local)}
  chosen = by_id if set(ordinals) <= set(by_id) else by_number
  return {ordinal: chosen[ordinal] for ordinal in ordinals if ordinal in chosen}


def _kind(name: str) -> str:
  return re.sub(r"[.#@].*", "", name)


def _name(members: tuple[str, ...]) -> str:
  return members[0] if len(members) == 1 else f"{members[0]} and {len(members) - 1} more"
