"""Who waits for whom in the collectives of a run, whether all ranks meet in all of them or not.

Ranks that meet in a collective are one group of it; groups that share ranks, in whatever
collectives, are joined. What is never joined is never compared: its clocks, and what its ranks wait
for, have nothing to do with each other.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxpace.diagnose.idea import last_pays, transfer
from jaxpace.diagnose.selected_steps import ratio
from jaxpace.runs.collectives import is_point_to_point
from jaxpace.runs.groups import RankGroups, read_groups
from jaxpace.runs.run import Run


class Grouped:
  """Reduces [R, K] values over groups of ranks and gives each rank its group's."""

  def __init__(self, groups: np.ndarray):
    """Sorts the ranks.

    Args:
      groups: [R] group of each rank, -1 for none.
    """
    members = np.flatnonzero(groups >= 0)
    self.order = members[np.argsort(groups[members], kind="stable")]
    ordered = groups[self.order]
    self.starts = np.flatnonzero(np.diff(ordered, prepend=-1))
    self.size = len(self.starts)
    self.of_rank = np.full(len(groups), self.size, np.int64)
    """[R] number of the group, from 0 without a gap; the number of groups for a rank of none."""
    self.of_rank[self.order] = np.repeat(np.arange(self.size),
                                         np.diff(np.append(self.starts, len(self.order))))
    sizes = np.bincount(self.of_rank[self.order], minlength=self.size)
    self.members = [self.order[np.isin(self.of_rank[self.order], np.flatnonzero(sizes == size))
                               ].reshape(-1, size) for size in np.unique(sizes)]
    """[groups, ranks] of those groups that have as many ranks."""
    self.whole = self.size == 1 and len(self.order) == len(groups)
    """Whether there is one group, of all ranks: these need no sorting."""

  def reduce(self, how: np.ufunc, values: np.ndarray) -> np.ndarray:
    """[R, ...] to [G, ...]."""
    if self.whole:
      return np.asarray(how.reduce(values, axis=0, keepdims=True))
    return how.reduceat(values[self.order], self.starts, axis=0)

  def spread(self, values: np.ndarray, fill: float) -> np.ndarray:
    """[G, ...] to [R, ...], not to be written to; `fill` for ranks of no group."""
    if self.whole:
      return np.broadcast_to(values, (len(self.of_rank), *values.shape[1:]))
    padding = np.full((1, *values.shape[1:]), fill, values.dtype)
    return np.concatenate([values, padding])[self.of_rank]

  def mean(self, values: np.ndarray, there: np.ndarray) -> np.ndarray:
    """[R, K] mean over the ranks of the group that are there; 0 where none is."""
    number = self.reduce(np.add, there.astype(np.int64))
    total = self.reduce(np.add, np.where(there, values, 0.0))
    return self.spread(ratio(total, number, 0.0), 0.0)

  def last_pays(self, arrival: np.ndarray, there: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[R, K] the rank of its group that each waits for, and s; itself, 0 where it is not there."""
    last = np.broadcast_to(np.arange(len(there))[:, None], there.shape).copy()
    early = np.zeros(there.shape)
    for members in self.members:
      at, own = last_pays(arrival[members], there[members])
      last[members] = np.take_along_axis(members[..., None], at, axis=1)
      early[members] = own
    last = np.where(there, last, np.arange(len(there))[:, None])
    return last, np.where(there, early, 0.0)

  def transfer(self, wait: np.ndarray, there: np.ndarray) -> np.ndarray:
    """[R, K] s that the collective takes the rank's group; NaN where that is not known."""
    took = np.full(there.shape, np.nan)
    for members in self.members:
      took[members] = transfer(wait[members], there[members])[:, None]
    return took


class RunGroups(NamedTuple):
  """The meetings of all C collectives, in the order of a step; R ranks."""

  of: tuple[RankGroups, ...]
  grouped: tuple[Grouped, ...]
  direct: np.ndarray
  """[C, R] bool: the ranks of the group left their last collective together, so that own exits are
  one origin."""
  joined: np.ndarray
  """[R] number of the ranks that are joined by any collectives, from 0 on; of their own where in
  none."""
  roles: np.ndarray
  """[R] number of those of them that take the same part in each collective: meet the others, send,
  receive, both or nothing."""
  alike: np.ndarray
  """[C] point-to-point transfers of as many bytes have one number; others one of their own."""
  levels: np.ndarray
  """[C, R] bool, ranks that meet all those they are joined with: they leave the collective
  together."""

  @property
  def all_meet(self) -> bool:
    """Whether every collective joins all ranks."""
    return bool(self.levels.all()) and not self.apart

  @property
  def apart(self) -> bool:
    """Whether there are ranks that nothing joins."""
    return bool(self.joined.max(initial=0) > 0)

  @property
  def staged(self) -> bool:
    """Whether ranks that are joined take different parts in a step, so that they may wait for each
    other though none is late."""
    return bool(self.roles.max(initial=0) > self.joined.max(initial=0))

  def receives(self, c: int) -> np.ndarray:
    """[R] bool, ranks to which the c-th collective brings something."""
    return _ends(self.of[c])[1]


def run_groups(run: Run) -> RunGroups:
  """Who meets in which collective: all ranks where nothing else is known. A run without collectives
  has one of all ranks, the end of its steps."""
  whole = RankGroups(np.zeros(run.ranks, np.int64))
  of = tuple(c.rank_groups or whole for c in run.collectives) or (whole,)
  key = tuple((m.groups.tobytes(), b"" if m.sources is None else m.sources.tobytes()) for m in of)
  bytes_of = [c.bytes for c in run.collectives] or [None]
  alike = tuple(-1 - c if m.sources is None or size is None else size
                for c, (m, size) in enumerate(zip(of, bytes_of, strict=True)))
  return _run_groups(key, alike, run.ranks)


def join_groups(of: tuple[RankGroups, ...], alike: Sequence[int] | None = None) -> RunGroups:
  """Who waits for whom in collectives of these meetings, in the order of a step."""
  ranks = len(of[0].groups)
  joined = _joined(of, ranks)
  numbers = range(len(of)) if alike is None else alike
  grouped = tuple(Grouped(_who_wait(m)) for m in of)
  levels = np.array([_levels(*one, joined) for one in zip(of, grouped, strict=True)])
  return RunGroups(of, grouped, _direct(of, ranks), joined, _roles(of, joined),
                   np.unique(numbers, return_inverse=True)[1], levels)


def joined_ranks(info: dict[str, Any]) -> list[list[int]] | None:
  """Ranks that any collectives of the plan in `run.json` join, list by list; None where these join
  all, or nothing is known of them."""
  planned, ranks = (info.get("plan") or {}).get("collectives"), info.get("ranks")
  if not planned or not ranks:
    return None
  of = [read_groups(info, entry, ranks, is_point_to_point(entry)) for entry in planned]
  if None in of:
    return None
  joined = _joined([one for one in of if one is not None], ranks)
  return [np.flatnonzero(joined == number).tolist() for number in range(joined.max() + 1)]


def fully_grouped(run: Run) -> list[np.ndarray] | None:
  """Parts of the run whose ranks all meet in each collective; None where there are none such.

  Each is ranks, in their order; together they are all ranks.
  """
  found = run_groups(run)
  if not found.levels.all():
    return None
  return [np.flatnonzero(found.joined == number) for number in np.unique(found.joined)]


@functools.lru_cache(maxsize=8)
def _run_groups(key: tuple[tuple[bytes, bytes], ...], alike: tuple[int, ...], ranks: int
              ) -> RunGroups:
  of = tuple(RankGroups(np.frombuffer(groups, np.int64),
                     np.frombuffer(sources, np.int64).reshape(-1, ranks) if sources else None)
             for groups, sources in key)
  return join_groups(of, alike)


def _levels(rank_groups: RankGroups, grouped: Grouped, joined: np.ndarray) -> np.ndarray:
  """[R] bool, whether each rank meets all those it is joined with."""
  if rank_groups.sources is not None:
    return np.zeros(len(joined), bool)
  inside = grouped.of_rank < grouped.size
  sizes = np.append(np.diff(np.append(grouped.starts, len(grouped.order))), -1)
  return np.asarray(inside & (sizes[grouped.of_rank] == np.bincount(joined)[joined]))


def _roles(of: tuple[RankGroups, ...], joined: np.ndarray) -> np.ndarray:
  """[R] ranks that are joined and take the same part in each collective, numbered."""
  parts = [joined, *(sends + 2 * receives for sends, receives in map(_ends, of))]
  return np.unique(np.array(parts), axis=1, return_inverse=True)[1].reshape(-1)


def _ends(rank_groups: RankGroups) -> tuple[np.ndarray, np.ndarray]:
  """[R] bool, ranks that bring something into a collective, and those to which it brings something:
  in other than point-to-point transfers all that meet do both."""
  if rank_groups.sources is None:
    return (rank_groups.groups >= 0,) * 2
  sends = np.isin(np.arange(rank_groups.sources.shape[1]), rank_groups.sources)
  return sends, np.asarray((rank_groups.sources >= 0).any(axis=0))


def _who_wait(rank_groups: RankGroups) -> np.ndarray:
  """[R] groups, without the ranks of which nobody receives and that receive from nobody."""
  if rank_groups.sources is None:
    return rank_groups.groups
  chain = _joined((rank_groups,), len(rank_groups.groups))
  return np.where(np.logical_or(*_ends(rank_groups)), chain, -1)


def _direct(of: tuple[RankGroups, ...], ranks: int) -> np.ndarray:
  """[C, R] whether all ranks of the rank's group left one and the same group of one collective
  before."""
  takes_part = [_who_wait(m) >= 0 for m in of]
  direct = np.zeros((len(of), ranks), bool)
  for c, rank_groups in enumerate(of):
    if rank_groups.sources is not None:
      continue
    left = np.full(ranks, -1, np.int64)  # which group of which collective before, as one number
    for back in range(len(of), 0, -1):  # the nearest comes last
      before = (c - back) % len(of)
      groups = of[before].groups
      together = of[before].sources is None
      left = np.where(takes_part[before], before * (ranks + 1) + groups if together else -1, left)
    for group in np.unique(rank_groups.groups[rank_groups.groups >= 0]).tolist():
      own = np.flatnonzero(rank_groups.groups == group)
      direct[c, own] = left[own].min() >= 0 and left[own].min() == left[own].max()
  return direct


def _joined(of: Sequence[RankGroups], ranks: int) -> np.ndarray:
  """[R] connected ranks, numbered by their first one."""
  number = np.arange(ranks)
  pairs = [np.empty((2, 0), np.int64)]
  for rank_groups in of:
    members = np.flatnonzero(rank_groups.groups >= 0)
    if rank_groups.sources is None and members.size:
      _, first, inverse = np.unique(rank_groups.groups[members], return_index=True,
                                    return_inverse=True)
      pairs.append(np.stack([members, members[first][inverse]]))
    for sources in () if rank_groups.sources is None else rank_groups.sources:
      targets = np.flatnonzero(sources >= 0)
      pairs.append(np.stack([targets, sources[targets]]))
  one, other = np.concatenate(pairs, axis=1)
  while True:
    low = np.minimum(number[one], number[other])
    before = number.copy()
    np.minimum.at(number, one, low)
    np.minimum.at(number, other, low)
    number = number[number]
    if (number == before).all():
      return np.unique(number, return_inverse=True)[1]


# What every rank waits in a collective, and for whom.
#
# Ranks of a group that left their last collective together are compared by their busy time since
# then: always where all ranks meet. Ranks that come from different groups have no common origin but
# this collective's end: there the wait beyond the group's shortest one counts. It is for the rank
# that waited least: `ledger` says on whose account. In a point-to-point transfer each rank waits
# for its source alone.

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


def waits_of(found: RunGroups, c: int, arrival: np.ndarray, wait: np.ndarray, valid: np.ndarray,
             before: np.ndarray, shortest: np.ndarray | None = None) -> Waits:
  """Says who waits for whom in one collective.

  Args:
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
    receives = there & found.receives(c)[:, None]
    return _from_sources(grouped, sources, arrival, wait, there, receives, before, shortest)
  took, direct = grouped.transfer(wait, there), found.direct[c, :, None]
  last, early = grouped.last_pays(arrival, there)
  if direct.all():
    return Waits(early, last, early, took, there, there, early)
  last = np.where(direct, last, grouped.last_pays(-wait, there)[0])
  longer = np.where(there, np.take_along_axis(arrival, last, axis=0) - arrival, 0.0)
  early = np.where(direct, early, np.where(there, wait - took, 0.0))
  return Waits(early, last, np.where(direct, early, np.clip(longer, 0.0, early)), took, there,
               there, early)


def _from_sources(grouped: Grouped, sources: np.ndarray, arrival: np.ndarray, wait: np.ndarray,
                  there: np.ndarray, receives: np.ndarray, before: np.ndarray,
                  shortest: np.ndarray | None) -> Waits:
  own_rank = np.broadcast_to(np.arange(len(there))[:, None], there.shape)
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


def step_through(found: RunGroups, arrival: np.ndarray, wait: np.ndarray, valid: np.ndarray
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


def _shortest(found: RunGroups, wait: np.ndarray, valid: np.ndarray) -> dict[int, np.ndarray]:
  """[R, K] s of the shortest wait of any rank in each step's transfers of as many bytes, between
  stages that are joined: the one whose source was there first."""
  joined = Grouped(found.joined)
  least: dict[int, np.ndarray] = {}
  for c, rank_groups in enumerate(found.of):
    if rank_groups.sources is not None:
      receives = valid & found.receives(c)[:, None]
      own, kind = np.where(receives, wait[c], np.inf), int(found.alike[c])
      least[kind] = np.minimum(least.get(kind, np.inf), own)
  return {kind: joined.spread(joined.reduce(np.minimum, own), np.nan)
          for kind, own in least.items()}
