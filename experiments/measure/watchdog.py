"""Late processes, named: real ones of which one stops, sleeps, starves of data, leaves, is process
0; and healthy ones.

    python -m experiments.measure.watchdog                          # about five minutes on two cores; needs no quiet
    machine
    python -m experiments.measure.watchdog --only=stopped --repeats=1

Every run is a job of its own: gloo processes whose step sums over all of them, watched by
`jaxpace.Watchdog`. After a number of steps one process misbehaves. What is measured is the time
from the reporter's last completed step to its report, less the timeout T. In the healthy runs
nothing may be said, though they pause, compile or wait longer than T. Writes
docs/measurements/watchdog.json and the table of it, watchdog.md.
"""  # noqa: E501

from __future__ import annotations

import contextlib
import os
import pathlib
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import time
from typing import Any, NamedTuple

from absl import app, flags

from jaxpace.hosts.launch.environment import ADDRESS, COUNT, INDEX, with_device_count
from jaxpace.live.watchdog.events import read_events


class Scenario(NamedTuple):
  """One kind of run: who misbehaves and what must be said of it."""

  culprit: int
  states: tuple[str, ...]  # one of which the culprit must be found in; none: nothing may be said
  words: str  # what happens


SCENARIOS = {
    "stopped": Scenario(2, ("silent",), "process 2 gets SIGSTOP"),
    "sleeping": Scenario(2, ("outside",), "process 2 sleeps in Python, between steps"),
    "starving": Scenario(1, ("outside",), "process 1 waits for data that never come"),
    "left": Scenario(1, ("left",), "process 1 runs out of batches and leaves its loop"),
    "zero sleeping": Scenario(0, ("outside",), "process 0's loop sleeps"),
    "zero stopped": Scenario(0, ("service",), "process 0 gets SIGSTOP, and the store with it"),
    "healthy": Scenario(-1, (), "nothing happens"),
    "checkpoint": Scenario(1, (), "process 1 writes a checkpoint for twice T, announced"),
    "compiling": Scenario(1, (), "process 1 compiles for twice T"),
}
_STEPS = 40
_BAD_STEP = 20
_START_SECONDS = 90.0


def work(scenario: str, directory: str, timeout: float) -> None:
  """What one process does."""
  import jax
  import jax.numpy as jnp
  import numpy as np
  from jax.sharding import AxisType, NamedSharding
  from jax.sharding import PartitionSpec as P

  import jaxpace

  jaxpace.distributed.initialize()
  process = jax.process_index()
  mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))

  def local(x):
    if scenario == "compiling" and x.shape[-1] == 8 and process == 1:
      time.sleep(2 * timeout)  # while it is traced
    return jax.lax.psum(jnp.sum(x), "data")

  step = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=P()))

  def batch(width: int) -> jax.Array:
    shape = (jax.device_count(), width)
    return jax.make_array_from_callback(shape, NamedSharding(mesh, P("data")),
                                        lambda i: np.ones(shape, np.float32)[i])

  batches = {width: batch(width) for width in (4, 8)}
  bad = process == SCENARIOS[scenario].culprit
  with jaxpace.Watchdog(timeout, directory=directory) as watchdog:
    watched = watchdog.watch(step)
    for k in range(_STEPS):
      if bad and k == _BAD_STEP:
        if scenario == "left":
          break
        misbehave(scenario, watchdog, timeout)
      total = watched(batches[8 if scenario == "compiling" and k >= _BAD_STEP else 4])
      if k % 4 == 3:
        float(total)
      time.sleep(0.01)
    float(total)
  if scenario == "left":
    time.sleep(60)
  jaxpace.distributed.barrier("end", 60)


def misbehave(scenario: str, watchdog: Any, timeout: float) -> None:
  """What the culprit does."""
  match scenario:
    case "stopped" | "zero stopped":
      os.kill(os.getpid(), signal.SIGSTOP)
    case "sleeping" | "zero sleeping":
      time.sleep(60)
    case "starving":
      next_batch(queue.Queue())
    case "checkpoint":
      with watchdog.pause("checkpoint"):
        time.sleep(2 * timeout)


def next_batch(source: queue.Queue) -> Any:
  """Waits for a batch."""
  return source.get()


