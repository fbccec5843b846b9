"""What every rank waits in a collective that not all ranks meet in, and for whom.

Ranks of a group that left their last collective together are compared by their busy time since
then, as where all ranks meet. Ranks that come from different groups have no common origin but this
collective's end: there the wait beyond the group's shortest one counts. It is for the rank that
waited least: `ledger` says on whose account. In a point-to-point transfer each rank waits for its
source alone.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxpace.diagnosis.meetings import Grouped, Meetings


class Waits(NamedTuple):
  """Of one collective; [R, K], 0 where the rank is not there."""

  early: np.ndarray  # s, wait for a rank that came later
  last: np.ndarray  # int64, that rank; the rank itself where there is none
  own: np.ndarray  # s of `early` because that rank was busy for longer itself
  # s, what the collective takes the rank's group; NaN where the rank is not in it
  transfer: np.ndarray
  there: np.ndarray  # bool
  takes: np.ndarray  # bool, ranks to which something is transferred
  beyond: np.ndarray  # s, wait beyond the shortest of the group, whatever it is for


def waits_of(found: Meetings, c: int, arrival: np.ndarray, wait: np.ndarray, valid: np.ndarray,
             before: np.ndarray, shortest: np.ndarray | None = None) -> Waits:
  """Says who waits for whom in one collective.

  Args:
    found: who meets.
    c: which collective, in the order of a step.
    arrival: [R, K] s busy since the own last exit.
    wait: [R, K] s in the collective.
    valid: [R, K] ranks whose step is known.
    before: [R, K] s that each rank waited in its last collective beyond the shortest wait there.
    shortest: [R, K] s that transfers like this one take between stages; None for what is none.
  """
  grouped = found.grouped[c]
  there = valid & (grouped.of_rank < grouped.size)[:, None]
  own_rank = np.broadcast_to(np.arange(len(valid))[:, None], valid.shape)
  sources = found.of[c].sources
  if not grouped.size:
    nothing = np.zeros(valid.shape)
    return Waits(nothing, own_rank, nothing, np.full(valid.shape, np.nan), there, there, nothing)
  if sources is not None:
    return _from_sources(grouped, sources, arrival, wait, there, own_rank, before, shortest)
  reach = np.where(there, arrival, -np.inf)
  least = np.where(there, wait, np.inf)
  low = grouped.spread(grouped.reduce(np.minimum, least), np.nan)
  direct = found.direct[c, :, None]
  last = np.where(direct, grouped.first(there & (reach == grouped.highest(reach))),
                  grouped.first(there & (least == low)))
  last = np.where(there, last, own_rank)
  with np.errstate(invalid="ignore"):
    longer = np.where(there, np.take_along_axis(arrival, last, axis=0) - arrival, 0.0)
    early = np.where(direct, longer, np.where(there, wait - low, 0.0))
  return Waits(early, last, np.where(direct, early, np.clip(longer, 0.0, early)),
               np.where(np.isfinite(low), low, np.nan), there, there, early)


def _from_sources(grouped: Grouped, sources: np.ndarray, arrival: np.ndarray, wait: np.ndarray,
                  there: np.ndarray, own_rank: np.ndarray, before: np.ndarray,
                  shortest: np.ndarray | None) -> Waits:
  receives = there & np.asarray((sources >= 0).any(axis=0))[:, None]
  low = (grouped.spread(grouped.reduce(np.minimum, np.where(receives, wait, np.inf)), np.nan)
         if shortest is None else shortest)
  low = np.where(np.isfinite(low), low, np.nan)
  # Of several sources the one that comes latest, as far as busy times and waits before tell.
  last, most = own_rank, np.full(arrival.shape, -np.inf)
  late = np.where(there, arrival + before, -np.inf)
  for row in sources:
    source = np.where(row >= 0, row, np.arange(len(row)))
    reach = np.where((row >= 0)[:, None] & receives, late[source], -np.inf)
    last, most = np.where(reach > most, source[:, None], last), np.maximum(reach, most)
  with np.errstate(invalid="ignore"):
    beyond = np.where(receives & (last != own_rank), np.clip(wait - low, 0.0, None), 0.0)
    longer = np.where(there, np.take_along_axis(arrival, last, axis=0) - arrival, 0.0)
  own = np.clip(np.nan_to_num(longer), 0.0, beyond)
  if shortest is not None:  # what a stage waits beyond that is for others, late or not
    return Waits(beyond, last, own, np.where(receives, low, np.nan), there, receives, beyond)
  inherited = np.minimum(beyond - own, np.take_along_axis(before, last, axis=0))
  early = own + inherited
  # What is neither is the transfer itself.
  took = np.where(receives, wait - early, 0.0)
  number = np.maximum(grouped.reduce(np.add, receives.astype(np.int64)), 1)
  mean = grouped.spread(grouped.reduce(np.add, took) / number, np.nan)
  return Waits(early, last, own, np.where(receives & np.isfinite(low), mean, np.nan), there,
               receives, beyond)


def step_through(found: Meetings, arrival: np.ndarray, wait: np.ndarray, valid: np.ndarray
                 ) -> list[Waits]:
  """The waits of all [C, R, K] collectives of some steps, in their order."""
  first = np.zeros(valid.shape)
  waits: list[Waits] = []
  shortest = _shortest(found, wait, valid) if found.staged else {}
  # What was waited for at the end of a step is known the second time; only point-to-point transfers
  # ask for it.
  for _ in range(1 if found.direct.all() or not any(m.sources is not None for m in found.of)
                 else 2):
    waits, before = [], first
    for c in range(len(arrival)):
      waits.append(waits_of(found, c, arrival[c], wait[c], valid, before,
                            shortest.get(int(found.alike[c]))))
      before = np.where(waits[-1].there, waits[-1].beyond, before)
    first = np.zeros(valid.shape)
    first[:, 1:] = before[:, :-1]
  return waits


def _shortest(found: Meetings, wait: np.ndarray, valid: np.ndarray) -> dict[int, np.ndarray]:
  """[R, K] s of the shortest wait of any rank in each step's transfers of as many bytes, between
  stages that are joined: the one whose source was there first."""
  joined = Grouped(found.joined)
  least: dict[int, np.ndarray] = {}
  for c, meeting in enumerate(found.of):
    if meeting.sources is not None:
      receives = valid & found.receives(c)[:, None]
      own, kind = np.where(receives, wait[c], np.inf), int(found.alike[c])
      least[kind] = np.minimum(least.get(kind, np.inf), own)
  return {kind: joined.spread(joined.reduce(np.minimum, own), np.nan)
          for kind, own in least.items()}
