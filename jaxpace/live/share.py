"""What a process loads for one step: its ranks' examples, in the room that there is for them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxpace.core import own_context


@dataclasses.dataclass(frozen=True)
class Share:
  """What this process loads for one step. R ranks along the data axis, L of them this process's."""

  step: int
  counts: np.ndarray
  """[R] int32, micro-batches of every rank: for `jaxpace.accumulate`, the same on all ranks."""
  ranks: tuple[int, ...]
  """[L] the ranks that this process loads for."""
  numbers: tuple[np.ndarray, ...]
  """L arrays [count, size] int64: the examples of each of them."""
  capacity: int
  sharding: NamedSharding
  size: int
  """Examples of a micro-batch; 0 where the trainer's own loader loads."""

  def take(self, source: Any) -> Any:
    """Loads this process's part.

    Args:
      source: arrays in memory, whose first axis is examples, or a tree of them; or anything that
        has an example at each number, `source[number]`, an array or a tree of arrays: Grain's
        `RandomAccessDataSource`, a list.

    Returns:
      The same tree in numpy: [L * capacity, size, ...], zeros where there is room to spare.
    """
    leaves = jax.tree.leaves(source)
    if (leaves and all(isinstance(leaf, (np.ndarray, jax.Array)) and leaf.ndim for leaf in leaves)
        and not isinstance(source, list)):
      return jax.tree.map(self._gathered, source)
    parts = [_stacked([_example(source, int(i)) for i in n.reshape(-1)], n.shape)
             for n in self.numbers]
    if parts and all(part is None for part in parts):
      # Nothing to run, and the room for it has the shape of an example all the same.
      parts[0] = jax.tree.map(lambda leaf: leaf[:0],
                              _stacked([source[0]] * self.size, (1, self.size)))
    return self._laid_out(parts)

  def draw(self, examples: Iterator[Any]) -> Any:
    """Takes the next examples of an iterator that belongs to this process, as many as its ranks
    run.

    For data that can't be had by number. What is drawn is trained on, and nothing is skipped; but a
    quick process goes through its part of the data sooner. `Shares.drawn` says how many it has
    drawn, for a restart.

    Args:
      examples: yields an example, an array or a tree of arrays.

    Returns:
      As `take`.

    Raises:
      StopIteration: it yields too few.
      TypeError: it is no iterator.
    """
    if not isinstance(examples, Iterator):
      raise TypeError("share.draw goes on where the last step ended, and this "
                      f"{type(examples).__name__} begins anew each time: give it one iterator, "
                      "made once before the loop, iter(...).")
    return self._laid_out([_stacked(self._drawn(examples, n.size), n.shape)
                           for n in self.numbers])

  def _drawn(self, examples: Iterator[Any], number: int) -> list[Any]:
    drawn = list(itertools.islice(examples, number))
    if len(drawn) < number:
      raise StopIteration(f"The iterator ended within step {self.step}: the ranks of this process "
                          f"take {sum(n.size for n in self.numbers)} examples in it. All processes "
                          "must end at the same step; an iterator that begins anew never ends.")
    return drawn

  def batch(self, source: Any) -> Any:
    """Loads this process's part and lays it out over the mesh: [R * capacity, size, ...], split
    along the data axis."""
    return self.put(self.take(source))

  def put(self, local: Any) -> Any:
    """Lays this process's part, of `take` or `draw`, out over the mesh. Every process calls it.

    Raises:
      ValueError: a leaf has no axis in front that this process's ranks divide.
    """
    # The user's data under the user's settings: its types are what they are without jaxpace.
    with own_context.unguarded():
      return jax.tree.map(self._placed, local)

  def _placed(self, leaf: Any) -> jax.Array:
    """[L * n, ...] of this process as its part of [R * n, ...]. As
    `jax.make_array_from_process_local_data`, which works out anew each time which rows are
    whose, in four times as long."""
    rows, rest = divmod(leaf.shape[0], len(self.ranks)) if leaf.ndim else (0, 1)
    if rest:
      raise ValueError(f"share.put takes trees of arrays like those of share.take, "
                       f"[{len(self.ranks) * self.capacity}, size, ...], and not of the shape "
                       f"{list(leaf.shape)}: this process loads for {len(self.ranks)} ranks.")

    def of_rank(index: Any) -> Any:
      first = rows * self.ranks.index((index[0].start or 0) // max(rows, 1))
      return leaf[first:first + rows]

    return jax.make_array_from_callback(
        (len(self.counts) * rows, *leaf.shape[1:]), self.sharding, of_rank)

  def _gathered(self, leaf: Any) -> np.ndarray:
    """Copies this process's examples of an array in memory, once: [L * capacity, size, ...]."""
    self._has_examples()
    leaf = np.asarray(leaf)
    room = np.zeros((len(self.numbers), self.capacity, self.size, *leaf.shape[1:]), leaf.dtype)
    for rows, numbers in zip(room, self.numbers, strict=True):
      if numbers.size and numbers.max() >= len(leaf):
        raise IndexError(f"There is no example {numbers.max()} in an array of {len(leaf)}: the "
                         "examples given to jaxpace.shares are more than the source has.")
      # Not "raise", which fills a copy first.
      np.take(leaf, numbers, axis=0, out=rows[:len(numbers)], mode="clip")
    return room.reshape(-1, *room.shape[2:])

  def _has_examples(self) -> None:
    if not self.size:
      raise ValueError("jaxpace.shares was given no examples to load: give it examples= and size=, "
                       "or load as ever and use share.counts alone, with "
                       "jaxpace.accumulate(..., fetch=True).")

  def _laid_out(self, parts: list[Any]) -> Any:
    """Puts the ranks' examples, trees of [count, size, ...] or None for none, into their room."""
    self._has_examples()
    some = next((part for part in parts if part is not None), None)
    if some is None:
      raise ValueError(f"This process's ranks, {', '.join(map(str, self.ranks))}, run no "
                       f"micro-batch in step {self.step}, so it does not know what one looks like. "
                       "Let every rank have one: share_by_speed(..., least=1).")

    def whole(*ranks: np.ndarray) -> np.ndarray:
      room = np.zeros((len(ranks), self.capacity, *ranks[0].shape[1:]), ranks[0].dtype)
      for own, rows in zip(room, ranks, strict=True):
        own[:len(rows)] = rows
      return room.reshape(-1, *room.shape[2:])

    none = jax.tree.map(lambda leaf: leaf[:0], some)
    return jax.tree.map(whole, *(none if part is None else part for part in parts))


def _example(source: Any, number: int) -> Any:
  try:
    return source[number]
  except (IndexError, KeyError, TypeError) as error:
    raise IndexError(f"The source, a {type(source).__name__}, gives no example {number} "
                     f"({type(error).__name__}: {error}): it must have an example at each number "
                     "below the examples given to jaxpace.shares, or be arrays in memory, all with "
                     "an axis of examples in front.") from error


def _stacked(rows: list[Any], shape: tuple[int, ...]) -> Any:
  if not rows:
    return None
  together = jax.tree.map(lambda *leaves: np.stack([np.asarray(leaf) for leaf in leaves]), *rows)
  return jax.tree.map(lambda leaf: leaf.reshape(*shape, *leaf.shape[1:]), together)
