"""Trains the character transformer on documents of different length, evened out over the ranks.

    jaxpace run --nproc 2 -- python -m experiments.examples.chars.train_documents --steps=200
    python -m experiments.examples.chars.train_documents --compare=documents.json

Two forms of sharing work are in it. `jaxpace.balance` says which rank gets which documents, so that all have about as
many windows; `jaxpace.accumulate` lets every rank run as many as it has, weighs every character alike, and meets once.
With --compare it starts two processes itself, each on a core of its own, and runs each batch of documents as drawn, as
drawn again (A/A) and balanced, in random order.
"""

from __future__ import annotations

import functools
import itertools
import os
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


def compare(training: Training, texts: list[np.ndarray], rounds: int, each: int) -> dict[str, Any]:
  """Step times of arms that take turns step by step, over the same documents in every arm of a round.

  A round is `each` global batches, every one of them run once in each arm, in random order.
  """
  seconds: dict[str, list[float]] = {DRAWN: [], AGAIN: [], BALANCED: []}
  load: dict[bool, list[float]] = {False: [], True: []}
  ranks = training.mesh.size
  for number in range(rounds):
    drawn, even = ([*itertools.islice(documents.batches(texts, CONTEXT, ranks, EACH, number, balanced), each)]
                   for balanced in (False, True))
    for balanced, batches in ((False, drawn), (True, even)):
      load[balanced] += [float(one.counts.max() / one.counts.mean()) for one in batches]
    # Begins with a step that doesn't count.
    jax.block_until_ready(training.run(drawn[0]))
    took = dict.fromkeys(seconds, 0.0)
    draw = random.Random(number)
    for one, other in zip(drawn, even, strict=True):
      for arm in draw.sample(list(seconds), len(seconds)):
        start = time.perf_counter()
        jax.block_until_ready(training.run(other if arm == BALANCED else one))
        took[arm] += time.perf_counter() - start
    for arm, total in took.items():
      seconds[arm].append(total / each)
  first, again, balanced = (np.array(seconds[arm]) for arm in (DRAWN, AGAIN, BALANCED))
  return {"processes": jax.process_count(), "ranks": ranks, "rounds": rounds, "batches": each,
          "real_time": measured.has_priority(),
          "step_ms": {arm: estimate(np.array(took) * 1e3).to_json() for arm, took in seconds.items()},
          "again_percent": estimate((again / first - 1) * 100).to_json(),
          "balanced_percent": estimate((balanced / ((first + again) / 2) - 1) * 100).to_json(),
          "most_over_mean": {"as drawn": float(np.mean(load[False])), "balanced": float(np.mean(load[True]))}}


def lines(figures: dict[str, Any]) -> list[str]:
  """The comparison as a page."""
  page = measured.introduction("Documents of different length, as drawn and balanced", figures)
  priority = " with real-time priority (`chrt -r 5`)" if figures["real_time"] else ""
  page += [f"{figures['processes']} processes, each on a core of its own{priority}, {EACH} documents a rank and step, windows "
           f"of {CONTEXT} characters. A round: {figures['batches']} global batches, each of them run in every way, in "
           "random order. Change: against as drawn in the same round. Load: windows of the rank that has most, over the mean. "
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
  flags.DEFINE_integer("rounds", 24, "Rounds, with --compare.", lower_bound=2)
  flags.DEFINE_string("compare", "", "Compare as drawn and balanced, and write the figures to this file.")
  flags.DEFINE_integer("processes", 2, "Processes to start, with --compare.", lower_bound=1)
  flags.DEFINE_bool("worker", False, "Of the program's own processes.")


def main(_: list[str]) -> None:
  its = flags.FLAGS
  if its.compare and not its.worker:
    sys.exit(subprocess.call([
        sys.executable, "-m", "jaxpace.cli", "run", "--no-record", "--nproc", str(its.processes), "--", sys.executable, "-m",
        "experiments.examples.chars.train_documents", *sys.argv[1:], "--worker"]))
  place = jaxpace.distributed.initialize()
  if its.compare:
    # A host each: who is done early leaves its core to nobody. Before JAX starts its threads, which inherit it.
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, [cores[place.index % len(cores)]])
  texts = documents.split(data.load(data.DEFAULT_TEXT, CONTEXT)[0])
  training = Training()
  if its.compare:
    found = compare(training, texts, its.rounds, each=8)
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
