"""The programs of this process that have timestamps: their numbers, and the names they go by."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from typing import Any

import jax

from jaxpace.core.observed import ObservedProgram
from jaxpace.observation.clocks import host_ring
from jaxpace.observation.partitioned import collectives

_lock = threading.Lock()
_known: tuple[ObservedProgram, ...] = ()
"""One register a process, as the ring is."""


def known() -> tuple[ObservedProgram, ...]:
  """All that this process compiled with timestamps, also what does not run any more."""
  return _known


def add(made: ObservedProgram) -> None:
  """Takes note of a program that has timestamps."""
  global _known
  with _lock:
    _known = (*_known, made)


def refuse(number: int, reason: str) -> None:
  """Takes note that a program runs without its timestamps from now on."""
  global _known
  with _lock:
    _known = tuple(dataclasses.replace(one, bare=reason) if one.number == number else one
                   for one in _known)


def next_number() -> int:
  """A number for a program that gets timestamps.

  Raises:
    ValueError: there is none left.
  """
  number = host_ring.next_program()
  if number >= host_ring.MOST_PROGRAMS:
    raise ValueError(f"this process has more than {host_ring.MOST_PROGRAMS - 1} observed programs.")
  return number


def executions(number: int) -> int:
  """How often a program has started on the devices of this process, all together."""
  return sum(host_ring.executions(buffer, number) for buffer in range(jax.local_device_count()))


def bare(name: str, devices: Sequence[Any], reason: str) -> ObservedProgram:
  """What a plan says of a program that runs unmodified."""
  ranks = host_ring.ranks()
  return ObservedProgram(
      number=host_ring.next_program(), name=name,
      ranks=tuple(ranks.get(device, 0) for device in devices), mesh_axes={}, collectives=(),
      bare=reason)


def named(made: ObservedProgram) -> ObservedProgram:
  """The same by a name of its own: one without any gets the line of its largest collective; one
  function on several submeshes, such as a pipeline's stages, its first rank."""
  name = made.name
  if collectives.is_nameless(name):
    largest = max((one for one in made.collectives if one.source),
                  key=lambda one: one.bytes or 0, default=None)
    name = name if largest is None else f"{name} ({largest.source})"
  if any(one.name == name and one.origin == made.origin
         and set(one.ranks).isdisjoint(made.ranks) for one in _known):
    name = f"{name} (from rank {min(made.ranks)})"
  return dataclasses.replace(made, name=name)
