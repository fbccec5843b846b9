"""Counts of an observed step by what all ranks know of how long each was busy in its calls.

Every process reads its own devices' busy times from the ring on the host. Every few steps a small
compiled program beside the step gathers them on all processes, four steps later the balancer is
asked on what came, and four later still its counts are taken: nobody waits for either. While counts
stay as they are that happens less and less often, down to once in some ten seconds, since the
exchange costs every rank some milliseconds. The step's own program stays as it is.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxpace.coordination.apportion import even
from jaxpace.coordination.knobs import Knobs
from jaxpace.core import own_context
from jaxpace.core.observed import ObservedFunction
from jaxpace.core.pacing import decide_counts
from jaxpace.core.types import Balancer, Observation
from jaxpace.live.busy_times import BusyTimes
from jaxpace.live.control_file import ControlRequest
from jaxpace.observation.clocks import host_ring

_LOG = logging.getLogger("jaxpace")
EVERY, _RAREST = 4, 1024
"""Steps from one exchange to the next, at least and at most."""
RARELY = 10.0
"""Seconds from one exchange to the next, at most, once counts have stayed for long: an exchange
costs some 10 ms where four gloo processes share two cores, and is to cost a thousandth."""
MOST = 16
"""Steps that the balancer is asked on at once, the last ones."""
_PATIENT = 4
"""Exchanges that change nothing, after which they are half as frequent."""
_NAN = np.float32(np.nan)


class Gathered:
  """Gathers numbers of all devices of a mesh on every process, by a program that nobody waits
  for."""

  def __init__(self, mesh: Mesh, numbers: int):
    """Compiles the program; `numbers` are those of each device."""
    # A mesh of its own: the step's may have axes that are explicit.
    self._mesh = Mesh(mesh.devices.reshape(-1), ("devices",), axis_types=(AxisType.Auto,))
    self._own = [device for device in self._mesh.devices
                 if device.process_index == jax.process_index()]
    self._alone = len(self._own) == self._mesh.size
    self._split = NamedSharding(self._mesh, PartitionSpec("devices"))
    self._sent: Any = None
    if not self._alone:
      shape = jax.ShapeDtypeStruct((self._mesh.size, numbers), jnp.float32, sharding=self._split)
      with own_context.on(self._mesh):
        self._program = jax.jit(jnp.copy, out_shardings=NamedSharding(
            self._mesh, PartitionSpec())).lower(shape).compile()

  @property
  def own(self) -> list[jax.Device]:
    """This process's devices, in the order of their rows."""
    return self._own

  def send(self, rows: np.ndarray) -> None:
    """Begins to gather; every process of the mesh calls it. [own devices, n] float32."""
    if self._alone:
      self._sent = rows
      return
    with own_context.on(self._mesh):
      parts = [jax.device_put(row[None], device)
               for row, device in zip(rows, self._own, strict=True)]
      whole = jax.make_array_from_single_device_arrays(
          (self._mesh.size, rows.shape[1]), self._split, parts)
      self._sent = self._program(whole)
      self._sent.copy_to_host_async()

  def received(self) -> np.ndarray | None:
    """Returns what was sent last, [devices of the mesh, n] float32, the same on all processes; None
    where nothing was. Once."""
    sent, self._sent = self._sent, None
    return own_context.fetch(sent.addressable_data(0)) if isinstance(sent, jax.Array) else sent


class ShareState(NamedTuple):
  """What a checkpoint holds of work that is shared by speed. R ranks; the same on all processes."""

  step: np.ndarray  # [] int64, number of the next step
  counts: np.ndarray  # [R] int32, micro-batches of each rank in it
  ran: np.ndarray  # [R] int64, micro-batches that each rank has been given so far
  balancer: tuple[np.ndarray, ...]  # what the balancer knows: the leaves of its state, in order


