"""What sampling by JAX's profiler costs: a plain-jit loop on four forced devices, with and without
`ProfiledRecorder`.

    python -m experiments.measure.profiled_cost                # about two minutes; wants a quiet machine

Blocks with and without the recorder alternate in random order in one process; the ratio of each
pair counts. Beside that: what each session's start, stop and reading took, and how much slower
sampled steps are. Writes docs/measurements/profiled_cost.json and the table of it,
profiled_cost.md.
"""  # noqa: E501

from __future__ import annotations

import os
import pathlib
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from absl import app, flags

from jaxpace.hosts.launch.environment import with_device_count

_DEVICES = flags.DEFINE_integer("devices", 4, "Forced CPU devices.", lower_bound=2)
_EVERY = flags.DEFINE_integer("every", 100, "Steps from one session to the next.")
_LENGTH = flags.DEFINE_integer("length", 4, "Steps in a session.")
_STEPS = flags.DEFINE_integer("steps", 200, "Steps in a block.", lower_bound=10)
_PAIRS = flags.DEFINE_integer("pairs", 60, "Pairs of blocks.", lower_bound=2)
_OUT = flags.DEFINE_string("out", "docs/measurements/profiled_cost.json", "Where the figures go.")


def loop(devices: int, steps: int) -> Callable[[Callable[[Any], object]], float]:
  """Makes a function that trains for so many steps, calls its argument after each, and returns the
  seconds."""
  import jax
  import jax.numpy as jnp
  from jax.sharding import AxisType, NamedSharding
  from jax.sharding import PartitionSpec as P

  mesh = jax.make_mesh((devices,), ("data",), axis_types=(AxisType.Auto,))

  def loss(w: dict[str, Any], x: Any) -> Any:
    for name in sorted(w):
      x = jnp.tanh(x @ w[name])
    return jnp.mean(x**2)

  @jax.jit
  def step(w: dict[str, Any], x: Any) -> Any:
    value, slope = jax.value_and_grad(loss)(w, x)
    return jax.tree.map(lambda a, b: a - 0.01 * b, w, slope), value

  w = jax.device_put({f"layer{i}": 0.1
                      * np.random.default_rng(i).normal(size=(256, 256)).astype(np.float32)
                      for i in range(4)}, NamedSharding(mesh, P()))
  x = jax.device_put(np.ones((64 * devices, 256), np.float32), NamedSharding(mesh, P("data")))

  def block(record: Callable[[Any], object]) -> float:
    nonlocal w
    begin = time.monotonic()
    for _ in range(steps):
      w, value = step(w, x)
      record(value)
      # more devices than cores: without it XLA's threads can wait for each other for good
      jax.block_until_ready(value)
    return time.monotonic() - begin

  return block


def measure() -> dict[str, Any]:
  """Compares blocks with the recorder and without, pair by pair."""
  import jaxpace

  block, order, ratios = loop(_DEVICES.value, _STEPS.value), random.Random(0), []
  block(_not_recorded)
  with tempfile.TemporaryDirectory() as root, jaxpace.ProfiledRecorder(
      root, every=_EVERY.value, steps=_LENGTH.value, hosts=False) as recorder:
    block(recorder.record)
    for pair in range(_PAIRS.value):
      total = {on: block(recorder.record if on else _not_recorded)
               for on in order.sample((True, False), 2)}
      ratios.append(total[True] / total[False])
      if pair % 10 == 9:
        print(f"{pair + 1} of {_PAIRS.value}: {statistics.mean(ratios) - 1:+.2%}", flush=True)
  sessions = max(1, recorder.sessions)
  return {"every": _EVERY.value, "steps": _LENGTH.value, "pairs": len(ratios),
          "slower": statistics.mean(ratios) - 1,
          "error": statistics.stdev(ratios) / len(ratios)**0.5, "sessions": recorder.sessions,
          "session_ms": {name: 1e3 * seconds / sessions
                         for name, seconds in recorder.seconds.items()}}


def _not_recorded(value: Any) -> None:
  pass


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"Not an option: {argv[1]}.")
  os.environ["XLA_FLAGS"] = with_device_count(os.environ.get("XLA_FLAGS", ""), _DEVICES.value)
  os.environ.setdefault("JAX_PLATFORMS", "cpu")
  from experiments.lib import measured  # imports JAX

  figures = measured.circumstances("experiments.measure.profiled_cost")
  figures |= measure()
  rows = [("slower, with the recorder",
           f"{figures['slower']:+.2%} ± {1.96 * figures['error']:.2%}")]
  rows += [(f"{name} of a session, ms", value) for name, value in figures["session_ms"].items()]
  lines = [*measured.introduction("What sampling by JAX's profiler costs", figures),
           f"{_DEVICES.value} forced devices, {_LENGTH.value} steps in {_EVERY.value} sampled, "
           f"{figures['sessions']} sessions, {figures['pairs']} pairs of blocks of "
           f"{_STEPS.value} steps.", "",
           *measured.table(("what", "measured"), rows)]
  measured.write(figures, lines, pathlib.Path(_OUT.value))


if __name__ == "__main__":
  app.run(main)
