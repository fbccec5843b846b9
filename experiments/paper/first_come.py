"""First come, first served: the bound for jobs that take turns, which knows what no job can know.

Each bucket goes into one queue when it is ready and is sent, alone, when all that came before it
are over. Nobody listens, errs, or waits for nothing.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.paper.quick import EDGE

_WAITS, _QUEUES, _SENDS = np.int32(0), np.int32(1), np.int32(2)
_NOBODY = np.int32(2**30)


def play(ready: jax.Array, work: jax.Array, start: jax.Array, steps: int) -> jax.Array:
  """Plays J jobs on one link.

  Args:
    ready: [J, K, B] s after a job's last exit, when each bucket could be sent; K steps, after which
      they begin again.
    work: [J, K, B] s, each bucket's own time on a quiet link.
    start: [J] s, idle before the first step.
    steps: of the first job.

  Returns:
    [steps] s, the first job's steps.
  """
  jobs, most, buckets = ready.shape
  each = jnp.arange(jobs)
  none = jnp.zeros((jobs,), jnp.int32)

  def turn(carry: Any) -> Any:
    phase, left, ticket, clock, step, bucket, count, times = carry
    wait = jnp.min(jnp.where(phase == _QUEUES, np.float32(np.inf), left))
    clock = clock + wait
    left = jnp.where(phase == _QUEUES, left, left - wait)
    ended = (left <= EDGE) & (phase != _QUEUES)
    sent = ended & (phase == _SENDS)
    over = sent & (bucket == np.int32(buckets - 1))
    times = times.at[jnp.where(over[0], step[0], np.int32(steps))].set(clock[0], mode="drop")
    step, clock = step + over.astype(jnp.int32), jnp.where(over, np.float32(0), clock)
    bucket = jnp.where(over, np.int32(0), bucket + sent.astype(jnp.int32))
    place = step % np.int32(most), bucket
    left = jnp.where(sent, jnp.maximum(ready[each, *place] - clock, np.float32(0)), left)
    joins = ended & (phase == _WAITS)
    ticket = jnp.where(joins, count * np.int32(jobs) + each.astype(jnp.int32), ticket)
    phase = jnp.where(sent, _WAITS, jnp.where(joins, _QUEUES, phase))
    # The next bucket of who has just sent may be ready at once; it comes after all that wait.
    free = ~jnp.any(phase == _SENDS)
    first = jnp.argmin(jnp.where(phase == _QUEUES, ticket, _NOBODY))
    begins = free & (phase[first] == _QUEUES) & (each == first)
    left = jnp.where(begins, work[each, *place], left)
    phase = jnp.where(begins, _SENDS, phase)
    return phase, left, ticket, clock, step, bucket, count + np.int32(1), times

  zero = jnp.zeros((jobs,), jnp.float32)
  begin = (none, ready[:, 0, 0] + start, none, zero, none, none, jnp.int32(0),
           jnp.zeros((steps,), jnp.float32))
  return jax.lax.while_loop(lambda c: c[4][0] < np.int32(steps), turn, begin)[-1]
