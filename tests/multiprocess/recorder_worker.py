"""A training loop in a process of its own, for tests that kill it.

Usage: recorder_worker.py DIRECTORY STEPS PAUSE [--processes N --index I --port P] [--mode MODE]

Prints "step K at T" (T on the machine's monotonic clock) after each step. Modes:
  plain      nothing handles SIGTERM
  deaf       a Python handler that was there before, and goes on
  stuck      after step 30 the main thread sleeps in C, where no Python handler can run
  sync       orbax-like: asks JAX whether a preemption was announced, and ends the loop
  gloo       every step has a psum over all processes
"""

import argparse
import ctypes
import logging
import os
import signal
import time

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxpace.record.recorder import Recorder
from tests.record import fake_step as fake


def main() -> None:
  parser = argparse.ArgumentParser()
  parser.add_argument("directory")
  parser.add_argument("steps", type=int)
  parser.add_argument("pause", type=float)
  parser.add_argument("--processes", type=int, default=1)
  parser.add_argument("--index", type=int, default=0)
  parser.add_argument("--port", type=int, default=0)
  parser.add_argument("--mode", default="plain")
  parser.add_argument("--grace", type=float, default=5.0)
  args = parser.parse_args()
  logging.basicConfig()
  if args.processes > 1:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{args.port}", args.processes, args.index)
  if args.mode == "deaf":
    # Not by print: the signal may come while the loop prints.
    signal.signal(signal.SIGTERM, lambda *_: os.write(1, b"told\n"))
  mesh = fake.mesh()
  spec = P("data")

  def body(pace):
    pace = fake.advance(pace)
    if args.mode != "gloo":
      return pace
    # Adds 0 (which XLA can't know), but only once all processes are there.
    surplus = jax.lax.psum(pace.step, "data") - jnp.uint32(mesh.devices.size) * pace.step
    return pace._replace(step=pace.step + surplus)

  step = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(spec,), out_specs=spec, check_vma=False),
                 donate_argnums=0)
  pace = fake.init(mesh)
  with Recorder(args.directory, fake.FakePaced(), grace_seconds=args.grace) as recorder:
    for i in range(args.steps):
      pace = step(pace)
      if args.mode == "stuck" and i == 30:
        jax.block_until_ready(pace)
        print("stuck", flush=True)
        libc = ctypes.CDLL(None)
        end = time.monotonic() + 3600
        # usleep is interrupted by signals; Python runs none meanwhile.
        while time.monotonic() < end:
          libc.sleep(60)
      recorder.record()
      print(f"step {i} at {time.monotonic():.4f}", flush=True)
      if args.mode == "sync" and jax.experimental.multihost_utils.reached_preemption_sync_point(i):
        print(f"preempted at {i}", flush=True)
        break
      if args.mode == "gloo" and i % 5 == 4:
        # As a program does that looks at its loss: raises if a peer is gone.
        jax.block_until_ready(pace)
      time.sleep(args.pause)
  print("closed", recorder.lost, flush=True)


if __name__ == "__main__":
  import jax.experimental.multihost_utils
  main()
