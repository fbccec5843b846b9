"""Train steps as their authors write them, bare and observed: the same bits? the same collectives?
compiled how long?

    python -m experiments.measure.observed_trainers

Five shrunk trainers on eight forced devices of one process
(experiments/measure/observed_trainers_steps.py): 20 steps of each, bare and observed, from the same
state with the same batches; parameters, optimizer, keys, metrics are compared bit for bit after
every step. Compile time is what JAX reports of the step's compilation, both orders, after
`jax.clear_caches()`. Writes docs/measurements/observed_trainers.json and .md. Takes some two
minutes.
"""

from __future__ import annotations

import collections
import os
import pathlib
import sys
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
from absl import app, flags

import jaxpace
from experiments.lib import measured
from experiments.measure.observed_trainers_steps import TRAINERS, Trainer
from jaxpace.core.observed import ObservedProgram

_MODULE = "experiments.measure.observed_trainers"
_COMPILED = "/jax/core/compile/backend_compile_duration"
_seconds: list[tuple[str, float]] = []


def define_flags() -> None:
  flags.DEFINE_list("trainers", ",".join(TRAINERS), "Which to run.")
  flags.DEFINE_integer("steps", 20, "Steps of each.", lower_bound=1)
  flags.DEFINE_integer("rounds", 2, "Times each is compiled.", lower_bound=1)
  flags.DEFINE_string("out", "docs/measurements/observed_trainers.json",
                      "File the figures are written to.")


def bits(tree: Any) -> list[tuple[str, bytes]]:
  """Arrays of a tree by path, as bytes; of flax's modules, of their states."""
  from flax import nnx
  tree = jax.tree.map(lambda leaf: nnx.to_pure_dict(nnx.state(leaf)) if isinstance(leaf, nnx.Module)
                      else leaf, tree,
                      is_leaf=lambda leaf: isinstance(leaf, nnx.Module))
  found = []
  for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
      leaf = jax.random.key_data(leaf)
    if isinstance(leaf, (jax.Array, np.ndarray)):
      found.append((jax.tree_util.keystr(path), np.asarray(leaf).tobytes()))
  return found


def floats(tree: Any) -> list[np.ndarray]:
  """Its arrays of floating numbers; of flax's modules, of their states."""
  from flax import nnx
  leaves = [leaf for one in jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, nnx.Module))
            for leaf in jax.tree.leaves(nnx.state(one) if isinstance(one, nnx.Module) else one)]
  return [np.asarray(leaf, np.float64) for leaf in leaves
          if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, np.floating)]


def relative(one: np.ndarray, two: np.ndarray) -> float:
  """Largest difference of two arrays, relative to the largest number of the first."""
  return float(np.abs(one - two).max(initial=0.0) / (np.abs(one).max(initial=0.0) or 1.0))


def compiled(trainer: Trainer, step: Any) -> float:
  """Seconds that JAX says compiling the step took at its first call."""
  state, batch = trainer.start(), trainer.batch(0)
  jax.block_until_ready(jax.tree.leaves(batch))
  _seconds.clear()
  trainer.call(step, state, batch)
  return max(seconds for _, seconds in _seconds)


