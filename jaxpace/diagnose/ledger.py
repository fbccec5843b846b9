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

from jaxpace.diagnose.groups import Grouped, RunGroups, Waits
from jaxpace.diagnose.limits import SAME
from jaxpace.diagnose.selected_steps import ratio

_REASONS = 4
"""Reasons that a rank carries: the largest ones. Small ones of chance come and go."""
_OLDEST = 64
"""Steps for which transfers from one rank to the next hand them on, at most."""


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


def charges(found: RunGroups, waits: Sequence[Waits], arrival: np.ndarray,
            adjacent: np.ndarray) -> Iterator[Charge]:
  """Goes through the collectives of some steps.

  Args:
    waits: of each collective.
    arrival: [C, R, K] s busy before it, undelayed.
    adjacent: [K] bool, whether the step before is the one before in the arrays: reasons of its end
      are then known.

  Yields:
    For each collective, in its order, who is charged.
  """
  if found.levels.all():  # nobody is late for what was before
    for c, waited in enumerate(waits):
      yield Charge((waited.last,), (waited.early,), (np.full(waited.early.shape, c == 0),))
    return
  ranks, size = waits[0].early.shape
  events = np.full((_REASONS, ranks, size), -1, np.int64)
  amounts = np.zeros((_REASONS, ranks, size))
  carried = adjacent.any() and not found.levels[-1].all()
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


