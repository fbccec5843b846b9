"""A training loop on several processes with a housekeeper; prints as JSON which mode each step was
done in.

Every step adds up gradients over all processes; process 1 is now and then late, and slow to read
messages. Started with the variables that `jaxpace.distributed.initialize` looks for.
"""

import gc
import json
import logging
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxpace
from jaxpace import distributed
from jaxpace.hosts.distributed import announcements

EVERY = 3


def train(steps, keeper=None, log=None):
  """Returns the parameters' bytes after `steps` steps of descent on data that differs by rank."""
  mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))

  def update(weights, batch):
    gradient = jax.grad(lambda w: jnp.mean((jnp.tanh(batch @ w) - batch[:, :1]) ** 2))(weights)
    return weights - jnp.float32(0.3) * jax.lax.pmean(gradient, "data")

  step = jax.jit(jax.shard_map(update, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(),
                               check_vma=False))
  rows = np.random.default_rng(3).normal(size=(8 * jax.device_count(), 5)).astype(np.float32)
  batch = jax.make_array_from_callback(
      rows.shape, jax.sharding.NamedSharding(mesh, P("data")), lambda index: rows[index])
  weights = jnp.ones((5, 1), jnp.float32)
  for number in range(steps):
    if distributed.process_index() == 1 and number % 17 == 5:
      time.sleep(0.02)
    weights = step(weights, batch)
    garbage = [[number]]
    garbage.append(garbage)
    if keeper is not None:
      keeper.step()
      log.append(keeper.mode)
  return np.asarray(weights.addressable_data(0)).tobytes().hex()


def main(broken):
  logging.basicConfig(level=logging.WARNING)
  me = distributed.initialize(timeout=60).index
  read, publish, texts = announcements.key_value_get, announcements.key_value_set, []
  settings = gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()

  def slow_read(key, timeout):
    if "housekeeper" in key:
      time.sleep(0.05)  # process 1 is late to hear of it, and must wait at the step
    text = read(key, timeout)
    texts.append(text)
    return text

  def publish_some(key, value, overwrite=False):
    if not (broken and key.endswith("/5")):
      publish(key, value, overwrite)

  announcements.key_value_get, announcements.key_value_set = slow_read, publish_some
  bare = train(60)
  modes = []
  with jaxpace.Housekeeper(every=EVERY, mode="auto", warmup=4, timeout=2.0) as keeper:
    kept = train(600, keeper, modes)
    if me == 0:
      keeper.add(lambda: None, every=3)
  announcements.key_value_get = read
  old = None
  if me == 0 and not broken:
    try:
      old = read("jaxpace/housekeeper/0/0", 0.2)
    except TimeoutError:
      old = "deleted"
  log = []
  with jaxpace.Housekeeper(every=EVERY, mode="frozen", warmup=4) as second:
    again = train(60, second, log)
  print("FACTS", json.dumps({
      "modes": modes, "bare": bare, "again": again, "kept": len(kept), "old": old,
      "messages": len(texts),
      "restored": (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()) == settings,
      "trial": keeper.summary()["trial"] is not None}), flush=True)


if __name__ == "__main__":
  main(broken=sys.argv[1:] == ["--broken"])
