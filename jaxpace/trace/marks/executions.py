"""Which events belong to which execution of a program, on one device."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxpace.core.marks import NUMBER, VALUES


class Executions(NamedTuple):
  """Executions of one program on one device that have ended, and their marks; n and m of them."""

  # [n] int64, rising: how many had started on this device before
  number: np.ndarray
  # [n] int64
  start_ns: np.ndarray
  # [n] int64
  end_ns: np.ndarray
  # [m] int64, place of the mark's execution in the arrays above; rising
  of: np.ndarray
  # [m] uint32, without the program's number
  tag: np.ndarray
  # [m] int64; from the tag `VALUES` on a number, no time
  ns: np.ndarray

  def picked(self, chosen: np.ndarray) -> Executions:
    """Some of them: [n] bool."""
    kept = chosen[self.of]
    return Executions(self.number[chosen], self.start_ns[chosen], self.end_ns[chosen],
                      (np.cumsum(chosen) - 1)[self.of[kept]], self.tag[kept], self.ns[kept])


MOST_MARKS = 1 << 21
"""Marks of an execution that has not ended, at most: one with more is dropped."""
_NONE = np.empty(0, np.int64)
NOTHING = Executions(_NONE, _NONE, _NONE, _NONE, np.empty(0, np.uint32), _NONE)


def join(parts: list[Executions]) -> Executions:
  """Joins successive executions of one program and device."""
  if len(parts) == 1:
    return parts[0]
  offsets = np.cumsum([0, *(len(each.number) for each in parts[:-1])])
  return Executions(
      np.concatenate([each.number for each in parts]),
      np.concatenate([each.start_ns for each in parts]),
      np.concatenate([each.end_ns for each in parts]),
      np.concatenate([each.of + offset for each, offset in zip(parts, offsets, strict=True)]),
      np.concatenate([each.tag for each in parts]), np.concatenate([each.ns for each in parts]))


def part(whole: Executions, begin: int, end: int) -> Executions:
  """Picks executions `begin` to `end`."""
  first, last = np.searchsorted(whole.of, [begin, end])
  chosen, marks_of = slice(begin, end), slice(first, last)
  return Executions(whole.number[chosen], whole.start_ns[chosen], whole.end_ns[chosen],
                    whole.of[marks_of] - begin, whole.tag[marks_of], whole.ns[marks_of])


class Splitter:
  """Splits the events of one program and device as they come.

  A device ends an execution before it begins the next one, and the end mark waits for all results.
  So what comes between two end marks belongs to one execution. What comes between an end mark and
  the next start mark does too: the first collectives may wait for nothing but the program's
  arguments, and so be entered before the start mark is written.
  """

  def __init__(self, start_tag: int = 0, end_tag: int = 1):
    """Begins; of an execution that is under way nothing is kept."""
    self._start, self._end = start_tag, end_tag
    self._tag, self._ns = np.empty(0, np.uint32), _NONE
    # Whether what is kept begins where an execution does.
    self._complete = True

  def lose(self) -> None:
    """Says that events are missing between what came and what comes: what has not ended is
    dropped."""
    self._tag, self._ns, self._complete = np.empty(0, np.uint32), _NONE, False

  def feed(self, tag: np.ndarray, ns: np.ndarray) -> Executions:
    """Takes events and gives the executions that they bring to an end.

    One that has not ended when the next begins is dropped.

    Args:
      tag: [k] uint32, without the program's number.
      ns: [k] int64.
    """
    tag, ns = np.concatenate([self._tag, tag]), np.concatenate([self._ns, ns])
    ends = np.flatnonzero(tag == self._end)
    ended, complete = int(ends[-1]) + 1 if ends.size else 0, self._complete
    self._tag, self._ns = tag[ended:], ns[ended:]
    self._complete = complete or ended > 0
    if len(self._tag) > MOST_MARKS:
      self.lose()
    if not ended:
      return NOTHING
    tag, ns = tag[:ended], ns[:ended]
    of = np.cumsum(tag == self._end) - (tag == self._end)
    # Where several began and one ended, the last one did.
    numbers = np.bincount(of[tag == NUMBER], minlength=len(ends))
    later = np.zeros(len(ends), np.int64)
    np.maximum.at(later, of[tag == NUMBER], np.flatnonzero(tag == NUMBER))
    uncut = numbers == 1
    uncut[0] &= complete
    kept = np.arange(len(tag)) >= np.where(uncut, 0, later)[of]
    has_start, start_ns = _first(of, ns, kept & (tag == self._start), len(ends))
    whole = (numbers > 0) & has_start
    marks = kept & whole[of] & (tag != NUMBER) & (tag != self._start) & (tag != self._end)
    timed = marks & (tag < VALUES)
    np.minimum.at(start_ns, of[timed], ns[timed])
    place = np.cumsum(whole) - 1
    return Executions(ns[later[whole]], start_ns[whole], ns[ends[whole]], place[of[marks]],
                      tag[marks], ns[marks])


def _first(of: np.ndarray, ns: np.ndarray, chosen: np.ndarray,
           count: int) -> tuple[np.ndarray, np.ndarray]:
  """Whether each execution has a chosen event, and the time of its first."""
  found, at = np.unique(of[chosen], return_index=True)
  has, times = np.zeros(count, bool), np.zeros(count, np.int64)
  has[found] = True
  times[found] = ns[chosen][at]
  return has, times
