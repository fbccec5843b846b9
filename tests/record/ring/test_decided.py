"""What was decided for calls of observed functions, found by what devices executed."""

from jaxpace.core.observed import MOST_DECIDED, ObservedFunction, ObservedPlan, ObservedProgram
from jaxpace.record.columns import UNKNOWN, Range, StepCalls
from jaxpace.record.ring.calls import DecidedSteps, call_of


def function(*programs):
  made = ObservedFunction()
  made.runs = frozenset(programs)
  return made


def call(made, *decided):
  for counts in decided:
    made.decide(counts)
    made.calls += 1


def step(*ranges):
  return StepCalls(0, tuple(Range(*each) for each in ranges), UNKNOWN, {})


def decisions(decided, *steps):
  return [each.decisions for each in decided.beside(steps)]


def test_executions_of_several_programs_are_calls_in_their_order():
  started = {1: 2, 2: 1}  # three calls came before
  ran = [(1, 2), (2, 1), (7, 0), (1, 3), (1, 5)]
  assert [call_of(started, *each) for each in ran] == [3, 4, 5, 6, 8]


def test_each_step_has_what_was_decided_for_the_call_in_it():
  even, uneven = {"n": {0: 4}}, {"n": {0: 5}}
  made, other = function(1, 2), function(3)
  call(made, even, even, uneven, uneven)
  decided = DecidedSteps({})
  decided.note([(1, 0), (3, 0), (2, 0), (1, 1), (3, 1)], [other, made])
  decided.note([(2, 1)], [made, other])
  assert decisions(decided, step((1, 0, 1)), step((3, 0, 1), (2, 0, 1)), step((1, 1, 2)),
                   step((2, 1, 2)), step((3, 1, 2))) == [even, even, uneven, uneven, {}]
  # A second time, too: a guess of the steps comes first.
  assert decisions(decided, step((1, 0, 1)), step((2, 1, 2))) == [even, uneven]


def test_calls_before_the_recording_count_and_those_before_anything_was_decided_have_nothing():
  made = function(1, 2)
  call(made, *[{"n": {0: 4}}] * 5)
  made.calls = 12
  call(made, after := {"n": {0: 7}})
  decided = DecidedSteps({1: 7, 2: 5})
  decided.note([(2, 5)], [made])
  assert decisions(decided, step((2, 5, 6))) == [after]
  later = function(9)
  later.calls = 1
  call(later, after)
  decided.note([(9, 0), (9, 1)], [later])
  assert decisions(decided, step((9, 0, 1)), step((9, 1, 2))) == [{}, after]


def test_a_call_that_failed_has_what_was_decided_for_it_again():
  made = function(1)
  first, again = {"n": {0: 1}}, {"n": {0: 2}}
  made.decide(first)
  call(made, again)
  decided = DecidedSteps({})
  decided.note([(1, 0)], [made])
  assert decisions(decided, step((1, 0, 1))) == [again]


def test_calls_that_are_not_counted_have_nothing():
  made = function(1)
  call(made, {"n": {0: 1}})
  made.plan = ObservedPlan((ObservedProgram(2, "step", (0,), {}, (), bare="No clock."),))
  decided = DecidedSteps({})
  decided.note([(1, 0)], [made])
  assert decisions(decided, step((1, 0, 1))) == [{}]


def test_changes_that_nobody_records_are_not_kept_for_ever():
  made = function(1)
  call(made, *({"n": {0: at}} for at in range(3 * MOST_DECIDED)))
  assert len(made.decided) == MOST_DECIDED
  assert made.decided[-1] == (3 * MOST_DECIDED - 1, {"n": {0: 3 * MOST_DECIDED - 1}})
  decided = DecidedSteps({})
  decided.note([(1, at) for at in range(3 * MOST_DECIDED)], [made])
  assert len(decided._decided[1]) == MOST_DECIDED
