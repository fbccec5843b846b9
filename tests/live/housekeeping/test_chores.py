"""When a pause is due, and what becomes of its errors."""

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpace.live.housekeeping import chores


def chore(every=10, movable=False, hook=lambda: None, seconds=None, start=0):
  one = chores.Chore("it", hook, every, movable)
  one.begin(start)
  if seconds is not None:
    one.durations.append(seconds)
  return one


def steps_run(one, steps, slack=lambda step: None, stagger=0.0, start=0):
  done, errors = [], chores.Errors()
  for step in range(start + 1, start + steps + 1):
    if one.is_due(step, slack(step), stagger):
      expected = one.expected
      chores.run(one, step, errors)
      one.durations.clear()
      if expected is not None:
        one.durations.append(expected)
      done.append(step)
  return done


@pytest.mark.parametrize("start", [0, 7, 10, 1000])
def test_it_is_due_at_the_multiples_wherever_the_run_begins(start):
  assert steps_run(chore(start=start), 40, start=start) == [
      step for step in range(start + 1, start + 41) if step % 10 == 0]


def test_a_movable_one_runs_in_the_slack_of_the_second_half_of_its_period():
  assert steps_run(chore(every=100, movable=True,
                         seconds=0.05), 300, lambda step: 0.05) == [50, 150, 250]
  assert steps_run(chore(every=100, movable=True,
                         seconds=0.05), 300, lambda step: 0.05, stagger=0.5) == [63, 163, 263]


def test_less_slack_than_it_takes_leaves_it_where_it_is_due():
  assert steps_run(chore(every=100, movable=True,
                         seconds=0.05), 200, lambda step: 0.049) == [100, 200]


def test_unknown_durations_and_hooks_that_must_come_together_are_not_moved():
  assert steps_run(chore(every=100, movable=True), 200, lambda step: 1.0) == [100, 200]
  assert steps_run(chore(every=100, seconds=0.05), 200, lambda step: 1.0) == [100, 200]


@given(every=st.integers(1, 50), start=st.integers(0, 200), stagger=st.floats(0, 1),
       movable=st.booleans(), slacks=st.lists(st.one_of(st.none(), st.floats(0, 1)), min_size=200,
                                              max_size=200))
def test_it_runs_once_in_every_period_whatever_the_slack(every, start, stagger, movable, slacks):
  one = chore(every, movable, seconds=0.5, start=start)
  done = steps_run(one, 200, lambda step: slacks[step - start - 1], stagger, start)
  periods = [-(-step // every) for step in done]
  # the first period to end, and the last that is over
  first, over = start // every + 1, (start + 200) // every
  assert periods[:max(0, over - first + 1)] == list(range(first, over + 1))
  assert len(periods) <= max(0, over - first + 1) + 1  # and perhaps the one that has begun


def test_an_error_is_told_once_a_kind_and_counted(caplog):
  errors, raised = (chores.Errors(),
                    iter([OSError("disk full"), OSError("again"), ValueError("other"),
                          OSError("more")]))

  def hook():
    raise next(raised)

  one = chore(1, hook=hook)
  with caplog.at_level(logging.WARNING):
    for step in range(1, 5):
      chores.run(one, step, errors)
  assert errors.counts == {"it": 4}
  assert [record.message.split(". Training")[0] for record in caplog.records] == [
      "Housekeeping hook 'it' raised OSError at step 1: disk full",
      "Housekeeping hook 'it' raised ValueError at step 3: other"]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_what_is_meant_to_end_the_program_passes(kind):
  def hook():
    raise kind

  with pytest.raises(kind):
    chores.run(chore(hook=hook), 1, chores.Errors())


def test_the_expected_duration_is_the_longest_of_the_last_three():
  one = chore()
  for seconds in (9.0, 1.0, 3.0, 2.0):
    one.durations.append(seconds)
  assert one.expected == 3.0


def test_periods_may_count_from_any_step():
  one = chore(every=60)
  one.begin(140, origin=140)
  assert steps_run(one, 200, start=140) == [200, 260, 320]
