"""What timestamps add to compiling: the first call of a step, bare and recorded unchanged, on the
first start of a program and on the second.

    python -m experiments.measure.compile_time
    python -m experiments.measure.compile_time --before=CHECKOUT    # an older jaxpace, too

Each start is a process of its own; the arms take turns. Without JAX's persistent compilation cache
all starts are alike; with it the second finds what the first left. Seconds are from the call of the
step to its results, tracing and lowering included.
"""

from __future__ import annotations

import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from typing import Any

from absl import app, flags

from experiments.lib import measured

_MODULE = "experiments.measure.compile_time"
_ROOT = pathlib.Path(__file__).parents[2]
_WORKER = """
import json, os, time
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
split = NamedSharding(mesh, P("data"))
weights = [jax.device_put(np.full((64, 64), 0.01, np.float32), split) for _ in range(LAYERS)]
x = jax.device_put(np.ones((16, 64), np.float32), split)

def loss(weights, x):
  for w in weights:
    x = jnp.tanh(x @ w) * jax.nn.softmax(x, axis=-1) + x
  return jnp.mean(x ** 2)

@jax.jit
def train_step(weights, x):
  value, grads = jax.value_and_grad(loss)(weights, x)
  return [w - 1e-3 * jnp.tanh(g) for w, g in zip(weights, grads)], value

began = time.monotonic()
jax.block_until_ready(train_step(weights, x))
print("TOOK", time.monotonic() - began)
"""
NONE, FIRST, SECOND = STARTS = ("without a cache", "first start", "second start")


def define_flags() -> None:
  """Defines the flags of this program."""
  measured.define_flags("compile_time", 5, "Rounds.")
  flags.DEFINE_integer("layers", 24, "Layers of the step, none of them scanned.", lower_bound=1)
  flags.DEFINE_string("before", "", "Checkout of an older jaxpace, with its native library.")


def seconds(arm: str, layers: int, cache: str, package: pathlib.Path) -> float:
  """What the first call takes in a process of its own."""
  environment = os.environ | {
      "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
      "PYTHONPATH": os.pathsep.join([
          str(package / "jaxpace" / "hosts" / "launch" / "on_path"), str(package)])}
  if cache:
    environment["JAX_COMPILATION_CACHE_DIR"] = cache
  with tempfile.TemporaryDirectory() as folder:
    if arm != "bare":
      environment["JAXPACE_RUN"] = str(pathlib.Path(folder) / "run")
    done = subprocess.run(
        [sys.executable, "-c", f"LAYERS = {layers}\n{_WORKER}"], env=environment, cwd=folder,
        capture_output=True, text=True, check=True)
  return float(done.stdout.split("TOOK")[1])


def measure(rounds: int, layers: int, packages: dict[str, pathlib.Path]) -> list[dict[str, Any]]:
  """Seconds of each arm and start, by round."""
  taken: dict[tuple[str, str], list[float]] = {}
  for _ in range(rounds):
    for arm, package in packages.items():
      with tempfile.TemporaryDirectory() as cache:
        for start in STARTS:
          taken.setdefault((arm, start), []).append(
              seconds(arm, layers, "" if start == NONE else cache, package))
  return [{"arm": arm, "start": start, "seconds": found} for (arm, start), found in taken.items()]


def to_markdown(figures: dict[str, Any]) -> list[str]:
  """The page."""
  rows, bare = [], {row["start"]: row["seconds"] for row in figures["rows"] if row["arm"] == "bare"}
  for row in figures["rows"]:
    middle = statistics.median(row["seconds"])
    each = [one / two for one, two in zip(row["seconds"], bare[row["start"]], strict=True)]
    rows.append([row["start"], row["arm"], f"{middle:.2f}",
                 f"{min(row['seconds']):.2f} to {max(row['seconds']):.2f}",
                 f"{statistics.median(each):.2f}"])
  return [*measured.introduction("What timestamps add to compiling", figures),
          f"The first call of a step of {figures['layers']} layers on four forced devices, bare "
          "and recorded unchanged; each start is a process of its own, with JAX's persistent "
          "compilation cache empty at the first start. Before: "
          f"{figures['before'] or 'not measured'}.", "",
          *measured.table(["start", "arm", "seconds, median", "least to most",
                           "times the bare one, median of rounds"], sorted(rows)), ""]


def main(argv: list[str]) -> None:
  del argv
  its = flags.FLAGS
  packages, before = {"bare": _ROOT, "unchanged": _ROOT}, ""
  if its.before:
    packages["unchanged, before"] = pathlib.Path(its.before).resolve()
    before = subprocess.run(["git", "-C", its.before, "rev-parse", "--short", "HEAD"],
                            capture_output=True, text=True, check=True).stdout.strip()
  figures = {**measured.circumstances(_MODULE), "layers": its.layers, "before": before,
             "rows": measure(its.rounds, its.layers, packages)}
  figures = json.loads(json.dumps(figures).replace(its.before or "\0", "CHECKOUT"))
  measured.write(figures, to_markdown(figures), pathlib.Path(its.out))


if __name__ == "__main__":
  define_flags()
  app.run(main)
