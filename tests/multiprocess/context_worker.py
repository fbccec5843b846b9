"""A training loop whose mesh is in context, in a process of its own; all that jaxpace runs beside
it is on.

Usage: context_worker.py DIRECTORY CONTEXT, started with the variables that
`jaxpace.distributed.initialize` looks for. Contexts: none, set, set for good, explicit, legacy,
abstract (around everything but the step).
"""

import contextlib
import logging
import sys

import jax
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxpace
from jaxpace import distributed
from tests.multiprocess.joining import laid_out

STEPS = 60


def step(weights, batch):
  gradient = jax.grad(lambda w: ((batch @ w) ** 2).mean())(weights)
  return weights - np.float32(0.1) * jax.lax.pmean(gradient, "data")


def main(directory, context):
  logging.basicConfig(level=logging.WARNING)
  distributed.initialize(timeout=300)
  kind = AxisType.Explicit if context == "explicit" else AxisType.Auto
  mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(kind,))
  around = beside = contextlib.nullcontext
  if context in ("set", "explicit"):
    around = lambda: jax.set_mesh(mesh)  # noqa: E731
  elif context == "set for good":
    jax.set_mesh(mesh)
  elif context == "legacy":
    around = lambda: mesh  # noqa: E731
  elif context == "abstract":
    beside = lambda: jax.sharding.use_abstract_mesh(mesh.abstract_mesh)  # noqa: E731

  with around():
    with beside():
      paced = jaxpace.instrument(step, "data", share=True, pacer=jaxpace.steerable(
          jaxpace.guard(jaxpace.chain(jaxpace.pace_early_ranks(), jaxpace.interleave_jobs()))))
      spec, pace = jaxpace.spec(mesh), paced.init(mesh)
    run = jax.jit(jax.shard_map(paced, mesh=mesh, in_specs=(spec, P(), P("data")),
                                out_specs=(spec, P())),
                  donate_argnums=0)
    rows = np.random.default_rng(3).normal(size=(4 * jax.device_count(), 5)).astype(np.float32)
    weights = laid_out(np.ones((5, 1), np.float32), mesh, P())
    batch = laid_out(rows, mesh, P("data"))
    with (jaxpace.Recorder(directory, paced) as recorder,
          jaxpace.Control(directory + "/control.json") as control,
          jaxpace.Housekeeper(every=5, warmup=4) as keeper):
      for _ in range(STEPS):
        with beside():
          pace = control(pace)
        pace, weights = run(pace, weights, batch)
        with beside():
          recorder.record()
          keeper.step()
      with beside():
        links = jaxpace.probe_links(message_bytes=4096, repeats=1)
        pace = jaxpace.restore_pace(pace, paced, mesh)
  print("links", len(links.hosts), flush=True)


if __name__ == "__main__":
  main(*sys.argv[1:])
