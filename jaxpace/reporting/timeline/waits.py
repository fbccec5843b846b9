"""Whom the ranks waited for in each collective of a timeline, and what the transfer itself took."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxpace.diagnosis.accounting import account, busy
from jaxpace.diagnosis.grouped_waits import Waits
from jaxpace.trace.run import MISSING, Run


class TimelineWaits(NamedTuple):
  """Of one collective."""

  last: np.ndarray  # [K] rank that the others waited for
  transfer: np.ndarray  # [K] ns; -1 where not known
  longest: np.ndarray  # [K] ns
  # [R, K] `last` and `transfer` of each; None: all alike
  of_rank: tuple[np.ndarray, np.ndarray] | None = None


def collective_waits(run: Run) -> list[TimelineWaits]:
  """Who was last and how long the transfer took, as the report accounts for them; by waits where it
  does not."""
  work = busy(run, slice(0, len(run.steps))) if run.collectives else None
  newest = run.attempt.max(axis=0)
  found = []
  split = account(work).waits if work is not None and work.meetings is not None else None
  for c, collective in enumerate(run.collectives):
    assert work is not None
    there = ((collective.enter_ns != MISSING) & (collective.exit_ns != MISSING)
             & (collective.attempt == newest))
    wait = np.where(there, np.clip(collective.exit_ns - collective.enter_ns, 0, None),
                    np.iinfo(np.int64).max)
    exposed = np.where(work.valid, work.wait[c] * 1e9, np.inf).min(axis=0)
    some, accounted = there.any(axis=0), work.valid.any(axis=0)
    arrival = np.where(work.valid, work.arrival[c], -np.inf)
    if split is not None:
      found.append(_in_groups(split[c], work.valid, wait, there))
      continue
    last = np.where(accounted, arrival.argmax(axis=0), wait.argmin(axis=0))
    least = np.where(some, wait.min(axis=0), -1)
    transfer = np.where(accounted, np.rint(np.where(accounted, exposed, 0)).astype(np.int64), least)
    found.append(TimelineWaits(last, transfer, np.where(there, wait, 0).max(axis=0)))
  return found


def _in_groups(waits: Waits, valid: np.ndarray, wait: np.ndarray, there: np.ndarray
               ) -> TimelineWaits:
  """The same where ranks wait for those of their own group only: of the group that waits
  longest."""
  longest = np.where(waits.there, waits.early, -1.0).argmax(axis=0)[None]
  last = np.take_along_axis(waits.last, longest, axis=0)[0]
  took = np.take_along_axis(waits.transfer, longest, axis=0)[0]
  transfer = np.where(valid.any(axis=0) & np.isfinite(took), np.rint(np.nan_to_num(took) * 1e9),
                      -1).astype(np.int64)
  of_rank = np.where(valid & np.isfinite(waits.transfer),
                     np.rint(np.nan_to_num(waits.transfer) * 1e9), -1)
  most = np.where(there & (waits.last == last), np.where(there, wait, 0), 0).max(axis=0)
  return TimelineWaits(last, transfer, most, (waits.last, of_rank.astype(np.int64)))
