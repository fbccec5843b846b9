"""The idea of the diagnosis, on arrays: read this first. Pure numpy.

All ranks of a job meet in a collective. None leaves it before the last one is there, so a profiler
sees every rank wait in it and cannot say for whom. Three observations can, without comparing the
clocks of two hosts:

1. **Arrival.** A rank's own last exit is its origin: how long it was busy from there to its own
   entry says how late it is, since ranks leave a collective at nearly the same time.
2. **The last one pays.** The others wait for the rank that was busy longest, by as much as it was
   busy longer. It waits itself only while the collective transfers: the shortest wait of a step is
   the transfer.
3. **The cause is charged.** What ranks wait is charged to what the last rank spent longer on than
   they did: computing, the gap between two steps, or a delay.

So each rank's step is its own busy time, plus its waiting for late ranks, plus the transfer, plus
what is left, by which ranks leave a collective apart from each other. Exactly, on its own clock.

Three ranks, two steps; times in ms, each on its rank's own clock. Rank 1 is late in the first step,
rank 2 in the second; the transfer takes 2 ms, then 3 ms.

>>> import numpy as np
>>> before = np.array([[100, 122], [5000, 5022], [-40, -18]])  # exits of the step before
>>> enter = np.array([[110, 132], [5020, 5034], [-30, 2]])
>>> leave = np.array([[122, 145], [5022, 5045], [-18, 5]])
>>> arrival, wait, left = busy_and_wait(enter, leave, before)
>>> arrival
array([[10, 10],
       [20, 12],
       [10, 20]])
>>> there = np.ones(arrival.shape, bool)
>>> last, early = last_pays(arrival, there)
>>> last.tolist()
[[1, 2]]
>>> early
array([[10, 10],
       [ 0,  8],
       [10,  0]])
>>> transfer(wait, there).tolist()
[2.0, 3.0]
>>> step = left - before
>>> (step == arrival + early + transfer(wait, there)).all()
np.True_

Of the 20 ms that rank 2 is busy in the second step, 9 are the gap before it; of the others' 10 and
12 one each. Of the 10 and 8 ms that these wait then, 8 are for the gap:

>>> gap = np.array([[1, 1], [1, 1], [1, 9]])
>>> compute, runtime = split_by_cause(early, last, (arrival - gap, gap))
>>> runtime.round(1).tolist()
[[0.0, 8.0], [0.0, 8.0], [0.0, 0.0]]
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def busy_and_wait(enter: np.ndarray, leave: np.ndarray, before: np.ndarray
                  ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """How long ranks are busy before a collective, and wait in it.

  Where collectives overlap only what is exposed counts: times never run backwards on a rank.

  Args:
    enter: [R, K] when each rank enters, on its own clock.
    leave: [R, K] when it leaves, on the same clock.
    before: [R, K] when it left the collective before.

  Returns:
    [R, K] arrival and wait, in the unit of the times, and [R, K] when the rank is through.
  """
  begin = np.maximum(enter, before)
  end = np.maximum(leave, begin)
  return begin - before, end - begin, end


def last_pays(arrival: np.ndarray, there: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """The rank that all others wait for, and how long each of them does.

  Args:
    arrival: [..., R, K] s that each rank is busy before the collective.
    there: [..., R, K] bool, ranks whose arrival is known.

  Returns:
    [..., 1, K] the rank that is busy longest, and [..., R, K] s by which each is busy for less.
  """
  last = np.where(there, arrival, -np.inf).argmax(axis=-2, keepdims=True)
  return last, np.take_along_axis(arrival, last, axis=-2) - arrival


def transfer(wait: np.ndarray, there: np.ndarray) -> np.ndarray:
  """The collective's own time: the shortest wait, that of the rank that arrived last.

  Args:
    wait: [..., R, K] s.
    there: [..., R, K] bool, ranks whose wait is known.

  Returns:
    [..., K] s; NaN where no rank is known.
  """
  shortest = np.where(there, wait, np.inf).min(axis=-2)
  return np.where(there.any(axis=-2), shortest, np.nan)


def split_by_cause(early: np.ndarray, last: np.ndarray, spent: Sequence[np.ndarray]
                   ) -> list[np.ndarray]:
  """Splits waiting by what the last rank spent more on than the rank that waits.

  Args:
    early: [R, K] s that each rank waits for the last one.
    last: [1, K], or [R, K] where ranks wait for different ones.
    spent: [R, K] s of each rank, by cause: together its arrival.

  Returns:
    [R, K] s by cause, in proportion to the positive differences; 0 where nothing is longer.
  """
  longer = [np.maximum(np.take_along_axis(own, last, axis=0) - own, 0.0) for own in spent]
  total = np.sum(longer, axis=0)
  scale = np.divide(early, total, out=np.zeros_like(total), where=total > 0)
  return [own * scale for own in longer]
