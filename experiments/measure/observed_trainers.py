"""Train steps as their authors write them, bare and observed: the same bits? a warning? the same
collectives?

    python -m experiments.measure.observed_trainers
    python -m experiments.measure.observed_trainers --trainer=pmap --trainer=spmd_mnist --steps=3

Shrunk trainers on forced devices of one process (experiments/measure/observed_trainers_steps.py and
observed_trainers_more.py): steps of each, bare and observed, from the same state with the same
batches; parameters, optimizer, keys, metrics are compared bit for bit after every step. A warning
is what the logger "jaxpace" said before the first step. Writes docs/measurements/
observed_trainers.json and .md, after each trainer. Takes some ten minutes.
"""

from __future__ import annotations

import collections
import json
import logging
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
from absl import app, flags

import jaxpace
from experiments.lib import measured
from experiments.measure.observed_trainers_more import MORE
from experiments.measure.observed_trainers_steps import TRAINERS, Trainer
from jaxpace.core.observed import ObservedProgram
from jaxpace.observation.clocks import host_ring

_MODULE = "experiments.measure.observed_trainers"
ALL: dict[str, Callable[[], Trainer]] = {**MORE, **TRAINERS}
def define_flags() -> None:
  flags.DEFINE_multi_enum("trainer", list(ALL), list(ALL), "Which to run.")
  flags.DEFINE_integer("steps", 10, "Steps of each.", lower_bound=1)
  flags.DEFINE_bool("resume", False, "Leave out the trainers that are in the file already.")
  flags.DEFINE_string("out", "docs/measurements/observed_trainers.json",
                      "File the figures are written to.")


def plain(tree: Any) -> Any:
  """A tree of arrays: of flax modules their states, of Refs what they hold, of keys their data."""
  from flax import nnx
  tree = jax.tree.map(lambda leaf: nnx.to_pure_dict(nnx.state(leaf)) if isinstance(leaf, nnx.Module)
                      else leaf, tree, is_leaf=lambda leaf: isinstance(leaf, nnx.Module))
  tree = jax.tree.map(lambda leaf: leaf[...] if isinstance(leaf, jax.Ref) else leaf, tree,
                      is_leaf=lambda leaf: isinstance(leaf, jax.Ref))
  return jax.tree.map(
      lambda leaf: jax.random.key_data(leaf)
      if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
      else leaf, tree)


def bits(tree: Any) -> list[tuple[str, bytes]]:
  """Arrays of a tree by path, as bytes."""
  return [(jax.tree_util.keystr(path), np.asarray(leaf).tobytes())
          for path, leaf in jax.tree_util.tree_flatten_with_path(plain(tree))[0]
          if isinstance(leaf, (jax.Array, np.ndarray))]


def floats(tree: Any) -> list[np.ndarray]:
  """A tree's arrays of floating numbers."""
  return [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(plain(tree))
          if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, np.floating)]


def relative(one: np.ndarray, two: np.ndarray) -> float:
  """Largest difference of two arrays, relative to the largest number of the first."""
  return float(np.abs(one - two).max(initial=0.0) / (np.abs(one).max(initial=0.0) or 1.0))


class _Said(logging.Handler):
  """Warnings of jaxpace."""

  def __init__(self) -> None:
    super().__init__(logging.WARNING)
    self.said: list[str] = []

  def emit(self, record: logging.LogRecord) -> None:
    self.said.append(record.getMessage())


