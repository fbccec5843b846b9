"""A balancer, asked on several steps at once by a small program beside the step; and what a
checkpoint holds of it, and of work that is shared by speed."""

from __future__ import annotations

import contextlib
import logging
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpace.coordination import knobs
from jaxpace.coordination.apportion import even
from jaxpace.coordination.guard import judged
from jaxpace.core import own_context, packing
from jaxpace.core.pacing import decide_counts
from jaxpace.core.types import Balancer, Observation

_LOG = logging.getLogger("jaxpace")
MOST = 16
"""Steps that the balancer is asked on at once, the last ones."""
NAN = np.float32(np.nan)


class ShareState(NamedTuple):
  """What a checkpoint holds of work that is shared by speed. R ranks; the same on all processes."""

  step: np.ndarray  # [] int64, number of the next step
  counts: np.ndarray  # [R] int32, micro-batches of each rank in it
  ran: np.ndarray  # [R] int64, micro-batches that each rank has been given so far
  balancer: tuple[np.ndarray, ...]  # what the balancer knows: the leaves of its state, in order


class AskedBalancer:
  """What asks a balancer of R ranks.

  Attributes:
    even: [R] int32, even counts.
    digest: what tells this balancer from another, for the other processes: a whole number that
      float32 holds; 0 where it can't be asked.
  """

  def __init__(self, balancer: Balancer, ranks: int):
    """Compiles what asks it. Now, not in the middle of the job: it takes seconds. Where it can't be
    asked, that is a warning."""
    self._balancer, self._ranks = balancer, ranks
    self.even = np.asarray(even(balancer.micro_batches, ranks), np.int32)
    self.digest, self._update = 0.0, None
    ran, begun = np.stack([self.even] * MOST), self.tree(self.fresh(0)[0].balancer)
    with _beside():
      try:
        lowered = jax.jit(self._updates).lower(
            np.arange(MOST, dtype=np.int32), np.full(ran.shape, NAN, np.float32),
            np.full(MOST, NAN, np.float32), ran, self.even, begun, NAN)
      except Exception as error:
        _LOG.warning("The balancer can't be asked, so work stays shared evenly. Its update must "
                     "return ([%d] int32 counts, a state like the one it was given): %s: %s",
                     ranks, type(error).__name__, error)
        return
      self.digest = float(1 + zlib.crc32(lowered.as_text().encode()) % (1 << 23))
      self._update = lowered.compile()

  def fresh(self, step: int) -> tuple[ShareState, Any]:
    """Where it begins anew at a step; and the balancer's state, as a tree."""
    with _beside():
      begun = self._balancer.init(self._ranks)
      leaves, self._structure = jax.tree.flatten(begun)
      return ShareState(np.asarray(step), self.even, np.zeros(self._ranks, np.int64),
                        tuple(map(np.asarray, leaves))), begun

  def tree(self, leaves: tuple[np.ndarray, ...]) -> Any:
    """The balancer's state with these leaves."""
    return jax.tree.unflatten(self._structure, leaves)

  def __call__(self, steps: np.ndarray, busy: np.ndarray, took: np.ndarray, ran: np.ndarray,
               counts: np.ndarray, state: Any, threshold: float | None
               ) -> tuple[jax.Array, Any, dict[str, jax.Array]]:
    """Asks the balancer on each of some steps, and waits for nothing.

    Args:
      steps: [MOST] int32 numbers, -1 where there is none.
      busy: [MOST, R] float32 s, how long each rank was busy; NaN where not known.
      took: [MOST] float32 s, how long steps took.
      ran: [MOST, R] int32, the counts of each.
      counts: [R] int32, those in force.
      state: the balancer's.
      threshold: the least gain that counts change for; None for the balancer's own.

    Returns:
      Counts [R] int32, the balancer's state, and what a guard has found by then.
    """
    assert self._update is not None, "it can be asked"
    with _beside():
      found: tuple[jax.Array, Any, dict[str, jax.Array]] = self._update(
          steps, busy, took, ran, counts, state,
          NAN if threshold is None else np.float32(threshold))
    return found

  def _updates(self, steps: jax.Array, busy: jax.Array, took: jax.Array, ran: jax.Array,
               counts: jax.Array, state: Any, threshold: jax.Array
               ) -> tuple[jax.Array, Any, dict[str, jax.Array]]:
    unknown, none = jnp.float32(NAN), jnp.full((1,), NAN)
    state = knobs.turned(state, knobs.Knobs, lambda _: knobs.Knobs(threshold, unknown))

    def one(carried: Any, seen: Any) -> tuple[Any, None]:
      step, times, took, ran = seen

      def updated(counts: jax.Array, state: Any) -> Any:
        # Steps that ran older counts say nothing of these.
        known = jnp.where(jnp.all(ran == counts), times, unknown)
        return decide_counts(self._balancer, Observation(
            step=step, rank=jnp.int32(0), arrivals=known, delays=jnp.zeros_like(times), waits=none,
            step_time=took, job_step_time=took, job_transfers=none, counts=ran), state)

      return jax.lax.cond(step >= 0, updated, lambda *as_it_is: as_it_is, *carried), None

    counts, state = jax.lax.scan(one, (counts, state), (steps, busy, took, ran))[0]
    return counts, state, judged(state)


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


def restored(state: Any, fresh: Callable[[int], tuple[ShareState, Any]],
             sound: Callable[[np.ndarray], bool]) -> ShareState:
  """Returns what training goes on from: what a checkpoint holds; of other ranks, another balancer,
  one whose numbers are damaged or whose counts aren't `sound` the step alone, with a notice:
  `fresh` says where it begins anew there, and the balancer's state as a tree. Raises TypeError
  where it is something else, or its numbers are damaged."""
  if state is None:
    _LOG.warning("The checkpoint holds no shares: counts begin evenly, at step 0.")
    return fresh(0)[0]
  stored = _stored(state)
  anew, tree = fresh(int(stored.step))
  counts, leaves = np.asarray(stored.counts), [*map(np.asarray, jax.tree.leaves(stored.balancer))]
  if counts.shape != anew.counts.shape:
    wrong = f"are of {counts.size} ranks, and this job has {anew.counts.size}"
  elif not sound(counts) or [leaf.shape for leaf in leaves] != [
      leaf.shape for leaf in anew.balancer]:
    wrong = "are of another balancer or another global batch"
  elif damaged := packing.not_finite(tree, jax.tree.unflatten(jax.tree.structure(tree), leaves)):
    wrong = f"hold NaN or infinity as the balancer's {', '.join(damaged[:4])}"
  else:
    return anew._replace(counts=counts.astype(np.int32), ran=stored.ran, balancer=tuple(
        leaf.astype(like.dtype) for leaf, like in zip(leaves, anew.balancer, strict=True)))
  _LOG.warning("The checkpoint's shares %s: counts begin evenly, at step %d. What was known of "
               "speeds is lost, no training state is.", wrong, int(anew.step))
  return anew


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
