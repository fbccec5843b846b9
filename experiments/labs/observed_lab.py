"""Faults in a real trainer under plain `jit`: does the report of the observed step name the rank,
the mode, the layer?

Four simulated devices of one process train a scanned model, its parameters sharded over `fsdp`, the
batch over `data`. One device has more work in a layer, or in all; devices have more work by turns;
or nothing is wrong. How much more each has is an argument of the step, so that one compiled program
serves all runs.

    python -m experiments.labs.observed_lab                # forty runs
"""

from __future__ import annotations

import os
import pathlib
import tempfile
import time
from typing import Any

from absl import app, flags

RANKS, LAYERS, WIDTH = 4, 4, 64
KINDS = ("healthy", "late in a layer", "late in all layers", "by turns")


def make_step() -> tuple[Any, Any, Any, Any]:
  """The observed step, its parameters, a batch, and how to place the devices' further work."""
  import jax
  import jax.numpy as jnp
  from jax.sharding import AxisType, NamedSharding
  from jax.sharding import PartitionSpec as P

  import jaxpace
  mesh = jax.make_mesh((2, 2), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)

  def place(value: Any, *spec: Any) -> Any:
    return jax.device_put(value, NamedSharding(mesh, P(*spec)))

  shapes = {"up": ((WIDTH, 4 * WIDTH), (None, "fsdp", None)),
            "down": ((4 * WIDTH, WIDTH), (None, None, "fsdp"))}
  params = {name: place(0.1 * jax.random.normal(jax.random.key(i), (LAYERS, *shape)), *spec)
            for i, (name, (shape, spec)) in enumerate(shapes.items())}
  batch = place(jax.random.normal(jax.random.key(2), (32, WIDTH)), ("data", "fsdp"), None)

  def work(hidden: Any, turns: Any) -> Any:
    square = jnp.full((128, 128), 1e-3)
    done = jax.lax.fori_loop(0, turns[0], lambda _, a: jnp.tanh(a @ square), square)
    return hidden + 1e-30 * done[0, 0]

  both = P(("data", "fsdp"))
  more = jax.shard_map(work, mesh=mesh, in_specs=(both, both), out_specs=both, check_vma=False)

  def loss_of(params: Any, batch: Any, turns: Any) -> Any:
    def layer(hidden: Any, own: Any) -> tuple[Any, None]:
      weights, some = own
      hidden = more(hidden, some)
      return hidden + jnp.tanh(hidden @ weights["up"]) @ weights["down"], None
    return jnp.mean(jax.lax.scan(layer, batch, (params, turns))[0] ** 2)

  def train(params: Any, batch: Any, turns: Any) -> tuple[Any, Any]:
    loss, gradient = jax.value_and_grad(loss_of)(params, batch, turns)
    return jax.tree.map(lambda a, b: a - 0.01 * b, params, gradient), loss

  return jaxpace.observe(jax.jit(train)), params, batch, lambda turns: place(
      turns, None, ("data", "fsdp"))


def once(number: int, made: tuple[Any, Any, Any, Any], steps: int, amount: int) -> dict[str, Any]:
  """Records one run, and says what its report says."""
  import numpy as np

  import jaxpace
  from jaxpace.diagnosis.codes import Evidence
  from jaxpace.diagnosis.diagnose import diagnose
  from jaxpace.trace.reader import read_run
  step, params, batch, place = made
  kind = KINDS[number % len(KINDS)]
  random = np.random.default_rng(number)
  rank, layer = int(random.integers(RANKS)), int(random.integers(LAYERS))
  with tempfile.TemporaryDirectory() as folder:
    with jaxpace.Recorder(folder, step) as recorder:
      for _ in range(steps):
        turns = np.zeros((LAYERS, RANKS), np.int32)
        if kind == "late in a layer":
          turns[layer, rank] = amount
        elif kind == "late in all layers":
          turns[:, rank] = amount // LAYERS
        elif kind == "by turns":
          turns[layer, random.integers(RANKS)] = amount
        params, loss = step(params, batch, place(turns))
        loss.block_until_ready()
        recorder.record()
    found = diagnose(read_run(folder))
  blamed = sorted({r for finding in found.findings for r in finding.ranks})
  modes = [finding.mode for finding in found.findings]
  expected = [rank] if kind.startswith("late") else []
  at = " ".join(s for f in found.findings
                for s in f.evidence if getattr(s, "code", None) == Evidence.AT)
  right = blamed == expected and (not expected or modes[0] == "persistent_straggler")
  right &= kind != "by turns" or "synchronization_amplification" in modes
  return {"number": number, "fault": kind, "rank": expected,
          "layer": layer if kind == "late in a layer" else None, "modes": modes, "blamed": blamed,
          "right": right, "steps_in_full": found.selected.size,
          "named": after(layer) in at if kind == "late in a layer" else None,
          "step_ms": 1e3 * found.step_time.mean if found.step_time else None}