def run(scenario: str, timeout: float, processes: int = 3) -> dict[str, Any]:
  """Runs one job and returns what its watchdogs said.

  Args:
    scenario: a key of `SCENARIOS`.
    timeout: T, seconds.
    processes: more than the culprit's index.

  Returns:
    "events": as `read_events` returns them; "named": whether the culprit and nobody else was named,
    or, of a healthy run, nobody; "late_by": seconds from T to the first report; "log": what process
    0 to n logged.
  """
  expected = SCENARIOS[scenario]
  with tempfile.TemporaryDirectory() as root, contextlib.ExitStack() as stack:
    with socket.socket() as probe:
      probe.bind(("127.0.0.1", 0))
      port = probe.getsockname()[1]
    children = []
    for index in range(processes):
      log = stack.enter_context((pathlib.Path(root) / f"{index}.log").open("wb"))
      env = {**os.environ, ADDRESS: f"127.0.0.1:{port}", COUNT: str(processes), INDEX: str(index),
             "JAX_PLATFORMS": "cpu",
             "XLA_FLAGS": with_device_count(os.environ.get("XLA_FLAGS", ""), 1), "PJRT_NPROC": "2"}
      children.append(subprocess.Popen(
          [sys.executable, "-m", "experiments.measure.watchdog", f"--worker={scenario}",
           f"--root={root}", f"--timeout={timeout}"], env=env, stdout=log,
          stderr=subprocess.STDOUT))
    try:
      events = _wait(root, children, bool(expected.states))
    finally:
      for child in children:
        child.kill()
        child.wait()
    logs = [(pathlib.Path(root) / f"{index}.log").read_text(errors="replace")
            for index in range(processes)]
  late = [event for event in events if event["event"] == "late"]
  named = not late if not expected.states else bool(late) and all(
      [one["process"] for one in event["late"]] == [expected.culprit]
      and event["late"][0]["state"] in expected.states for event in late)
  return {"scenario": scenario, "timeout": timeout, "named": named, "events": events, "log": logs,
          "late_by": late[0]["waited"] - timeout if late else None}


def _wait(root: str, children: list[subprocess.Popen[bytes]],
          wants_event: bool) -> list[dict[str, Any]]:
  """Waits for the first report, or for the end of all processes where none is wanted."""
  deadline = time.monotonic() + _START_SECONDS
  while time.monotonic() < deadline:
    ended = [child.poll() is not None for child in children]
    if all(ended) or (wants_event and read_events(root)):
      break
    time.sleep(0.1)
  time.sleep(1.0 if wants_event else 0.0)  # others may speak as well
  return read_events(root)


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"Not an option: {argv[1]}.")
  if flags.FLAGS.worker:
    work(flags.FLAGS.worker, flags.FLAGS.root, flags.FLAGS.timeout)
    return
  from experiments.lib import measured
  circumstances = measured.circumstances("experiments.measure.watchdog")
  rows = []
  names = [flags.FLAGS.only] if flags.FLAGS.only else list(SCENARIOS)
  for name in names:
    for repeat in range(flags.FLAGS.repeats):
      found = run(name, flags.FLAGS.timeout)
      rows.append({key: found[key] for key in ("scenario", "timeout", "named", "late_by")} | {
          "words": SCENARIOS[name].words,
          "said": [e.get("late") for e in found["events"] if e["event"] == "late"][:1]})
      by = "" if found["late_by"] is None else f", {found['late_by']:.2f} s after T"
      print(
          f"{name} {repeat + 1}/{flags.FLAGS.repeats}: "
          f"{'as it should be' if found['named'] else 'WRONG'}{by}",
          flush=True)
      if not found["named"]:
        print("\n".join(found["log"]), flush=True)
  if not flags.FLAGS.only:
    figures = {**circumstances, "timeout": flags.FLAGS.timeout, "rows": rows}
    text = [*measured.introduction("Late processes, named", figures),
            f"3 processes, T = {flags.FLAGS.timeout:g} s.", "",
            *table(rows)]
    measured.write(figures, text, pathlib.Path(flags.FLAGS.out))


def table(rows: list[dict[str, Any]]) -> list[str]:
  """Renders the rows, one line a scenario."""
  lines = ["| what happens | as it should be | reported so long after T, s: median, longest |",
           "|---|---|---|"]
  for name, scenario in SCENARIOS.items():
    own = [row for row in rows if row["scenario"] == name]
    times = sorted(row["late_by"] for row in own if row["late_by"] is not None)
    span = f"{times[len(times) // 2]:.2f}, {times[-1]:.2f}" if times else "nothing said"
    lines.append(
        f"| {scenario.words} | {sum(row['named'] for row in own)} of {len(own)} | {span} |")
  return lines


def define_flags() -> None:
  """Defines this program's flags."""
  flags.DEFINE_string("worker", None, "Internal: be one process of this scenario.")
  flags.DEFINE_string("root", "", "Internal: where the watchdogs write.")
  flags.DEFINE_float("timeout", 3.0, "T, seconds.")
  flags.DEFINE_enum("only", None, list(SCENARIOS), "Only this scenario; nothing is written.")
  flags.DEFINE_string("out", "docs/measurements/watchdog.json", "Where the figures go.")
  flags.DEFINE_integer("repeats", 5, "Runs of each scenario.", lower_bound=1)


if __name__ == "__main__":
  define_flags()
  app.run(main)
