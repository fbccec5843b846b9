"""Whom ranks wait for in collectives of mixed groups: what made each rank late, and by how much.

A rank that waits takes over the lateness of the rank it waited for: from then on it is as late, for
the same reasons. So each rank carries a few reasons: a rank that was busy for longer before a
collective than the others were, and by how much. What one rank waits for another is charged to that
rank as far as it was busy for longer just now, and else to the reasons that it has and the waiting
rank doesn't: what made both late makes neither wait for the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jaxpace.diagnosis.grouped_waits import Waits
from jaxpace.diagnosis.meetings import Grouped, Meetings

_REASONS = 4
"""Reasons that a rank carries: the largest ones. Small ones of chance come and go."""
_OLDEST = 64
"""Steps for which transfers from one rank to the next hand them on, at most."""


class Charge(NamedTuple):
  """What ranks wait in one collective, by those on whose account: every [R, K] pair of them."""

  culprits: tuple[np.ndarray, ...]  # int64, ranks
  seconds: tuple[np.ndarray, ...]  # together what each rank waits
  # bool, what the culprit did before its first collective made it late
  begun: tuple[np.ndarray, ...]

  def by_culprit(self, ranks: int, weight: np.ndarray) -> np.ndarray:
    """[R, K] s that are charged to each rank, each step's times its weight, [K]."""
    size = len(weight)
    steps, total = np.arange(size), np.zeros(ranks * size)
    for culprit, seconds in zip(self.culprits, self.seconds, strict=True):
      at = np.flatnonzero(seconds)
      if at.size:
        total += np.bincount((culprit * size + steps).reshape(-1)[at],
                             (seconds * weight).reshape(-1)[at], total.size)
    return total.reshape(ranks, size)


def charges(found: Meetings, waits: Sequence[Waits], arrival: np.ndarray,
            adjacent: np.ndarray) -> Iterator[Charge]:
  """Goes through the collectives of some steps.

  Args:
    found: who meets.
    waits: of each collective.
    arrival: [C, R, K] s busy before it, undelayed.
    adjacent: [K] bool, whether the step before is the one before in the arrays: reasons of its end
      are then known.

  Yields:
    For each collective, in its order, who is charged.
  """
  ranks, size = waits[0].early.shape
  events = np.full((_REASONS, ranks, size), -1, np.int64)
  amounts = np.zeros((_REASONS, ranks, size))
  carried = adjacent.any() and not found.levels(len(waits) - 1).all()
  # Reasons of steps before have numbers of their own by their age, and none is older than that.
  old = len(waits) * ranks
  oldest = _steps_to_all(found) * old if carried else 0
  for _ in range(oldest // old):
    for _ in _through(found, waits, arrival, events, amounts):
      pass
    for values, empty in ((events, -1), (amounts, 0)):
      values[..., 1:] = np.where(adjacent[1:], values[..., :-1], empty)
      values[..., :1] = empty
    gone = events >= oldest
    events[:] = np.where(gone, -1, np.where(events >= 0, events + old, -1))
    amounts[gone] = 0.0
  yield from _through(found, waits, arrival, events, amounts)


def _steps_to_all(found: Meetings) -> int:
  """Steps in which lateness reaches all that are joined: a transfer hands it on by one rank."""
  transfers = sum(meeting.sources is not None for meeting in found.of)
  most = int(np.bincount(found.joined).max())
  return min(-(-most // transfers), _OLDEST) if transfers else 1


def _through(found: Meetings, waits: Sequence[Waits], arrival: np.ndarray, events: np.ndarray,
             amounts: np.ndarray
             ) -> Iterator[Charge]:
  """The same, with the reasons [M, R, K] that ranks have at the begin; they are changed to those at
  the end."""
  reasons, ranks, _ = events.shape
  own_rank = np.arange(ranks)[:, None]
  joined = Grouped(found.joined)
  for c, waited in enumerate(waits):
    if not found.grouped[c].size:
      nothing = np.zeros(waited.early.shape)
      yield Charge((np.broadcast_to(own_rank, nothing.shape),), (nothing,), (nothing > 0,))
      continue
    last = waited.last
    theirs = np.take_along_axis(events, last[None], axis=1)
    worth = np.take_along_axis(amounts, last[None], axis=1)
    different = worth * (theirs[:, None] != events[None]).all(axis=1)
    whole = different.sum(axis=0)
    rest = waited.early - waited.own
    part = np.divide(rest, whole, out=np.zeros_like(rest), where=whole > 0)
    seconds = tuple(different[m] * part for m in range(reasons))
    yield Charge((last, *(np.maximum(theirs[m], 0) % ranks for m in range(reasons))),
                 (waited.own + np.where(whole > 0, 0.0, rest), *seconds),
                 (np.full(rest.shape, c == 0),
                  *(theirs[m] % (len(waits) * ranks) < ranks for m in range(reasons))))
    if found.levels(c).all():
      events[:], amounts[:] = -1, 0.0
      continue
    there = waited.there
    if found.of[c].sources is not None:  # who waited for nobody has its own reasons still
      kept = waited.early <= 0
      last = np.where(kept, own_rank, last)
      theirs, worth = np.where(kept, events, theirs), np.where(kept, amounts, worth)
    busy = np.where(there, arrival[c], 0.0)
    longer = np.where(there, busy - joined.mean(busy, there), 0.0)
    longer = np.take_along_axis(longer, last, axis=0)
    # A rank that is late again is late for that, not for having been late in a step before.
    again = (theirs >= len(waits) * ranks) & (theirs % ranks == last) & (2 * longer >= worth)
    kept = np.where(again, 0.0, worth)
    least = kept.argmin(axis=0)[None]
    new = (longer > np.take_along_axis(kept, least, axis=0)[0]) & there
    own_event = np.where(new, c * ranks + last, np.take_along_axis(theirs, least, axis=0)[0])
    own_amount = np.where(new, longer, np.take_along_axis(worth, least, axis=0)[0])
    np.put_along_axis(theirs, least, own_event[None], axis=0)
    np.put_along_axis(worth, least, own_amount[None], axis=0)
    np.copyto(events, theirs, where=there)
    np.copyto(amounts, worth, where=there)
