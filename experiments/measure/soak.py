"""A long job recorded unchanged: does anything grow?

    python -m experiments.measure.soak

Runs 50,000 short steps on four forced devices under `jaxpace run`, with an evaluation every 1,000
steps and a checkpoint every 5,000; the program itself reads its memory, descriptors and threads and
the size of its run as it goes. Then times the report. Writes docs/measurements/soak.json and .md.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

from absl import app, flags

from experiments.lib import measured

_MODULE = "experiments.measure.soak"
_ROOT = pathlib.Path(__file__).parents[2]
_LOOKS = 10
_TRAIN = """
import json, os, pathlib, sys, time
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
steps, every, out = int(sys.argv[1]), int(sys.argv[2]), pathlib.Path(sys.argv[3])
mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
w = jax.device_put(np.ones((32, 32), np.float32), NamedSharding(mesh, P()))
x = jax.device_put(np.ones((32, 32), np.float32) / 32, NamedSharding(mesh, P("data")))

@jax.jit
def train_step(w, x):
  return w - jnp.float32(1e-4) * jax.grad(lambda w: ((x @ w) ** 2).mean())(w)

@jax.jit
def evaluate(w, x):
  return ((x @ w) ** 2).mean()

def look(step):
  status = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
  size = sum(one.stat().st_size for one in pathlib.Path("run").rglob("*") if one.is_file())
  return {"step": step, "seconds": time.monotonic() - began,
          "memory_mb": int(status["VmRSS"].split()[0]) / 1e3, "threads": int(status["Threads"]),
          "descriptors": len(os.listdir("/proc/self/fd")), "run_mb": size / 1e6}

began, found = time.monotonic(), []
for step in range(1, steps + 1):
  w = jax.block_until_ready(train_step(w, x))
  if step % max(1, steps // 50) == 0:
    evaluate(w, x).block_until_ready()
  if step % max(1, steps // 10) == 0:
    np.save("checkpoint.npy", np.asarray(w))
  if step % every == 0:
    found.append(look(step))
out.write_text(json.dumps(found))
"""


def define_flags() -> None:
  """Defines the flags of this program."""
  flags.DEFINE_integer("steps", 50_000, "Steps of the job.", lower_bound=100)
  flags.DEFINE_string("out", "docs/measurements/soak.json", "File the figures are written to.")


def soak(steps: int, folder: pathlib.Path) -> dict[str, Any]:
  """Runs the job; what it saw of itself, and what the report took and says."""
  environment = os.environ | {
      "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(_ROOT),
      "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
  (folder / "train.py").write_text(_TRAIN)
  done = subprocess.run(
      [sys.executable, "-m", "jaxpace", "run", "--out", "run", "--", sys.executable, "train.py",
       str(steps), str(max(1, steps // _LOOKS)), "looks.json"], cwd=folder, env=environment,
      stderr=subprocess.PIPE, text=True, check=True)
  began = time.monotonic()
  said = subprocess.run([sys.executable, "-m", "jaxpace", "report", "run", "--json", "-"],
                        cwd=folder, env=environment, stdout=subprocess.PIPE, check=True).stdout
  report = json.loads(said)
  return {"looks": json.loads((folder / "looks.json").read_text()),
          "printed": done.stderr.splitlines(), "report_seconds": time.monotonic() - began,
          "recorded": report["steps"], "missing": report["missing"], "verdict": report["verdict"]}


def to_markdown(figures: dict[str, Any]) -> list[str]:
  """The page."""
  rows = [[look["step"], look["seconds"], look["memory_mb"], look["threads"], look["descriptors"],
           look["run_mb"]] for look in figures["looks"]]
  return [*measured.introduction("A long job, recorded unchanged", figures),
          f"{figures['steps']:,} steps on four forced devices under `jaxpace run`, with an "
          f"evaluation every {figures['steps'] // 50:,} steps and a checkpoint every "
          f"{figures['steps'] // 10:,}. {figures['recorded']:,} steps were recorded; the report "
          f"took {figures['report_seconds']:.1f} s.", "",
          *measured.table(["after step", "seconds", "resident memory, MB", "threads",
                           "descriptors", "run directory, MB"], rows)]


def main(argv: list[str]) -> None:
  del argv
  its = flags.FLAGS
  with tempfile.TemporaryDirectory() as folder:
    figures = {**measured.circumstances(_MODULE), "steps": its.steps,
               **soak(its.steps, pathlib.Path(folder))}
    figures = json.loads(json.dumps(figures).replace(folder, "FOLDER"))
  measured.write(figures, to_markdown(figures), pathlib.Path(its.out))


if __name__ == "__main__":
  define_flags()
  app.run(main)