def _steps_to_all(found: RunGroups) -> int:
  """Steps in which lateness reaches all that are joined: a transfer hands it on by one rank."""
  transfers = sum(rank_groups.sources is not None for rank_groups in found.of)
  most = int(np.bincount(found.joined).max())
  return min(-(-most // transfers), _OLDEST) if transfers else 1


def _through(found: RunGroups, waits: Sequence[Waits], arrival: np.ndarray, events: np.ndarray,
             amounts: np.ndarray
             ) -> Iterator[Charge]:
  """The same, with the reasons [M, R, K] that ranks have at the begin; they are changed to those at
  the end."""
  ranks, events_of = events.shape[1], len(waits) * events.shape[1]
  own_rank = np.arange(ranks)[:, None]
  joined = Grouped(found.joined)
  for c, waited in enumerate(waits):
    grouped, last = found.grouped[c], waited.last
    theirs = np.take_along_axis(events, last[None], axis=1)
    worth = np.take_along_axis(amounts, last[None], axis=1)
    different = worth * (theirs[:, None] != events[None]).all(axis=1)
    whole = different.sum(axis=0)
    rest = waited.early - waited.own
    seconds = different * ratio(rest, whole, 0.0)
    what = np.maximum(theirs, 0) % (2 * events_of)  # whatever step it was in
    slow = what >= events_of
    yield Charge((last, *(what % ranks)),
                 (waited.own + np.where(whole > 0, 0.0, rest), *np.where(slow, 0.0, seconds)),
                 (np.full(rest.shape, c == 0), *(what < ranks)),
                 tuple(what % events_of), tuple(np.where(slow, seconds, 0.0)))
    if found.levels[c].all():
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
    if found.of[c].sources is None and grouped.size:
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
  new = amount > np.maximum(np.take_along_axis(kept, least, axis=0)[0], SAME)
  for values, own in ((events, event), (amounts, amount)):
    now = np.where(new, own, np.take_along_axis(values, least, axis=0)[0])
    np.put_along_axis(values, least, now[None], axis=0)


# Jobs whose ranks don't all take the same part in a step, as the stages of a pipeline do.
#
# There ranks wait for each other though none is late: a pipeline fills and drains. These *bubbles*
# are what ranks would wait if all were busy for as long as their mean; what they wait beyond is
# for ranks that are busy for longer, and goes to the account of the rank that is busy longest of
# those it is joined with, step by step. Of a pipeline of S stages and M micro-batches, t the
# longest time of one on any stage, (M - 1) t + the sum over stages gives the step: nobody else's
# lateness counts for much.

_STEPS = 4
"""Steps that are played until ranks wait in each for what they wait in the next."""


def leave(found: RunGroups, c: int, time: np.ndarray, ready: np.ndarray) -> np.ndarray:
  """When ranks are let out of the c-th collective, its transfer left out.

  Args:
    c: which collective, in the order of a step.
    time: [R, ...] when each left its last one.
    ready: [R, ...] when it is there; minus infinity for a rank that is not.

  Returns:
    [R, ...]; those whose group is not there stay where they were.
  """
  grouped, sources = found.grouped[c], found.of[c].sources
  top = ready.copy()
  if sources is None and grouped.size:
    top = np.maximum(top, grouped.spread(grouped.reduce(np.maximum, ready), -np.inf))
  for row in () if sources is None else sources:
    target = row >= 0
    top[target] = np.maximum(top[target], ready[row[target]])
  return np.where(np.isfinite(top), top, time)


def evened(found: RunGroups, arrival: np.ndarray, valid: np.ndarray) -> np.ndarray:
  """Arrivals of ranks that are all equally busy.

  Args:
    arrival: [C, R, K] s busy before each collective.
    valid: [R, K] ranks that are there.

  Returns:
    [C, R, K]: ranks that take the same part in a step are as busy as their mean before each of its
    collectives, and all those that are joined as busy as theirs over the step.
  """
  roles, joined = Grouped(found.roles), Grouped(found.joined)
  even = np.stack([roles.mean(own, valid) for own in arrival])
  if found.staged:
    whole = even.sum(axis=0)
    even *= ratio(joined.mean(whole, valid), whole, 1.0)
  return even


def beyond_bubbles(found: RunGroups, waits: Sequence[Waits], arrival: np.ndarray,
                   valid: np.ndarray) -> tuple[list[Waits], list[Charge]]:
  """What ranks wait in the collectives of some steps beyond what they would if all were equally
  busy, and on whose account: that one's of those they are joined with who is busy longest in the
  step.

  Args:
    waits: of each collective.
    arrival: [C, R, K] s busy before it, undelayed.
    valid: [R, K] ranks whose step is known.

  Returns:
    The waits, less what is waited anyway, each rank's in proportion: mean over ranks, what a step
    takes longer for them. And who is charged with them.
  """
  joined = Grouped(found.joined)
  whole = np.sum([waited.beyond for waited in waits], axis=0)
  more = whole - _bubbles(found, waits, arrival, valid)[:, None]
  # The late rank waits for less than its bubble, and of all together no more is waited than a step
  # takes longer.
  later = np.maximum(more, 0.0)
  most = joined.mean(later, valid)
  scale = ratio(joined.mean(more, valid), most, 0.0)
  part = ratio(later * np.maximum(scale, 0.0), whole, 0.0)
  left = [waited._replace(early=waited.beyond * part, own=np.zeros_like(part)) for waited in waits]
  busy = arrival.sum(axis=0)
  longest = joined.last_pays(busy, valid)[0]
  nothing = np.zeros(valid.shape)
  return left, [Charge((longest, longest), (nothing, waited.early), (nothing > 0, nothing == 0))
                for waited in left]


def _bubbles(found: RunGroups, waits: Sequence[Waits], arrival: np.ndarray, valid: np.ndarray
             ) -> np.ndarray:
  """[R] s per step that each rank would wait if all were as busy as their mean over the steps."""
  ranks = len(valid)
  number = np.maximum(valid.sum(axis=1), 1)
  mean = np.where(valid, arrival, 0.0).sum(axis=2) / number  # [C, R]
  even = evened(found, mean[..., None], (valid.sum(axis=1) > 0)[:, None])[..., 0]
  transfers = [np.nan_to_num(np.where(waited.takes & valid, waited.transfer, 0.0)).sum(axis=1)
               / number for waited in waits]
  time = np.zeros(ranks)
  for _ in range(_STEPS):
    bubbles = np.zeros(ranks)
    for c, transfer in enumerate(transfers):
      ready = time + even[c]
      out = leave(found, c, time, ready)
      bubbles += out - ready
      time = out + transfer
  return bubbles
