"""A device made late inside one turn of a loop of an instrumented step: does the run say so?

    python -m experiments.measure.loops_truth --json loops_truth.json --markdown loops_truth.md

A step per device under `shard_map`, instrumented: layers in a scan, each with a sum over the data
axis in the forward pass and one in the backward pass, and gradients averaged at the end. In some
steps one device sleeps 1 to 50 ms inside one turn, before that turn's sum in the forward pass; how
much and where is an argument of the step, and how long it slept is an output of it. What a
`Recorder` wrote of the marks in the loops is asked two things: by how much that device's arrival at
that turn's sum was above its usual value in that step, and which arrival of all ranks and
collectives was most above its own: is it that rank's, in that turn? Steps without a delay are the
null.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpace
from experiments.lib import measured
from experiments.measure.observed_truth import (
    EVERY,
    LAYERS,
    faults,
    placed,
    rows_of,
    summary,
)
from jaxpace.execution import native
from jaxpace.trace.reader import read_run

WIDTH, BATCH = 128, 64
MODULE = "experiments.measure.loops_truth"


def define_flags() -> None:
  """Defines the flags of this program."""
  flags.DEFINE_list("delays_ms", ["1", "2", "5", "10", "20", "50"],
                    "Delays, each injected `times` times.")
  flags.DEFINE_integer("times", 12, "Faults of each delay.", lower_bound=1)
  flags.DEFINE_list("jobs", ["1", "2"],
                    "Processes of each job: 1 has two devices, others one each.")
  flags.DEFINE_bool("real_time", False, "Run jobs with real-time priority (needs the right to).")
  measured.define_output_flags()
  flags.DEFINE_string("worker", "", "Internal: this is one process of a job; directory of its run.")


def train(weights: jax.Array, given: tuple[jax.Array, jax.Array]) -> Any:
  """One device's step: (weights, (batch, [1, layers] seconds)) -> (weights, loss, slept)."""
  batch, seconds = given

  def layer(h: jax.Array, one: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    w, wait = one
    y = jnp.tanh(h @ w)
    before, after = native.delay(wait, 1.0, jnp.zeros(2, jnp.uint32), jax.lax.stop_gradient(y))
    slept = (after[1] - before[1]).astype(jnp.float32) * jnp.float32(1e-9)
    # Waited for by what is summed.
    ready = jnp.where(after[0] == jnp.uint32(0xFFFFFFFF), jnp.float32(0), jnp.float32(1))
    mean = jax.lax.pmean((y * ready).mean(0), "data")
    return h + y - mean, slept

  def loss_of(weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    out, slept = jax.lax.scan(layer, batch, (weights, seconds[0]))
    return jnp.mean(out ** 2), slept

  (loss, slept), gradient = jax.value_and_grad(loss_of, has_aux=True)(weights)
  gradient, loss = jax.lax.pmean((gradient, loss), "data")
  return weights - 0.01 * gradient, (loss, slept[None])


def work(root: pathlib.Path, delays: list[float], times: int) -> None:
  """One process: all steps, recorded in full; what its devices slept goes to a file of its own."""
  ranks = jax.device_count()
  mesh = jax.make_mesh((ranks,), ("data",), axis_types=(AxisType.Auto,))
  todo = {fault.step: fault for fault in faults(delays, times, ranks)}
  paced = jaxpace.instrument(train, "data")
  spec = jaxpace.spec(mesh)
  step = jax.jit(jax.shard_map(paced, mesh=mesh, in_specs=(spec, P(), (P("data"), P("data"))),
                               out_specs=(spec, (P(), (P(), P("data")))), check_vma=False))
  random_numbers = np.random.default_rng(0)
  whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
  weights = placed((random_numbers.normal(size=(LAYERS, WIDTH, WIDTH)) / 16).astype(np.float32),
                   whole)
  batch = placed(random_numbers.normal(size=(BATCH, WIDTH)).astype(np.float32), split)
  pace, slept = paced.init(mesh), []
  steps = max(todo) + EVERY
  say = measured.progress(f"steps of process {jax.process_index()}", steps)
  with jaxpace.Recorder(root / "run", paced, detail=1) as recorder:
    for number in range(steps):
      seconds = np.zeros((ranks, LAYERS), np.float32)
      if fault := todo.get(number):
        seconds[fault.rank, fault.layer] = fault.delay_ms * 1e-3
      pace, (weights, (loss, found)) = step(pace, weights, (batch, placed(seconds, split)))
      recorder.record(pace)
      slept.append(found)
      jax.block_until_ready(loss)
      say(number + 1)
  if not paced.plan.inside or paced.plan.unstamped:
    raise SystemExit(f"The loops have no marks: {paced.plan.notices}")
  own = {int(jax.devices().index(shard.device)):
         [np.asarray(each.addressable_shards[k].data).ravel().tolist() for each in slept]
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
  steps = np.arange(enter.shape[2])
  usual_steps = steps[(steps >= 12) & ((steps - 20) % EVERY != 0)]
  order = np.argsort(np.nanmedian(enter - start[:, None], axis=(0, 2)))
  before = np.empty_like(leave)
  before[:, order[0]] = start
  before[:, order[1:]] = leave[:, order[:-1]]
  arrival = enter - before
  excess = arrival - np.nanmedian(arrival[:, :, usual_steps], axis=2)[:, :, None]
  # The forward pass is gone through first.
  turns = [int(place) for place in order if planned[slots[place]]["loops"]][:LAYERS]
  judged = []
  for fault in faults(delays, times, run.ranks):
    found = excess[:, :, fault.step]
    rank, place = np.unravel_index(np.nanargmax(found), found.shape)
    there = turns[fault.layer]
    assert planned[slots[there]]["loops"][-1][1] == fault.layer
    truth = float(slept[fault.rank][fault.step][fault.layer]) * 1e3
    error = float(found[fault.rank, there]) * 1e-6 - truth
    judged.append({"delay_ms": fault.delay_ms, "slept_ms": truth,
                   "told_ms": float(found[rank, place]) * 1e-6,
                   "name": planned[slots[place]]["name"], "rank_right": bool(rank == fault.rank),
                   "layer_right": bool(rank == fault.rank and place == there), "error_ms": error,
                   "within": bool(abs(error) <= max(0.05 * truth, 0.3))})
  quiet = np.nanmax(excess[:, :, usual_steps], axis=(0, 1))
  return {"ranks": run.ranks, "faults": judged, "steps": int(enter.shape[2]),
          "collectives": len(slots),
          "lost": sum(process.info.get("lost_rows", 0) for process in run.processes),
          "null_ms": {"median": float(np.median(quiet)) * 1e-6,
                      "p90": float(np.quantile(quiet, 0.9)) * 1e-6}}


def launch(processes: int, delays: list[float], times: int, real_time: bool) -> dict[str, Any]:
  """Runs a job and judges it: one process with two devices, or several with one each."""
  with tempfile.TemporaryDirectory() as root:
    own = [sys.executable, "-m", MODULE, f"--worker={root}",
           f"--delays_ms={','.join(f'{d:g}' for d in delays)}", f"--times={times}"]
    devices = 2 if processes == 1 else 1
    command = own if processes == 1 else [
        sys.executable, "-m", "jaxpace.cli", "launch", "--nproc", str(processes), "--logs",
        os.path.join(root, "logs"), "--", *own]
    prefix = ["chrt", "-r", "5"] if real_time else []
    flag = f"--xla_force_host_platform_device_count={devices}"
    subprocess.run([*prefix, *command], check=True,
                   env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flag})
    return {"processes": processes, **judge(pathlib.Path(root), delays, times)}


def text(figures: dict[str, Any]) -> str:
  """The figures in Markdown."""
  lines = measured.introduction("A device late in one turn of a loop of an instrumented step",
                                figures)
  if figures["real_time"]:
    lines += ["With real-time priority: nothing else on the machine runs before these jobs.", ""]
  for job in figures["jobs"]:
    kind = f"{job['processes']} processes with gloo, one device each"
    kind = "One process, two devices" if job["processes"] == 1 else kind
    lines += [f"## {kind}", "",
              f"{job['steps']} steps, {job['collectives']} collectives a step with turns of loops "
              f"counted, {job['lost']} rows lost. In steps without a delay the largest excess of "
              f"any arrival has a median of {job['null_ms']['median']:.2f} ms, "
              f"{job['null_ms']['p90']:.2f} in one of ten: a delay below that can't be told from "
              "the machine's own.", "",
              "| delay | faults | arrival within 5 % or 0.3 ms | median error | 90 % of errors "
              "below | largest is that rank's | and in that turn |",
              "|---|---|---|---|---|---|---|"]
    lines += [f"| {row['delay']} | {row['faults']} | {row['within']} | {row['error_ms']:+.3f} ms | "
              f"{row['error_p90_ms']:.3f} ms | {row['rank_right']} | {row['layer_right']} |"
              for row in summary(job)]
    lines.append("")
  return "\n".join(lines)


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"Unexpected arguments: {argv[1:]}")
  settings = flags.FLAGS
  delays = [float(delay) for delay in settings.delays_ms]
  if settings.worker:
    if "JAX_COORDINATOR_ADDRESS" in os.environ or "JAXPACE_PROCESS_ID" in os.environ:
      jaxpace.distributed.initialize()
    work(pathlib.Path(settings.worker), delays, settings.times)
    return
  figures = {**measured.circumstances(MODULE), "real_time": settings.real_time}
  figures["jobs"] = [launch(int(count), delays, settings.times, settings.real_time)
                     for count in settings.jobs]
  measured.tell(figures, text(figures))


if __name__ == "__main__":
  define_flags()
  app.run(main)
