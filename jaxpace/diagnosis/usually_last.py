"""Ranks that the job waits for in most of the steps at a cost, however much their lateness varies.

Whether a rank is late for good is told by the mean of its arrival over blocks of steps. A rank
whose lateness comes and goes (a loader that prefetches, say) or that hides in noise may pass no
such test, and yet be last in nine steps of ten.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from jaxpace.diagnosis.modes.case import COSTLY, JITTER, Finding
from jaxpace.diagnosis.totals import Summed, Totals
from jaxpace.trace.run import Run

# Chosen by hand; no measurement of them is published.
MOST = 0.5
"""Part of the steps, at least, in which such a rank is last ..."""
_FAR = 2.0
"""Standard deviations by which that is more often than by chance. Whom the job waits for at such a
cost in most of its steps is the one to look at, should it be so by chance in one run of many: the
report's table names it, too."""
_HALF = 0.5
"""... and that it costs `COSTLY` of the step, or this part of all waiting where that is so much."""
_FEW = 0.5
"""Beside pauses between steps: the median step in which a rank is last costs this part of the mean
one, or it is last by a hair in most of them, and what it costs is the pauses."""


class Usual(NamedTuple):
  """Ranks that are last in most of the steps: one, or all of a process or a host."""

  ranks: tuple[int, ...]
  often: float  # share of the steps
  cost: float  # what is waited for them, share of the step
  steady: float  # of their median step over their mean one


def usually_last(summed: Summed) -> list[Usual]:
  """Finds them, ranks before processes, processes before hosts.

  Args:
    summed: the run, added up.

  Returns:
    Those that are last clearly more often than by chance.
  """
  run, selected, totals, step_time = summed.run, summed.selected, summed.totals, summed.step_time
  there = np.flatnonzero(totals.present > 0)
  if len(there) < 2 or not run.collectives or not step_time > 0:
    return []
  whole = np.where(selected.mask, np.nan_to_num(totals.earliness.sum(axis=0)), 0.0)
  waiting = float(whole.sum()) / max(1, selected.size) / step_time
  found: list[Usual] = []
  if totals.groups is not None:
    return _in_groups(totals, there, step_time * max(1, selected.size))
  for groups in _groups(run, there):
    for own in groups:
      last = selected.mask & np.isin(totals.last_rank, own)
      often = float(last.sum()) / max(1, int(totals.present[own].max()))
      cost = float(whole[last].sum()) / max(1, selected.size) / step_time
      if often < MOST or any(set(usual.ranks) & set(own) for usual in found):
        continue
      if cost < COSTLY and not (waiting >= COSTLY and cost >= _HALF * waiting):
        continue
      if _beyond(often, len(own) / len(there), int(totals.present[own].max())) >= _FAR:
        found.append(Usual(tuple(own), often, cost,
                           float(np.median(whole[last]) / max(whole[last].mean(), 1e-12))))
  return found


def _in_groups(totals: Totals, there: np.ndarray, elapsed: float) -> list[Usual]:
  """The same where not all ranks meet: of each rank, against those that it meets, directly or by
  others."""
  assert totals.groups is not None
  joined, found = totals.groups.found.joined, []
  for rank in there.tolist():
    often, cost = (float(totals.last[rank]) / int(totals.present[rank]),
                   float(totals.blame[rank]) / elapsed)
    among = int((joined[there] == joined[rank]).sum())
    if often >= MOST and cost >= COSTLY and among > 1 and _beyond(
        often, 1 / among, int(totals.present[rank])) >= _FAR:
      found.append(Usual((rank,), often, cost, 1.0))
  return found


def _beyond(often: float, chance: float, steps: int) -> float:
  """Standard deviations of a share of the steps above what chance would give."""
  return (often - chance) / math.sqrt(chance * (1 - chance) / max(1, steps))


def unnamed(usual: Iterable[Usual], findings: Iterable[Finding]) -> list[int]:
  """The ranks of those that no finding names."""
  findings = list(findings)
  names = {rank for finding in findings for rank in finding.ranks}
  pauses = any(finding.mode == JITTER for finding in findings)
  return sorted({rank for own in usual if not names.intersection(own.ranks)
                 and not (pauses and own.steady < _FEW)
                 for rank in own.ranks})


def _groups(run: Run, there: np.ndarray) -> list[list[list[int]]]:
  """Single ranks, those of each process, those of each host; none that is the whole job."""
  levels: list[list[list[int]]] = [[[int(rank)] for rank in there]]
  for key in (lambda r: int(run.process_of_rank[r]), run.host_of_rank):
    together: dict[object, list[int]] = {}
    for rank in there.tolist():
      together.setdefault(key(rank), []).append(rank)
    levels.append([own for name, own in together.items()
                   if name not in (-1, "", None) and 1 < len(own) < len(there)])
  return levels


__all__ = ["Usual", "unnamed", "usually_last"]
