"""What the rings of timestamps tell a watchdog of a step that does not end: in which collective,
and who keeps it."""

from __future__ import annotations

import dataclasses
import pathlib
import socket
from collections.abc import Mapping, Sequence

from jaxpace.core.observed import ObservedPlan, ObservedProgram
from jaxpace.hang.describe import CauseInWords, Flight, describe
from jaxpace.hang.heartbeat import LastHeartbeat
from jaxpace.hang.positions import ProgramsByKey, from_text, to_text
from jaxpace.hang.read_rings import of_ring, read_flight
from jaxpace.observation.clocks import host_ring

CHARACTERS, CHARACTERS_IN_LARGE_JOBS = 2000, 700
"""Longest account of a process's timestamps that is sent in a heartbeat."""


def own_flight(programs: Sequence[ObservedProgram], process: int) -> Flight:
  """Where this process's ranks are, by its own ring in place."""
  known = ProgramsByKey()
  if not programs:
    return Flight({}, known)
  ring = host_ring.current()
  found = of_ring(ring.blocks, ring.events, process, ObservedPlan(tuple(programs)), known,
                  socket.gethostname())
  return Flight({one.rank: one for one in found}, known)


def own_text(programs: Sequence[ObservedProgram], process: int, most: int) -> str:
  """The same for a heartbeat; empty where nothing is observed."""
  return to_text(own_flight(programs, process).positions.values(), most) if programs else ""


def find(programs: Sequence[ObservedProgram], process: int, heard: Mapping[int, LastHeartbeat],
         directory: pathlib.Path | None) -> tuple[CauseInWords, ...]:
  """Tells why a step does not end.

  Args:
    programs: what this process runs; () where nothing is observed, and nothing is described.
    process: this process.
    heard: the processes' last heartbeats.
    directory: run directory, for the rings of those that sent nothing of their timestamps; None
      where there is none.
  """
  if not programs:
    return ()
  own = own_flight(programs, process)
  positions = dict(own.positions)
  for other, one in heard.items():
    if other != process and one.heartbeat.marks:
      sent = from_text(one.heartbeat.marks, other, one.heartbeat.host, own.programs, one.silence)
      positions |= {each.rank: each for each in sent}
  flight = read_flight(directory, own=dataclasses.replace(own, positions=positions))
  return describe(flight) if flight is not None else ()
