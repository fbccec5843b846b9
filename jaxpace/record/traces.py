"""What a profiler trace says of the executions of one program: when each device was in which
collective, and the events that timestamps around it would have left.

XLA timestamps every operation that runs with the program's name, a number of the execution
(`run_id`, the same on all devices of a process), and the device. Times of a trace are its own; one
annotation whose name holds the host's clock ties them to that.
"""

from __future__ import annotations

import collections
import functools
import itertools
import math
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpace.core.observed import KINDS, ObservedProgram
from jaxpace.core.plan import Collective, Loop
from jaxpace.core.ring_layout import slot_tags
from jaxpace.record.ring.executions import Executions

CLOCK = "profiler"
ANCHOR = "jaxpace_clock:"
"""Name of the annotation that ties the trace's times to the host's monotonic clock; that clock, in
ns, follows."""

_NOISE = ("ThreadpoolListener", "end: ", "Wait", "ThunkExecutor")
"""Beginnings of the names of most events of a trace on CPU. They belong to no operation; reading
more takes time."""

_LEAST = b'\n"\x1a\n"\x08\x08\x01"\x04\x08\x01\x18\x01"\t\x08\x01\x12\x05\x08\x01\x12\x01e' \
  b"*\t\x08\x01\x12\x05\x08\x01\x12\x01a"
"""A trace, serialized: one plane, line and event `e`, which has one number `a`."""

_COLLECTIVE = re.compile(rf"^({'|'.join(KINDS)})(-start|-done)?(\.\d+)*$")


class Operation(NamedTuple):
  """One operation of one execution on one device; ns of the host's monotonic clock."""

  program: str
  execution: int
  device: int  # ordinal among the process's devices
  name: str
  begin_ns: int
  end_ns: int


class Execution(NamedTuple):
  """One run of the program on one device; ns of the host's monotonic clock."""

  begin_ns: int
  end_ns: int
  # entries and exits by name of the operation, one for each iteration of its loop
  collectives: dict[str, list[tuple[int, int]]]


class ProfileError(Exception):
  """The trace doesn't show what is looked for; the message says what it lacks."""


@functools.cache
def make_types() -> tuple[type, ...]:
  """Has jaxlib make the types that traces are read by, and keeps them: they would be collected as
  garbage, and made again.

  From 0.12 on Python warns of one of them. Where a warning is an error, as under `python -W error`,
  the process would be aborted; and what is ignored is so in all threads, until another one that
  ignores something comes to its end. So it is for the loop's thread, before there are others.
  """
  profile: Any = jax.profiler.ProfileData.from_serialized_xspace(_LEAST)
  with warnings.catch_warnings(action="ignore"):
    return tuple(type(iter(event.stats)) for event in _events(profile))


def operations(profile: Any) -> list[Operation]:
  """Reads the operations of a trace that belong to an execution and a device.

  Raises:
    ProfileError: there is no anchor in it.
  """
  found: list[Operation] = []
  offset: int | None = None
  nameless = False
  for event in _events(profile):
    name = event.name
    if name.startswith(_NOISE):
      continue
    if name.startswith(ANCHOR):
      offset = round(int(name.removeprefix(ANCHOR)) - event.start_ns)
      continue
    stats = dict(event.stats)
    if "hlo_op" in stats and "run_id" in stats and "device_ordinal" in stats:
      found.append(Operation(
          str(stats.get("hlo_module", "")), int(stats["run_id"]), int(stats["device_ordinal"]),
          str(stats["hlo_op"]), round(event.start_ns), round(event.start_ns + event.duration_ns)))
    elif "hlo_op" in stats:
      nameless = True
  if offset is None:
    raise ProfileError("the trace holds no mark of the host's clock")
  if nameless and not found:
    raise ProfileError("its operations do not say which execution they belong to")
  return [one._replace(begin_ns=one.begin_ns + offset, end_ns=one.end_ns + offset) for one in found]


def _events(profile: Any) -> Iterator[Any]:
  for plane in profile.planes:
    for line in plane.lines:
      yield from line.events


def is_collective(name: str) -> bool:
  """Whether an operation of a compiled program sends something to other devices, by its name.

  >>> is_collective("all-reduce.3"), is_collective("fusion.all-reduce")
  (True, False)
  """
  return _COLLECTIVE.match(name) is not None


