"""Of each collective the time that a rank waits for it, and the time that computing hides.

A rank may compute, and enter other collectives, while one is under way. Who waits for one goes on
only when it is over: so up to the last entry that a rank makes into another before that, it did not
wait. With the collectives of a step in the order of their exits, on each rank's own clock:

    L[c]       = the last entry, into whichever collective, before exit[c]
    begin[c]   = max(L[c], exit[c-1])
    exposed[c] = exit[c] - begin[c]                       what it is waited for, at most
    hidden[c]  = of enter[c] .. begin[c] what lies in no other's exposed time: computing, at least
    behind[c]  = what is left of exit[c] - enter[c]: others are waited for

After `begin` a rank may compute as well, which no stamp tells: hence at most, and at least.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from jaxpace.diagnosis.accounting import BusyTimes, InFlight


class Split(NamedTuple):
  """In-flight time by what the rank did meanwhile; s. C collectives, R ranks, K steps.

  On every rank, in every step: exposed + hidden + behind = exit - entry.
  """

  exposed: np.ndarray  # [C, R, K]
  hidden: np.ndarray  # [C, R, K]
  behind: np.ndarray  # [C, R, K]
  computing: np.ndarray  # [R, K] computing while any collective is under way: each instant once


def split(flight: InFlight) -> Split:
  """Divides the time in which collectives are under way."""
  size = len(flight.leave)
  order = np.argsort(flight.leave, axis=0, kind="stable")
  enter, leave = (np.take_along_axis(x, order, axis=0) for x in (flight.enter, flight.leave))
  first = flight.first[None]
  before = np.concatenate([first, leave[:-1]])
  entries = np.sort(enter, axis=0)
  earlier = _smaller(entries, leave)
  last = np.take_along_axis(entries, np.maximum(earlier - 1, 0), axis=0)
  begin = np.minimum(np.maximum(np.maximum(np.where(earlier > 0, last, enter), enter), before),
                     leave)
  computed = begin - before
  done = np.concatenate([np.zeros_like(first), np.cumsum(computed, axis=0)])
  # Up to its entry: the exits before that, and a part of what came next.
  over = np.minimum(size - _smaller(-leave[::-1], -enter), size - 1)
  part = np.clip(enter - np.take_along_axis(before, over, axis=0), 0,
                 np.take_along_axis(computed, over, axis=0))
  hidden = done[:-1] + computed - np.take_along_axis(done, over, axis=0) - part
  soonest = np.minimum.accumulate(enter[::-1], axis=0)[::-1]
  computing = np.maximum(begin - np.maximum(before, soonest), 0).sum(axis=0)
  exposed = leave - begin

  def by_collective(ordered: np.ndarray) -> np.ndarray:
    placed = np.empty(ordered.shape)
    np.put_along_axis(placed, order, ordered * 1e-9, axis=0)
    return placed

  return Split(by_collective(exposed), by_collective(hidden),
               by_collective(leave - enter - exposed - hidden), computing * 1e-9)


def _smaller(values: np.ndarray, of: np.ndarray) -> np.ndarray:
  """How many of `values`, rising along the first axis, are smaller than each one of `of`: [C, ...]
  both."""
  size = len(values)
  # Where equal, what is asked for comes first.
  order = np.argsort(np.concatenate([of, values]), axis=0, kind="stable")
  seen = np.cumsum(order >= size, axis=0)
  found = np.empty_like(seen)
  np.put_along_axis(found, order, seen, axis=0)
  return found[:size]


@dataclasses.dataclass
class OverlapSums:
  """Sums over counted steps of means over ranks; s. C collectives."""

  exposed: np.ndarray  # [C]
  hidden: np.ndarray  # [C]
  behind: np.ndarray  # [C]
  computing: float = 0.0

  @staticmethod
  def none(slots: int) -> OverlapSums:
    """Before any step was added up."""
    return OverlapSums(np.zeros(slots), np.zeros(slots), np.zeros(slots))

  def add(self, work: BusyTimes) -> None:
    """Adds the steps that are valid; those without a rank add nothing."""
    number = work.valid.sum(axis=0)
    weight = np.divide(1.0, number, out=np.zeros(len(number)), where=number > 0)
    if work.in_flight is None:
      for c, wait in enumerate(work.wait):
        self.exposed[c] += np.where(work.valid, wait, 0.0).sum(axis=0) @ weight
      return
    found = split(work.in_flight)
    for total, values in ((self.exposed, found.exposed), (self.hidden, found.hidden),
                          (self.behind, found.behind)):
      total += np.where(work.valid, values, 0.0).sum(axis=1) @ weight
    self.computing += float(np.where(work.valid, found.computing, 0.0).sum(axis=0) @ weight)


__all__ = ["OverlapSums", "Split", "split"]
