"""A balancer, asked on several steps at once by a small program beside the step."""

from __future__ import annotations

import contextlib
import logging
import zlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpace.coordination import knobs
from jaxpace.coordination.apportion import even
from jaxpace.coordination.guard import judged
from jaxpace.core import own_context
from jaxpace.core.pacing import decide_counts
from jaxpace.core.types import Balancer, Observation
from jaxpace.live.share_state import ShareState

_LOG = logging.getLogger("jaxpace")
MOST = 16
"""Steps that the balancer is asked on at once, the last ones."""
NAN = np.float32(np.nan)


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
    state = knobs.turned(state, knobs.Knobs(threshold, unknown))

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
