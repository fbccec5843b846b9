"""Whom ranks wait for in collectives of mixed groups: what made each rank late, and by how much.

A rank that waits takes over the lateness of the rank it waited for: from then on it is as late, for
the same reasons. So each rank carries a few reasons, and by how much: a rank that was busy for
longer before a collective than the others were, or its group's transfer, which took longer than the
others'. What one rank waits for another is charged to that rank as far as it was busy for longer
just now, and else to the reasons that it has and the waiting rank doesn't: what made both late
makes neither wait for the other. What a slow transfer makes others wait later is no rank's fault.
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
_NOTHING = 1e-9
"""Seconds that timestamps tell apart."""


class Charge(NamedTuple):
  """What ranks wait in one collective, by those on whose account: every [R, K] pair of them."""

  culprits: tuple[np.ndarray, ...]  # int64, ranks
  seconds: tuple[np.ndarray, ...]  # what each rank waits for them
  # bool, what the culprit did before its first collective made it late
  begun: tuple[np.ndarray, ...]
  # int64, slow transfers before, numbered R·collective + the first rank of the group
  transfers: tuple[np.ndarray, ...] = ()
  slow: tuple[np.ndarray, ...] = ()  # s that each rank waits because of them

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

  def add_slow(self, total: np.ndarray) -> None:
    """Adds what ranks wait because of slow transfers to [C, R, K] sums, at each group's first
    rank."""
    steps = np.arange(total.shape[2])
    flat = total.reshape(-1)
    for group, seconds in zip(self.transfers, self.slow, strict=True):
      at = np.flatnonzero(seconds)
      np.add.at(flat, (group * len(steps) + steps).reshape(-1)[at], seconds.reshape(-1)[at])


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
  old = 2 * len(waits) * ranks
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
  ranks, events_of = events.shape[1], len(waits) * events.shape[1]
  own_rank = np.arange(ranks)[:, None]
  joined = Grouped(found.joined)
  for c, waited in enumerate(waits):
    grouped = found.grouped[c]
    if not grouped.size:
      nothing = np.zeros(waited.early.shape)
      yield Charge((np.broadcast_to(own_rank, nothing.shape),), (nothing,), (nothing > 0,))
      continue
    last = waited.last
    theirs = np.take_along_axis(events, last[None], axis=1)
    worth = np.take_along_axis(amounts, last[None], axis=1)
    different = worth * (theirs[:, None] != events[None]).all(axis=1)
    whole = different.sum(axis=0)
    rest = waited.early - waited.own
    seconds = different * np.divide(rest, whole, out=np.zeros_like(rest), where=whole > 0)
    what = np.maximum(theirs, 0) % (2 * events_of)  # whatever step it was in
    slow = what >= events_of
    yield Charge((last, *(what % ranks)),
                 (waited.own + np.where(whole > 0, 0.0, rest), *np.where(slow, 0.0, seconds)),
                 (np.full(rest.shape, c == 0), *(what < ranks)),
                 tuple(what % events_of), tuple(np.where(slow, seconds, 0.0)))
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
    _add(theirs, worth, c * ranks + last, np.take_along_axis(longer, last, axis=0), 2 * events_of)
    if found.of[c].sources is None:
      took = np.where(there, np.nan_to_num(waited.transfer), 0.0)
      leader = grouped.order[grouped.starts][np.minimum(grouped.of_rank, grouped.size - 1)]
      _add(theirs, worth, np.broadcast_to(events_of + c * ranks + leader[:, None], took.shape),
           np.where(there, took - joined.mean(took, there), 0.0), 2 * events_of)
    np.copyto(events, theirs, where=there)
    np.copyto(amounts, worth, where=there)


def _add(events: np.ndarray, amounts: np.ndarray, event: np.ndarray, amount: np.ndarray,
         old: int) -> None:
  """Puts an [R, K] reason in the place of each rank's smallest one, if it is larger.

  What is late again is late for that, not for having been late in a step before: it takes the place
  of its older self, be that up to twice as large.
  """
  again = (events >= old) & (events % old == event) & (2 * amount >= amounts)
  kept = np.where(again, 0.0, amounts)
  least = kept.argmin(axis=0)[None]
  new = amount > np.maximum(np.take_along_axis(kept, least, axis=0)[0], _NOTHING)
  for values, own in ((events, event), (amounts, amount)):
    now = np.where(new, own, np.take_along_axis(values, least, axis=0)[0])
    np.put_along_axis(values, least, now[None], axis=0)
