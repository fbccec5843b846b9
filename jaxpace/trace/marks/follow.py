"""Takes the events of a lane out of its ring, while it is being written or when nobody writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np


class Taken(NamedTuple):
  """Events that follow a position, in order and without a hole between them."""

  # [n] int64
  ns: np.ndarray
  # [n] uint32
  tag: np.ndarray
  lost: int
  """Events before these that were written over, or never finished."""
  position: int
  """Where to go on."""


def take(slots: np.ndarray, head: Callable[[], int], position: int, *, final: bool = False,
         most: int | None = None) -> Taken:
  """Takes what was written since `position`.

  A slot's `seq` tells which event is in it. One that a mark is just writing ends what is taken: the
  next call goes on there. One that was written over counts as lost.

  Args:
    slots: [capacity] `core.marks.EVENT`, a lane's events; another thread may be writing them.
    head: returns how many events were begun so far.
    position: events already dealt with.
    final: nobody writes any more, or the event at `position` has been awaited long enough: it is
      lost if it isn't there.
    most: events at most; all by default.
  """
  capacity = len(slots)
  reached = head()
  begin = max(position, reached - capacity)
  if reached <= begin:
    return Taken(np.empty(0, np.int64), np.empty(0, np.uint32), 0, max(position, 0))
  count = reached - begin if most is None else min(reached - begin, most)
  offsets = np.arange(count)
  copied = slots[(begin % capacity + offsets) % capacity]
  # What was begun meanwhile may have been written into slots that were just copied.
  doubtful = max(0, min(count, head() - capacity - begin))
  expected = ((begin + 1) % 2**32 + offsets.astype(np.uint64)) % np.uint64(2**32)
  good = copied["seq"] == expected
  good[:doubtful] = False
  skipped = doubtful
  if final:
    # Go on at the first that is there.
    there = np.flatnonzero(good[doubtful:])
    skipped += int(there[0]) if there.size else count - doubtful
  bad = np.flatnonzero(~good[skipped:])
  stop = skipped + (int(bad[0]) if bad.size else count - skipped)
  chosen = copied[skipped:stop]
  return Taken(chosen["ns"].astype(np.int64), chosen["tag"].astype(np.uint32),
               begin - position + skipped, begin + stop)


class Lane:
  """Follows one lane; a slot that stays unfinished for long is given up."""

  def __init__(self, position: int = 0, patience: int = 8):
    """Begins at a position; `patience` is how many calls in a row wait for the same slot."""
    self.position = position
    self.lost = 0
    self._patience, self._waited = patience, 0

  def take(self, slots: np.ndarray, head: Callable[[], int], *, final: bool = False) -> Taken:
    """Takes what is new; see `take`. Call again until nothing comes and nothing is lost."""
    before = self.position
    taken = take(slots, head, before, final=final or self._waited >= self._patience)
    self.position = taken.position
    self.lost += taken.lost
    stuck = taken.position == before and head() > before
    self._waited = self._waited + 1 if stuck else 0
    return taken
