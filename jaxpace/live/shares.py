"""The data follow the counts: what this process loads for a step whose micro-batches are shared by
speed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpace.coordination.balancer import TOTAL, share_by_speed
from jaxpace.coordination.data_order import DataOrder
from jaxpace.coordination.share_work import SharedWork, found
from jaxpace.core import fields, own_context, packing
from jaxpace.core.observed import ObservedFunction, observed_function
from jaxpace.core.pace import PaceState
from jaxpace.core.packing import Packed
from jaxpace.core.types import Balancer
from jaxpace.instrumentation import checks
from jaxpace.live.control_file import ControlRequest
from jaxpace.live.share import Share
from jaxpace.live.speeds import SharedCounts, ShareState


def shares(mesh: Mesh, *, total_micro_batches: int, examples: int | None = None,
           size: int | None = None, capacity: int | None = None,
           axis_name: str | Sequence[str] = "data", seed: int = 0, shuffle: bool = True,
           balancer: Balancer | None = None) -> Shares:
  """Says, step by step, how many micro-batches each rank runs, and which of the data set this
  process loads.

  Of an observed step by what its ranks' speeds have shown. Where the step's
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
  `feed.state()` belongs into a checkpoint, `feed.restore(state)` goes on from it. Of an
  instrumented step with `jaxpace.share_work` the counts are in the pace state:

        share = feed.next(pace)
        pace, (state, loss) = step(pace, state, share.batch(source), share.counts)

  Every example is trained on once an epoch, whatever changes when (`DataOrder`). `next` never waits
  for the step under way: of an instrumented step counts were decided two steps before it, of an
  observed one eight to twelve.

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
    balancer: of an observed step; `jaxpace.share_by_speed` by default.

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
    self._made = functools.partial(SharedCounts, mesh, of_device, balancer, capacity)
    self._step: int | None = None
    self._ahead: Callable[[], tuple[int, SharedWork]] | None = None

  def next(self, pace: Any) -> Share:
    """Returns what to load for the next step. Once a step, on every process; of an observed step
    up to four steps ahead of its calls, in another thread it waits for them.

    Args:
      pace: the observed step, or what `jaxpace.recorded` made of it; of an instrumented one the
        pace state that it will be given, which may be donated to it afterwards.

    Raises:
      ValueError: the step is not observed, it shares out no work, or its counts are of another mesh
        or another global batch; or this came more than once a step. If it did so on some processes
        alone, the step raises on all of them, some steps later.
    """
    if callable(pace):
      return self._share(*self._shared.next(_observed(pace)))
    if not isinstance(pace, PaceState):
      raise ValueError("feed.next takes the observed step, step = jaxpace.observe(jax.jit("
                       "train_step)), or the pace state of an instrumented one; this is a "
                       f"{type(pace).__name__}.")
    later = _copied(pace)
    if self._step is None or self._ahead is None:
      # The first one: there is nothing to overlap yet.
      self._step, work = later()
      counts = work.counts[0]
    else:
      step, work = self._ahead()
      if step != self._step:
        raise ValueError(f"feed.next was given the pace state of step {step}, and step "
                         f"{self._step} was to come: it comes once a step, with the pace state "
                         "that the last step returned. After a restart make the feed anew.")
      self._step, counts = step + 1, work.counts[1]
    self._ahead = later
    return self.share(self._step, np.asarray(counts))

  def share(self, step: int, counts: np.ndarray) -> Share:
    """Returns what this process loads for a step with these counts.

    Raises:
      ValueError: the counts are of another mesh, another global batch, or exceed the capacity.
    """
    counts = np.asarray(counts, np.int32)
    if counts.shape != (self._ranks,):
      raise ValueError(f"The counts are of {counts.size} ranks, and the mesh has {self._ranks} "
                       "along the data axis: they are of another mesh. A pace state from a "
                       "checkpoint goes through jaxpace.restore_pace.")
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
    """Goes by what `jaxpace control` asks for, of an observed step: even counts where it is off,
    and its threshold as the least gain that counts change for. Returns the first step that does,
    eight after `step`, which comes next: counts of those between may have been asked for."""
    return self._shared.steer(request, step)

  def state(self) -> ShareState:
    """Returns what a checkpoint of an observed step needs: the next step, its counts, and what the
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

  @functools.cached_property
  def _shared(self) -> SharedCounts:
    """Made where it is asked for: it compiles, which an instrumented step does without."""
    return self._made()

  def drawn(self, pace: PaceState | None = None) -> int:
    """Returns how many examples this process's ranks have been given before the next step: to skip
    in a restart.

    Of jobs whose number of ranks did not change. Waits for the step under way.

    Args:
      pace: the pace state of an instrumented step; nothing of an observed one.
    """
    ran = np.asarray(self.state().ran if pace is None else _copied(pace)()[1].ran)
    size = 0 if self.order is None else self.order.size
    return int(ran[list(self.ranks)].astype(np.int64).sum()) * size


def _observed(step: Any) -> ObservedFunction:
  found = observed_function(step) or observed_function(getattr(step, "step", None))
  if found is None:
    raise ValueError(f"feed.next needs to see how long ranks are busy, and {step!r:.60} is not "
                     "observed: give it step = jaxpace.observe(jax.jit(train_step)), or the pace "
                     "state of an instrumented step.")
  return found


def _copied(pace: PaceState) -> Callable[[], tuple[int, SharedWork]]:
  """Begins to copy the step's number and the shared work's state to the host; what it returns waits
  for them."""
  packed = checks.packed_pacer(pace)
  if packed is None:
    raise ValueError("The step shares out no work: jaxpace.instrument was given no pacer. Give it "
                     "pacer=jaxpace.share_work(jaxpace.share_by_speed(...)).")

  def of_one_rank(leaf: jax.Array) -> jax.Array:
    # A copy: the pace state may be donated to the step that comes.
    copy = jnp.copy(leaf.addressable_shards[0].data)
    copy.copy_to_host_async()
    return copy

  with own_context.on(packed.words.addressable_shards[0].data):
    copies = jax.tree.map(of_one_rank, (pace.step, packed))

  def state() -> tuple[int, SharedWork]:
    here: tuple[np.ndarray, Packed] = jax.tree.map(own_context.fetch, copies)
    one: SharedWork = found(packing.unpack(here[1]))
    counts, ran = np.asarray(one.counts), np.asarray(one.ran)
    # The axis of ranks in front, of `shard_map`.
    return int(here[0].reshape(-1)[0]), one._replace(
        counts=counts.reshape(-1, *counts.shape[-2:])[0], ran=ran.reshape(-1, ran.shape[-1])[0])

  return state
