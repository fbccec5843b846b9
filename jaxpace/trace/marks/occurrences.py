"""Each time a collective ran in an execution: when the device entered and left it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxpace.core.observed import ObservedCollective
from jaxpace.trace.marks.executions import Executions


class Occurrences(NamedTuple):
  """Times that collectives ran, by execution and entry; m of them."""

  # [m] int64, place of the execution
  execution: np.ndarray
  # [m] int64, index of the `ObservedCollective`
  collective: np.ndarray
  # [m] int64, how often it had run before in this execution
  turn: np.ndarray
  # [m] int64
  enter_ns: np.ndarray
  # [m] int64, never before the entry
  exit_ns: np.ndarray


def occurrences(executions: Executions, collectives: Sequence[ObservedCollective]) -> Occurrences:
  """Matches enter and exit marks.

  The t-th mark with a tag belongs to the t-th time that its collective ran. Where a collective has
  several tags, since the compiler combined several into it, the device enters at the last of its
  enter marks and leaves at the first of its exit marks. A tag may be the exit of several: of
  all-reduces that are summed, which compilers for GPUs make one. One that lacks a mark is left out.
  """
  marks = [(tag, place, leaves) for place, each in enumerate(collectives)
           for leaves, tags in enumerate((each.enter_tags, each.exit_tags)) for tag in tags]
  if not marks or not executions.tag.size:
    nothing = np.empty(0, np.int64)
    return Occurrences(nothing, nothing, nothing, nothing, nothing)
  size = max(tag for tag, _, _ in marks) + 1
  marks.sort()
  tags_of, place_of, side_of = np.array(marks, np.int64).T
  owners = np.bincount(tags_of, minlength=size + 1)
  begin = np.cumsum(owners) - owners
  tag = np.minimum(executions.tag, size).astype(np.int64)
  known = owners[tag] > 0
  execution, ns, tag = executions.of[known], executions.ns[known], tag[known]
  turn = _count_before(execution * (size + 1) + tag)
  owner = begin[tag]
  if owners.max() > 1:
    each = owners[tag]
    nth = np.arange(each.sum()) - np.repeat(np.cumsum(each) - each, each)
    execution, ns, turn = (np.repeat(column, each) for column in (execution, ns, turn))
    owner = np.repeat(owner, each) + nth
  # One number for each occurrence; entries at even places, exits at odd ones.
  turns = int(turn.max(initial=0)) + 1
  which = (execution * len(collectives) + place_of[owner]) * turns + turn
  key = 2 * which + side_of[owner]
  order = np.argsort(key, kind="stable")
  key, ns = key[order], ns[order]
  first = np.flatnonzero(np.concatenate([[True], key[1:] != key[:-1]])[:len(key)])
  if not first.size:
    nothing = np.empty(0, np.int64)
    return Occurrences(nothing, nothing, nothing, nothing, nothing)
  found, counts = key[first], np.diff(np.append(first, len(key)))
  last, earliest = np.maximum.reduceat(ns, first), np.minimum.reduceat(ns, first)
  tags = np.array([(len(each.enter_tags), len(each.exit_tags)) for each in collectives], np.int64)
  place = found // 2 // turns % len(collectives)
  whole = counts == tags[place, found % 2]
  pairs = np.flatnonzero(whole[:-1] & whole[1:] & (found[:-1] % 2 == 0)
                         & (found[1:] == found[:-1] + 1))
  number = found[pairs] // 2
  enter = last[pairs]
  leave = np.maximum(earliest[pairs + 1], enter)
  own = number // turns // len(collectives)
  by_time = np.lexsort((leave, enter, own))
  index = np.array([each.index for each in collectives], np.int64)
  return Occurrences(own[by_time], index[number // turns % len(collectives)][by_time],
                     (number % turns)[by_time], enter[by_time], leave[by_time])


def _count_before(values: np.ndarray) -> np.ndarray:
  """How many equal values stand before each."""
  order = np.argsort(values, kind="stable")
  ordered = values[order]
  fresh = np.concatenate([[True], ordered[1:] != ordered[:-1]])[:len(values)]
  starts = np.maximum.accumulate(np.where(fresh, np.arange(len(values)), 0))
  before = np.empty(len(values), np.int64)
  before[order] = np.arange(len(values)) - starts
  return before
