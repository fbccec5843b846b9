"""Who keeps the others waiting: from what the processes say of themselves; and within a step, from
the rings of timestamps, in which collective and who keeps it.

A process that waits inside a step has arrived; one that has not called it, or that says nothing any
more, has not. A step that has completed anywhere was called by all: each holds a collective over
all processes. The step that is waited for is the one after the last that any process has seen
complete: loops may run ahead of their devices by different numbers of steps, so the farthest step
called says nothing.
"""

from __future__ import annotations

import dataclasses
import pathlib
import socket
from collections.abc import Mapping, Sequence

from jaxpace.core.observed import ObservedPlan, ObservedProgram
from jaxpace.hang.alarms import Late, LateProcess, State
from jaxpace.hang.describe import CauseInWords, Flight, describe
from jaxpace.hang.heartbeat import Heartbeat, LastHeartbeat
from jaxpace.hang.positions import ProgramsByKey, from_text, to_text
from jaxpace.hang.read_rings import of_ring, read_flight
from jaxpace.observation.clocks import host_ring

CHARACTERS = (2000, 700)
"""Longest account of a process's timestamps that is sent in a heartbeat; in a large job."""


def excused(last_heartbeats: Mapping[int, LastHeartbeat], silence: float) -> float:
  """Seconds since the last process said that it would take long (a pause, a compilation); 0 while
  one does, infinity if nobody did. The excuse of who has been silent for `silence` s no longer
  holds."""
  fresh = [one for one in last_heartbeats.values() if one.silence <= silence and not one.left]
  return min((0.0 if one.heartbeat.excused == 0 else one.heartbeat.excused + one.silence
              for one in fresh),
             default=float("inf"))


def speaker(last_heartbeats: Mapping[int, LastHeartbeat], silence: float, own: int) -> int:
  """The one process that speaks: the lowest that is heard of and has itself waited too long; or
  `own`."""
  return min([own, *(process for process, one in last_heartbeats.items()
                     if one.silence <= silence and one.heartbeat.waiting and not one.left)])


def judge(last_heartbeats: Mapping[int, LastHeartbeat], processes: int, silence: float, own: int,
          waited: float) -> Late:
  """Says who has not arrived, where so many seconds have passed since a step last completed here,
  by all heartbeats, this process's own among them; who has been silent for `silence` s counts as
  silent."""
  # No step has completed that one of those heard of now has not called, whatever the others take
  # for completed: where all results are donated they can only count calls.
  called = [one.heartbeat.entered for one in last_heartbeats.values() if one.left
            or one.silence <= silence]
  step = 1 + min([max(one.heartbeat.completed for one in last_heartbeats.values()), *called])
  late, arrived = [], []
  for process in range(processes):
    one = last_heartbeats.get(process)
    if one is None:
      late.append(LateProcess(process, "absent"))
      continue
    heartbeat = one.heartbeat
    if one.left:
      late.append(_late(heartbeat, "left"))
    elif one.silence > silence:
      late.append(_late(heartbeat._replace(entered=max(heartbeat.entered, step - 1)), "silent",
                        one.silence))
    elif heartbeat.entered < step:
      late.append(_late(heartbeat, "outside", heartbeat.age + one.silence, heartbeat.stack))
    else:
      arrived.append(process)
  return Late(step, waited, tuple(late), tuple(arrived), own)


def without_service(last_heartbeats: Mapping[int, LastHeartbeat], own: LastHeartbeat,
                    waited: float) -> Late:
  """Names process 0, in which the store lives that does not answer: all that a process can know by
  itself, by the heartbeats heard before."""
  inside = own.heartbeat.entered > own.heartbeat.completed
  step = own.heartbeat.completed + 1
  if 0 in last_heartbeats:
    heartbeat = last_heartbeats[0].heartbeat
    zero = _late(heartbeat._replace(entered=max(heartbeat.entered, step - 1)), "service",
                 last_heartbeats[0].silence)
  else:
    zero = LateProcess(0, "service", last_step=step - 1)
  return Late(step, waited, (zero,), (own.heartbeat.process,) if inside else (),
              own.heartbeat.process)


def _late(heartbeat: Heartbeat, state: State, seconds: float = 0.0, stack: str = "") -> LateProcess:
  return LateProcess(heartbeat.process, state, heartbeat.host, heartbeat.pid, heartbeat.entered,
                     heartbeat.phase, seconds, stack)


def _own_flight(programs: Sequence[ObservedProgram], process: int) -> Flight:
  """Where this process's ranks are, by its own ring in place."""
  known, ring = ProgramsByKey(), host_ring.current()
  found = of_ring(ring.blocks["rank"], ring.blocks["head"], ring.events, process,
                  ObservedPlan(tuple(programs)), known)
  return Flight({one.rank: dataclasses.replace(one, host=socket.gethostname()) for one in found},
                known)


def own_text(programs: Sequence[ObservedProgram], process: int, most: int) -> str:
  """Where this process's ranks are, for a heartbeat; empty where nothing is observed."""
  return to_text(_own_flight(programs, process).positions.values(), most) if programs else ""


def find_in_step(programs: Sequence[ObservedProgram], process: int,
                 heard: Mapping[int, LastHeartbeat], directory: pathlib.Path | None
                 ) -> tuple[CauseInWords, ...]:
  """Tells why a step does not end; nothing where no program is observed. The run directory has the
  rings of processes that sent nothing of their timestamps."""
  if not programs:
    return ()
  own = _own_flight(programs, process)
  positions = dict(own.positions)
  for other, one in heard.items():
    if other != process and one.heartbeat.marks:
      sent = from_text(one.heartbeat.marks, other, one.heartbeat.host, own.programs, one.silence)
      positions |= {each.rank: each for each in sent}
  own = dataclasses.replace(own, positions=positions)
  flight = read_flight(directory, own=own) if directory is not None else own
  return describe(flight or own)
