"""Each example exactly once an epoch, whatever the counts are and whenever they change."""

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from jaxpace.coordination.data_order import DataOrder
from tests.quick import examples


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
