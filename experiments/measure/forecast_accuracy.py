"""How far forecasts from a run of 8 ranks hold at 32 and 64: on simulated jobs, and on forced
devices that sleep.

    python -m experiments.measure.forecast_accuracy --part=simulated
    python -m experiments.measure.forecast_accuracy --part=real

Simulated: jobs of several kinds of noise, 2,000 steps on 8 ranks, forecast and then played with 32
and 64 ranks, another 2,000 steps. Where ranks differ for good, the 8 recorded ones are among the 32
and 64. Real: one process whose devices' work is sleep, so that two cores don't set the pace,
recorded with 8 devices and with 32 and 64.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
import tempfile
from typing import Any

import numpy as np
from absl import app, flags

_WORK, _SPREAD = 60e-3, 4e-3
_TRANSFER = (20e-6, 2e-3)  # s: α, and m·β of the made-up fabric
KINDS = ("normal", "exponential", "heavy", "pauses", "autocorrelated", "offsets", "common",
         "common_exponential")


def own_noise(kind: str, ranks: int, steps: int, lasting: np.ndarray,
              random: np.random.Generator) -> np.ndarray:
  """Arrivals [ranks, steps], s, of a made-up job."""
  shape = ranks, steps
  normal = random.standard_normal(shape)
  if kind == "normal":
    noise = normal
  elif kind in ("exponential", "common_exponential"):
    noise = random.exponential(size=shape)
  elif kind == "heavy":
    noise = random.pareto(3.0, size=shape)
  elif kind == "pauses":
    noise = normal + 10 * (random.random(shape) < 0.003)
  elif kind == "autocorrelated":
    noise, keep = normal.copy(), 0.9
    for k in range(1, steps):
      noise[:, k] = keep * noise[:, k - 1] + np.sqrt(1 - keep**2) * normal[:, k]
  else:
    noise = normal
  arrival = _WORK + _SPREAD * noise
  if kind == "offsets":
    arrival = arrival + 0.5 * _SPREAD * lasting[:ranks, None]
  if kind.startswith("common"):
    arrival = arrival + 3 * _SPREAD * random.gamma(2.0, size=steps)
  return np.maximum(arrival, 1e-3)


def simulated(kind: str, jobs: int, steps: int, ranks: int, sizes: list[int],
              seed: int) -> list[dict[str, Any]]:
  """Forecasts `jobs` jobs and plays them at each size."""
  from jaxpace.costs import fabric_file as fabrics
  from jaxpace.diagnosis.forecast.forecast import forecast
  from jaxpace.diagnosis.forecast.sample import take_sample
  from tests.diagnosis.traces import barrier, make_run
  exact = [fabrics.Estimate(x, x, x) for x in (_TRANSFER[0], _TRANSFER[1] / 4096)]
  cost = fabrics.Cost(exact[0], exact[1], fabrics.RING)
  known = fabrics.MeasuredFabric(
      (fabrics.Level("made up", None, None, {fabrics.ALL_REDUCE: cost}),), "made up")
  rows = []
  for job in range(jobs):
    random = np.random.default_rng([seed, KINDS.index(kind), job])
    lasting = random.standard_normal(max(sizes))
    arrival = own_noise(kind, ranks, steps + 1, lasting, random)
    transfer = cost.seconds(fabrics.ALL_REDUCE, ranks, 4096)
    run = make_run(*barrier(np.rint(arrival * 1e9), round(transfer * 1e9)), bytes_of=4096)
    found = forecast(take_sample(run), sizes, fabric=known, seed=job)
    for point in found.points:
      assert point.step_time is not None, point.silent
      played = own_noise(kind, point.ranks, steps, lasting, random)
      truth = float(played.max(axis=0).mean()) + cost.seconds(fabrics.ALL_REDUCE, point.ranks, 4096)
      rows.append({"kind": kind, "job": job, "ranks": point.ranks, "truth": truth,
                   "cv_truth": float((played.max(axis=0)).std()) / truth,
                   "cv": point.cv.estimate if point.cv else None, **point.step_time.to_json()})
  return rows


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
  """Coverage of the intervals and errors of the points."""
  errors = np.array([row["estimate"] / row["truth"] - 1 for row in rows])
  held = np.array([row["low"] <= row["truth"] <= row["high"] for row in rows])
  width = np.array([(row["high"] - row["low"]) / row["truth"] for row in rows])
  variation = np.array([row["cv"] / row["cv_truth"] - 1 for row in rows])
  return {"forecasts": len(rows), "coverage": round(float(held.mean()), 4),
          "median_error": round(float(np.median(np.abs(errors))), 5),
          "worst_error": round(float(np.abs(errors).max()), 5),
          "bias": round(float(errors.mean()), 5),
          "within_10_percent": round(float((np.abs(errors) <= 0.1).mean()), 4),
          "median_width": round(float(np.median(width)), 5),
          "median_cv_error": round(float(np.median(np.abs(variation))), 4)}


def measure_simulated(sizes: list[int]) -> dict[str, Any]:
  """All kinds of noise."""
  rows: list[dict[str, Any]] = []
  for kind in KINDS:
    rows += simulated(kind, flags.FLAGS.jobs, flags.FLAGS.steps, flags.FLAGS.ranks, sizes, seed=2)
    print(kind, summarise([row for row in rows if row["kind"] == kind]), file=sys.stderr,
          flush=True)
  table = {f"{kind}, {size}":
           summarise([r for r in rows if r["kind"] == kind and r["ranks"] == size])
           for kind in KINDS for size in sizes}
  return {"jobs": len(KINDS) * flags.FLAGS.jobs, "steps": flags.FLAGS.steps,
          "ranks": flags.FLAGS.ranks, "all": summarise(rows),
          "by_kind_and_ranks": table}


def sleeping_run(directory: pathlib.Path, ranks: int, steps: int, seed: int,
                 longer: float = 1.0) -> float:
  """Records a job of `ranks` devices whose work is sleep, so many times as long; returns its mean
  recorded step, s."""
  import random as plain
  import threading
  import time

  import jax
  import jax.numpy as jnp
  from jax.experimental import io_callback
  from jax.sharding import AxisType
  from jax.sharding import PartitionSpec as P

  import jaxpace
  from experiments.lib import measured
  from jaxpace.diagnosis.selected_steps import count_steps, step_times
  from jaxpace.trace.reader import read_run
  dice, lock = plain.Random(seed), threading.Lock()

  # no argument: moving one to the host can hang where devices share few threads
  def work() -> np.uint32:
    with lock:
      seconds = longer * (_WORK + dice.expovariate(1 / _SPREAD))
    time.sleep(seconds)
    return np.uint32(0)

  def train_step(state: Any, batch: Any) -> Any:
    done = io_callback(work, jax.ShapeDtypeStruct((), jnp.uint32))
    value = jnp.where(done == 0, batch, 0 * batch)
    return state + jax.lax.pmean(value.sum(), "data"), ()

  mesh = jax.make_mesh((ranks,), ("data",), axis_types=(AxisType.Auto,),
                       devices=jax.devices()[:ranks])
  paced, spec = jaxpace.instrument(train_step, axis_name="data", phases=False), jaxpace.spec(mesh)
  step = jax.jit(jax.shard_map(paced, mesh=mesh, in_specs=(spec, P(), P("data")),
                               out_specs=(spec, (P(), P())), check_vma=False))
  batch, state = jnp.ones((ranks, 4)), jnp.float32(0)
  say = measured.progress(f"{ranks} devices", steps)
  with jaxpace.recorded(directory, paced, step, mesh) as recorded:
    for done in range(steps):
      state, _ = recorded(state, batch)
      jax.block_until_ready(state)  # many steps ahead, the devices of one process starve each other
      say(done + 1)
  run = read_run(directory)
  return float(step_times(run)[count_steps(run).mask].mean())


def measure_real(sizes: list[int]) -> dict[str, Any]:
  """Records, forecasts, records at each size, compares."""
  from jaxpace.diagnosis.forecast.forecast import forecast
  from jaxpace.diagnosis.forecast.sample import take_sample
  from jaxpace.trace.reader import read_run
  rows = []
  with tempfile.TemporaryDirectory(prefix="forecast-") as folder:
    root = pathlib.Path(folder)
    recorded = sleeping_run(root / "sample", flags.FLAGS.ranks, flags.FLAGS.steps, 1,
                            flags.FLAGS.longer)
    found = forecast(take_sample(read_run(root / "sample")), sizes, per_host=max(sizes))
    for point in found.points:
      truth = sleeping_run(root / str(point.ranks), point.ranks, flags.FLAGS.checked_steps, 2,
                           flags.FLAGS.longer)
      assert point.step_time is not None, point.silent
      rows.append({"ranks": point.ranks, "truth": truth, "waiting": point.waiting,
                   "transfer": point.transfer, "error": point.step_time.estimate / truth - 1,
                   **point.step_time.to_json()})
      print(rows[-1], file=sys.stderr, flush=True)
  return {"recorded": recorded, "longer": flags.FLAGS.longer, "steps": flags.FLAGS.steps,
          "checked_steps": flags.FLAGS.checked_steps, "ranks": flags.FLAGS.ranks, "forecasts": rows,
          "notes": list(found.notes)}


def define_flags() -> None:
  """Defines this program's flags; not when it is imported, since other programs have flags of the
  same names."""
  flags.DEFINE_enum("part", "simulated", ["simulated", "real"], "What to measure.")
  flags.DEFINE_integer("jobs", 40, "Simulated jobs of each kind of noise.", lower_bound=1)
  flags.DEFINE_integer("steps", 2000, "Steps of a recorded run.", lower_bound=100)
  flags.DEFINE_integer("checked_steps", 600,
                       "Steps of the real runs that forecasts are checked by.", lower_bound=30)
  flags.DEFINE_float("longer", 1.0, "Real part: steps are so many times as long. What starting and "
                                    "waking 64 devices on a few cores takes stays, so the longer a "
                                    "step the less of it is that.", lower_bound=0.1)
  flags.DEFINE_integer("ranks", 8, "Ranks of the recorded run.", lower_bound=2)
  flags.DEFINE_list("sizes", ["32", "64"], "Numbers of ranks to forecast.")
  flags.DEFINE_string("output", None,
                      "JSON file; docs/measurements/forecast_<part>.json by default.")


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"Unknown arguments: {' '.join(argv[1:])}")
  sizes = [int(size) for size in flags.FLAGS.sizes]
  if flags.FLAGS.part == "real":
    devices = max(*sizes, flags.FLAGS.ranks)
    os.environ["XLA_FLAGS"] = (f"{os.environ.get('XLA_FLAGS', '')} "
                               f"--xla_force_host_platform_device_count={devices}").strip()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
  from experiments.lib import measured
  result = {**measured.circumstances("experiments.measure.forecast_accuracy"),
            **(measure_real(sizes) if flags.FLAGS.part == "real" else measure_simulated(sizes))}
  path = pathlib.Path(flags.FLAGS.output or f"docs/measurements/forecast_{flags.FLAGS.part}.json")
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(json.dumps(result, indent=1) + "\n")
  print(json.dumps(result, indent=1))


if __name__ == "__main__":
  define_flags()
  app.run(main)
