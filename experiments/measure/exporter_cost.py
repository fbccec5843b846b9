"""What exporters cost the training thread: a loop's time with them and without, in turns.

    python -m experiments.measure.exporter_cost --steps 20000 --pairs 6 --json exporter_cost.json

One process, one rank; the step is a short compiled sum. Each block is a run of its own, long enough
that exporters work several times in it; the order within a pair alternates. Blocks with exporters
have Prometheus (endpoint and file) and TensorBoard at once.
"""

from __future__ import annotations

import json
import pathlib
import sys
import tempfile
import time

from absl import app, flags

FLAGS = flags.FLAGS


def define_flags() -> None:
  """Defines the flags of this program."""
  flags.DEFINE_integer("steps", 20000, "Steps a block.", lower_bound=50)
  flags.DEFINE_integer("pairs", 6, "Pairs of blocks.", lower_bound=2)
  flags.DEFINE_string("json", None, "Also write the figures to this file.")


def block(steps: int, exporting: bool) -> float:
  """Mean seconds a step of one block."""
  import jax
  import jax.numpy as jnp

  import jaxpace
  from jaxpace.reporting.exporters import Prometheus, TensorBoard

  mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1],
                       axis_types=(jax.sharding.AxisType.Auto,))

  def train(state, batch):
    return state - 1e-3 * jax.lax.pmean((batch * state).sum(), "data"), state.sum()

  paced = jaxpace.instrument(train, axis_name="data")
  spec = jaxpace.spec(mesh)
  step = jax.jit(jax.shard_map(paced, mesh=mesh, in_specs=(spec, jax.P(), jax.P("data")),
                               out_specs=(spec, (jax.P(), jax.P()))))
  pace, state, batch = paced.init(mesh), jnp.ones((64, 64)), jnp.ones((64, 64))
  with tempfile.TemporaryDirectory() as folder:
    exporters = [Prometheus(port=0, textfile=f"{folder}/metrics.prom"), TensorBoard(f"{folder}/tb")]
    with jaxpace.Recorder(f"{folder}/run", paced,
                          exporters=exporters if exporting else ()) as recorder:
      for i in range(steps + 20):
        if i == 20:
          began = time.perf_counter()
        pace, (state, _) = step(pace, state, batch)
        recorder.record(pace)
      jax.block_until_ready(state)
      return (time.perf_counter() - began) / steps


def main(argv: list[str]) -> None:
  """Runs the pairs and prints the difference."""
  import numpy as np

  del argv
  differences = []
  for pair in range(FLAGS.pairs):
    order = (False, True) if pair % 2 else (True, False)
    times = {exporting: block(FLAGS.steps, exporting) for exporting in order}
    differences.append(times[True] - times[False])
    print(
        f"pair {pair + 1}/{FLAGS.pairs}: {1e6 * times[False]:.1f} µs a step without, "
        f"{1e6 * times[True]:.1f} with",
        flush=True)
  more = np.array(differences) * 1e6
  error = float(more.std(ddof=1) / np.sqrt(len(more)))
  print(
      f"Exporters: {more.mean():+.1f} ± {error:.1f} µs a step (mean and standard error over "
      f"{len(more)} pairs).")
  if FLAGS.json:
    figures = {"command": "python -m experiments.measure.exporter_cost " + " ".join(sys.argv[1:]),
               "us_a_step": more.tolist(),
               "mean": float(more.mean()), "standard_error": error}
    pathlib.Path(FLAGS.json).write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
  define_flags()
  app.run(main)
