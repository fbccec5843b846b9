"""Executions in a trace as those of an observed program: the events that timestamps around its
collectives would have left."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np

from jaxpace.core.observed import ObservedProgram
from jaxpace.core.plan import Collective, Loop
from jaxpace.record.profiler.executions import Execution
from jaxpace.record.ring.executions import Executions

CLOCK = "profiler"


def iterations(executions: Sequence[Execution]) -> dict[str, int]:
  """How often each collective ran in one execution, at most; by name, in the order in which that
  with most of them enters them."""
  fullest = max(executions, key=lambda one: sum(map(len, one.collectives.values())))
  order = sorted(fullest.collectives, key=lambda name: fullest.collectives[name][0])
  names = dict.fromkeys([*order, *(name for one in executions for name in one.collectives)])
  return {name: max(len(one.collectives.get(name, ())) for one in executions) for name in names}


def program(number: int, name: str, found: Mapping[str, int], axis: str, ranks: Sequence[int]
            ) -> ObservedProgram:
  """Describes what ran.

  Args:
    number: of the program, for its events.
    name: its name.
    found: how often each collective runs, see `iterations`.
    axis: name of the data axis.
    ranks: ranks that it ran on.
  """
  collectives = tuple(Collective(
      index=place, name=each, kind=re.sub(r"\..*", "", each), bytes=None, operands=1, dtypes=(),
      axes=(axis,), groups=(), pairs=(), phase="compute",
      loops=(Loop(f"loop.{place}", times),) if times > 1 else (), source=None, operation=None,
      enter_tags=(2 + 2 * place,), exit_tags=(3 + 2 * place,))
      for place, (each, times) in enumerate(found.items()))
  return ObservedProgram(number, name, tuple(ranks), {axis: len(ranks)}, collectives, notices=(
      f"Entries and exits are those of {name} in sampled traces of JAX's profiler: no phases, "
      "sizes, pacing or sharing.",), clock=CLOCK)


def events(executions: Sequence[Execution], of: ObservedProgram) -> Executions:
  """Returns what one device's executions would have left in the ring.

  Args:
    executions: in order.
    of: the program.
  """
  marks: list[tuple[int, int, int]] = []
  for place, one in enumerate(executions):
    for each in of.collectives:
      for enter, leave in one.collectives.get(each.name, ()):
        marks += [(place, each.enter_tags[0], enter), (place, each.exit_tags[0], leave)]
  at, tag, ns = np.array(marks, np.int64).reshape(-1, 3).T
  return Executions(np.arange(len(executions)),
                    np.array([one.begin_ns for one in executions], np.int64),
                    np.array([one.end_ns for one in executions], np.int64), at,
                    tag.astype(np.uint32), ns)


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
