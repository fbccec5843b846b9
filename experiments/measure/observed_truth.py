"""A device made late inside one layer of one step of a plain-`jit` trainer: does the run say so?

    python -m experiments.measure.observed_truth

A step jitted as a whole, over a mesh of data and tensor: layers in a scan, each with an all-reduce
of activations over the tensor axis in the forward pass and one in the backward pass, gradients
all-reduced over the data axis. In some steps one device sleeps 1 to 50 ms inside one layer's
forward pass, by a fault that is an argument of the step, before that layer's all-reduce; how long
it slept is an output of the step. What was recorded by `jaxpace.observe` and a `Recorder` is asked
two things: by how much that device's arrival at that layer's all-reduce was above its usual value
in that step, and which arrival of all ranks and layers was most above its own: is it that rank's,
in that layer?
"""

from __future__ import annotations

import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpace
from experiments.lib import measured
from jaxpace.observation.clocks import native
from jaxpace.runs.reader import read_run

LAYERS, WIDTH, BATCH = 6, 128, 64
EVERY = 4
"""One step in so many has a fault; the others say what is usual."""
MODULE = "experiments.measure.observed_truth"


class Fault(NamedTuple):
  """One device late in one layer of one step."""

  step: int
  rank: int
  layer: int
  delay_ms: float


def define_flags() -> None:
  """Defines the flags of this program."""
  flags.DEFINE_list("delays_ms", ["1", "2", "5", "10", "20", "50"],
                    "Delays, each injected `times` times.")
  flags.DEFINE_integer("times", 12, "Faults of each delay.", lower_bound=1)
  flags.DEFINE_list("jobs", ["1", "2", "4"],
                    "Processes of each job: 1 has four devices, others one each.")
  flags.DEFINE_string("out", "docs/measurements/observed_truth.json",
                      "File the figures are written to.")
  flags.DEFINE_string("worker", "", "Internal: this is one process of a job; directory of its run.")


def faults(delays: list[float], times: int, ranks: int) -> list[Fault]:
  """Every delay `times` times, on random devices and layers, in random order; the same in every
  process."""
  draw = random.Random(ranks)
  amounts = [delay for delay in delays for _ in range(times)]
  draw.shuffle(amounts)
  return [Fault(20 + EVERY * k, draw.randrange(ranks), draw.randrange(LAYERS), amount)
          for k, amount in enumerate(amounts)]


