"""Where a rank is, mark by mark."""

import numpy as np
import pytest

from jaxpace.core.observed import ObservedPlan
from jaxpace.core.ring_layout import NUMBER
from jaxpace.hang.positions import ProgramsByKey, position
from tests.hang.machine import collective, program

OF = program([collective(0, [(0, 1)]), collective(1, [(0, 1)])], 2)


def after(*tags, now=None):
  """Rank 0 after these timestamps of a call, one a millisecond."""
  programs = ProgramsByKey()
  keys = programs.add(ObservedPlan((OF,)))
  written = [(NUMBER, 8), *((tag, 1_000_000 * (i + 1)) for i, tag in enumerate(tags))]
  tag = np.array([OF.number << 20 | tag for tag, _ in written], np.uint32)
  return position(0, 0, tag, np.array([ns for _, ns in written], np.int64), keys, programs, now)


@pytest.mark.parametrize("tags, pending, last", [
    ((0,), [], None), ((0, 2), [(0, 0)], (0, 0, False)), ((0, 2, 3), [], (0, 0, True)),
    ((0, 2, 3, 4), [(1, 0)], (1, 0, False)), ((0, 2, 3, 4, 5), [], (1, 0, True)),
    ((0, 2, 3, 4, 5, 1), [], (1, 0, True)), ((0, 2, 1), [], (0, 0, False))])
def test_each_mark_moves_it_on(tags, pending, last):
  found = after(*tags)
  assert found.current.pending == pending and found.current.last == last
  assert found.current.number == 8 and found.current.ended is (1 in tags)
  assert found.quiet is None and found.waiting is None


def test_what_comes_after_an_end_is_of_the_next_call_before_its_start_is_written():
  """The first collectives may wait for nothing but the program's arguments."""
  ended = (0, 2, 3, 4, 5, 1)
  early = after(*ended, 2)
  assert (early.current.number, early.current.ended, early.current.pending) == (9, False, [(0, 0)])
  begun = after(*ended, 2, 3, NUMBER, 0, 4)
  assert (begun.current.ended, begun.current.pending) == (False, [(1, 0)])
  assert begun.current.left == (1, 0)
  # A call that raised has no end: whose the timestamps before the next start are can't be told.
  assert after(0, 2, 3, NUMBER, 0, 4).current.left == (0, 0)


def test_times_are_from_its_own_clock():
  found = after(0, 2, 3, 4, now=8_000_000)
  assert found.quiet == pytest.approx(4e-3) and found.waiting == pytest.approx(4e-3)
  # Of two that it is in at once, the one entered last.
  found = after(0, 4, 2, now=8_000_000)
  assert found.current.pending == [(0, 0), (1, 0)] and found.waiting == pytest.approx(5e-3)
  # A clock that was read before the newest timestamp.
  assert after(0, 2, now=1_000_000).quiet == 0.0


def test_events_of_programs_that_are_not_in_the_plan_are_passed_over():
  programs = ProgramsByKey()
  found = position(0, 0, np.array([9 << 20, 9 << 20 | 2], np.uint32), np.array([1, 2]), {},
                   programs, None)
  assert found.executions == () and found.current is None
  assert position(0, 0, np.empty(0, np.uint32), np.empty(0, np.int64), {}, programs,
                  5).quiet is None
