"""Ranks as quick as the typical one: what they would be busy for, were what is wrong with them
mended.

A rank that is gone makes a step shorter than a mended one does: of fewer ranks that vary the last
one comes earlier. So a mended rank keeps a time of its own in each step: where it was as late as in
one of ten of its own steps, it is now as late as the typical rank in one of ten.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxpace.diagnose.groups import RunGroups
from jaxpace.diagnose.limits import CELLS, SAME
from jaxpace.diagnose.step_times import counted
from jaxpace.diagnose.totals import typical
from jaxpace.runs.run import Run

_LEAST = 256
"""Steps that quantiles are taken of at least, if there are as many."""
_QUANTILES = 129


class Repaired(NamedTuple):
  """How long ranks would be busy: quantiles of their gaps, and of the rest before each
  collective."""

  ranks: tuple[int, ...]
  own: np.ndarray  # [1 + C, ranks, Q] s, of these ranks
  typical: np.ndarray  # [1 + C, ranks, Q] s, of the typical rank
  rest: np.ndarray
  """[ranks] what each still does longer in a step than the typical of all those it is joined with,
  as the part of it that would be left: all that take its part may be slow, a stage of a
  pipeline."""

  def arrivals(self, arrival: np.ndarray, gap: np.ndarray, ranks: Sequence[int]) -> np.ndarray:
    """Arrivals with some of the ranks repaired, never longer than they are given.

    Args:
      arrival: [C, R, K] s.
      gap: [R, K] s, the part of the first collective's that lies between two steps.
      ranks: those to repair.
    """
    result = arrival.copy()
    for rank in set(ranks) & set(self.ranks):
      at = self.ranks.index(rank)
      rows = _mended(_rows(arrival[:, [rank]], gap[[rank]])[:, 0], self.own[:, at],
                     self.typical[:, at])
      result[:, rank] = rows[1:] * self.rest[at]
      result[0, rank] += rows[0]
    return result


def repair(run: Run, mask: np.ndarray, found: RunGroups, ranks: Sequence[int]) -> Repaired:
  """Looks at how long ranks are busy.

  The typical rank is the lower median, at each quantile, of those that take the same part in a
  step, and of a gap of all those that are joined.
  """
  joined, roles = found.joined, found.roles
  times = _sampled(run, mask)
  known = np.isfinite(times[0])
  there = known.any(axis=1)
  at = np.linspace(0, 1, _QUANTILES)
  quantiles = np.full((*times.shape[:2], _QUANTILES), np.nan)
  for rank in np.flatnonzero(there).tolist():
    quantiles[:, rank] = np.quantile(times[:, rank, known[rank]], at, axis=1,
                                     method="inverted_cdf").T
  usual = np.concatenate([_typical(quantiles[:1], joined), _typical(quantiles[1:], roles)])
  chosen = tuple(rank for rank in ranks if there[rank])
  whole = np.full(run.ranks, np.nan)
  whole[there] = np.nanmean(times[1:, there].sum(axis=0), axis=1)
  typical_whole, rest = typical(whole, joined), np.ones(len(chosen))
  for i, rank in enumerate(chosen):
    own = times[:, rank, known[rank]]
    left = float(_mended(own, quantiles[:, rank], usual[:, rank])[1:].sum(axis=0).mean())
    rest[i] = min(1.0, typical_whole[rank] / left) if left > 0 else 1.0
  return Repaired(chosen, quantiles[:, chosen], usual[:, chosen], rest)


def sampled(run: Run, mask: np.ndarray) -> np.ndarray:
  """[K] bool, counted steps evenly spread over the run, of which quantiles are taken."""
  steps = np.flatnonzero(mask)
  most = max(_LEAST, CELLS // max(1, run.ranks * len(run.collectives)))
  some = np.zeros(len(mask), bool)
  some[steps[::max(1, -(-len(steps) // most))]] = True
  return some


def _sampled(run: Run, mask: np.ndarray) -> np.ndarray:
  """[1 + C, R, K] gaps and busy times, s, of counted steps evenly spread over the run; NaN where
  not known."""
  some = sampled(run, mask)
  return np.concatenate([
      np.where(work.valid, _rows(work.undelayed, work.runtime), np.nan)[..., some[part]]
      for part, work in counted(run, some)], axis=2)


def _rows(arrival: np.ndarray, gap: np.ndarray) -> np.ndarray:
  """[1 + C, R, K] gaps, and what else is done before each collective."""
  rows = np.concatenate([gap[None], arrival])
  rows[1] -= gap
  return rows


def _typical(values: np.ndarray, group: np.ndarray) -> np.ndarray:
  """[1 + C, R, Q] of the typical rank of each one's group."""
  return np.moveaxis(typical(np.moveaxis(values, 1, 0), group), 0, 1)


def _mended(rows: np.ndarray, own: np.ndarray, typical: np.ndarray) -> np.ndarray:
  """[1 + C, K] rows of a rank, none longer than it is."""
  return np.stack([np.minimum(*of) for of in
                   zip(rows, map(_mapped, rows, own, typical), strict=True)])


def _mapped(values: np.ndarray, own: np.ndarray, typical: np.ndarray) -> np.ndarray:
  """[K] typical values at the quantiles that values have among the own ones, both [Q]; where many
  own ones are the same, at the middle of these."""
  low = np.searchsorted(own, values - SAME, side="left")
  high = np.searchsorted(own, values + SAME, side="right")
  return np.where(high - low > 1, typical[np.minimum((low + high) // 2, len(own) - 1)],
                  np.interp(values, own, typical))
