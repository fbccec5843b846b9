"""What recording costs: a bare step against the same step observed, and against the instrumented
one.

    python -m experiments.measure.recording_overhead --real_time    # one process, about ten minutes
    python -m experiments.measure.recording_overhead --real_time --processes=2 --cases=shard_map

Steps of real arithmetic whose arms take turns step by step, in an order drawn anew each time: the
jitted step, the same compiled once more (the null), one recorded unchanged as by `jaxpace run`, the
one that `jaxpace.recorded` observes, and, where the step is a `shard_map`, the instrumented one
that it records. The loop waits for the loss of each
step, as one that logs it does. Rounds are many and short: each gives a ratio to the bare step, of
means and of medians, so that what disturbs the machine for a second is in all arms of its round;
their mean has Student's interval over rounds. The recorders' threads work at any time, so their CPU
time is given apart. With several processes each has one device, and process 0's times count.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from absl import app, flags

from experiments.lib import measured, paired

MODULE = "experiments.measure.recording_overhead"
CASES = ("data parallel, scan", "FSDP, scan, remat", "shard_map")
LAYERS = 8
BARE, AGAIN, UNCHANGED, OBSERVED, INSTRUMENTED = ARMS = (
    "bare", "bare again", "unchanged", "recorded", "instrumented")


def define_flags() -> None:
  """Defines the flags of this program."""
  measured.define_flags("observed_overhead", 60, "Rounds.")
  flags.DEFINE_integer("devices", 2, "Forced devices of one process.", lower_bound=2)
  flags.DEFINE_integer("processes", 1, "Processes, joined by gloo.", lower_bound=1)
  flags.DEFINE_list("targets_ms", ["5", "20", "50"], "Steps to aim at.")
  flags.DEFINE_list("cases", ["data parallel", "FSDP", "shard_map"],
                    f"Beginnings of: {'; '.join(CASES)}.")
  flags.DEFINE_float("seconds", 0.5, "Seconds per round.")
  flags.DEFINE_string("worker", "", "Internal: one process of several; file for the rows.")
  measured.define_priority_flag()


def make(case: str, width: int, batch: int) -> tuple[Any, Any, Any, Any]:
  """Makes a case of a width and a batch size.

  Returns:
    What makes the jitted step anew, of an instrumented function if one is given, with the function
    of one device; weights; inputs; the mesh where the step is a `shard_map`.
  """
  import jax
  import jax.numpy as jnp
  from jax.sharding import AxisType, NamedSharding
  from jax.sharding import PartitionSpec as P

  import jaxpace
  mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
  sharded, by_hand = case.startswith("FSDP"), case.startswith("shard_map")
  spec = NamedSharding(mesh, P(None, "data", None) if sharded else P())

  def layer(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
    return jnp.tanh(h @ w) + h, None

  def loss(weights: jax.Array, batch: jax.Array) -> jax.Array:
    out, _ = jax.lax.scan(jax.checkpoint(layer) if sharded else layer, batch, weights)
    return jnp.mean(out ** 2)

  def train(weights: jax.Array, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
    value, gradient = jax.value_and_grad(loss)(weights, batch)
    if by_hand:
      value, gradient = jax.lax.pmean((value, gradient), "data")
    return weights - jnp.float32(1e-3) * gradient, value

  def fresh(paced: Any = None) -> Any:
    if not by_hand:
      return jax.jit(train, out_shardings=(spec, NamedSharding(mesh, P())))
    pace = () if paced is None else (jaxpace.spec(mesh),)
    return jax.jit(jax.shard_map(paced or train, mesh=mesh, in_specs=(*pace, P(), P("data")),
                                 out_specs=(*pace, P()) if pace else P(), check_vma=False))

  def put(values: np.ndarray, where: NamedSharding) -> jax.Array:
    return jax.make_array_from_callback(values.shape, where, lambda place: values[place])

  drawn = np.random.default_rng(0)
  weights = put(drawn.normal(size=(LAYERS, width, width)).astype(np.float32) / width, spec)
  inputs = put(drawn.normal(size=(batch, width)).astype(np.float32),
               NamedSharding(mesh, P("data")))
  return (fresh, train), weights, inputs, mesh if by_hand else None


def sized(case: str, target: float) -> tuple[int, int]:
  """Width and batch with which a step takes about `target` seconds here, the same in every
  process."""
  import jaxpace
  width, batch = 128, 64
  for attempt in range(4):
    (fresh, _), weights, inputs, _ = make(case, width, batch)
    took = min(timed(fresh(), weights, inputs, 5) for _ in range(2))
    if jaxpace.distributed.process_count() > 1:
      took = float(jaxpace.distributed.share_string(f"{case}/{target}/{attempt}", str(took), 60)
                   or took)
    if 0.8 < took / target < 1.25:
      break
    batch = max(16, min(16384, round(batch * target / took / 16) * 16))
  return width, batch


def timed(step: Any, weights: Any, inputs: Any, steps: int) -> float:
  """Mean seconds per step, after a first one."""
  import jax
  jax.block_until_ready(step(weights, inputs))
  return paired.seconds_each(lambda: jax.block_until_ready(step(weights, inputs)), steps)


def measure(case: str, target: float, rounds: int, seconds: float) -> dict[str, Any]:
  """One case at one size: the arms take turns step by step, the recorders open all the time."""
  import jaxpace
  width, batch = sized(case, target)
  (fresh, train), weights, inputs, mesh = make(case, width, batch)
  observed = jaxpace.observe(fresh())
  steps: dict[str, Any] = {BARE: fresh()}
  # JAX would not compile the same function again.
  steps[AGAIN] = make(case, width, batch)[0][0]()
  for bare in (BARE, AGAIN):
    timed(steps[bare], weights, inputs, 5)
  with tempfile.TemporaryDirectory() as root, contextlib.ExitStack() as stack:
    # What is compiled from here on gets timestamps, though nobody wraps it.
    inside = stack.enter_context(jaxpace.observed(os.path.join(root, "unchanged")))
    steps[UNCHANGED] = make(case, width, batch)[0][0]()
    steps[OBSERVED] = stack.enter_context(
        jaxpace.recorded(os.path.join(root, "observed"), observed))
    if mesh is not None:
      paced = jaxpace.instrument(train, "data")
      steps[INSTRUMENTED] = stack.enter_context(
          jaxpace.recorded(os.path.join(root, "paced"), paced, fresh(paced), mesh))
    for step in steps.values():
      timed(step, weights, inputs, 5)
    before = writer_seconds()
    found = in_turns(steps, weights, inputs, rounds, max(5, round(seconds / (3 * target))),
                     measured.progress(f"{case}, {target * 1e3:g} ms", rounds))
    writer = writer_seconds() - before
  if inside.step is None:
    raise SystemExit("The unchanged step has no marks.")
  program, = observed.plan.programs
  if program.bare:
    raise SystemExit(f"The step has no marks: {program.bare}")
  return {"case": case, "target_ms": target * 1e3, "width": width, "batch": batch,
          "marks": program.marks, **compared(found),
          "writer_percent": writer_percent(writer, found)}


def in_turns(steps: dict[str, Any], weights: Any, inputs: Any, rounds: int, length: int,
             say: Callable[[int], None]) -> dict[str, np.ndarray]:
  """Seconds of each arm's steps, [rounds, length]."""
  import jax
  order = random.Random(0)  # the same in every process
  found = {name: np.zeros((rounds, length)) for name in steps}
  for done in range(rounds):
    for k in range(length):
      for name in order.sample(list(steps), len(steps)):
        start = time.perf_counter()
        jax.block_until_ready(steps[name](weights, inputs))
        found[name][done, k] = time.perf_counter() - start
    say(done + 1)
  return found


