"""Which examples a step trains on, and which rank runs them: a function of the step, the counts and
a seed alone."""

from __future__ import annotations

import functools

import numpy as np

from jaxpace.core import fields


class DataOrder:
  """The order in which examples are trained on, whoever runs them.

  Step k trains on the examples at the places k G to (k + 1) G - 1 of a sequence, G being the global
  batch; the sequence is one shuffled epoch after another, so a step may hold the end of one and the
  beginning of the next. Within the step micro-batches follow one another, rank by rank: the first
  `counts[0]` are rank 0's. So each example is trained on once an epoch, whatever the counts are and
  whenever they change, and a restart goes on where the number of the step says.

  >>> order = DataOrder(examples=10, size=2, micro_batches=3, seed=0, shuffle=False)
  >>> order.numbers(0, np.array([2, 1]), 0).tolist(), order.numbers(0, np.array([2, 1]), 1).tolist()
  ([[0, 1], [2, 3]], [[4, 5]])
  >>> order.numbers(1, np.array([0, 3]), 1).tolist()     # the epoch ends within this step
  [[6, 7], [8, 9], [0, 1]]

  Args:
    examples: in the data set.
    size: examples of a micro-batch.
    micro_batches: of the global batch.
    seed: of the shuffling, the same on every process.
    shuffle: whether each epoch has an order of its own; else as they lie.

  Raises:
    ValueError: an argument is out of range.
  """

  def __init__(self, examples: int, size: int, micro_batches: int, seed: int = 0,
               shuffle: bool = True):
    self.examples = fields.whole("examples", examples, 1)
    self.size = fields.whole("size", size, 1)
    self.micro_batches = fields.whole("micro_batches", micro_batches, 1)
    self.seed = fields.whole("seed", seed, 0)
    self.shuffle = fields.truth("shuffle", shuffle)
    # Two: a step may hold the end of one epoch and the beginning of the next.
    self._epoch = functools.lru_cache(maxsize=2)(self._permuted)

  def numbers(self, step: int, counts: np.ndarray, rank: int) -> np.ndarray:
    """Numbers of the examples that a rank trains on in a step: [counts[rank], size] int64, to read
    only.

    Raises:
      ValueError: the counts are of another global batch, or there is no such rank.
    """
    # In each step of a job: plain numbers, and slices of what is there.
    each = np.asarray(counts).tolist()
    if min(each) < 0:
      raise ValueError(f"A rank's count is {min(each)}: numbers of micro-batches are not below 0, "
                       "these are damaged.")
    if sum(each) != self.micro_batches:
      raise ValueError(f"The counts add up to {sum(each)}, and the global batch has "
                       f"{self.micro_batches} micro-batches: they are of another job, or damaged.")
    if not 0 <= rank < len(each):
      raise ValueError(f"There is no rank {rank}: the counts are of {len(each)}.")
    begin = (int(step) * self.micro_batches + sum(each[:rank])) * self.size
    end = begin + each[rank] * self.size
    parts: list[np.ndarray] = []
    while begin < end or not parts:
      epoch, within = divmod(begin, self.examples)
      parts.append(self._epoch(epoch)[within:within + end - begin])
      begin += len(parts[-1])
    return (parts[0] if len(parts) == 1 else np.concatenate(parts)).reshape(-1, self.size)

  def _permuted(self, epoch: int) -> np.ndarray:
    order = (np.random.default_rng([self.seed, epoch]).permutation(self.examples) if self.shuffle
             else np.arange(self.examples))
    order.setflags(write=False)
    return order