def executions(found: Iterable[Operation], steps: int,
               end_ns: float = math.inf) -> tuple[str, dict[int, list[Execution]]]:
  """Picks the program with collectives that takes most time, and lays its executions out by device.

  Args:
    found: operations of the trace.
    steps: steps that the trace covers; where the program ran a multiple of it, that many executions
      are one step.
    end_ns: when these had ended; what begins later is of no step.

  Returns:
    The program's name; and of each device its executions in order, as many in each step.

  Raises:
    ProfileError: no program has collectives, or the executions don't fit the steps.
  """
  runs: dict[str, dict[tuple[int, int], list[Operation]]] = collections.defaultdict(
      lambda: collections.defaultdict(list))
  time: collections.Counter[str] = collections.Counter()
  for operation in found:
    if operation.begin_ns > end_ns:
      continue
    runs[operation.program][operation.device, operation.execution].append(operation)
    if is_collective(operation.name):
      time[operation.program] += max(1, operation.end_ns - operation.begin_ns)
  if not time:
    raise ProfileError(
        "no program that ran in it has a collective: one device, or nothing is reduced over them")
  program = time.most_common(1)[0][0]
  by_device: dict[int, list[Execution]] = collections.defaultdict(list)
  for (device, _), own in sorted(runs[program].items()):
    by_device[device].append(_execution(own))
  ran = {device: len(own) for device, own in by_device.items()}
  wrong = next((device for device in ran if ran[device] % steps
                or ran[device] != next(iter(ran.values()))), None)
  if wrong is not None:
    raise ProfileError(f"{program} ran {ran[wrong]} times on device {wrong} in {steps} steps")
  return program, {device: sorted(own) for device, own in by_device.items()}


def _execution(own: list[Operation]) -> Execution:
  """One device's operations as an execution. A start and its done are one collective, the first
  with the first."""
  turns: dict[str, dict[str, list[tuple[int, int]]]] = collections.defaultdict(
      lambda: collections.defaultdict(list))
  for operation in sorted(own, key=lambda one: one.begin_ns):
    if is_collective(operation.name):
      half = re.search(r"-(start|done)", operation.name)
      turns[re.sub(r"-(start|done)", "", operation.name)][half[1] if half else ""].append(
          (operation.begin_ns, operation.end_ns))
  collectives: dict[str, list[tuple[int, int]]] = collections.defaultdict(list)
  for name, halves in turns.items():
    for parts in itertools.zip_longest(*halves.values()):
      known = [part for part in parts if part is not None]
      collectives[name].append((min(part[0] for part in known), max(part[1] for part in known)))
  return Execution(min(one.begin_ns for one in own), max(one.end_ns for one in own),
                   dict(collectives))


def iterations(ran: Sequence[Execution]) -> dict[str, int]:
  """How often each collective ran in one execution, at most; by name, in the order in which that
  with most of them enters them."""
  fullest = max(ran, key=lambda one: sum(map(len, one.collectives.values())))
  order = sorted(fullest.collectives, key=lambda name: fullest.collectives[name][0])
  names = dict.fromkeys([*order, *(name for one in ran for name in one.collectives)])
  return {name: max(len(one.collectives.get(name, ())) for one in ran) for name in names}


def program(number: int, name: str, found: Mapping[str, int], axis: str, ranks: Sequence[int]
            ) -> ObservedProgram:
  """Describes what ran."""
  collectives = tuple(Collective(
      index=place, name=each, kind=re.sub(r"\..*", "", each), bytes=None, operands=1, dtypes=(),
      axes=(axis,), phase="compute", enter_tag=slot_tags(place)[0],
      loops=(Loop(f"loop.{place}", times),) if times > 1 else ())
      for place, (each, times) in enumerate(found.items()))
  return ObservedProgram(number, name, tuple(ranks), {axis: len(ranks)}, collectives, notices=(
      f"Entries and exits are those of {name} in sampled traces of JAX's profiler: no phases, "
      "sizes, pacing or sharing.",), clock=CLOCK)


def events(ran: Sequence[Execution], of: ObservedProgram) -> Executions:
  """Returns what one device's executions would have left in the ring."""
  marks: list[tuple[int, int, int]] = []
  for place, one in enumerate(ran):
    for each in of.collectives:
      for enter, leave in one.collectives.get(each.name, ()):
        marks += [(place, each.enter_tag, enter), (place, each.exit_tag, leave)]
  at, tag, ns = np.array(marks, np.int64).reshape(-1, 3).T
  return Executions(np.arange(len(ran)),
                    np.array([one.begin_ns for one in ran], np.int64),
                    np.array([one.end_ns for one in ran], np.int64), at,
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
