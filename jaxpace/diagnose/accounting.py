"""Where a step's time goes: exact by construction, on each rank's own clock.

Per rank r and step k, between two exits of r itself:

    step = compute + runtime + pacing + earliness + transfer + spread

With A'_c = enter_c - exit_{c-1} (busy time before collective c, the applied delay included) and w_c
= exit_c - enter_c, the step is the sum of all A'_c + w_c. A' splits into compute, runtime (the gap)
and pacing (the applied delay); earliness_c = max of A'_c - own A'_c and transfer_c = min of w_c,
both over the ranks that meet in c; spread is what is left: w_c - earliness_c - transfer_c, 0 where
these leave it together. `groups` says who waits where ranks come from different collectives. See
docs/accounting.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from jaxpace.diagnose.groups import Grouped, RunGroups, Waits, step_through
from jaxpace.diagnose.idea import split_by_cause
from jaxpace.diagnose.ledger import Charge, beyond_bubbles, charges
from jaxpace.diagnose.selected_steps import ratio
from jaxpace.diagnose.step_times import StepTimes


class Account(NamedTuple):
  """A step's time by what it was spent on, seconds, NaN where the rank's step is not known.

  step = compute + runtime + pacing + waiting (three) + transfer + spread, on every rank and in
  every step.
  """

  step: np.ndarray  # [R, K]
  compute: np.ndarray  # [R, K] own
  runtime: np.ndarray  # [R, K] own
  pacing: np.ndarray  # [R, K] own
  waiting_compute: np.ndarray  # [R, K] earliness because the last rank computed longer
  waiting_runtime: np.ndarray  # [R, K] earliness because the last rank's gap was longer
  waiting_pacing: np.ndarray  # [R, K] earliness because the last rank was delayed longer
  # [C, K] the collective's own time: floor + contention; of several groups their ranks' mean
  transfer: np.ndarray
  spread: np.ndarray  # [R, K]
  waits: list[Waits]  # of each collective
  for_whom: list[np.ndarray]
  """[R, K] s by collective, mean over ranks, that are waited on each rank's account."""
  slow: np.ndarray  # [R, K] s waited because other groups' transfers were slow
  slow_groups: np.ndarray
  """[C, R, K] s, summed over ranks, that the slow transfer of the group whose first rank it is
  makes others wait later: part of `transfer`."""


def account(work: StepTimes) -> Account:
  """Splits every rank's step by what it was spent on. Waiting is charged to what made the last rank
  last.

  Earliness is split by the positive differences (last rank - this rank) in compute, runtime and
  pacing, scaled to its sum. Ahead of the second and later collectives of a step there is only
  compute. Ranks wait for those of their own group only; without any collective for nobody.
  """
  found = work.meetings
  arrival = work.arrival if work.synchronised else np.zeros_like(work.arrival)
  waits = step_through(found, arrival, work.wait, work.valid)
  alone = arrival.copy()
  alone[0] -= work.pacing
  waiting = [np.where(work.valid, 0.0, np.nan) for _ in range(3)]
  earliness, transfers = np.where(work.valid, 0.0, np.nan), np.zeros(work.valid.shape)
  transfer = np.full((len(waits), work.valid.shape[1]), np.nan)
  number = work.valid.sum(axis=0)
  chain: Iterable[Charge]
  if found.staged:
    waits, chain = beyond_bubbles(found, waits, alone, work.valid)
  else:
    chain = charges(found, waits, alone, np.full(work.valid.shape[1], not work.apart_steps))
  causes, for_whom = _causes(work, found), []
  weight = ratio(1.0, number, 0.0)
  slow, slow_groups = np.zeros(work.valid.shape), np.zeros(work.arrival.shape)
  for c, charge in enumerate(chain):
    if charge.slow:
      held_up = np.sum(charge.slow, axis=0)
      slow += held_up
      charge.add_slow(slow_groups)
      waits[c] = waits[c]._replace(early=waits[c].early - held_up)
    waited = waits[c]
    own_transfer = np.where(waited.takes, waited.transfer, 0.0)
    transfers += own_transfer
    transfer[c] = ratio(own_transfer.sum(axis=0), number)
    earliness += waited.early
    for_whom.append(charge.by_culprit(len(work.valid), weight))
    _charge_causes(waiting, charge, waited, causes)
    if c:
      waiting[0] += waited.own
      continue
    parts = split_by_cause(np.where(waited.there, waited.own, 0.0), waited.last,
                           [np.where(work.valid, own, 0.0) for own in work.causes])
    for charged, seconds in zip(waiting, parts, strict=True):
      charged += seconds
    waiting[0] += np.where(np.sum(parts, axis=0) > 0, 0.0, waited.own)
  transfer += slow_groups.sum(axis=1) * weight
  compute = work.compute + work.arrival[1:].sum(axis=0)
  return Account(
      step=work.step, compute=compute, runtime=work.runtime, pacing=work.pacing,
      waiting_compute=waiting[0], waiting_runtime=waiting[1], waiting_pacing=waiting[2],
      transfer=transfer, spread=work.wait.sum(axis=0) - earliness - transfers - slow, waits=waits,
      for_whom=for_whom, slow=slow, slow_groups=slow_groups)


