"""Whole numbers of micro-batches, against all there are."""

import functools
import itertools

import hypothesis
import jax
import numpy as np
from hypothesis import strategies as st

from jaxpace.coordination.apportion import apportion, even
from tests.quick import examples

RANKS, TOTAL = 4, 10
EVERY = [counts for counts in itertools.product(range(TOTAL + 1), repeat=RANKS)
         if sum(counts) == TOTAL]


@functools.cache
def compiled(total):
  return jax.jit(lambda seconds, fixed, least, most, now: apportion(
      seconds, fixed, total, least, most, now))


SPEEDS = st.lists(st.floats(1e-4, 1e-1), min_size=RANKS, max_size=RANKS)
BOUNDS = st.tuples(st.integers(0, 2), st.integers(3, TOTAL))


@hypothesis.given(SPEEDS, st.sampled_from([0.0, 0.5, 3.0]), BOUNDS, st.sampled_from(EVERY))
@hypothesis.settings(max_examples=examples(150))
def test_no_other_counts_are_done_earlier(speeds, fixed, bounds, now):
  seconds = np.asarray(speeds, np.float32)
  least, most = (np.full(RANKS, bound, np.int32) for bound in bounds)
  found = np.asarray(compiled(TOTAL)(seconds, np.float32(fixed), least, most,
                                     np.asarray(now, np.int32)))
  assert found.sum() == TOTAL and (found >= least).all() and (found <= most).all()

  def ends(counts):
    return max((n + fixed) * float(s) for n, s in zip(counts, seconds, strict=True))

  best = min(ends(counts) for counts in EVERY
             if all(a <= n <= b for n, a, b in zip(counts, least, most, strict=True)))
  assert ends(found) <= best * (1 + 1e-5)


@hypothesis.given(st.integers(0, 2**31 - 1))
@hypothesis.settings(max_examples=examples(30))
def test_many_ranks_add_up_whatever_their_speeds(seed):
  """Against putting the next micro-batch where it ends earliest."""
  from jaxpace.simulation.shared_work import best
  rng = np.random.default_rng(seed)
  ranks, total = 96, 8 * 96
  seconds = (np.exp(rng.normal(0, 1, ranks)) * 10.0 ** rng.integers(-6, 1)).astype(np.float32)
  least, most = np.ones(ranks, np.int32), np.full(ranks, 24, np.int32)
  found = np.asarray(compiled(total)(seconds, np.float32(0), least, most, even(total, ranks)))
  assert found.sum() == total and (found >= least).all() and (found <= most).all()
  assert (found * seconds).max() <= best(seconds.astype(np.float64), total, 24) * (1 + 1e-5)


def test_of_counts_that_end_alike_the_nearer_are_taken():
  seconds, one, most = np.full(4, 1e-3, np.float32), np.ones(4, np.int32), np.full(4, 10, np.int32)
  for now in ([3, 3, 2, 2], [2, 3, 2, 3], [2, 2, 3, 3]):
    found = compiled(TOTAL)(seconds, np.float32(0), one, most, np.asarray(now, np.int32))
    assert np.asarray(found).tolist() == now


def test_of_counts_that_end_alike_the_slow_have_less():
  """10, 10, 10 and 8 ms, where 9, 9, 9, 5 would take 10 ms as well."""
  seconds, most = np.asarray([1, 1, 1, 2], np.float32), np.full(4, 16, np.int32)
  for now in ([8, 8, 8, 8], [9, 9, 9, 5], [9, 10, 9, 4]):
    found = np.asarray(compiled(32)(seconds, np.float32(0), np.ones(4, np.int32), most,
                                    np.asarray(now, np.int32)))
    assert sorted(found[:3].tolist()) == [9, 9, 10] and found[3] == 4
    assert now[3] != 4 or found.tolist() == now


def test_bounds_that_leave_no_choice():
  seconds = np.asarray([1e-3, 2e-3, 3e-3, 4e-3], np.float32)
  fixed = np.asarray([1, 2, 3, 4], np.int32)
  assert (np.asarray(compiled(TOTAL)(seconds, np.float32(1), fixed, fixed, fixed)).tolist()
          == [1, 2, 3, 4])


def test_even_counts():
  assert even(32, 4).tolist() == [8] * 4 and even(3, 4).tolist() == [1, 1, 1, 0]