class SharedCounts:
  """The counts of each step of an observed step: decided beside it, alike on all ranks."""

  def __init__(self, mesh: Mesh, ranks: np.ndarray, balancer: Balancer, capacity: int):
    """Begins evenly, at step 0; `ranks` is the rank along the data axis of each device of the
    mesh."""
    self._balancer, self._capacity, self._ranks = balancer, capacity, ranks.reshape(-1)
    self._count = int(ranks.max()) + 1
    self._gathered = Gathered(mesh, 2 * MOST + 1)
    self._busy: BusyTimes | None = None
    self._warned = False
    self._even = np.asarray(even(balancer.micro_batches, self._count), np.int32)
    self._steered = ControlRequest()
    places = host_ring.ranks()
    self._places = {places[device]: int(rank)
                    for device, rank in zip(mesh.devices.flat, self._ranks, strict=True)
                    if device.process_index == jax.process_index()}
    self._told: np.ndarray | None = None
    # What tells this balancer from another, for the other processes; 0 where it can't be asked.
    self._print = 0.0
    self._begin(self._fresh(0))
    self._update = self._compiled()
    self._exchanges = True

  def _compiled(self) -> Any:
    """Compiles what asks the balancer. Now, not in the middle of the job: it takes seconds. None,
    with a warning, where the balancer can't be asked."""
    ran = np.stack([self._even] * MOST)
    with _beside():
      try:
        lowered = jax.jit(self._updates).lower(
            np.arange(MOST, dtype=np.int32), np.full(ran.shape, _NAN, np.float32),
            np.full(MOST, _NAN, np.float32), ran, self._even, self._inner, _NAN)
      except Exception as error:
        _LOG.warning("The balancer can't be asked, so work stays shared evenly. Its update must "
                     "return ([%d] int32 counts, a state like the one it was given): %s: %s",
                     self._count, type(error).__name__, error)
        return None
      # A whole number that float32 holds.
      self._print = float(1 + zlib.crc32(lowered.as_text().encode()) % (1 << 23))
      return lowered.compile()

  def _begin(self, state: ShareState) -> None:
    """Begins at a state, with nothing on its way."""
    self._number, self._counts = int(state.step), state.counts
    self._ran = state.ran.copy()
    self._inner = jax.tree.unflatten(self._structure, state.balancer)
    # Of the last steps: the number of the call, and the counts.
    self._recent: dict[int, tuple[int, np.ndarray]] = {}
    # Of the steps whose busy times were sent, room for `MOST`: their numbers, -1 where there is
    # none, and the counts [MOST, R] of each.
    self._sent: tuple[np.ndarray, np.ndarray] | None = None
    self._decided: Any = None
    # The step at which the next exchange is due, and how many have changed nothing.
    self._due, self._unchanged = 0, 0
    self._rarest = _RAREST

  def _fresh(self, step: int) -> ShareState:
    with _beside():
      leaves, self._structure = jax.tree.flatten(self._balancer.init(self._count))
      return ShareState(np.asarray(step), self._even, np.zeros(self._count, np.int64),
                        tuple(map(np.asarray, leaves)))

  @property
  def state(self) -> ShareState:
    """What a checkpoint holds."""
    return ShareState(np.asarray(self._number), self._counts, self._ran.copy(),
                      tuple(map(own_context.fetch, jax.tree.leaves(self._inner))))

  def restore(self, state: Any) -> None:
    """Goes on from a checkpoint; of other ranks or another balancer only the step is kept, with a
    notice."""
    if state is None:
      _LOG.warning("The checkpoint holds no shares: counts begin evenly, at step 0.")
      self._begin(self._fresh(0))
      return
    stored = _stored(state)
    fresh = self._fresh(int(stored.step))
    counts, leaves = np.asarray(stored.counts), [*map(np.asarray, jax.tree.leaves(stored.balancer))]
    if counts.shape != (self._count,):
      other = f"{counts.size} ranks, and this job has {self._count}"
    elif not self._sound(counts) or [leaf.shape for leaf in leaves] != [
        leaf.shape for leaf in fresh.balancer]:
      other = "another balancer or another global batch"
    else:
      self._begin(fresh._replace(
          counts=counts.astype(np.int32), ran=stored.ran,
          balancer=tuple(leaf.astype(like.dtype)
                         for leaf, like in zip(leaves, fresh.balancer, strict=True))))
      return
    _LOG.warning("The checkpoint's shares are of %s: counts begin evenly, at step %d. What was "
                 "known of speeds is lost, no training state is.", other, int(fresh.step))
    self._begin(fresh)

  def steer(self, request: ControlRequest) -> None:
    """Goes by other settings from the next step on; every process calls it before the same one."""
    self._steered = request

  def next(self, step: ObservedFunction) -> tuple[int, np.ndarray]:
    """Returns the number and the counts of the step that is about to be called."""
    number = self._number
    if self._busy is None:
      self._busy = BusyTimes(step, self._gathered.own)
    if number % EVERY == 0 and self._exchanges:
      self._take()
      self._ask()
      if not self._exchanges:
        self._recent.clear()
      elif number >= self._due:
        self._send(number)
      elif number % MOST == 0:
        self._guarded(self._busy.keep_up)
    counts = self._counts if self._steered.allows(number) else self._even
    if self._exchanges:
      self._recent[number] = step.calls, counts
    if counts is not self._told:
      # For whoever records the step.
      self._told, step.micro_batches = counts, {
          place: int(counts[rank]) for place, rank in self._places.items()}
    self._ran += counts
    self._number += 1
    return number, counts

  def _take(self) -> None:
    """Takes the counts that were decided, if they can be."""
    decided, self._decided = self._decided, None
    if decided is None:
      return
    before = self._counts
    try:
      counts, after = own_context.fetch(decided[0]), jax.block_until_ready(decided[1])
    except Exception as error:
      self._failed(error)
      return
    self._inner = after
    if self._sound(counts):
      self._counts = counts
    elif not self._warned:
      self._warned = True
      _LOG.warning("The balancer asks for counts of %s, which do not add up to %d with at most %d "
                   "each: the counts stay.", counts.tolist(), self._balancer.micro_batches,
                   self._capacity)
    if np.any(self._counts != before):
      self._due, self._unchanged = 0, 0
    else:
      self._unchanged += 1

  def _ask(self) -> None:
    """Asks the balancer on what was gathered. Its answer takes its place behind the steps that were
    dispatched, so it is not waited for here."""
    sent, self._sent = self._sent, None
    rows = self._gathered.received()
    if sent is None or rows is None:
      return
    busy, took, prints = rows[:, :MOST], rows[:, MOST:-1].max(axis=0), rows[:, -1]
    # All processes see the same, and end together.
    self._exchanges = bool(np.all(prints == prints[0]) and prints[0])
    if not self._exchanges:
      self._counts = self._even
      if np.any(prints != prints[0]) and np.all(prints):
        _LOG.warning("The job's processes were given different balancers, or run different "
                     "versions of jax: their counts would differ, so work is shared evenly. Give "
                     "jaxpace.shares the same arguments in every process.")
      return
    self._rarest = _rarest(took, self._rarest)
    least = self._steered.threshold
    try:
      with _beside():
        self._decided = self._update(sent[0], self.by_rank(busy), took, sent[1], self._counts,
                                     self._inner, _NAN if least is None else np.float32(least))
    except Exception as error:
      self._failed(error)

  def _failed(self, error: Exception) -> None:
    """The balancer raised while it ran, perhaps here alone: the others hear of it with the next
    exchange, and share evenly then, too."""
    self._print, self._counts = 0.0, self._even
    _LOG.warning("The balancer failed, so work is shared evenly from step %d on: %s", self._number,
                 str(error).strip().rpartition("\n")[2])

  def _send(self, number: int) -> None:
    """Has the busy times gathered of the last steps since the last time, but the very last, which
    may be under way."""
    over = sorted(each for each in self._recent if each < number - EVERY)
    if not over:
      return
    numbers = over[-MOST:]
    ran = [self._recent.get(each) for each in (*numbers, numbers[-1] + 1)]
    for each in over:
      del self._recent[each]
    # A call that ran without timestamps has counted no further.
    calls = [one[0] if one and after and one[0] < after[0] else None
             for one, after in itertools.pairwise(ran)]
    steps, counts = np.full(MOST, -1, np.int32), np.stack([self._counts] * MOST)
    steps[:len(numbers)] = numbers
    counts[:len(numbers)] = [one[1] for one in ran[:-1] if one]
    self._sent = steps, counts
    self._gathered.send(self._own_rows(calls))
    self._due = number + min(EVERY << min(self._unchanged // _PATIENT, 8), self._rarest)

  def _own_rows(self, calls: Sequence[int | None]) -> np.ndarray:
    """[own devices, 2 MOST + 1] float32: busy times in s and what steps took, NaN where nothing is
    known, whatever went wrong; and which balancer this process has."""
    assert self._busy is not None, "made before the first exchange"
    rows = np.full((len(self._gathered.own), 2 * MOST + 1), _NAN, np.float32)
    rows[:, -1] = self._print
    found = self._guarded(self._busy.of, calls)
    if found is not None:
      rows[:, :-1].reshape(len(rows), 2, MOST)[:, :, :len(calls)] = found
    return rows

  @staticmethod
  def _guarded(reads: Callable[..., Any], *args: Any) -> Any:
    """What reading the ring gives; None, and the job goes on, whatever goes wrong."""
    try:
      return reads(*args)
    except Exception:
      _LOG.debug("shares", exc_info=True)
      return None

  def by_rank(self, rows: np.ndarray) -> np.ndarray:
    """The longest of each rank's devices, NaN if one is not known: [devices, steps] -> [steps,
    R]."""
    return np.stack([rows[self._ranks == rank].max(axis=0) for rank in range(self._count)], axis=1)

  def _sound(self, counts: np.ndarray) -> bool:
    return bool(counts.shape == (self._count,) and counts.min() >= 0
                and counts.max() <= self._capacity
                and counts.sum() == self._balancer.micro_batches)

  def _updates(self, steps: jax.Array, busy: jax.Array, took: jax.Array, ran: jax.Array,
               counts: jax.Array, state: Any, threshold: jax.Array) -> tuple[jax.Array, Any]:
    """The balancer's `update` on each of some steps: [MOST], [MOST, R], [MOST], [MOST, R], [R]."""
    unknown, none = jnp.float32(_NAN), jnp.full((1,), _NAN)
    steered = Knobs(threshold, unknown)
    state = jax.tree.map(lambda node: steered if isinstance(node, Knobs) else node, state,
                         is_leaf=lambda node: isinstance(node, Knobs))

    def one(carried: Any, seen: Any) -> tuple[Any, None]:
      step, times, took, ran = seen

      def updated(counts: jax.Array, state: Any) -> Any:
        # Steps that ran older counts say nothing of these.
        known = jnp.where(jnp.all(ran == counts), times, unknown)
        return decide_counts(self._balancer, Observation(
            step=step, rank=jnp.int32(0), arrivals=known, delays=jnp.zeros_like(times), waits=none,
            step_time=took, job_step_time=took, job_transfers=none, counts=ran), state)

      return jax.lax.cond(step >= 0, updated, lambda *as_it_is: as_it_is, *carried), None

    return jax.lax.scan(one, (counts, state), (steps, busy, took, ran))[0]


def _stored(state: Any) -> ShareState:
  """What a checkpoint gave back, its numbers checked; TypeError, in words, where it is damaged or
  something else."""
  # As a tuple, or a dict of its fields, which named tuples may come back as.
  fields = list(ShareState._fields)
  given = dict(zip(fields, state, strict=False)) if isinstance(state, (tuple, list)) else state
  if not isinstance(given, dict) or sorted(given) != sorted(fields) or len(state) != len(fields):
    raise TypeError("feed.restore takes what feed.state() returned, or None where a checkpoint has "
                    f"none: {', '.join(fields)}. This is a {type(state).__name__}"
                    + (f" of {', '.join(map(str, given))}." if isinstance(given, dict) else "."))
  stored = ShareState(**given)
  step, ran, counts = np.asarray(stored.step), np.asarray(stored.ran), np.asarray(stored.counts)
  for name, value in (("step", step), ("ran", ran), ("counts", counts)):
    numbers = value.dtype.kind in "iuf" and bool(np.all(np.isfinite(value)))
    if not numbers or not bool(np.all((value == np.rint(value)) & (value >= 0))):
      raise TypeError(f"The checkpoint's shares have no whole numbers from 0 as {name} but "
                      f"{np.array2string(value, threshold=8)}: they are damaged. "
                      "feed.restore(None) begins anew.")
  if step.size != 1 or ran.shape != counts.shape:
    raise TypeError(f"The checkpoint's shares have a step of the shape {list(step.shape)}, counts "
                    f"{list(counts.shape)} and ran {list(ran.shape)}: they are damaged. "
                    "feed.restore(None) begins anew.")
  return stored._replace(step=step.reshape(()), ran=ran.astype(np.int64), counts=counts)


def _rarest(took: np.ndarray, before: int) -> int:
  """Steps between exchanges that fill `RARELY` seconds, a power of two: the same on all processes.

  Args:
    took: [steps] float32 s, NaN where not known.
    before: what it was: it stays where no step is known.
  """
  known = took[~np.isnan(took)]
  if not known.size:
    return before
  steps = RARELY / max(float(np.median(known)), 1e-9)
  return 1 << int(np.clip(steps, EVERY, _RAREST)).bit_length() - 1


@contextlib.contextmanager
def _beside() -> Iterator[None]:
  """Where the balancer runs: on the host's processor, if JAX has it, whatever the devices do; in 32
  bits, as in an instrumented step, where a user's own has no types of its own."""
  try:
    place = jax.local_devices(backend="cpu")[0]
  except RuntimeError:
    place = None
  with own_context.on(None), jax.default_device(place), jax.enable_x64(False):
    yield


__all__ = ["EVERY", "Gathered", "ShareState", "SharedCounts"]