def _causes(work: StepTimes, found: RunGroups) -> np.ndarray:
  """[3, R, K] parts of what makes a rank late at its first collective: compute, runtime, pacing; 1
  together. Of stages, where the step's busiest rank is waited for, of what makes it so."""
  joined = Grouped(found.joined)
  # of stages what they compute in the whole step: they wait for the busiest
  compute = work.compute + (work.arrival[1:].sum(axis=0) if found.staged else 0.0)
  own = [np.where(work.valid, x, 0.0) for x in (compute, work.runtime, work.pacing)]
  longer = np.stack([np.maximum(np.where(work.valid, x - joined.mean(x, work.valid), 0.0), 0.0)
                     for x in own])
  total = longer.sum(axis=0)
  parts = ratio(longer, total, 0.0)
  parts[0] += total <= 0
  return parts


def _charge_causes(waiting: list[np.ndarray], charge: Charge, waited: Waits,
                   causes: np.ndarray) -> None:
  """Adds what ranks wait beyond what the last rank was busy for longer just now, by what made the
  culprits late."""
  for i, (culprit, seconds, begun) in enumerate(zip(charge.culprits, charge.seconds, charge.begun,
                                                    strict=True)):
    rest = seconds if i else seconds - waited.own
    if not rest.any():
      continue
    at_begin = begun & (i > 0)
    for number, (part, total) in enumerate(zip(causes, waiting, strict=True)):
      total += np.where(at_begin, rest * np.take_along_axis(part, culprit, axis=0),
                        0.0 if number else rest)


# Of each collective the time that a rank waits for it, and the time that computing hides.
#
# A rank may compute, and enter other collectives, while one is under way. Who waits for one goes on
# only when it is over: so up to the last entry that a rank makes into another before that, it did
# not wait. With the collectives of a step in the order of their exits, on each rank's own clock:
#
#     L[c]       = the last entry, into whichever collective, before exit[c]
#     begin[c]   = max(L[c], exit[c-1])
#     exposed[c] = exit[c] - begin[c]                       what it is waited for, at most
#     hidden[c]  = of enter[c] .. begin[c] what lies in no other's exposed time: computing, at least
#     behind[c]  = what is left of exit[c] - enter[c]: others are waited for
#
# After `begin` a rank may compute as well, which no timestamp shows: hence at most, and at least.

def split(first: np.ndarray, enter: np.ndarray, leave: np.ndarray
          ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
  """Divides the time in which collectives are under way by what the rank does meanwhile.

  Args:
    first: [R, K] ns, where the rank's step begins.
    enter: [C, R, K] ns, not before that.
    leave: [C, R, K] ns, not before the entry; the same as it where a rank takes no part, or its
      step is not known.

  Returns:
    [C, R, K] s exposed, hidden and behind others: together, on every rank and in every step, exit -
    entry. And [R, K] s of computing while any is under way: each instant once.
  """
  size, first = len(leave), first[None]
  order = np.argsort(leave, axis=0, kind="stable")
  enter, leave = (np.take_along_axis(x, order, axis=0) for x in (enter, leave))
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

  return (by_collective(exposed), by_collective(hidden),
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


def overlap_of(work: StepTimes) -> tuple[np.ndarray, float]:
  """What of the collectives of some steps is waited for, and what computing hides.

  Returns:
    [3, C] s exposed, hidden and behind others, sums over steps of means over ranks, and s of
    computing while any is under way. Steps without a rank add nothing.
  """
  weight = ratio(1.0, work.valid.sum(axis=0), 0.0)
  if work.in_flight is None:
    exposed = [np.where(work.valid, wait, 0.0).sum(axis=0) @ weight for wait in work.wait]
    return np.array([exposed, *np.zeros((2, len(exposed)))]), 0.0
  *parts, computing = split(*work.in_flight)
  return (np.array([np.where(work.valid, values, 0.0).sum(axis=1) @ weight for values in parts]),
          float(np.where(work.valid, computing, 0.0).sum(axis=0) @ weight))
