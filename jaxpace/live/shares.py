"""The data follow the counts: what this process loads for a step whose micro-batches are shared by
speed."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpace.coordination.apportion import DataOrder
from jaxpace.coordination.balancer import TOTAL, share_by_speed
from jaxpace.core import fields, own_context
from jaxpace.core.observed import ObservedFunction, observed_function
from jaxpace.core.pace import PaceState
from jaxpace.core.types import Balancer
from jaxpace.instrumentation import checks
from jaxpace.live.asked import ShareState
from jaxpace.live.control_file import ControlRequest
from jaxpace.live.speeds import SharedCounts


def shares(mesh: Mesh, *, total_micro_batches: int, examples: int | None = None,
           size: int | None = None, capacity: int | None = None,
           axis_name: str | Sequence[str] = "data", seed: int = 0, shuffle: bool = True,
           balancer: Balancer | None = None) -> Shares:
  """Says, step by step, how many micro-batches each rank runs, and which of the data set this
  process loads.

  By what the speeds of the observed step's ranks have shown. Where its
  `jaxpace.accumulate(..., fetch=True)` takes the batch as the trainer's own loader lays it out,
  counts are all there is to say:

      step = jaxpace.observe(jax.jit(train_step))
      feed = jaxpace.shares(mesh, total_micro_batches=32)
      for batch in batches:
        state, loss = step(state, batch, feed.next(step).counts)

  Where each process loads what its ranks run, and nothing moves between them:

      feed = jaxpace.shares(mesh, total_micro_batches=32, examples=len(source), size=8)
      for _ in range(steps):
        share = feed.next(step)
        state, loss = step(state, share.batch(source), share.counts)

  Every process reads in its own ring how long its devices were busy. Every fourth step, and down to
  once in some ten seconds while counts stay as they are, a small program beside the step gathers
  that, and all processes ask the balancer on the same numbers: all change their counts at one step.
  Counts may be asked for up to four steps ahead, by a thread that loads batches too.
  `feed.state()` belongs into a checkpoint, `feed.restore(state)` goes on from it.

  Every example is trained on once an epoch, whatever changes when (`DataOrder`). `next` never waits
  for the step under way: counts were decided eight to twelve steps before it. Where they change it
  waits until all processes say that they have decided on the same.

  Args:
    mesh: of the step.
    total_micro_batches: of all ranks of the job together, in a step; that of the balancer.
    examples: in the data set; none where the trainer's own loader loads.
    size: examples of a micro-batch, where there are `examples`.
    capacity: micro-batches that one rank has room for; that of the balancer. By default twice an
      even share, or all of them where the trainer's own loader loads.
    axis_name: the data axis of the mesh, or several.
    seed: of the shuffling, the same on every process.
    shuffle: whether each epoch has an order of its own.
    balancer: what decides; `jaxpace.share_by_speed` by default. `jaxpace.guard(balancer)` judges it
      on the running job.

  Raises:
    ValueError: an argument is out of range, or the mesh has no such axis.
  """
  checks.is_mesh(mesh)
  names = checks.axis_names(axis_name)
  checks.known_axes(names, mesh)
  fields.whole("total_micro_batches", total_micro_batches, 1)
  if (examples is None) != (size is None):
    raise ValueError("Give jaxpace.shares both examples, of the data set, and size, examples of a "
                     "micro-batch; or neither where the trainer's own loader loads.")
  order = None if examples is None or size is None else DataOrder(
      examples, size, total_micro_batches, seed, shuffle)
  ranks = int(np.prod([mesh.shape[name] for name in names]))
  if capacity is None:
    capacity = total_micro_batches if order is None else min(
        total_micro_batches, 2 * -(-total_micro_batches // ranks))
  room = fields.whole("capacity", capacity, 1, total_micro_batches, more=TOTAL)
  if ranks * room < total_micro_batches:
    raise ValueError(f"capacity={room} is too small: {ranks} ranks have room for {ranks * room} "
                     f"micro-batches, and total_micro_batches={total_micro_batches}.")
  if balancer is None and total_micro_batches < ranks:
    raise ValueError(f"total_micro_batches={total_micro_batches} is too few: each of the {ranks} "
                     "ranks runs at least one. Cut the batch into more; or give a balancer that "
                     "leaves ranks out, jaxpace.share_by_speed(..., least=0).")
  chosen = share_by_speed(total_micro_batches, room) if balancer is None else balancer
  if not isinstance(chosen, Balancer) or chosen.micro_batches != total_micro_batches:
    raise ValueError(f"balancer={chosen!r:.60} must be a Balancer of total_micro_batches="
                     f"{total_micro_batches}, such as jaxpace.share_by_speed("
                     f"{total_micro_batches}, capacity={room}); or leave it out.")
  return Shares(mesh, names, order, room, chosen)


class Shares:
  """Made by `shares`."""

  def __init__(self, mesh: Mesh, names: tuple[str, ...], order: DataOrder | None, capacity: int,
               balancer: Balancer):
    self.order, self.capacity = order, capacity
    self.sharding = NamedSharding(mesh, PartitionSpec(names if len(names) > 1 else names[0]))
    sizes = [mesh.shape[name] for name in names]
    self._ranks = int(np.prod(sizes))
    axes = [mesh.axis_names.index(name) for name in names]
    of_device = np.array([np.ravel_multi_index([place[axis] for axis in axes], sizes)
                          for place in np.ndindex(mesh.devices.shape)]).reshape(mesh.devices.shape)
    self.ranks = tuple(sorted({int(of_device[place])
                               for place, device in np.ndenumerate(mesh.devices)
                               if device.process_index == jax.process_index()}))
    self._make = functools.partial(SharedCounts, mesh, of_device, balancer, capacity)
    self._counts: SharedCounts | None = None
    self._lock = threading.Lock()

  def next(self, step: Any) -> Share:
    """Returns what to load for the next step. Once a step, on every process; up to four steps ahead
    of its calls, in another thread it waits for them.

    Args:
      step: the observed step, or what `jaxpace.recorded` made of it.

    Raises:
      ValueError: the step is not observed, or this came more than once a step. If it did so on some
        processes alone, the step raises on all of them, some steps later.
    """
    return self._share(*self._shared.next(_observed(step)))

  def share(self, step: int, counts: np.ndarray) -> Share:
    """Returns what this process loads for a step with these counts.

    Raises:
      ValueError: the counts are of another mesh, another global batch, or exceed the capacity.
    """
    counts = np.asarray(counts, np.int32)
    if counts.shape != (self._ranks,):
      raise ValueError(f"The counts are of {counts.size} ranks, and the mesh has {self._ranks} "
                       "along the data axis: they are of another mesh.")
    if counts.max() > self.capacity:
      raise ValueError(f"A rank is to run {counts.max()} micro-batches, and "
                       f"capacity={self.capacity}: give jaxpace.shares the capacity of "
                       "jaxpace.share_by_speed.")
    return self._share(step, counts)

  def _share(self, step: int, counts: np.ndarray) -> Share:
    if self.order is None:
      return Share(step, counts, self.ranks, (), self.capacity, self.sharding, 0)
    numbers = tuple(self.order.numbers(step, counts, rank) for rank in self.ranks)
    return Share(step, counts, self.ranks, numbers, self.capacity, self.sharding, self.order.size)

  def steer(self, request: ControlRequest, step: int) -> int:
    """Goes by what `jaxpace control` asks for: even counts where it is off, and its threshold as
    the least gain that counts change for. Returns the first step that does,
    eight after `step`, which comes next: counts of those between may have been asked for."""
    return self._shared.steer(request, step)

  def state(self) -> ShareState:
    """Returns what a checkpoint needs: the next step, its counts, and what the
    balancer knows; the same on all processes."""
    return self._shared.state

  def restore(self, state: Any) -> None:
    """Goes on from what `state` returned, before the first step. Of another number of ranks, or of
    another balancer, only the number of the step is taken: counts begin evenly, with a notice.

    Args:
      state: a `ShareState`, or the tuple or dict of its four that a checkpoint made of it. None:
        the checkpoint has none, all starts anew.

    Raises:
      TypeError: it is something else, or its numbers are damaged.
      ValueError: counts were asked for already.
    """
    self._shared.restore(state)

  @property
  def _shared(self) -> SharedCounts:
    """Made where it is asked for: it compiles, which who gives counts to `share` does without."""
    with self._lock:  # the loop may ask for the state while a loader's thread asks for counts
      if self._counts is None:
        self._counts = self._make()
      return self._counts

  def drawn(self) -> int:
    """Returns how many examples this process's ranks have been given before the next step: to skip
    in a restart, of jobs whose number of ranks did not change."""
    size = 0 if self.order is None else self.order.size
    return int(self.state().ran[list(self.ranks)].sum()) * size

  def __reduce__(self) -> Any:
    raise TypeError("What jaxpace.shares returns belongs to its process and devices, and is not "
                    "copied or pickled: a checkpoint holds feed.state(), and feed.restore(state) "
                    "goes on from that.")


def _observed(step: Any) -> ObservedFunction:
  found = observed_function(step) or observed_function(getattr(step, "step", None))
  if found is None:
    raise ValueError("feed.next takes the observed step, whose ranks it sees at work: step = "
                     "jaxpace.observe(jax.jit(train_step)). This is "
                     f"{'a pace state' if isinstance(step, PaceState) else repr(step):.60}: of an "
                     "instrumented step it is what jaxpace.observe makes of the compiled function.")
  return found


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
