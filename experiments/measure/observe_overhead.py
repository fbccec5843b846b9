"""What observing a plain `jit` step costs: bare, bare again and observed, in turns, at several sizes of step.

    python -m experiments.measure.observe_overhead

Two steps on two forced CPU devices of one process: data parallel (an MLP), and layers scanned, rematerialised and
sharded over the data axis. Each is sized to about 5, 20 and 50 ms. A round runs a block of each arm in an order drawn
anew; a step is waited for before the next is called. Beside it the cost of a call itself, at 10 and 300 arrays. Nothing
else should run meanwhile. Writes docs/measurements/observe_overhead.json and .md. Takes some five minutes.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpace
from experiments.lib import measured, paired

_MODULE = "experiments.measure.observe_overhead"
_WIDTH, _LAYERS = 128, 8


def define_flags() -> None:
  flags.DEFINE_list("sizes_ms", "5,20,50", "Sizes of the bare step to aim at, in ms.")
  flags.DEFINE_list("steps", "data parallel,scan + FSDP + remat", "Which steps.")
  flags.DEFINE_integer("rounds", 14, "Rounds of each.", lower_bound=4)
  flags.DEFINE_float("seconds", 0.8, "How long a block runs.", lower_bound=0.05)
  flags.DEFINE_float("most_seconds", 330.0, "Stop taking rounds after this long.")
  flags.DEFINE_string("out", "docs/measurements/observe_overhead.json", "File the figures are written to.")


def _step(kind: str) -> tuple[Callable[..., Any], Any, Any]:
  """A train step (params, x) -> (params, loss), its parameters and a sharding for x."""
  mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
  fsdp = kind != "data parallel"
  rng = np.random.default_rng(0)
  weights = rng.normal(size=(_LAYERS, _WIDTH, _WIDTH)).astype(np.float32) / _WIDTH ** 0.5
  params = jax.device_put(weights, NamedSharding(mesh, P(None, "data") if fsdp else P()))

  def layer(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
    return jnp.tanh(h @ w) + h, None

  def loss(params: jax.Array, x: jax.Array) -> jax.Array:
    if fsdp:
      h, _ = jax.lax.scan(jax.checkpoint(layer), x, params)
    else:
      h = x
      for place in range(_LAYERS):
        h, _ = layer(h, params[place])
    return jnp.square(h).mean()

  def step(params: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    value, grads = jax.value_and_grad(loss)(params, x)
    return jax.lax.with_sharding_constraint(params - 1e-3 * grads, params_sharding), value

  params_sharding = params.sharding
  return step, params, NamedSharding(mesh, P("data"))


def _rows(rows: int, sharding: Any) -> jax.Array:
  x = np.random.default_rng(1).normal(size=(rows, _WIDTH)).astype(np.float32)
  return jax.block_until_ready(jax.device_put(x, sharding))


def _loop(step: Any, params: Any, x: Any) -> Callable[[int], float]:
  """Runs so many steps; seconds a step."""
  state = [jax.block_until_ready(step(params, x))[0]]

  def run(times: int) -> float:
    began = time.perf_counter()
    for _ in range(times):
      state[0], value = step(state[0], x)
      jax.block_until_ready((state[0], value))
    return (time.perf_counter() - began) / times
  return run


def measure(kind: str, size_ms: float, rounds: int, seconds: float, until: float) -> dict[str, Any]:
  """Seconds a step of each arm, by round."""
  step, params, sharding = _step(kind)
  trial = 256
  sized = _loop(jax.jit(step), params, _rows(trial, sharding))
  each = min(sized(10) for _ in range(3))
  rows = max(16, round(trial * size_ms / (each * 1e3) / 16) * 16)
  x = _rows(rows, sharding)
  jitted, observed = jax.jit(step), jaxpace.observe(jax.jit(step))
  loops = {"bare": _loop(jitted, params, x), "bare again": _loop(jitted, params, x),
           "observed": _loop(observed, params, x)}
  times = max(3, round(seconds / (size_ms / 1e3)))
  for loop in loops.values():
    loop(5)
  taken: dict[str, list[float]] = {name: [] for name in loops}
  order = np.random.default_rng(0)
  for _ in range(rounds):
    for name in order.permutation(list(loops)):
      taken[name].append(loops[name](times))
    if time.monotonic() > until and len(taken["bare"]) >= 4:
      break
  program = observed.plan.programs[-1]
  base = np.asarray(taken["bare"])
  arms = {name: (paired.ratio_of_means(np.asarray(taken[name]), base)) for name in ("bare again", "observed")}
  return {"step": kind, "rows": rows, "bare_ms": paired.estimate(base * 1e3).to_json(), "rounds": len(base),
          "steps_a_block": times, "marks": program.marks, "marked": not program.bare,
          "percent": {name: [100 * (each - 1) for each in found.to_json()] for name, found in arms.items()},
          "seconds": {name: [float(f"{each:.6g}") for each in values] for name, values in taken.items()}}


def calls(arrays: int, rounds: int) -> dict[str, Any]:
  """Microseconds until a call of a step of many small arrays returns, and what observing adds to it."""
  sharding = NamedSharding(jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,)), P())
  state = [jax.device_put(np.ones(4, np.float32), sharding) for _ in range(arrays)]
  x = jax.device_put(np.ones(8, np.float32), NamedSharding(sharding.mesh, P("data")))
  step = jax.jit(lambda state, x: ([leaf + x.mean() for leaf in state], x.mean()))
  observed = jaxpace.observe(step)
  arms = {"bare": step, "bare again": step, "observed": observed}

  def block(call: Any) -> Callable[[], float]:
    def run() -> float:
      taken = []
      for _ in range(100):
        began = time.perf_counter()
        out = call(state, x)
        taken.append(time.perf_counter() - began)
        jax.block_until_ready(out)
      return float(np.median(taken)) * 1e6
    return run
  for call in arms.values():
    jax.block_until_ready(call(state, x))
  found = paired.interleave({name: block(call) for name, call in arms.items()}, rounds)
  return {"arrays": arrays, "bare_us": paired.estimate(found["bare"]).to_json(), "rounds": rounds,
          "more_us": {name: paired.estimate(found[name] - found["bare"]).to_json()
                      for name in ("bare again", "observed")}}


def to_markdown(figures: dict[str, Any]) -> str:
  def interval(triple: list[float], digits: int) -> str:
    value, low, high = (f"{each:.{digits}f}" for each in triple)
    return f"{value} [{low}, {high}]"
  lines = [*measured.introduction("What observing costs", figures),
           "Two forced CPU devices of one process. Blocks of each arm in turns, in an order drawn anew each round; "
           "every step is waited for. In brackets 95 % Student intervals over rounds. The null is the bare step "
           "against itself. The aim is 1 % at 20 ms.", "",
           "| step | bare, ms | marks a step and device | observed, % | null, % | rounds |",
           "|---|---|---|---|---|---|"]
  for row in figures["steps"]:
    lines.append(f"| {row['step']} | {interval(row['bare_ms'], 1)} | {row['marks']} | "
                 f"{interval(row['percent']['observed'], 2)} | {interval(row['percent']['bare again'], 2)} | "
                 f"{row['rounds']} |")
  lines += ["", "Until a call returns, many small arrays:", "",
            "| arrays in, and out | bare, µs | observed, µs more | null, µs | rounds |", "|---|---|---|---|---|"]
  for row in figures["calls"]:
    lines.append(f"| {row['arrays']} | {interval(row['bare_us'], 0)} | {interval(row['more_us']['observed'], 1)} | "
                 f"{interval(row['more_us']['bare again'], 1)} | {row['rounds']} |")
  return "\n".join([*lines, ""])


def main(argv: list[str]) -> None:
  del argv
  config = flags.FLAGS
  began = time.monotonic()
  figures: dict[str, Any] = {**measured.circumstances(_MODULE), "steps": [], "calls": []}
  for arrays in (10, 300):
    figures["calls"].append(calls(arrays, config.rounds))
    print(json.dumps(figures["calls"][-1]), file=sys.stderr, flush=True)
  pairs = [(kind, float(size)) for kind in config.steps for size in config.sizes_ms]
  for place, (kind, size) in enumerate(pairs):
    # What is left of the time is shared among what is left to measure.
    left = config.most_seconds - (time.monotonic() - began)
    until = time.monotonic() + left / (len(pairs) - place)
    row = measure(kind, size, config.rounds, config.seconds, until)
    figures["steps"].append(row)
    print(f"{kind}, {row['bare_ms'][0]:.1f} ms: observed {row['percent']['observed'][0]:+.2f} %, null "
          f"{row['percent']['bare again'][0]:+.2f} %, {row['rounds']} rounds", file=sys.stderr, flush=True)
  figures["seconds"] = round(time.monotonic() - began, 1)
  out = pathlib.Path(config.out)
  out.write_text(json.dumps(figures, indent=1) + "\n")
  out.with_suffix(".md").write_text(to_markdown(figures))


if __name__ == "__main__":
  define_flags()
  app.run(main)