def compared(found: dict[str, np.ndarray]) -> dict[str, Any]:
  """Each arm's ratio to the bare one, of a round's means and of its medians."""
  def percent(of: Callable[..., np.ndarray]) -> dict[str, list[float]]:
    return {name: [100 * (value - 1) for value in paired.estimate(
        of(values, axis=1) / of(found[BARE], axis=1)).to_json()]
        for name, values in found.items() if name != BARE}

  return {"bare_ms": paired.estimate(1e3 * found[BARE].mean(axis=1)).to_json(),
          "percent": percent(np.mean), "percent_of_medians": percent(np.median),
          "raw_ms": {name: (1e3 * values.mean(axis=1)).round(5).tolist()
                     for name, values in found.items()}}


def writer_seconds() -> float:
  """CPU time that the recorders' threads have used so far; 0 where the system does not say."""
  paths = [pathlib.Path(f"/proc/self/task/{thread.native_id}/schedstat")
           for thread in threading.enumerate() if thread.name == "jaxpace-writer"]
  return sum(int(path.read_text().split()[0]) * 1e-9 for path in paths if path.exists())


def writer_percent(writer: float, found: dict[str, np.ndarray]) -> float:
  """CPU time of one recorder's thread in percent of a core, from the time of them all:
  the recorders are open while every arm runs."""
  recorders = sum(name in found for name in ARMS[2:])
  return 100 * writer / recorders / sum(float(times.sum()) for times in found.values())


