"""Whole numbers of micro-batches, against all there are."""

import functools
import itertools

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st

from jaxpace.coordination.apportion import DataOrder, apportion, even
from tests.coordination.jobs import best
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


def test_even_counts():
  assert even(32, 4).tolist() == [8] * 4 and even(3, 4).tolist() == [1, 1, 1, 0]


# Each example exactly once an epoch, whatever the counts are and whenever they change.

@st.composite
def jobs(draw):
  """A data set, and the counts of step after step, of one mesh and then of another."""
  micro_batches, size = draw(st.integers(1, 9)), draw(st.integers(1, 4))
  examples, steps = draw(st.integers(1, 60)), draw(st.integers(1, 12))
  counts = []
  for k in range(steps):
    ranks = 4 if k < steps // 2 else draw(st.sampled_from([4, 3]))
    cuts = sorted(draw(st.lists(st.integers(0, micro_batches), min_size=ranks - 1,
                                max_size=ranks - 1)))
    counts.append(np.diff([0, *cuts, micro_batches]))
  return examples, size, micro_batches, counts


@hypothesis.given(jobs(), st.booleans())
@hypothesis.settings(max_examples=examples(150))
def test_every_example_once_an_epoch(job, shuffle):
  examples, size, micro_batches, every = job
  order = DataOrder(examples, size, micro_batches, seed=3, shuffle=shuffle)
  seen = []
  for step, counts in enumerate(every):
    # Each rank asks an order of its own, as after a restart of its process.
    parts = [DataOrder(examples, size, micro_batches, seed=3,
                       shuffle=shuffle).numbers(step, counts, rank)
             for rank in range(len(counts))]
    assert [part.shape for part in parts] == [(count, size) for count in counts]
    even = np.array([micro_batches, *[0] * (len(counts) - 1)])
    assert (np.concatenate(parts).tolist() == order.numbers(step, even,
                                                            0).tolist()), "the same global batch"
    seen += np.concatenate(parts).reshape(-1).tolist()
  for begin in range(0, len(seen) - examples + 1, examples):
    assert sorted(seen[begin:begin + examples]) == list(range(examples))
  last = seen[len(seen) - len(seen) % examples:]
  assert len(set(last)) == len(last)


def test_epochs_differ_and_a_seed_repeats_them():
  order = DataOrder(12, 3, 4, seed=5)
  first, second = (order.numbers(step, np.array([4]), 0).reshape(-1).tolist() for step in (0, 1))
  assert first != second and sorted(first) == sorted(second) == list(range(12))
  assert DataOrder(12, 3, 4, seed=5).numbers(1, np.array([4]), 0).reshape(-1).tolist() == second
  assert DataOrder(12, 3, 4, seed=6).numbers(1, np.array([4]), 0).reshape(-1).tolist() != second


def test_counts_of_another_job():
  order = DataOrder(12, 3, 4)
  with pytest.raises(ValueError, match="The counts add up to 5, and the global batch has 4"):
    order.numbers(0, np.array([3, 2]), 0)
  with pytest.raises(ValueError, match="count is -1"):
    order.numbers(0, np.array([-1, 3, 2]), 0)
  with pytest.raises(ValueError, match="There is no rank 2: the counts are of 2"):
    order.numbers(0, np.array([2, 2]), 2)
