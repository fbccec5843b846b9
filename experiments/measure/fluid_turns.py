"""Jobs of the fluid model that take turns: holds before collectives, which `fluid` doesn't know.

The same jobs, on the same link, in the simulation of `jaxpace.simulation.turns`: senders share the
link equally at every instant, without loss. Listening once takes as long as in the fabric lab, as a
share of the period, longer beside another's traffic, and is sometimes mistaken.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

import jaxpace
from experiments.measure import fluid
from jaxpace.simulation import turns

TINY, BUSY, SCATTER, WRONG = 0.008, 4.0, 0.2, 0.02
"""Listening once on a quiet link, as a share of the period; how many times as long it takes beside
another's traffic; the deviation of its logarithm; the share of readings that tell the opposite."""


def history(drawn: fluid.Jobs, periods: Sequence[float], floors: Sequence[float], by: str | None,
            steps: int) -> fluid.History:
  """Runs scenes whose jobs take turns.

  Args:
    drawn: of `fluid.scene`, leaves [seeds, jobs, ...]; without noise on what is seen, and nobody
      leaves.
    periods: s, of each job alone.
    floors: s, of each job's buckets.
    by: "bucket", "message", or None, where nobody waits for anybody.
    steps: of each.

  Returns:
    What happened, [seeds, jobs, steps]; NaN where a job did not get that far when the first one was
    done. `delay` is what was held and listened.
  """
  seeds, count, _, buckets = drawn.work.shape
  # A window longer than the run keeps the floors that the state begins with.
  pacer = (turns.nothing() if by is None
           else jaxpace.take_turns(by=by, window=1_000_000, slots=buckets))
  states = fluid.stack([pacer.init(1) for _ in range(count)])
  if by is not None:
    keys = np.random.default_rng(7).integers(0, 2**32, count, np.uint32)
    quiet = jnp.broadcast_to(jnp.asarray(floors, jnp.float32)[:, None], (count, buckets))
    states = states._replace(floor=states.floor._replace(floor=quiet), key=jnp.asarray(keys))
  senders = jnp.arange(1, count + 1, dtype=jnp.float32)
  jobs = turns.Drawn(
      ready=jnp.broadcast_to(drawn.compute[..., None], drawn.work.shape), work=drawn.work,
      start=drawn.start, speeds=jnp.broadcast_to(1 / senders, (seeds, count)),
      tiny=jnp.broadcast_to(TINY * jnp.asarray(periods, jnp.float32), (seeds, count)),
      obeys=drawn.paced)
  run = jax.jit(turns.simulator(pacer, steps))
  found = run(jax.random.key(0), jobs, turns.Ear(BUSY, SCATTER, WRONG), states)
  return fluid.History(found.step_time, found.held, found.sent, found.info)
