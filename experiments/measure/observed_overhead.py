"""What `jaxpace.observe` and a `Recorder` cost a plain-`jit` step, in time a step and in compile
time.

    python -m experiments.measure.observed_overhead --real_time --json overhead.json --markdown overhead.md

Steps of real arithmetic on forced CPU devices, in three arms that take turns step by step, in an
order drawn anew each time: the jitted step, the same again (the null), and the observed one with
`record()` after it. The loop waits for the loss of each step, as one that logs it does. Rounds are
many and short: each gives a ratio to the bare step, of means and of medians, so that what disturbs
the machine for a second is in all arms of its round; their mean has Student's interval over rounds.
The recorder's thread works at any time, so its CPU time is told apart, as a share of the recorded
steps' time. `--real_time` lets all threads of the program run before anything else on the machine.
Takes some five minutes.
"""  # noqa: E501

from __future__ import annotations

import os
import pathlib
import random
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from absl import app, flags

from experiments.lib import measured

MODULE = "experiments.measure.observed_overhead"
CASES = ("data parallel, scan", "FSDP, scan, remat")
LAYERS = 8
ARMS = ("bare", "bare again", "recorded")


def define_flags() -> None:
  """Defines the flags of this program."""
  flags.DEFINE_integer("devices", 2, "Forced devices.", lower_bound=2)
  flags.DEFINE_list("targets_ms", ["5", "20", "50"], "Steps to aim at.")
  flags.DEFINE_integer("rounds", 60, "Rounds.", lower_bound=2)
  flags.DEFINE_float("seconds", 0.5, "Seconds a round.")
  measured.define_priority_flag()
  measured.define_output_flags()


