"""One process of a job of which process 1's device comes to stand still before a layer, until both are killed."""

import os
import sys
import time

import jax
import numpy as np

jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(os.environ["ADDRESS"], 2, int(os.environ["INDEX"]))

from jax.sharding import PartitionSpec as P  # noqa: E402

import jaxpace  # noqa: E402
from tests.trace.marks.handmade import Handmade  # noqa: E402

LAYERS, LAYER, CALL, STEPS = 4, 2, 6, 12

step = Handmade(layers=LAYERS, name="train_step")
sharding = jax.NamedSharding(step.mesh, P("data"))


def on_devices(values):
  return jax.make_array_from_callback(values.shape, sharding, lambda place: values[place])


x = on_devices(np.ones((2, 4), np.float32))
none = np.zeros((2, LAYERS + 1), np.float32)
hangs = none.copy()
# Longer than the test lasts, and as long as the native clock holds a device at most.
hangs[1, LAYER] = 10.0
x = jax.block_until_ready(step(x, on_devices(none)))
with (jaxpace.Recorder(os.environ["RUN"], step) as recorder,
      jaxpace.Watchdog(timeout=1.0, recorder=recorder) as watchdog):
  watched = watchdog.watch(step)
  for k in range(1, STEPS):
    x = jax.block_until_ready(watched(x, on_devices(hangs if k == CALL else none)))
    recorder.record()
print("it went on", file=sys.stderr)
time.sleep(60)