def run(trainer: Trainer, steps: int) -> dict[str, Any]:
  """What a trainer's arrays and warnings were; `different` has the first step by array's path."""
  jax.clear_caches()
  bare, observed = trainer.jitted(), jaxpace.observe(trainer.jitted())
  one, two = trainer.start(), trainer.start()
  different: dict[str, int] = {}
  heard = _Said()
  logging.getLogger("jaxpace").addHandler(heard)
  try:
    for k in range(steps):
      batch = trainer.batch(k)
      one, said = trainer.call(bare, one, batch)
      jax.block_until_ready(jax.tree.leaves(plain((one, said))))
      two, told = trainer.call(observed, two, batch)
      arrays = bits((one, said))
      for (path, left), (_, right) in zip(arrays, bits((two, told)), strict=True):
        if left != right:
          different.setdefault(path, k)
  finally:
    logging.getLogger("jaxpace").removeHandler(heard)
  largest = max((relative(left, right) for left, right in zip(floats(one), floats(two),
                                                              strict=True)), default=0.0)
  program = observed.plan.programs[-1]
  return {"steps": steps, "arrays": len(arrays), "different": different,
          "after_one": sum(step == 0 for step in different.values()), "largest": largest,
          "warnings": heard.said,
          "executions": sum(host_ring.executions(0, number) for number in observed.runs),
          "bare_reasons": [each.bare for each in observed.plan.programs if each.bare],
          "collectives": _kinds(program), "marks_a_step": program.marks,
          "untimed": len(program.unstamped), "mesh": program.mesh_axes,
          "compile_s": program.bare_compile_s, "marks_s": program.stamped_compile_s}


def _kinds(program: ObservedProgram) -> dict[str, int]:
  return dict(collections.Counter(one.kind + (" in a loop" if one.loops else "")
                                  for one in program.collectives))


def to_markdown(figures: dict[str, Any]) -> str:
  rows = figures["trainers"]
  right = sum(bool(row["warnings"]) == bool(row["different"]) for row in rows)
  lines = [*measured.introduction("Trainers, bare and observed", figures),
           "Train steps written as their authors publish them or as trainers of their kind do, "
           "shrunk, made-up data, forced CPU devices of one process, "
           f"{figures['steps']} steps each from the same state: every array of parameters, "
           "optimizer, keys and metrics is compared bit for bit after every step. Warned: "
           "jaxpace logged a warning before the first step. Largest: of the differences of the "
           "state after the last step, relative to the largest number of its array. Compiled: the "
           "step as JAX compiles it; marks: what putting them in took beside it.", "",
           f"What was said and what was true agree in {right} of {len(rows)} trainers; arrays "
           f"differ in {sum(bool(row['different']) for row in rows)}.", "",
           "| trainer | mesh | collectives timed | not timed | marks a step and device | warned | "
           "arrays | differ after 1 step | after all | largest | compiled, s | marks, s |",
           "|---|---|---|---|---|---|---|---|---|---|---|---|"]
  for row in rows:
    mesh = ", ".join(f"{axis} {size}" for axis, size in row["mesh"].items())
    kinds = ", ".join(f"{count} {kind}" for kind, count in row["collectives"].items())
    seconds = ["" if row[name] is None else f"{row[name]:.2f}" for name in ("compile_s", "marks_s")]
    cells = [row["trainer"], mesh, kinds, row["untimed"], row["marks_a_step"],
             "yes" if row["warnings"] else "no", row["arrays"], row["after_one"],
             len(row["different"]), f"{row['largest']:.1e}", *seconds]
    lines.append(f"| {' | '.join(map(str, cells))} |")
  return "\n".join([*lines, ""])


def main(argv: list[str]) -> None:
  del argv
  config = flags.FLAGS
  figures: dict[str, Any] = {**measured.circumstances(_MODULE), "steps": config.steps,
                             "trainers": []}
  out = pathlib.Path(config.out)
  if config.resume and out.exists():
    figures["trainers"] = json.loads(out.read_text())["trainers"]
  done = {row["trainer"] for row in figures["trainers"]}
  for name in config.trainer:
    if name in done:
      continue
    row = {"trainer": name, **run(ALL[name](), config.steps)}
    figures["trainers"].append(row)
    # Written after each: what is finished is not lost.
    measured.write(figures, to_markdown(figures).splitlines(), out)
    print(f"{name}: {len(row['different'])} of {row['arrays']} arrays differ, "
          f"{sum(row['collectives'].values())} collectives, {row['marks_a_step']} marks, "
          f"{row['warnings'] or 'no warning'} {row['bare_reasons'] or ''}",
          file=sys.stderr, flush=True)


if __name__ == "__main__":
  define_flags()
  app.run(main)