def after(layer: int) -> str:
  """How the report names the collective that follows a layer's work.

  A layer's weights are gathered before its work or beside it, so the work makes its device late at
  the gather of the next turn; that of the last layer at the first one of the backward pass, whose
  turns go from the last layer to the first.
  """
  return f"turn {(layer + 1) % LAYERS} of {LAYERS}"


def page(figures: dict[str, Any]) -> list[str]:
  """The figures in Markdown."""
  from experiments.lib import measured
  lines = measured.introduction("The fault lab on a trainer under plain jit", figures)
  lines += [f"{figures['done']} runs of {figures['wanted']}; {figures['right']} right. "
            f"{figures['healthy']} were healthy: {figures['healthy_blamed']} of them blamed a "
            f"rank. The layer was named in {figures['named']} of {figures['in_a_layer']}. Not held "
            "out: the rule for devices that take turns was set on earlier runs of this program.",
            ""]
  return lines + measured.table(("run", "fault", "rank", "layer", "findings", "ranks blamed",
                                 "right", "layer named"), [
                                     (row["number"], row["fault"], row["rank"], row["layer"],
                                      ", ".join(row["modes"]), row["blamed"], row["right"],
                                      row["named"]) for row in figures["runs"]])


def main(argv: list[str]) -> None:
  """Makes the runs, until they are done or the time is up."""
  if len(argv) > 1:
    raise app.UsageError(f"Unknown arguments: {' '.join(argv[1:])}")
  args = flags.FLAGS
  os.environ["XLA_FLAGS"] = (f"{os.environ.get('XLA_FLAGS', '')} "
                             f"--xla_force_host_platform_device_count={RANKS}")
  from experiments.lib import measured
  figures = measured.circumstances("experiments.labs.observed_lab")
  ends, made, rows = time.monotonic() + args.seconds, make_step(), []
  for number in range(args.runs):
    if time.monotonic() > ends:
      break
    rows.append(once(number, made, args.steps, args.amount))
    print(rows[-1], flush=True)
    healthy = [row for row in rows if not row["rank"] and row["fault"] == "healthy"]
    within = [row for row in rows if row["named"] is not None]
    figures |= {"wanted": args.runs, "done": len(rows), "right": sum(row["right"] for row in rows),
                "healthy": len(healthy),
                "healthy_blamed": sum(bool(row["blamed"]) for row in healthy),
                "in_a_layer": len(within), "named": sum(row["named"] for row in within),
                "runs": rows}
    measured.write(figures, page(figures), pathlib.Path(args.out))


if __name__ == "__main__":
  flags.DEFINE_integer("runs", 40, "Runs.", lower_bound=1)
  flags.DEFINE_integer("steps", 110, "Steps of each.", lower_bound=60)
  flags.DEFINE_integer("amount", 100, "Products of matrices that a late device has more.",
                       lower_bound=1)
  flags.DEFINE_float("seconds", 600.0, "After which no further run is begun.", lower_bound=0.0)
  flags.DEFINE_string("out", "docs/measurements/observed_lab.json",
                      "Where the figures go; a table beside it.")
  app.run(main)
