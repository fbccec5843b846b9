"""Jobs whose ranks don't all take the same part in a step, as the stages of a pipeline do.

There ranks wait for each other though none is late: a pipeline fills and drains. These *bubbles*
are what ranks would wait if all were busy for as long as their mean; what they wait beyond is for
ranks that are busy for longer, and goes to the account of the rank that is busy longest of those it
is joined with, step by step. Of a pipeline of S stages and M micro-batches, t the longest time of
one on any stage, (M - 1) t + the sum over stages tells the step: nobody else's lateness counts for
much.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from jaxpace.diagnosis.grouped_waits import Waits
from jaxpace.diagnosis.ledger import Charge
from jaxpace.diagnosis.meetings import Grouped, Meetings

_STEPS = 4
"""Steps that are played until ranks wait in each for what they wait in the next."""


def leave(found: Meetings, c: int, time: np.ndarray, ready: np.ndarray) -> np.ndarray:
  """When ranks are let out of the c-th collective, its transfer left out.

  Args:
    found: who meets.
    c: which collective, in the order of a step.
    time: [..., R] when each left its last one.
    ready: [..., R] when it is there; minus infinity for a rank that is not.

  Returns:
    [..., R]; those whose group is not there stay where they were.
  """
  grouped, sources = found.grouped[c], found.of[c].sources
  if not grouped.size:
    return np.where(np.isfinite(ready), ready, time)
  if sources is None:
    top = np.maximum.reduceat(ready[..., grouped.order], grouped.starts, axis=-1)
    top = np.concatenate([top, np.full((*top.shape[:-1], 1), -np.inf)],
                         axis=-1)[..., grouped.of_rank]
    top = np.where(grouped.of_rank < grouped.size, top, ready)
  else:
    top = ready
    for row in sources:
      top = np.maximum(top, np.where(row >= 0, ready[..., row], -np.inf))
  return np.where(np.isfinite(top), top, time)


def evened(found: Meetings, arrival: np.ndarray, valid: np.ndarray) -> np.ndarray:
  """Arrivals of ranks that are all equally busy.

  Args:
    found: who meets.
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
    even *= np.divide(joined.mean(whole, valid), whole, out=np.ones_like(whole), where=whole > 0)
  return even


def without_bubbles(found: Meetings, waits: Sequence[Waits], arrival: np.ndarray,
                    valid: np.ndarray) -> list[Waits]:
  """What ranks wait in the collectives of some steps beyond what they would if all were equally
  busy.

  Args:
    found: who meets.
    waits: of each collective.
    arrival: [C, R, K] s busy before it, undelayed.
    valid: [R, K] ranks whose step is known.

  Returns:
    The waits, less what is waited anyway, each rank's in proportion: mean over ranks, what a step
    takes longer for them.
  """
  whole = np.sum([waited.beyond for waited in waits], axis=0)
  more = whole - _bubbles(found, waits, arrival, valid)[:, None]
  # The late rank waits for less than its bubble, and of all together no more is waited than a step
  # takes longer.
  joined, later = Grouped(found.joined), np.maximum(more, 0.0)
  most = joined.mean(later, valid)
  scale = np.divide(joined.mean(more, valid), most, out=np.zeros_like(whole), where=most > 0)
  part = np.divide(later * np.maximum(scale, 0.0), whole, out=np.zeros_like(whole),
                   where=whole > 0)
  return [waited._replace(early=waited.beyond * part, own=np.zeros_like(part)) for waited in waits]


def _bubbles(found: Meetings, waits: Sequence[Waits], arrival: np.ndarray, valid: np.ndarray
             ) -> np.ndarray:
  """[R] s a step that each rank would wait if all were as busy as their mean over the steps."""
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


def to_the_busiest(found: Meetings, waits: Sequence[Waits], arrival: np.ndarray,
                   valid: np.ndarray) -> Iterator[Charge]:
  """Charges what ranks wait to the one of those they are joined with that is busy longest in the
  step.

  Args:
    found: who meets.
    waits: of each collective.
    arrival: [C, R, K] s busy before it, undelayed.
    valid: [R, K] ranks whose step is known.
  """
  joined = Grouped(found.joined)
  busy = np.where(valid, arrival.sum(axis=0), -np.inf)
  longest = np.minimum(joined.first(valid & (busy == joined.highest(busy))), len(valid) - 1)
  nothing = np.zeros(valid.shape)
  for waited in waits:
    yield Charge((longest, longest), (nothing, waited.early), (nothing > 0, nothing == 0))
