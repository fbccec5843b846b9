"""What it costs to time the collectives in the loops of an instrumented step.

    python -m experiments.measure.loops_overhead --real_time --json loops_overhead.json --markdown loops_overhead.md

A step per device under `shard_map` on two forced CPU devices, with a loop over layers in the
forward pass and one in the backward pass, a sum over the data axis in every turn, and gradients
averaged at the end. Three arms take turns step by step, in an order drawn anew each time: the
step, the same again (the null), and the instrumented step with `record()` after it, all of
`instrument` and of the `Recorder` in it. A round gives each arm's ratio to the bare step; its mean
has Student's interval over rounds. Takes about a minute and a half.
"""  # noqa: E501

from __future__ import annotations

import os
import random
import tempfile
import time
from typing import Any

import numpy as np
from absl import app, flags

from experiments.lib import measured, paired

MODULE = "experiments.measure.loops_overhead"
ARMS = ("bare", "bare again", "instrumented")
WIDTH, DEVICES = 256, 2


def define_flags() -> None:
  """Defines the flags of this program."""
  flags.DEFINE_list("layers", ["8", "32"], "Turns of each of the two loops.")
  flags.DEFINE_integer("rows", 128, "Rows of a batch.", lower_bound=1)
  flags.DEFINE_integer("rounds", 40, "Rounds.", lower_bound=2)
  flags.DEFINE_integer("steps", 15, "Steps of each arm a round.", lower_bound=1)
  measured.define_priority_flag()
  measured.define_output_flags()


def measure(layers: int, rows: int, rounds: int, steps: int) -> dict[str, Any]:
  """One number of layers."""
  import jax
  import jax.numpy as jnp
  from jax.sharding import AxisType
  from jax.sharding import PartitionSpec as P

  import jaxpace

  mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,))

  def train(weights: Any, batch: Any) -> Any:
    def layer(h: Any, w: Any) -> Any:
      h = jnp.tanh(h @ w)
      return h + jax.lax.psum(h.mean(0), "data") * 1e-3, None

    def loss(weights: Any) -> Any:
      return (jax.lax.scan(layer, batch, weights)[0] ** 2).mean()

    return weights - 1e-3 * jax.lax.pmean(jax.grad(loss)(weights), "data")

  draw = np.random.default_rng(0)
  weights = jnp.asarray(draw.normal(size=(layers, WIDTH, WIDTH)) * 0.05, jnp.float32)
  batch = jnp.ones((rows, WIDTH), jnp.float32)
  paced, spec = jaxpace.instrument(train, "data"), jaxpace.spec(mesh)
  bare = jax.jit(jax.shard_map(train, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(),
                               check_vma=False))
  timed = jax.jit(jax.shard_map(paced, mesh=mesh, in_specs=(spec, P(), P("data")),
                                out_specs=(spec, P()), check_vma=False))
  pace = paced.init(mesh)
  found: dict[str, list[list[float]]] = {name: [] for name in ARMS}
  order, say = random.Random(0), measured.progress(f"{layers} layers", rounds)
  with tempfile.TemporaryDirectory() as folder, jaxpace.Recorder(folder, paced) as recorder:

    def once(name: str) -> float:
      nonlocal pace
      start = time.perf_counter()
      if name == "instrumented":
        pace, out = timed(pace, weights, batch)
        jax.block_until_ready(out)
        recorder.record(pace)
      else:
        jax.block_until_ready(bare(weights, batch))
      return time.perf_counter() - start

    for _ in range(20):
      for name in ARMS:
        once(name)
    for done in range(rounds):
      taken: dict[str, list[float]] = {name: [] for name in ARMS}
      for _ in range(steps):
        for name in order.sample(ARMS, len(ARMS)):
          taken[name].append(once(name))
      for name, values in taken.items():
        found[name].append(values)
      say(done + 1)
  if not paced.plan.inside or paced.plan.unstamped:
    raise SystemExit(f"The loops have no marks: {paced.plan.notices}")
  means = {name: np.array([np.mean(values) for values in found[name]]) for name in ARMS}
  medians = {name: np.array([np.median(values) for values in found[name]]) for name in ARMS}

  def percent(of: dict[str, np.ndarray]) -> dict[str, list[float]]:
    return {name: [100 * (value - 1) for value in paired.estimate(of[name] / of["bare"]).to_json()]
            for name in ARMS[1:]}

  return {"layers": layers, "in_loops": layers * len(paced.plan.inside),
          "lost_rows": recorder.lost["lost_rows"],
          "bare_ms": paired.estimate(means["bare"]).scaled(1e3).to_json(),
          "percent": percent(means), "percent_of_medians": percent(medians),
          "raw_ms": {name: [round(value * 1e3, 5) for value in values.tolist()]
                     for name, values in means.items()}}


def table(figures: dict[str, Any]) -> str:
  """The figures in Markdown."""
  lines = [*measured.introduction("What timing the collectives in loops costs", figures),
           f"{DEVICES} forced devices in one process{measured.priority(figures)}. "
           f"{figures['rounds']} rounds of "
           f"{figures['steps']} steps an arm, the arms taking turns step by step; a round gives "
           "each arm's ratio to the bare step, and brackets are Student's intervals of 95 % of "
           "their mean. Twice: from a round's mean steps, which pauses are part of, and from its "
           "median steps. All of `instrument` and of the `Recorder` is in it.", "",
           "| sums in loops, a step | bare | means: instrumented and recorded | null: bare again | "
           "medians | null |", "|---|---|---|---|---|---|"]
  for row in figures["rows"]:
    cells = [f"{cost[0]:+.1f} % [{cost[1]:.1f}, {cost[2]:.1f}]"
             for kind in ("percent", "percent_of_medians")
             for cost in (row[kind]["instrumented"], row[kind]["bare again"])]
    lines.append(f"| {row['in_loops']} | {row['bare_ms'][0]:.1f} ms | {' | '.join(cells)} |")
  return "\n".join(lines) + "\n"


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"Unexpected arguments: {argv[1:]}")
  settings = flags.FLAGS
  os.environ["JAX_PLATFORMS"] = "cpu"
  measured.take_priority()
  measured.keep_memory(MODULE)
  import jax
  jax.config.update("jax_num_cpu_devices", DEVICES)
  figures = {**measured.circumstances(MODULE), "rounds": settings.rounds, "steps": settings.steps,
             "real_time": settings.real_time}
  figures["rows"] = [measure(int(layers), settings.rows, settings.rounds, settings.steps)
                     for layers in settings.layers]
  measured.tell(figures, table(figures))


if __name__ == "__main__":
  define_flags()
  app.run(main)
