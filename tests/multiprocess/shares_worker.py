"""One of two processes of two ranks each, whose work is shared by what the ring showed of their
speeds."""

import json
import os

import jax

jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(os.environ["ADDRESS"], 2, int(os.environ["INDEX"]))

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import jaxpace  # noqa: E402

TOTAL, CAPACITY, SIZE, EXAMPLES = 8, 5, 2, 48
mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


def update(observation, state):
  """The slowest gives one micro-batch to the quickest, by all that is known to the last bit."""
  busy = observation.arrivals
  known = jnp.all(busy > 0)
  less, more = jnp.argmax(busy), jnp.argmin(busy)
  moved = state[0].at[less].add(-1).at[more].add(1)
  can = known & (state[0][less] > 1) & (state[0][more] < CAPACITY) & (less != more)
  counts = jnp.where(can, moved, state[0])
  return counts, (counts, state[1] + jnp.where(known, busy, 0))


def loss_fn(w, micro_batch):
  seen = jnp.zeros((EXAMPLES,), jnp.int32).at[micro_batch["number"]].add(1)
  return jnp.sum(micro_batch["x"] * w), jnp.float32(SIZE), seen


def train(w, batch, counts):
  (_, seen), grads = jaxpace.accumulate(loss_fn, w, batch, counts, has_aux=True, mesh=mesh)
  return w - grads, seen


balancer = jaxpace.Balancer(lambda ranks: (jnp.full(4, 2, jnp.int32), jnp.zeros(4, jnp.float32)),
                            update, TOTAL)
source = {"x": np.arange(EXAMPLES, dtype=np.float32), "number": np.arange(EXAMPLES, dtype=np.int32)}
feed = jaxpace.shares(mesh, examples=EXAMPLES, size=SIZE, total_micro_batches=TOTAL,
                      capacity=CAPACITY, balancer=balancer)
step, w, ran, trained = jaxpace.observe(jax.jit(train)), jnp.float32(0), [], np.zeros(EXAMPLES, int)
for _ in range(30):
  share = feed.next(step)
  w, seen = step(w, share.batch(source), share.counts)
  ran.append(share.counts.tolist())
  trained += np.asarray(seen)
print("FACTS " + json.dumps({
    "counts": ran, "trained": trained.tolist(), "ran": feed.state().ran.tolist(),
    "busy": np.asarray(feed.state().balancer[1]).view(np.uint32).tolist()}))
