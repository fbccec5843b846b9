"""The order in which a step goes through its collectives, where no rank need take part in all of
them."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence

import numpy as np

from jaxpace.trace.run import MISSING

_RANKS, _CELLS = 8, 1 << 20
"""Ranks that are asked of those that take part in the same collectives, and times that are read of
them."""


def in_order(enter: Sequence[np.ndarray], leave: Sequence[np.ndarray],
             attempt: Sequence[np.ndarray], by_exit: bool = False) -> list[int]:
  """Finds an order that agrees with the order on each rank.

  Only times of one rank are compared: clocks of two have nothing to do with each other, and ranks
  that share no collective may go through theirs at any time. What no rank's times order stays as
  it is given.

  Args:
    enter: [R, K] entries of each of C collectives, ns; `MISSING` where there is no row.
    leave: [R, K] exits.
    attempt: [R, K] attempt of each row.
    by_exit: whether exits tell the order, and entries only of what is left together; else the other
      way round.

  Returns:
    Positions of the C collectives.
  """
  takes_part = np.array([(one != MISSING).any(axis=1) for one in enter])  # [C, R]
  alike: dict[bytes, list[int]] = {}
  for rank in np.flatnonzero(takes_part.any(axis=0)).tolist():
    alike.setdefault(takes_part[:, rank].tobytes(), []).append(rank)
  chains = []
  for ranks in alike.values():
    own = np.flatnonzero(takes_part[:, ranks[0]])
    some = np.array(ranks[::-(-len(ranks) // _RANKS)])
    begin, end = _of_ranks([[of[c] for c in own.tolist()] for of in (enter, leave, attempt)], some)
    chains.append(own[np.lexsort((begin, end) if by_exit else (end, begin))].tolist())
  return _merged(chains, len(enter))


def _of_ranks(rows: Sequence[Sequence[np.ndarray]], ranks: np.ndarray
              ) -> tuple[np.ndarray, np.ndarray]:
  """Median entry and exit, [C] ns since the step's first entry, of ranks that take part in all of
  the collectives."""
  some = np.flatnonzero((rows[0][0][ranks] != MISSING).any(axis=0))
  most = max(16, _CELLS // (len(rows[0]) * len(ranks)))
  steps = some[::-(-len(some) // most)]
  enter, leave, attempt = (np.stack([one[np.ix_(ranks, steps)] for one in of]).reshape(len(of), -1)
                           for of in rows)
  there = (enter != MISSING) & (attempt == attempt.max(axis=0))
  whole = there.all(axis=0)
  there &= whole | ~whole.any()  # steps with all rows, if there are any
  first = np.where(there, enter, np.iinfo(np.int64).max).min(axis=0)
  begin, end = (np.ma.median(np.ma.array(times - first, mask=~there | (times == MISSING)),
                             axis=1).filled(0.0) for times in (enter, leave))
  return begin, end


def _merged(chains: Sequence[Sequence[int]], size: int) -> list[int]:
  """Positions from 0 to `size` in an order that all chains have, the lowest first where they leave
  it open; where two contradict each other the lowest of those left comes next."""
  behind: list[set[int]] = [set() for _ in range(size)]
  for chain in chains:
    for one, next_one in itertools.pairwise(chain):
      behind[one].add(next_one)
  ahead = np.bincount([at for after in behind for at in after], minlength=size)
  ready = np.flatnonzero(ahead == 0).tolist()
  left = dict.fromkeys(range(size))
  result = []
  while left:
    at = heapq.heappop(ready) if ready else next(iter(left))
    if at not in left:
      continue
    del left[at]
    result.append(at)
    for after in behind[at]:
      ahead[after] -= 1
      if not ahead[after]:
        heapq.heappush(ready, after)
  return result
