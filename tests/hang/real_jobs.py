"""Jobs of real processes that a `jaxpace.Watchdog` watches, one of which misbehaves.

    python -m tests.hang.real_jobs SCENARIO ROOT TIMEOUT      # one process of a job
"""

from __future__ import annotations

import os
import pathlib
import queue
import signal
import subprocess
import sys
import time
from typing import Any, NamedTuple

from jaxpace.hang.alarms import read_events
from jaxpace.hosts.launch.environment import ADDRESS, COUNT, INDEX, with_device_count
from tests.multiprocess.jobs import free_high_port
from tests.patience import awaited


class Scenario(NamedTuple):
  """One kind of run: which process misbehaves, and the state in which it must be found."""

  culprit: int
  state: str


SCENARIOS = {"starving": Scenario(1, "outside"), "left": Scenario(1, "left"),
             "zero stopped": Scenario(0, "service")}
BAD_STEP = 20
_STEPS = 40
_START_SECONDS = 300.0


def work(scenario: str, directory: str, timeout: float) -> None:
  """What one process does: steps whose sum is over all processes, until its turn to misbehave."""
  import jax
  import jax.numpy as jnp
  from jax.sharding import AxisType, NamedSharding
  from jax.sharding import PartitionSpec as P

  import jaxpace

  jaxpace.distributed.initialize()
  mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
  step = jax.jit(jax.shard_map(lambda x: jax.lax.psum(jnp.sum(x), "data"), mesh=mesh,
                               in_specs=P("data"), out_specs=P()))
  batch = jax.device_put(jnp.ones((jax.device_count(), 4)), NamedSharding(mesh, P("data")))
  bad = jax.process_index() == SCENARIOS[scenario].culprit
  with jaxpace.Watchdog(timeout, directory=directory) as watchdog:
    watched = watchdog.watch(step)
    for k in range(_STEPS):
      if bad and k == BAD_STEP:
        if scenario == "left":
          break
        misbehave(scenario)
      float(watched(batch))
      time.sleep(0.01)
  if scenario == "left":
    time.sleep(600)
  jaxpace.distributed.barrier("end", 600)


def misbehave(scenario: str) -> None:
  """Stops this process, or waits for data that never come."""
  if scenario == "zero stopped":
    os.kill(os.getpid(), signal.SIGSTOP)
  else:
    next_batch(queue.Queue())


def next_batch(source: queue.Queue) -> Any:
  """Waits for a batch."""
  return source.get()


def run(scenario: str, root: pathlib.Path, timeout: float,
        processes: int) -> tuple[list[dict[str, Any]], list[str]]:
  """Runs one job of `SCENARIOS`, with watchdogs of this timeout in s, until the first report;
  returns reports of late processes as `read_events` does, and what each process logged."""
  port = free_high_port()
  logs = [root / f"{index}.log" for index in range(processes)]
  children = []
  for index, path in enumerate(logs):
    env = {**os.environ, ADDRESS: f"127.0.0.1:{port}", COUNT: str(processes), INDEX: str(index),
           "JAX_PLATFORMS": "cpu", "PJRT_NPROC": "2",
           "XLA_FLAGS": with_device_count(os.environ.get("XLA_FLAGS", ""), 1)}
    with path.open("wb") as log:
      children.append(subprocess.Popen(
          [sys.executable, "-m", __spec__.name, scenario, str(root), str(timeout)], env=env,
          stdout=log, stderr=subprocess.STDOUT))
  try:
    _wait(root, children)
  finally:
    for child in children:
      child.kill()
      child.wait()
  return ([event for event in read_events(root) if event["event"] == "late"],
          [path.read_text(errors="replace") for path in logs])


def _wait(root: pathlib.Path, children: list[subprocess.Popen[bytes]]) -> None:
  """Waits for the first report, or for the end of all processes."""
  awaited(lambda: read_events(root) or all(child.poll() is not None for child in children),
          _START_SECONDS)
  time.sleep(1.0)  # others may report as well


if __name__ == "__main__":
  work(sys.argv[1], sys.argv[2], float(sys.argv[3]))
