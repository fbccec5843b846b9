"""A training loop under control, in one of several processes. Prints when what applied, and the
delays asked for.

Usage: control_worker.py DIRECTORY STEPS. The environment joins the job. Process 1's news arrive
late.
"""

import itertools
import json
import os
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxpace
from jaxpace.hosts.distributed import rounds as messages
from jaxpace.live import control_file
from jaxpace.live.control_file import ControlRequest
from tests.instrumentation.running import column, instrumented
from tests.multiprocess.joining import scaled_down


def eager():
  def update(seen, state):
    return jaxpace.Decision(jnp.float32(2e-4), {}), state
  return jaxpace.Pacer(lambda ranks: (), update)


def main() -> None:
  directory, steps = pathlib.Path(sys.argv[1]), int(sys.argv[2])
  jaxpace.distributed.initialize()
  process = jax.process_index()
  get = messages.key_value_get
  if process == 1:
    messages.key_value_get = lambda key, timeout: (get(key, timeout), time.sleep(0.3))[0]
  shape = (jax.process_count(), jax.local_device_count())
  mesh = jax.make_mesh(shape, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
  paced, step, pace = instrumented(scaled_down, mesh, P(), P("data"), share=True,
                                   pacer=jaxpace.steerable(eager()))
  w = jnp.ones((4,))
  x = jax.make_array_from_callback(shape, jax.NamedSharding(mesh, P("data")),
                                   lambda index: np.ones(shape, np.float32)[index])
  applied, asked_at = [], {}
  with jaxpace.Control(directory, every_seconds=0.2, timeout=300) as control:
    # Both processes stop at one step: what applied by then is the same in both.
    for k in itertools.takewhile(lambda k: k < steps or len(applied) < 2, itertools.count()):
      before = control.request
      pace = control(pace)
      if control.request != before:
        applied.append([k + 1, control.request.enabled])
      if process == 0 and k == 20:
        os.mkfifo(directory / control_file.NAME)  # nobody will ever write to it
      if process == 0 and k == 40:
        control_file.write(directory / control_file.NAME, ControlRequest(enabled=False))
      if process == 0 and len(applied) == 1 and not asked_at:
        asked_at[k] = control_file.write(directory / control_file.NAME,
                                         ControlRequest(threshold=0.5))
      pace, w = jax.block_until_ready(step(pace, w, x))
      time.sleep(0.005)
    rounds = control._rounds.number
    newest = control._rounds.key(rounds - 1)
  asked = column(pace, paced.plan, "delay")
  assert (asked == asked[:1]).all(), "devices along the other axis do alike"
  kept = 0
  jaxpace.distributed.barrier("done", 60)
  from jaxpace.hosts.distributed.client import client
  joined = client()
  if joined is not None:
    kept = len(joined.key_value_dir_get(newest.rpartition("/")[0]))
  jaxpace.distributed.barrier("counted", 60)
  print("FACTS " + json.dumps({"process": process, "applied": applied, "rounds": rounds,
                               "kept": kept, "off": np.flatnonzero(asked[0, 1:] == 0).tolist()}),
        flush=True)


if __name__ == "__main__":
  main()
