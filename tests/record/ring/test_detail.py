"""Which steps are written in detail."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxpace.core.detail import is_detailed
from jaxpace.record.ring.collect import AROUND, FIRST, Detail


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