def make(case: str, width: int, batch: int) -> tuple[Callable[[], Any], Any, Any]:
  """A function that makes a jitted step anew, its weights and its batch."""
  import jax
  import jax.numpy as jnp
  from jax.sharding import AxisType, NamedSharding
  from jax.sharding import PartitionSpec as P

  mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
  sharded = case != CASES[0]
  spec = NamedSharding(mesh, P(None, "data", None) if sharded else P())

  def layer(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
    return jnp.tanh(h @ w) + h, None

  def loss(weights: jax.Array, batch: jax.Array) -> jax.Array:
    out, _ = jax.lax.scan(jax.checkpoint(layer) if sharded else layer, batch, weights)
    return jnp.mean(out ** 2)

  def train(weights: jax.Array, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
    value, gradient = jax.value_and_grad(loss)(weights, batch)
    return weights - jnp.float32(1e-3) * gradient, value

  drawn = np.random.default_rng(0)
  weights = jax.device_put(drawn.normal(size=(LAYERS, width, width)).astype(np.float32) / width,
                           spec)
  inputs = jax.device_put(drawn.normal(size=(batch, width)).astype(np.float32),
                          NamedSharding(mesh, P("data")))
  return lambda: jax.jit(train, out_shardings=(spec, NamedSharding(mesh, P()))), weights, inputs


def sized(case: str, target: float) -> tuple[int, int]:
  """Width and batch with which a step takes about `target` seconds here."""
  width, batch = 128, 64
  for _ in range(4):
    fresh, weights, inputs = make(case, width, batch)
    took = min(timed(fresh(), weights, inputs, 5) for _ in range(2))
    if 0.8 < took / target < 1.25:
      break
    batch = max(16, min(16384, round(batch * target / took / 16) * 16))
  return width, batch


def timed(step: Any, weights: Any, inputs: Any, steps: int) -> float:
  """Mean seconds of a step, behind a first one."""
  import jax
  weights, loss = step(weights, inputs)
  jax.block_until_ready(loss)
  start = time.perf_counter()
  for _ in range(steps):
    weights, loss = step(weights, inputs)
    jax.block_until_ready(loss)
  return (time.perf_counter() - start) / steps


def measure(case: str, target: float, rounds: int, seconds: float) -> dict[str, Any]:
  """One case at one size: the arms take turns step by step, a recorder being open all the time."""
  import jax

  import jaxpace
  from experiments.lib import paired
  width, batch = sized(case, target)
  fresh, weights, inputs = make(case, width, batch)
  bare, observed = fresh(), jaxpace.observe(fresh())
  steps, order = max(5, round(seconds / (3 * target))), random.Random(0)
  found: dict[str, list[list[float]]] = {name: [] for name in ARMS}
  say = measured.progress(f"{case}, {target * 1e3:g} ms", rounds)
  with tempfile.TemporaryDirectory() as folder, jaxpace.Recorder(folder, observed) as recorder:
    for step in (bare, observed):
      timed(step, weights, inputs, 5)
    recorder.record()
    began = writer_seconds()
    for done in range(rounds):
      taken: dict[str, list[float]] = {name: [] for name in ARMS}
      for _ in range(steps):
        for name in order.sample(ARMS, len(ARMS)):
          step = observed if name == "recorded" else bare
          start = time.perf_counter()
          _, loss = step(weights, inputs)
          jax.block_until_ready(loss)
          if name == "recorded":
            recorder.record()
          taken[name].append(time.perf_counter() - start)
      for name, values in taken.items():
        found[name].append(values)
      say(done + 1)
    writer = writer_seconds() - began
  program, = observed.plan.programs
  if program.bare:
    raise SystemExit(f"The step has no marks: {program.bare}")
  means = {name: np.array([np.mean(values) for values in found[name]]) for name in ARMS}
  medians = {name: np.array([np.median(values) for values in found[name]]) for name in ARMS}

  def percent(of: dict[str, np.ndarray]) -> dict[str, list[float]]:
    return {name: [100 * (value - 1) for value in paired.estimate(of[name] / of["bare"]).to_json()]
            for name in ARMS[1:]}

  return {"case": case, "target_ms": target * 1e3, "width": width, "batch": batch,
          "steps_a_round": steps, "marks": program.marks, "lost_rows": recorder.lost["lost_rows"],
          "bare_ms": paired.estimate(means["bare"]).scaled(1e3).to_json(),
          "percent": percent(means), "percent_of_medians": percent(medians),
          "writer_percent": 100 * writer / sum(map(sum, found["recorded"])),
          "raw_ms": {name: [round(value * 1e3, 5) for value in values.tolist()]
                     for name, values in means.items()},
          "bare_compile_s": program.bare_compile_s, "stamped_compile_s": program.stamped_compile_s}


def writer_seconds() -> float:
  """CPU time that the recorder's thread has used so far."""
  writer = next(thread for thread in threading.enumerate() if thread.name == "jaxpace-writer")
  return (int(pathlib.Path(f"/proc/self/task/{writer.native_id}/schedstat").read_text().split()[0])
          * 1e-9)


def table(figures: dict[str, Any]) -> str:
  """The figures in Markdown."""
  lines = [*measured.introduction("What observing a plain-jit step costs", figures),
           f"{figures['devices']} forced devices in one process{measured.priority(figures)}. "
           f"{figures['rounds']} "
           "rounds, in each of which the arms take turns step by step; a round gives each arm's "
           "ratio to the bare step, and brackets are Student's intervals of 95 % of their mean. "
           "Twice: from a round's mean steps, which pauses are part of, and from its median steps. "
           "The recorder's thread: of one core.", "",
           "| step | marks a step and device | bare | means: observed and recorded | A/A "
           "control: bare again | medians | A/A control | recorder's thread | compiled: bare, and "
           "with marks |",
           "|---|---|---|---|---|---|---|---|---|"]
  for row in figures["rows"]:
    cells = [f"{cost[0]:+.1f} % [{cost[1]:.1f}, {cost[2]:.1f}]"
             for kind in ("percent", "percent_of_medians")
             for cost in (row[kind]["recorded"], row[kind]["bare again"])]
    compiled = row["bare_compile_s"], row["stamped_compile_s"]
    both = "" if None in compiled else f"{compiled[0]:.2f} s, {compiled[1]:.2f} s more"
    lines.append(f"| {row['case']} | {row['marks']} | {row['bare_ms'][0]:.1f} ms | "
                 f"{' | '.join(cells)} | {row['writer_percent']:.2f} % | {both} |")
  return "\n".join(lines) + "\n"


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"Unexpected arguments: {argv[1:]}")
  settings = flags.FLAGS
  os.environ["JAX_PLATFORMS"] = "cpu"
  measured.take_priority()
  measured.keep_memory(MODULE)
  import jax
  jax.config.update("jax_num_cpu_devices", settings.devices)
  figures = {**measured.circumstances(MODULE), "devices": settings.devices,
             "rounds": settings.rounds, "real_time": settings.real_time,
             "ratios": "a round's, of means and of medians; mean over rounds"}
  figures["rows"] = [measure(case, float(target) * 1e-3, settings.rounds, settings.seconds)
                     for case in CASES for target in settings.targets_ms]
  measured.tell(figures, table(figures))


if __name__ == "__main__":
  define_flags()
  app.run(main)
