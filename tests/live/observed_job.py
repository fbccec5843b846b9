"""A job whose step is observed and shares micro-batches, and what it asks for counts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import jaxpace
from tests.instrumentation.running import mesh_of
from tests.live.test_shares import CAPACITY, EXAMPLES, RANKS, SIZE, TOTAL, loss_fn

SOURCE = {"x": np.arange(EXAMPLES, dtype=np.float32), "number": np.arange(EXAMPLES, dtype=np.int32)}
EVEN, TURNS = [2, 2, 2, 2], [[2, 2, 2, 2], [5, 1, 1, 1], [1, 3, 0, 4], [1, 1, 5, 1]]


@functools.cache
def by_speed(window=16):
  return jaxpace.share_by_speed(TOTAL, CAPACITY, window=window)


@functools.cache
def turning():
  """Other counts after every second step in which every rank was seen to be busy."""

  def update(observation, turn):
    turn = turn + jnp.all(observation.arrivals > 0).astype(jnp.int32)
    return jnp.array(TURNS, jnp.int32)[turn // 2 % 4], turn

  return jaxpace.Balancer(lambda ranks: jnp.int32(0), update, TOTAL)


def train(w, batch, counts):
  (_, seen), grads = jaxpace.accumulate(loss_fn, w, batch, counts, has_aux=True,
                                        mesh=mesh_of(data=RANKS))
  return w - grads, seen


class Job:
  """A step that is jitted as a whole, and what it has been fed with."""

  def __init__(self, **settings):
    self.mesh = mesh_of(data=RANKS)
    self.step, self.w = jaxpace.observe(jax.jit(train)), jnp.float32(0)
    self.feed, self.ran = self.fed(**settings), []
    self.seen = np.zeros(EXAMPLES, int)

  def fed(self, **settings):
    return jaxpace.shares(**{"mesh": self.mesh, "examples": EXAMPLES, "size": SIZE, "seed": 2,
                             "total_micro_batches": TOTAL, "capacity": CAPACITY,
                             "balancer": turning()} | settings)

  def run(self, steps):
    for _ in range(steps):
      share = self.feed.next(self.step)
      self.w, seen = self.step(self.w, share.batch(SOURCE), share.counts)
      self.ran.append(share.counts.tolist())
      self.seen += np.asarray(seen)
