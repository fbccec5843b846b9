"""Events of an instrumented step: its timestamps and numbers, in the ring of timestamps of the
  process."""

from __future__ import annotations

from typing import NamedTuple

import jax


class Events(NamedTuple):
  """Where the events of a step go."""

  program: int
  """Number of the program, among those of the process that write to the ring."""
  place: jax.Array | None
  """What a clock must be given to know its device, see `jaxpace.observation.clocks.Clock.place`."""

  def tag(self, tag: int) -> Event:
    """The event with a tag."""
    return Event(self, tag)


class Event(NamedTuple):
  """What a timestamp leaves in the ring beside its value."""

  to: Events
  tag: int
  """The program's own, see `jaxpace.core.ring_layout`."""
