"""Sums of executions: time in collectives, and of what lies between them as far as phases tell.

A collective may stay open while its device computes and goes through others: one that overlaps with
the backward pass, say. Only its exposed time counts, after the last of the others that ended before
it. What lies between those is computing. So collectives are gone through in the order of their
exits.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

FORWARD, BACKWARD, UPDATE, COMPUTE = range(4)
PHASES = {"forward": FORWARD, "backward": BACKWARD, "update": UPDATE}
"""Any other phase is `COMPUTE`: it can't be told."""


class Sums(NamedTuple):
  """What n executions spent their time with; ns."""

  # [n] in collectives; where several overlap, the exposed time of each
  sync: np.ndarray
  # [n, 4] by phase of what was computed; -1 where nothing is known to belong to it
  computed: np.ndarray


def exposed(of: np.ndarray, enter: np.ndarray, leave: np.ndarray
            ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """From when to when each of m collectives was waited for: where they overlap, each instant counts
  once, for the one that ends first.

  Args:
    of: [m] the execution or step of each; those of different ones never overlap.
    enter: [m] ns.
    leave: [m] ns, not before `enter`.

  Returns:
    Their order by execution and exit, [m] places; and, in that order, when waiting began and ended,
    [m] ns each.
  """
  order = np.lexsort((enter, leave, of))
  of, enter, leave = of[order], enter[order], leave[order]
  begin = enter.copy()
  # Exits rise within an execution.
  same = of[1:] == of[:-1]
  begin[1:][same] = np.maximum(enter[1:], leave[:-1])[same]
  return order, np.minimum(begin, leave), leave


def sums(start: np.ndarray, end: np.ndarray, execution: np.ndarray, enter: np.ndarray,
         leave: np.ndarray, phase: np.ndarray) -> Sums:
  """Sums up executions.

  Between two collectives of the same phase, a device computes that phase; before the first one, if
  it is the forward pass's, the forward pass; after the last one, if it is the update's, the update.
  All else can't be told apart and is `COMPUTE`.

  Args:
    start: [n] ns, of the executions.
    end: [n] ns.
    execution: [m] place of each occurrence's execution, rising.
    enter: [m] ns.
    leave: [m] ns.
    phase: [m] one of the four numbers.
  """
  n = len(start)
  leave = np.maximum(leave, enter)
  enter = np.clip(enter, start[execution], end[execution])
  leave = np.clip(leave, enter, end[execution])
  order, begin, stop = exposed(execution, enter, leave)
  execution, phase = execution[order], phase[order]
  base = start[execution]
  begin, stop = begin - base, stop - base
  # A stretch of overlapping ones ends at its last.
  fresh = (execution[1:] != execution[:-1]) | (begin[1:] > stop[:-1])
  first = np.flatnonzero(np.concatenate([[True], fresh])[:len(execution)])
  last = np.append(first[1:], len(execution))[:len(first)] - 1
  of = execution[first]
  spans = begin[first], stop[last]
  before, after = phase[first], phase[last]
  sync = np.bincount(of, spans[1] - spans[0], n).astype(np.int64)

  computed, known = np.zeros((n, 4), np.int64), np.zeros((n, 4), bool)

  def add(which: np.ndarray, kind: np.ndarray, duration: np.ndarray) -> None:
    np.add.at(computed, (which, kind), duration)
    known[which, kind] = True

  opens = np.flatnonzero(np.concatenate([[True], of[1:] != of[:-1]])[:len(of)])
  closes = np.append(opens[1:], len(of))[:len(opens)] - 1
  add(of[opens], np.where(before[opens] == FORWARD, FORWARD, COMPUTE), spans[0][opens])
  add(of[closes], np.where(after[closes] == UPDATE, UPDATE, COMPUTE),
      (end - start)[of[closes]] - spans[1][closes])
  inner = np.flatnonzero(of[1:] == of[:-1])
  add(of[inner], np.where(after[inner] == before[inner + 1], after[inner], COMPUTE),
      spans[0][inner + 1] - spans[1][inner])
  bare = np.setdiff1d(np.arange(n), of)
  add(bare, np.full(len(bare), COMPUTE), (end - start)[bare])
  return Sums(sync, np.where(known, computed, -1))
