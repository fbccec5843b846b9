"""Trains the character transformer on documents of different length, evened out over the ranks.

    jaxpace launch --nproc 2 -- python -m experiments.examples.chars.train_documents --steps=200
    python -m experiments.examples.chars.train_documents --compare=documents.json

Two forms of sharing work are in it. `jaxpace.balance` says which rank gets which documents, so that all have about as
many windows; `jaxpace.accumulate` lets every rank run as many as it has, weighs every character alike, and meets once.
With --compare it starts two processes itself, in which blocks as drawn, as drawn again (A/A) and balanced take turns in
random order, over the same documents.
"""

from __future__ import annotations

import functools
import pathlib
import random
import subprocess
import sys
import time
from typing import Any

import jax
import numpy as np
import optax
from absl import app, flags
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpace
from experiments.examples.chars import data, documents
from experiments.examples.chars.model import Transformer
from experiments.lib import measured
from experiments.lib.paired import estimate

CONTEXT, WIDTH, HEADS, BLOCKS, EACH = 32, 64, 4, 2, 8
DRAWN, AGAIN, BALANCED = "as drawn", "as drawn again", "balanced"


class Training:
  """The model, its step and where they are."""

  def __init__(self) -> None:
    self.mesh = jax.make_mesh((jax.device_count(),), ("data",))
    model = Transformer(data.VOCABULARY, CONTEXT, WIDTH, HEADS, BLOCKS, rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(model, nnx.Param)
    self.optimizer = optax.adam(3e-3)
    place = NamedSharding(self.mesh, P())
    self.params, self.moments = jax.device_put((params, self.optimizer.init(params)), place)
    split = P("data")
    self.step = jax.jit(jax.shard_map(
        functools.partial(self.train_step, graphdef), mesh=self.mesh, in_specs=(P(), P(), split, split, P()),
        out_specs=P()), donate_argnums=(0, 1))

  def train_step(self, graphdef: Any, params: Any, moments: Any, windows: Any, weights: Any, counts: Any) -> Any:
    """One step on one device: this rank's first `counts[rank]` windows, and one all-reduce."""
    loss, grads = jaxpace.accumulate(
        functools.partial(documents.loss_fn, graphdef), params, (windows, weights), counts, "data")
    updates, moments = self.optimizer.update(grads, moments, params)
    return optax.apply_updates(params, updates), moments, loss

  def run(self, batch: documents.Batch) -> jax.Array:
    """Takes a step; returns the loss."""
    split, ranks = NamedSharding(self.mesh, P("data")), len(batch.counts)
    mine = [r for r, device in enumerate(self.mesh.devices.flat) if device.process_index == jax.process_index()]

    def own(rows: np.ndarray) -> jax.Array:
      here = rows.reshape(ranks, -1, *rows.shape[1:])[mine]
      return jax.make_array_from_process_local_data(split, here.reshape(-1, *rows.shape[1:]))

    self.params, self.moments, loss = self.step(
        self.params, self.moments, own(batch.windows), own(batch.weights), batch.counts)
    return loss


def compare(training: Training, texts: list[np.ndarray], rounds: int, block: int) -> dict[str, Any]:
  """Step times of blocks that take turns, over the same documents in every arm of a round."""
  seconds: dict[str, list[float]] = {DRAWN: [], AGAIN: [], BALANCED: []}
  load: dict[bool, list[float]] = {False: [], True: []}
  ranks = training.mesh.size
  for number in range(rounds):
    for arm in random.Random(number).sample(list(seconds), len(seconds)):
      source = documents.batches(texts, CONTEXT, ranks, EACH, number, arm == BALANCED)
      ready = [next(source) for _ in range(block)]
      load[arm == BALANCED] += [float(one.counts.max() / one.counts.mean()) for one in ready]
      jax.block_until_ready(training.run(ready[0]))
      start = time.perf_counter()
      for batch in ready[1:]:
        loss = training.run(batch)
      jax.block_until_ready(loss)
      seconds[arm].append((time.perf_counter() - start) / (block - 1))
  drawn, again, even = (np.array(seconds[arm]) for arm in (DRAWN, AGAIN, BALANCED))
  return {"processes": jax.process_count(), "ranks": ranks, "rounds": rounds,
          "step_ms": {arm: estimate(np.array(took) * 1e3).to_json() for arm, took in seconds.items()},
          "again_percent": estimate((again / drawn - 1) * 100).to_json(),
          "balanced_percent": estimate((even / ((drawn + again) / 2) - 1) * 100).to_json(),
          "most_over_mean": {"as drawn": float(np.mean(load[False])), "balanced": float(np.mean(load[True]))}}


def lines(figures: dict[str, Any]) -> list[str]:
  """The comparison as a page."""
  page = measured.introduction("Documents of different length, as drawn and balanced", figures)
  page += [f"{figures['processes']} processes, {EACH} documents a rank and step, windows of {CONTEXT} characters. "
           "Change: against as drawn in the same round. Load: windows of the rank that has most, over the mean. "
           + measured.about_intervals(figures.get("intervals"), figures["rounds"]), ""]
  change = {DRAWN: None, AGAIN: figures["again_percent"], BALANCED: figures["balanced_percent"]}
  rows = []
  for arm, took in figures["step_ms"].items():
    against, load = change[arm], figures["most_over_mean"][BALANCED if arm == BALANCED else DRAWN]
    rows.append([arm, "{:.1f} [{:.1f}, {:.1f}]".format(*took),
                 "{:+.1f} [{:+.1f}, {:+.1f}]".format(*against) if against else None, f"{load:.3f}"])
  return page + measured.table(["documents", "step, ms", "change, %", "load"], rows)


def define_flags() -> None:
  """Defines this program's flags."""
  flags.DEFINE_integer("steps", 200, "Steps to train.", lower_bound=1)
  flags.DEFINE_integer("rounds", 8, "Rounds, with --compare.", lower_bound=2)
  flags.DEFINE_string("compare", "", "Compare as drawn and balanced, and write the figures to this file.")
  flags.DEFINE_integer("processes", 2, "Processes to start, with --compare.", lower_bound=1)
  flags.DEFINE_bool("worker", False, "Of the program's own processes.")


def main(_: list[str]) -> None:
  its = flags.FLAGS
  if its.compare and not its.worker:
    sys.exit(subprocess.call([
        sys.executable, "-m", "jaxpace.cli", "launch", "--nproc", str(its.processes), "--", sys.executable, "-m",
        "experiments.examples.chars.train_documents", *sys.argv[1:], "--worker"]))
  jaxpace.distributed.initialize()
  texts = documents.split(data.load(data.DEFAULT_TEXT, CONTEXT)[0])
  training = Training()
  if its.compare:
    found = compare(training, texts, its.rounds, block=16)
    if jax.process_index() == 0:
      figures = measured.circumstances("experiments.examples.chars.train_documents") | found
      figures["command"] = figures["command"].removesuffix(" --worker")
      measured.write(figures, lines(figures), pathlib.Path(its.compare))
    return
  source = documents.batches(texts, CONTEXT, training.mesh.size, EACH, 0, balanced=True)
  for step in range(1, its.steps + 1):
    loss = training.run(next(source))
    if step % 50 == 0 and jax.process_index() == 0:
      print(f"step {step} loss {float(loss):.4f}", flush=True)


if __name__ == "__main__":
  define_flags()
  app.run(main)
