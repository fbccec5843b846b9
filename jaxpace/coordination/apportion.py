"""Whole numbers of micro-batches for ranks of different speed, so that the last rank is done as
early as can be; and which examples each rank trains on with such counts."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxpace.core import fields

_BRANCHES, _ROUNDS = 64, 6
"""Thresholds looked at at once, and how often: enough to separate all positive float32."""


def even(micro_batches: int, ranks: int) -> np.ndarray:
  """Equal counts, the first ranks one more where they don't come out even: [ranks] int32.

  >>> even(10, 4)
  array([3, 3, 2, 2], dtype=int32)
  """
  each, rest = divmod(micro_batches, ranks)
  return (each + (np.arange(ranks) < rest)).astype(np.int32)


def apportion(seconds: jax.Array, fixed: jax.Array, micro_batches: int, least: jax.Array,
              most: jax.Array, now: jax.Array) -> jax.Array:
  """Shares out micro-batches so that max over ranks of s (n + f) is least.

  For a threshold T a rank is done in time with at most floor(T / s - f) micro-batches, in its
  bounds. The least T for which these add up to enough is found by a search in 64 branches, the same
  arithmetic on all ranks. What the counts just below T lack of the total goes to ranks that finish
  at T itself: to the fastest, which are done soonest with it, and among ranks of one speed first to
  those that have that many now.

  Args:
    seconds: [R] float32 s, time s of a micro-batch on each rank; finite and above 0.
    fixed: [] float32, rest f of a step in micro-batches, the same on all.
    micro_batches: what the counts add up to; between the sums of `least` and `most`.
    least: [R] int32, least counts.
    most: [R] int32, greatest counts.
    now: [R] int32, the counts now: of two ways that are as good the nearer is taken.

  Returns:
    [R] int32.
  """
  def within(threshold: jax.Array) -> jax.Array:
    # [..., R]. Bounded as floats: a quotient may be beyond int32.
    wanted = jnp.floor(threshold[..., None] / seconds - fixed)
    return jnp.clip(wanted, least.astype(jnp.float32), most.astype(jnp.float32)).astype(jnp.int32)

  # By the bits of T, which order as it does: sums of floats are rounded as XLA happens to fuse
  # them.
  low = jnp.zeros((), jnp.int32)
  longest = jnp.max(seconds * (most.astype(jnp.float32) + fixed)) * np.float32(1.001)
  high = jax.lax.bitcast_convert_type(longest, jnp.int32)
  cuts = jnp.arange(1, _BRANCHES + 1, dtype=jnp.int32)
  # What was found for a threshold is kept, not computed again: XLA may round it another way
  # elsewhere.
  below, above = least, most
  for _ in range(_ROUNDS):
    whole, rest = jnp.divmod(high - low, np.int32(_BRANCHES))
    thresholds = low + whole * cuts + (rest * cuts) // np.int32(_BRANCHES)
    found = within(jax.lax.bitcast_convert_type(thresholds, jnp.float32))
    enough = jnp.sum(found, axis=-1, dtype=jnp.int32) >= np.int32(micro_batches)
    ends = jnp.any(enough)  # else only at `high`
    first = jnp.where(ends, jnp.argmax(enough), _BRANCHES - 1)
    before = jnp.maximum(first - 1, 0)
    above = jnp.where(ends, found[first], above)
    below = jnp.where(first == 0, below, found[before])
    low, high = jnp.where(first == 0, low, thresholds[before]), thresholds[first]
  lacking = np.int32(micro_batches) - jnp.sum(below, dtype=jnp.int32)
  order = jnp.lexsort((-jnp.clip(now - below, 0, above - below), seconds))
  # To those who have room, the first first.
  room = (above - below)[order]
  before_it = jnp.cumsum(room, dtype=jnp.int32) - room
  return below.at[order].add(jnp.clip(lacking - before_it, 0, room))


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
