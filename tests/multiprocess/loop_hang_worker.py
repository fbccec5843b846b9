"""A job of two processes whose instrumented step has a sum in a scan: in turn 5 of call 6 process
1 is stopped, in what comes before the sum, once its timestamps are in their file."""

import itertools
import os
import signal
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxpace
from tests.instrumentation.running import instrumented
from tests.multiprocess.joining import laid_out

TURNS, CALL, TURN = 8, 6, 5

jaxpace.distributed.initialize()
mesh = jax.make_mesh((jax.device_count(),), ("data",), (AxisType.Auto,))
turns = itertools.count()


def copied():
  """When the timestamps were last copied."""
  return os.stat("runs/hang/marks/1.ring").st_mtime_ns


def features(_):
  if jax.process_index() == 1 and next(turns) == CALL * TURNS + TURN:
    # The first of the two may have been under way.
    for _ in range(2):
      before = copied()
      while copied() == before:
        time.sleep(0.01)
    # All of this process stands still, the thread that says that it lives too.
    os.kill(os.getpid(), signal.SIGSTOP)
    # A signal may take a moment to reach this thread.
    time.sleep(3600)
  return np.float32(0)


def layer(h, w):
  y = jnp.tanh(h @ w) + jax.pure_callback(features, jax.ShapeDtypeStruct((), jnp.float32), h[0, 0])
  total = jax.lax.psum(y.mean(0), "data")
  return h + y - total / 2, None


def train_step(weights, batch):
  out, _ = jax.lax.scan(layer, batch, weights)
  return weights * 0.999, jax.lax.pmean(jnp.mean(out), "data")


weights = laid_out(np.ones((TURNS, 16, 16), np.float32) / 16, mesh, P())
batch = laid_out(np.ones((8, 16), np.float32), mesh, P("data"))
paced, step, pace = instrumented(train_step, mesh, P(), P("data"))
with (jaxpace.Recorder("runs/hang", paced) as recorder,
      jaxpace.Watchdog(timeout=3.0, recorder=recorder) as watchdog):
  watched = watchdog.watch(step)
  for _ in range(20):
    pace, (weights, value) = watched(pace, weights, batch)
    jax.block_until_ready(value)
    recorder.record()
