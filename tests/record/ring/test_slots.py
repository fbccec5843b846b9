"""Slots in unrolled order."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpace.core.detail import is_detailed
from jaxpace.core.observed import ObservedFunction, ObservedPlan
from jaxpace.core.plan import Loop
from jaxpace.record.ring import observed, plan
from jaxpace.record.ring.collect import AROUND, FIRST, Detail
from jaxpace.record.ring.plan import UNKNOWN_ITERATIONS, PlannedProgram
from tests.record.ring.programs import collective, program, programs
from tests.record.ring.test_executions import run_of


@given(st.data())
def test_slots_rise_as_the_program_runs(data):
  made = data.draw(programs(unknown=False))
  unrolled = PlannedProgram(made)
  _, truth = run_of(made, data.draw)
  slots = unrolled.slot(np.array([row[0] for row in truth], np.int64),
                        np.array([row[1] for row in truth], np.int64))
  assert slots.tolist() == list(range(len(unrolled)))


def test_layers_within_steps_are_named_by_their_turns():
  outer, inner = Loop("while.1", 2), Loop("while.2", 3)
  made = program(collective(0, name="all-gather.0"),
                 collective(1, name="all-gather.1", loops=[outer, inner]),
                 collective(2, name="all-reduce.2", loops=[outer]))
  unrolled = PlannedProgram(made, of=10)
  entries = [unrolled.entry(slot, 100 + slot) for slot in range(len(unrolled))]
  assert [entry["name"] for entry in entries] == [
      "all-gather.0", "all-gather.1", "all-gather.1@1", "all-gather.1@2", "all-reduce.2",
      "all-gather.1@3", "all-gather.1@4", "all-gather.1@5", "all-reduce.2@1"]
  assert [entry["slot"] for entry in entries] == list(range(100, 109))
  assert entries[5]["loops"] == [["while.1", 1, 2], ["while.2", 0, 3]] and entries[5]["of"] == 11
  assert entries[8]["loops"] == [["while.1", 1, 2]] and entries[8]["source"] == "model.py:12"
  assert unrolled.entry(8, 0, call=2)["name"] == "all-reduce.2@1#2"
  assert unrolled.entry(8, 0, call=2)["loops"][0] == ["call", 2, None]


def test_turns_nobody_knows_have_so_many_slots_and_later_ones_none():
  made = program(collective(0, loops=[Loop("while.1", None)]), collective(1))
  unrolled = PlannedProgram(made)
  assert len(unrolled) == UNKNOWN_ITERATIONS + 1
  found = unrolled.slot(np.array([0, 0, 0, 0, 1, 9]),
                        np.array([0, UNKNOWN_ITERATIONS - 1, UNKNOWN_ITERATIONS, 10**9, 0, 0]))
  assert found.tolist() == [0, UNKNOWN_ITERATIONS - 1, -1, -1, UNKNOWN_ITERATIONS, -1]


@given(st.integers(1, 400), st.integers(1, 400), st.integers(2, 60))
def test_a_step_with_more_than_fit_keeps_the_first_turns(trips, inner, most):
  made = program(collective(0, loops=[Loop("while.1", trips), Loop("while.2", inner)]),
                 collective(1, loops=[Loop("while.1", trips)]))
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(plan, "MOST", most)
    unrolled = PlannedProgram(made)
  assert len(unrolled) <= most
  if trips * inner + trips <= most:
    assert len(unrolled) == trips * inner + trips and unrolled.turns_kept is None
  for slot, (place, iteration) in enumerate(unrolled.slots):
    loops = unrolled.entry(slot, slot)["loops"]
    assert unrolled.slot(np.array([place]), np.array([iteration])).tolist() == [slot]
    assert iteration == (loops[0][1] * inner + loops[1][1] if place == 0 else loops[0][1])


def test_permutes_meet_with_whom_they_are_connected():
  made = program(collective(0, kind="collective-permute", groups=(),
                            pairs=((0, 1), (1, 0), (2, 3), (3, 2))))
  entry = PlannedProgram(made).entry(0, 0)
  assert (entry["groups"] == [[0, 1], [2, 3]]
          and entry["rank_pairs"] == [[0, 1], [1, 0], [2, 3], [3, 2]])


# Which steps are written in detail.

def fed(detail, steps, seconds, cuts):
  chosen, at = [], 0
  for cut in [*cuts, len(steps)]:
    cut = min(max(cut, at), len(steps))
    if cut > at:
      chosen.append(detail.choose(steps[at:cut], seconds[at:cut]))
    at = cut
  return np.concatenate(chosen) if chosen else np.zeros(0, bool)


@given(st.integers(2, 300), st.lists(st.integers(0, 900), max_size=4).map(sorted),
       st.integers(0, 899))
def test_a_slow_step_and_those_after_it_are_in_full_however_rows_come(every, cuts, slow):
  steps, seconds = np.arange(900), np.full(900, 0.01)
  seconds[0], seconds[slow] = np.nan, 0.1
  chosen = fed(Detail(every), steps, seconds, cuts)
  drawn = is_detailed(steps, every) | (steps < FIRST)
  around = (steps >= slow) & (steps <= slow + AROUND)
  assert (chosen[drawn]).all()
  if slow >= 64:  # the median is known by then
    assert chosen[around].all()
  assert not chosen[~drawn & ~around].any()


def test_the_first_steps_of_each_loop_are_in_full():
  detail = Detail(1000)
  steps = np.concatenate([np.arange(100), np.arange(101, 300)])
  chosen = fed(detail, steps, np.full(299, 0.01), [70, 110])
  assert steps[chosen].tolist() == sorted({
      *range(FIRST), *range(101, 101 + FIRST), *steps[is_detailed(steps, 1000)].tolist()})


def test_each_loop_has_slots_for_its_steps(monkeypatch):
  monkeypatch.setattr(observed, "MOST", 8)
  function = ObservedFunction()
  function.plan = ObservedPlan(tuple(
      program(*(collective(index) for index in range(5)), number=number, name=f"step{number}")
      for number in (1, 2, 3)))
  planned = observed.PlannedPrograms([function])
  planned.meet()
  planned.tell_step({"programs": ["step1"], "first_step": 0})
  for _ in range(2):
    assert (planned.block(1, 0), planned.block(2, 0)) == (0, -1)
    # More is known of the same loop.
    planned.tell_step({"programs": ["step1"], "first_step": 0, "beside": ["eval"]})
  planned.tell_step({"programs": ["step2"], "first_step": 90})
  assert (planned.block(2, 0), planned.block(3, 0)) == (5, -1)


def test_all_is_all():
  assert Detail(1).choose(np.arange(500), np.full(500, np.nan)).all()


def test_a_job_that_is_always_unusual_has_its_share_and_no_more():
  rng = np.random.default_rng(0)
  seconds = np.where(rng.random(20_000) < 0.3, 1.0, 0.1)
  detail = Detail(1000)
  chosen = np.concatenate([detail.choose(np.arange(k, k + 50), seconds[k:k + 50])
                           for k in range(0, 20_000, 50)])
  assert 0.02 < chosen.mean() < 0.13


def test_steps_without_known_times_are_drawn_only():
  detail = Detail(10)
  chosen = detail.choose(np.arange(1000), np.full(1000, np.nan))
  assert chosen.sum() == FIRST + is_detailed(np.arange(FIRST, 1000), 10).sum()