def make_mesh() -> jax.sharding.Mesh:
  """Two along the data axis where there are four devices."""
  count = jax.device_count()
  shape = (2, count // 2) if count >= 4 else (1, count)
  return jax.make_mesh(shape, ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)


def late(mesh: jax.sharding.Mesh, h: jax.Array, seconds: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Sleeps on each device once `h` is there, and hands `h` on after that; [devices] seconds, slept
  likewise.

  An island in the jitted step: the compiler partitions what is around it.
  """
  def each(h: jax.Array, seconds: jax.Array) -> tuple[jax.Array, jax.Array]:
    before, after = native.delay(seconds[0], 1.0, jnp.zeros(2, jnp.uint32), h)
    slept = (after[1] - before[1]).astype(jnp.float32) * jnp.float32(1e-9)
    return (jnp.where(after[0] == jnp.uint32(0xFFFFFFFF), jnp.float32(0), jnp.float32(1))[None],
            slept[None])

  both = P(("data", "tensor"))
  one, slept = jax.shard_map(each, mesh=mesh, in_specs=(P("data", None), both),
                             out_specs=(both, both), check_vma=False)(
                                 jax.lax.stop_gradient(h), seconds)
  # Each device's own 1, laid out as the activations are: it multiplies what that device computes
  # next.
  return jax.lax.stop_gradient(one), slept


def step(mesh: jax.sharding.Mesh) -> Any:
  """The jitted step: (weights, batch, seconds) -> (weights, loss, slept)."""
  def loss_of(weights: Any, batch: jax.Array, seconds: jax.Array) -> tuple[jax.Array, jax.Array]:
    def layer(h: jax.Array, one: Any) -> tuple[jax.Array, jax.Array]:
      first, second, wait = one
      hidden = jnp.tanh(h @ first)
      ready, slept = late(mesh, h, wait)
      # Sharded over the tensor axis, as the hidden layer is: the product waits for the sleep on
      # each device.
      scale = jnp.repeat(ready.reshape(mesh.devices.shape),
                         hidden.shape[1] // mesh.devices.shape[1], axis=1)
      scale = jnp.repeat(scale, hidden.shape[0] // mesh.devices.shape[0], axis=0)
      scale = jax.lax.with_sharding_constraint(scale, NamedSharding(mesh, P("data", "tensor")))
      return h + (hidden * scale) @ second, slept

    out, slept = jax.lax.scan(layer, batch, (*weights, seconds))
    return jnp.mean(out ** 2), slept

  def train(weights: Any, batch: jax.Array, seconds: jax.Array) -> Any:
    (loss, slept), gradients = jax.value_and_grad(loss_of, has_aux=True)(weights, batch, seconds)
    return jax.tree.map(lambda w, g: w - 0.01 * g, weights, gradients), loss, slept

  columns, rows = (NamedSharding(mesh, spec)
                   for spec in (P(None, None, "tensor"), P(None, "tensor", None)))
  both = NamedSharding(mesh, P(None, ("data", "tensor")))
  return jax.jit(train, in_shardings=((columns, rows), NamedSharding(mesh, P("data", None)), both),
                 out_shardings=((columns, rows), NamedSharding(mesh, P()), both))


def placed(values: np.ndarray, sharding: NamedSharding) -> jax.Array:
  """An array over all processes' devices; every process has all of its values."""
  return jax.make_array_from_callback(values.shape, sharding, lambda place: values[place])


def work(root: pathlib.Path, delays: list[float], times: int) -> None:
  """One process: all steps, recorded in full; what its devices slept goes to a file of its own."""
  mesh = make_mesh()
  ranks = jax.device_count()
  todo = {fault.step: fault for fault in faults(delays, times, ranks)}
  random_numbers = np.random.default_rng(0)
  run = jaxpace.observe(step(mesh))
  columns, rows = P(None, None, "tensor"), P(None, "tensor", None)
  weights = tuple(placed((random_numbers.normal(size=(LAYERS, *shape)) / 16).astype(np.float32),
                         NamedSharding(mesh, spec))
                  for shape, spec in (((WIDTH, 2 * WIDTH), columns), ((2 * WIDTH, WIDTH), rows)))
  batch = placed(random_numbers.normal(size=(BATCH, WIDTH)).astype(np.float32),
                 NamedSharding(mesh, P("data", None)))
  both = NamedSharding(mesh, P(None, ("data", "tensor")))
  slept = []
  steps = max(todo) + EVERY
  say = measured.progress(f"steps of process {jax.process_index()}", steps)
  with jaxpace.Recorder(root / "run", run, detail=1) as recorder:
    for number in range(steps):
      seconds = np.zeros((LAYERS, ranks), np.float32)
      if fault := todo.get(number):
        seconds[fault.layer, fault.rank] = fault.delay_ms * 1e-3
      weights, loss, found = run(weights, batch, placed(seconds, both))
      recorder.record()
      slept.append(found)
      jax.block_until_ready(loss)
      say(number + 1)
  print(run.plan, flush=True)
  own = {int(jax.devices().index(shard.device)):
         [np.asarray(each.addressable_shards[k].data).ravel().tolist()
          for each in slept]
         for k, shard in enumerate(slept[0].addressable_shards)}
  (root / f"slept{jax.process_index()}.json").write_text(json.dumps(own))


def judge(root: pathlib.Path, delays: list[float], times: int) -> dict[str, Any]:
  """Holds the run against what was slept."""
  run = read_run(root / "run")
  slept: dict[int, np.ndarray] = {}
  for path in root.glob("slept*.json"):
    slept |= {int(rank): np.array(values) for rank, values in json.loads(path.read_text()).items()}
  planned = {entry["slot"]: entry for entry in run.plan["collectives"]}
  enter, leave, start, slots = rows_of(root / "run", run.ranks)
  usual_steps = np.array([k for k in range(12, enter.shape[2]) if (k - 20) % EVERY != 0])
  # Collectives follow each other here; the first is reached from the step's start.
  order = np.argsort(np.nanmedian(enter - start[:, None], axis=(0, 2)))
  before = np.empty_like(leave)
  before[:, order[0]] = start
  before[:, order[1:]] = leave[:, order[:-1]]
  arrival = enter - before
  excess = arrival - np.nanmedian(arrival[:, :, usual_steps], axis=2)[:, :, None]
  judged = []
  for fault in faults(delays, times, run.ranks):
    found = excess[:, :, fault.step]
    rank, place = np.unravel_index(np.nanargmax(found), found.shape)
    entry = planned[slots[place]]
    truth = float(slept[fault.rank][fault.step][fault.layer]) * 1e3
    turn = entry["loops"][-1][1] if entry["loops"] else None
    told = float(found[rank, place]) * 1e-6
    there = next(at for at, slot in enumerate(slots) if planned[slot]["phase"] == "forward"
                 and planned[slot]["loops"]
                 and planned[slot]["loops"][-1][1] == fault.layer)
    at_place = float(found[fault.rank, there]) * 1e-6
    judged.append({"delay_ms": fault.delay_ms, "slept_ms": truth, "told_ms": told,
                   "rank_right": bool(rank == fault.rank),
                   "layer_right": bool(rank == fault.rank and turn == fault.layer
                                       and entry["phase"] == "forward"),
                   "name": entry["name"], "error_ms": at_place - truth,
                   "within": bool(abs(at_place - truth) <= max(0.05 * truth, 0.3))})
  quiet = excess[:, :, usual_steps]
  return {"ranks": run.ranks, "faults": judged, "steps": int(enter.shape[2]),
          "collectives": len(slots),
          "lost": sum(process.info.get("lost_rows", 0) for process in run.processes),
          "null_ms": {"median": float(np.median(np.nanmax(quiet, axis=(0, 1)))) * 1e-6,
                      "p90": float(np.quantile(np.nanmax(quiet, axis=(0, 1)), 0.9)) * 1e-6}}


def rows_of(path: pathlib.Path, ranks: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[int]]:
  """Entries and exits [ranks, slots, steps] and starts [ranks, steps], ns from each rank's first or
  NaN; and slots."""
  import pyarrow.parquet as pq
  table = pq.read_table(path / "collectives",
                        columns=["rank", "step", "collective", "enter_ns", "exit_ns"])
  rank, number, slot, enter, leave = (np.asarray(table[name].to_numpy(), np.int64)
                                      for name in table.column_names)
  slots = np.unique(slot)
  times = np.full((2, ranks, len(slots), int(number.max()) + 1), np.nan)
  starts = np.full((ranks, times.shape[3]), np.nan)
  begun = pq.read_table(path / "steps", columns=["rank", "step", "start_ns"])
  of_rank, of_step, start = (np.asarray(begun[name].to_numpy(), np.int64)
                             for name in begun.column_names)
  for each in range(ranks):
    own = rank == each
    origin = enter[own].min()
    starts[each, of_step[of_rank == each]] = start[of_rank == each] - origin
    for side, values in enumerate((enter, leave)):
      times[side, each, np.searchsorted(slots, slot[own]), number[own]] = values[own] - origin
  return times[0], times[1], starts, slots.tolist()


def launch(processes: int, delays: list[float], times: int) -> dict[str, Any]:
  """Runs a job and judges it: one process with four devices, or several with one each."""
  with tempfile.TemporaryDirectory() as root:
    own = [sys.executable, "-m", MODULE, f"--worker={root}",
           f"--delays_ms={','.join(f'{d:g}' for d in delays)}", f"--times={times}"]
    devices = 4 if processes == 1 else 1
    command = own if processes == 1 else [
        sys.executable, "-m", "jaxpace", "run", "--no-record", "--nproc", str(processes),
        "--logs", os.path.join(root, "logs"), "--", *own]
    subprocess.run(command, check=True, env={**os.environ, "JAX_PLATFORMS": "cpu",
                                             "XLA_FLAGS":
                                             f"--xla_force_host_platform_device_count={devices}"})
    return {"processes": processes, **judge(pathlib.Path(root), delays, times)}


def summary(job: dict[str, Any]) -> list[dict[str, Any]]:
  """What came out for each delay, and in all."""
  def row(name: str, chosen: list[dict[str, Any]]) -> dict[str, Any]:
    errors = np.array([fault["error_ms"] for fault in chosen])
    return {"delay": name, "faults": len(chosen),
            **{key: sum(fault[key] for fault in chosen) for key in (
                "rank_right", "layer_right", "within")}, "error_ms": float(np.median(errors)),
            "error_p90_ms": float(np.quantile(np.abs(errors), 0.9))}
  delays = sorted({fault["delay_ms"] for fault in job["faults"]})
  rows = [row(f"{delay:g} ms", [fault for fault in job["faults"] if fault["delay_ms"] == delay])
          for delay in delays]
  return [*rows, row("all", job["faults"])]


def lines(figures: dict[str, Any]) -> list[str]:
  """The figures in Markdown."""
  page = measured.introduction("A device late in one layer of one step", figures)
  for job in figures["jobs"]:
    kind = f"{job['processes']} processes with gloo, one device each"
    page += ["## One process, four devices" if job["processes"] == 1 else f"## {kind}", "",
             f"{job['steps']} steps, {job['collectives']} collectives per step with iterations of "
             f"loops counted, {job['lost']} rows lost. In steps without a fault the largest excess "
             f"of any arrival has a median of {job['null_ms']['median']:.2f} ms, "
             f"{job['null_ms']['p90']:.2f} in one of ten: a delay below that is hidden.", "",
             *measured.table(
                 ["delay", "faults", "arrival within 5 % or 0.3 ms", "median error",
                  "90 % of errors below", "largest is that rank's", "and of that layer"],
                 [[row["delay"], row["faults"], row["within"], f"{row['error_ms']:+.3f} ms",
                   f"{row['error_p90_ms']:.3f} ms", row["rank_right"], row["layer_right"]]
                  for row in summary(job)])]
  return page


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"Unexpected arguments: {argv[1:]}")
  delays = [float(delay) for delay in flags.FLAGS.delays_ms]
  if flags.FLAGS.worker:
    if "JAX_COORDINATOR_ADDRESS" in os.environ or "JAXPACE_PROCESS_ID" in os.environ:
      jaxpace.distributed.initialize()
    work(pathlib.Path(flags.FLAGS.worker), delays, flags.FLAGS.times)
    return
  figures = measured.circumstances(MODULE)
  figures["jobs"] = [launch(int(count), delays, flags.FLAGS.times) for count in flags.FLAGS.jobs]
  measured.write(figures, lines(figures), pathlib.Path(flags.FLAGS.out))


if __name__ == "__main__":
  define_flags()
  app.run(main)