def run(name: str, steps: int, rounds: int) -> dict[str, Any]:
  trainer = TRAINERS[name]()
  took: dict[str, list[float]] = {"bare": [], "observed": []}
  for turn in range(rounds):
    arms = ["bare", "observed"] if turn % 2 == 0 else ["observed", "bare"]
    for arm in arms:
      jax.clear_caches()
      step = trainer.jitted()
      took[arm].append(compiled(trainer, jaxpace.observe(step) if arm == "observed" else step))
  bare, observed = trainer.jitted(), jaxpace.observe(trainer.jitted())
  one, two = trainer.start(), trainer.start()
  different: dict[str, int] = {}
  for k in range(steps):
    batch = trainer.batch(k)
    one, said = trainer.call(bare, one, batch)
    two, told = trainer.call(observed, two, batch)
    for (path, left), (_, right) in zip(bits((one, said)), bits((two, told)), strict=True):
      if left != right:
        different.setdefault(path, k)
  largest = max((relative(left, right) for left, right in zip(
      jax.tree.leaves(floats(one)), jax.tree.leaves(floats(two)), strict=True)), default=0.0)
  program = observed.plan.programs[-1]
  first = observed.plan.programs[0]
  return {"trainer": name, "steps": steps, "arrays": len(bits((one, said))), "different": different,
          "largest": largest,
          "bare_reasons": [each.bare for each in observed.plan.programs if each.bare],
          "programs": len(observed.plan.programs), "collectives": _kinds(program),
          "marks_a_step": program.marks, "untimed": len(program.unstamped),
          "notices": [*program.notices], "mesh": program.mesh_axes,
          "differences": 0 if not first.bare else None, "compile_s": took,
          "compile_ratio": min(took["observed"]) / min(took["bare"])}


def _kinds(program: ObservedProgram) -> dict[str, int]:
  return dict(collections.Counter(one.kind + (" in a loop" if one.loops else "")
                                  for one in program.collectives))


def to_markdown(figures: dict[str, Any]) -> str:
  lines = [*measured.introduction("Real trainers, bare and observed", figures),
           "Train steps written as their authors publish them, shrunk, made-up data, eight forced "
           f"CPU devices of one process. {figures['steps']} steps each from the same state: every "
           "array of parameters, optimizer, keys and metrics is compared bit for bit after every "
           "step. The compiler's collectives were the same in both programs (kind, number, groups, "
           "operands, loops), else the step would have run bare. Largest: of the differences of "
           "the state after the last step, relative to the largest number of its array. Compile "
           f"time: the shortest of {figures['rounds']} compilations each, what JAX reports of "
           "the step's.", "",
           "| trainer | mesh | collectives timed | not timed | marks a step and device | arrays | "
           "that differ | largest | compiled bare, s | observed, s | ratio |",
           "|---|---|---|---|---|---|---|---|---|---|---|"]
  for row in figures["trainers"]:
    mesh = ", ".join(f"{axis} {size}" for axis, size in row["mesh"].items())
    kinds = ", ".join(f"{count} {kind}" for kind, count in row["collectives"].items())
    bare, observed = (min(row["compile_s"][arm]) for arm in ("bare", "observed"))
    lines.append(f"| {row['trainer']} | {mesh} | {kinds} | {row['untimed']} | "
                 f"{row['marks_a_step']} | {row['arrays']} | {len(row['different'])} | "
                 f"{row['largest']:.1e} | {bare:.1f} | {observed:.1f} | "
                 f"{row['compile_ratio']:.2f} |")
  return "\n".join([*lines, ""])


def main(argv: list[str]) -> None:
  del argv
  config = flags.FLAGS
  jax.monitoring.register_event_duration_secs_listener(
      lambda event, seconds, **where: _seconds.append((str(where.get("fun_name")), seconds))
      if event == _COMPILED else None)
  figures: dict[str, Any] = {**measured.circumstances(_MODULE), "steps": config.steps,
                             "rounds": config.rounds, "trainers": []}
  for name in config.trainers:
    row = run(name, config.steps, config.rounds)
    figures["trainers"].append(row)
    # Written after each: what is finished is not lost.
    measured.write(figures, to_markdown(figures).splitlines(), pathlib.Path(config.out))
    print(f"{name}: {len(row['different'])} of {row['arrays']} arrays differ, "
          f"{sum(row['collectives'].values())} collectives, {row['marks_a_step']} marks, compiled "
          f"in {row['compile_ratio']:.2f} of the bare time {row['bare_reasons'] or ''}",
          file=sys.stderr, flush=True)


if __name__ == "__main__":
  define_flags()
  app.run(main)
