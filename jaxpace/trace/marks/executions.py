"""Which events belong to which execution of a program, on one device."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxpace.core.marks import NUMBER


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
  # [m] int64
  ns: np.ndarray


MOST_MARKS = 1 << 21
"""Marks of an execution that has not ended, at most: one with more is dropped."""
_NONE = np.empty(0, np.int64)
NOTHING = Executions(_NONE, _NONE, _NONE, _NONE, np.empty(0, np.uint32), _NONE)


class Splitter:
  """Splits the events of one program and device as they come."""

  def __init__(self, start_tag: int = 0, end_tag: int = 1):
    """Begins; events before the first start are dropped."""
    self._start, self._end = start_tag, end_tag
    self._tag, self._ns = np.empty(0, np.uint32), _NONE

  def lose(self) -> None:
    """Says that events are missing between what came and what comes: what has not ended is
    dropped."""
    self._tag, self._ns = np.empty(0, np.uint32), _NONE

  def feed(self, tag: np.ndarray, ns: np.ndarray) -> Executions:
    """Takes events and gives the executions that they bring to an end.

    One that has not ended when the next begins is dropped.

    Args:
      tag: [k] uint32, without the program's number.
      ns: [k] int64.
    """
    tag, ns = np.concatenate([self._tag, tag]), np.concatenate([self._ns, ns])
    begins = np.flatnonzero(tag == NUMBER)
    if not begins.size:
      self.lose()
      return NOTHING
    # Everything before the first number belongs to an execution that began unseen.
    tag, ns, begins = tag[begins[0]:], ns[begins[0]:], begins - begins[0]
    of = np.cumsum(tag == NUMBER) - 1
    has_start, start_ns = _first(of, ns, tag == self._start, len(begins))
    has_end, end_ns = _first(of, ns, tag == self._end, len(begins))
    whole = has_start & has_end
    if whole[-1]:
      self.lose()
    else:
      self._tag, self._ns = tag[begins[-1]:], ns[begins[-1]:]
      if len(self._tag) > MOST_MARKS:
        self.lose()
    place = np.cumsum(whole) - 1
    marks = whole[of] & (tag != NUMBER) & (tag != self._start) & (tag != self._end)
    return Executions(ns[begins][whole], start_ns[whole], end_ns[whole], place[of[marks]],
                      tag[marks], ns[marks])


def _first(of: np.ndarray, ns: np.ndarray, chosen: np.ndarray,
           count: int) -> tuple[np.ndarray, np.ndarray]:
  """Whether each execution has a chosen event, and the time of its first."""
  found, at = np.unique(of[chosen], return_index=True)
  has, times = np.zeros(count, bool), np.zeros(count, np.int64)
  has[found] = True
  times[found] = ns[chosen][at]
  return has, times