def lines(figures: dict[str, Any]) -> list[str]:
  """The figures in Markdown."""
  where = (f"{figures['processes']} processes of one device" if figures.get("processes", 1) > 1
           else f"{figures['devices']} forced devices in one process")
  rows = [[row["case"], row["marks"], f"{row['bare_ms'][0]:.1f} ms", name,
           *(f"{cost[0]:+.1f} % [{cost[1]:.1f}, {cost[2]:.1f}]"
             for kind in ("percent", "percent_of_medians")
             for cost in (row[kind][name], row[kind][AGAIN])), f"{row['writer_percent']:.2f} %"]
          for row in figures["rows"] for name in ARMS[2:] if name in row["percent"]]
  return [*measured.introduction("What recording a step costs", figures),
          f"{where}{measured.priority(figures)}. {figures['rounds']} rounds, in each of which the "
          "arms take turns step by step; a round gives each arm's ratio to the bare step, and "
          "brackets are Student's intervals of 95 % of their mean. Twice: from a round's mean "
          "steps, which pauses are part of, and from its median steps. `unchanged`: as by `jaxpace "
          "run`; `recorded`: observed; `instrumented`: that, too. A recorder's thread: of one "
          "core, all the time.", "",
          *measured.table(["step", "marks per step and device", "bare", "arm", "means",
                           "A/A control: bare again", "medians", "A/A control",
                           "a recorder's thread"], rows)]


def launch(processes: int) -> list[dict[str, Any]]:
  """Runs this program in several processes and returns process 0's rows."""
  with tempfile.TemporaryDirectory() as root:
    target = os.path.join(root, "rows.json")
    subprocess.run([sys.executable, "-m", "jaxpace", "run", "--no-record", "--nproc",
                    str(processes), "--logs", os.path.join(root, "logs"), "--", sys.executable,
                    "-m", MODULE, f"--worker={target}", *sys.argv[1:]], check=True)
    return list(json.loads(pathlib.Path(target).read_text()))


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"Unexpected arguments: {argv[1:]}")
  settings = flags.FLAGS
  os.environ["JAX_PLATFORMS"] = "cpu"
  measured.take_priority()
  measured.keep_memory(MODULE)
  chosen = [case for case in CASES if case.startswith(tuple(settings.cases))]

  def rows() -> list[dict[str, Any]]:
    return [measure(case, float(target) * 1e-3, settings.rounds, settings.seconds)
            for case in chosen for target in settings.targets_ms]

  import jax
  if settings.worker:
    import jaxpace
    jaxpace.distributed.initialize()
    found = rows()
    if jax.process_index() == 0:
      pathlib.Path(settings.worker).write_text(json.dumps(found))
    return
  jax.config.update("jax_num_cpu_devices", settings.devices)
  figures = {**measured.circumstances(MODULE), "devices": settings.devices,
             "processes": settings.processes, "rounds": settings.rounds,
             "real_time": settings.real_time}
  figures["rows"] = launch(settings.processes) if settings.processes > 1 else rows()
  measured.write(figures, lines(figures), pathlib.Path(settings.out))


if __name__ == "__main__":
  define_flags()
  app.run(main)
