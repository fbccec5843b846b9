"""Synchronisation strategies side by side: simulated time and bytes, and what really trained with
them becomes.

    python -m experiments.measure.strategies
    python -m experiments.measure.strategies --steps=32 --seeds=1 --scenes=late --out=/tmp/strategies.json     # to
    try it

Time comes from `jaxpace.simulation.strategies` on clusters that are assumed (`SCENES`); loss and
accuracy from the digits CNN, trained on as many simulated workers with averaged, dropped, old,
local or compressed gradients. Writes docs/measurements/strategies.json and .md.
"""  # noqa: E501

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from absl import app, flags

from experiments.lib import measured
from experiments.measure import strategies_training as training
from jaxpace.simulation import noise
from jaxpace.simulation.strategies import cluster, schedule, timeline
from jaxpace.simulation.strategies.cluster import Cluster
from jaxpace.simulation.strategies.settings import (
    Backup,
    BoundedStaleness,
    Compressed,
    LocalSteps,
    ParameterServer,
    Strategy,
    Synchronous,
)

OUT = pathlib.Path("docs/measurements/strategies.json")
RANKS, BATCH, TARGET = 8, 16, 0.4
SIZES = (8, 64, 512)
SIZE_STEPS = 160


class Scene(NamedTuple):
  """A cluster, assumed: times of a model of 100 M parameters, of which the digits CNN stands in for
  the gradients."""

  about: str
  compute: float  # s
  gradient_bytes: float
  rate: float  # B/s of each rank's link
  server_rate: float  # B/s of a parameter server's link
  exponential: float  # mean extra time, share of the compute
  pauses: tuple[float, float] = (0.0, 0.0)  # probability in a step, s
  slow: float = 0.0  # extra time of the last rank, share of the compute

  def cluster(self, ranks: int) -> Cluster:
    slower = np.zeros(ranks, np.float32)
    slower[-1] = self.slow
    parts = noise.Exponential(self.exponential), noise.Pauses(*self.pauses), noise.Slow(slower)
    return cluster.check(Cluster(
        compute=self.compute, noise=parts, gradient_bytes=self.gradient_bytes, latency=10e-6,
        rate=self.rate, server_rate=self.server_rate, codec_rate=1e12))


SCENES = {
    "late":
    Scene("ranks late at random: extra time exponential, 10 %; pauses of 0.3 s in 2 % of steps",
          0.1, 400e6, 50e9, 50e9, 0.1, (0.02, 0.3)),
    "network": Scene("a slow network: 25 Gb/s, 5 % exponential extra time", 0.1, 400e6, 3.1e9,
                     3.1e9, 0.05),
    "slow": Scene("one rank slower by half, 2 % exponential extra time", 0.1, 400e6, 50e9, 50e9,
                  0.02, slow=0.5),
}


class Arm(NamedTuple):
  """A strategy, and how it is trained with."""

  strategy: Strategy
  optimizer: str = "sgd"


ARMS = {
    "synchronous": Arm(Synchronous()),
    "backup, 7/8 of the ranks": Arm(Backup(7)),
    "bounded staleness, 1": Arm(BoundedStaleness(1)),
    "bounded staleness, 4": Arm(BoundedStaleness(4)),
    "no bound": Arm(BoundedStaleness(None)),
    "parameter server": Arm(ParameterServer(1)),
    "parameter servers, 8": Arm(ParameterServer(8)),
    "local SGD, every 4": Arm(LocalSteps(4)),
    "local SGD, every 16": Arm(LocalSteps(16)),
    "fp16": Arm(Compressed("fp16")),
    "int8": Arm(Compressed("int8")),
    "top 1 %": Arm(Compressed("top_k", 0.01)),
    "top 1 %, no error feedback": Arm(Compressed("top_k", 0.01, error_feedback=False)),
    "synchronous, AdamW": Arm(Synchronous(), "adamw"),
    "DiLoCo, every 16": Arm(LocalSteps(16, 0.7, 0.9), "adamw"),
}
OPTIMIZERS: dict[str, tuple[training.Optimizer, tuple[float, ...]]] = {
    "sgd": (optax.sgd, (0.25, 0.5, 1.0, 2.0, 4.0)),
    "adamw": (optax.adamw, (3e-3, 1e-2, 3e-2, 0.1, 0.3))}
"""And the learning rates tried, of which the one with the least training loss in the end is
kept."""


def at_size(strategy: Strategy, ranks: int) -> Strategy:
  """The strategy on another number of ranks: as large a share of backups, as many servers a
  rank."""
  if isinstance(strategy, Backup):
    return Backup(ranks * strategy.wait_for // RANKS)
  if isinstance(strategy, ParameterServer) and strategy.servers > 1:
    return ParameterServer(ranks * strategy.servers // RANKS)
  return strategy


_play = jax.jit(schedule.play, static_argnums=(0, 3, 4))


def timed(strategy: Strategy, scene: Scene, key: jax.Array, ranks: int, steps: int
          ) -> timeline.CommonSteps | timeline.Updates:
  """Plays a strategy in a scene."""
  played = _play(strategy, scene.cluster(ranks), key, ranks, steps)
  if isinstance(strategy, (ParameterServer, BoundedStaleness)):
    return timeline.updates(played)
  assert isinstance(played, schedule.PlayedSteps)
  return timeline.rounds(played)


def step_seconds(times: timeline.CommonSteps | timeline.Updates, ranks: int) -> float:
  """s in which as many gradients are made as in a synchronous step; the first and last tenth of
  single ones left out.

  Dropped gradients count: they have been made.
  """
  if isinstance(times, timeline.CommonSteps):
    return float(times.time[-1] / len(times.time))
  first, last = len(times.time) // 10, len(times.time) * 9 // 10
  return float((times.time[last] - times.time[first]) / (last - first) * ranks)


def train(arm: Arm, times: timeline.CommonSteps | timeline.Updates, task: training.Task,
          keys: jax.Array, points: int) -> dict[str, Any]:
  """Trains with a strategy as scheduled; the curve of the better learning rate, mean over seeds."""
  optimizer, rates = OPTIMIZERS[arm.optimizer]
  if isinstance(times, timeline.CommonSteps):
    curve = training.in_rounds(task, arm.strategy, times, optimizer, rates, keys, points)
  else:
    curve = training.one_by_one(task, times, optimizer, rates, keys, points)
  ends = np.nan_to_num(curve.loss[-1].mean(axis=1), nan=np.inf)
  best = int(ends.argmin())
  return {"learning_rate": rates[best], "done": curve.done.tolist(),
          "loss": _rounded(curve.loss[:, best].mean(axis=1)),
          "accuracy": _rounded(curve.accuracy[:, best].mean(axis=1)),
          "loss_by_rate": _rounded(ends), "accuracy_by_seed": _rounded(curve.accuracy[-1, best])}


def seconds_to(target: float, seconds: np.ndarray, loss: Any) -> float | None:
  """Simulated s until the loss first is `target`, straight between points; None if it never is that
  low."""
  values = np.asarray(loss, np.float64)  # None, where training broke down, becomes NaN
  reached = np.flatnonzero(values <= target)
  if not len(reached):
    return None
  at = int(reached[0])
  if at == 0 or not np.isfinite(values[at - 1]):
    return float(seconds[at])
  part = (values[at - 1] - target) / (values[at - 1] - values[at])
  return float(seconds[at - 1] + part * (seconds[at] - seconds[at - 1]))


def measure(names: list[str], steps: int, seeds: int, points: int) -> Iterator[dict[str, Any]]:
  """Plays all strategies in all scenes, and trains with each; yields what there is after each
  scene."""
  task = training.task(RANKS, BATCH)
  keys = jax.random.split(jax.random.key(1), seeds)
  trained: dict[str, dict[str, Any]] = {}  # of strategies whose mathematics no schedule changes
  rows = []
  say = measured.progress("strategies", len(names) * len(ARMS))
  for name in names:
    scene = SCENES[name]
    for label, arm in ARMS.items():
      times = timed(arm.strategy, scene, jax.random.key(0), RANKS, steps)
      scheduled = isinstance(times, timeline.Updates) or not times.counted.all()
      quality = None if scheduled else trained.get(label)
      if quality is None:
        quality = train(arm, times, task, keys, points)
        if not scheduled:
          trained[label] = quality
      seconds = np.concatenate([[0.0], times.time])[quality["done"]]
      reached = seconds_to(TARGET, seconds, quality["loss"])
      delays = times.delay if isinstance(times, timeline.Updates) else np.zeros(1)
      dropped = 1 - times.counted.mean() if isinstance(times, timeline.CommonSteps) else 0.0
      sizes = {str(ranks): step_seconds(
          timed(at_size(arm.strategy, ranks), scene, jax.random.key(2), ranks, SIZE_STEPS), ranks)
               for ranks in SIZES}
      sent = cluster.bytes_per_step(arm.strategy, scene.cluster(RANKS), RANKS)
      rows.append({
          "scene": name, "strategy": label, "settings": repr(arm.strategy),
          "optimizer": arm.optimizer, "step_seconds": sizes, "megabytes_a_step": sent / 1e6,
          "delay_mean": float(delays.mean()), "delay_most": int(delays.max()),
          "dropped": float(dropped), "seconds_to_target": reached, "seconds": _rounded(seconds),
          **quality})
      say(len(rows))
    shown = {done: SCENES[done]._asdict() for done in names[:names.index(name) + 1]}
    yield {"ranks": RANKS, "batch": BATCH, "steps": steps, "seeds": seeds, "target_loss": TARGET,
           "scenes": shown, "rows": rows}


def page(figures: dict[str, Any]) -> list[str]:
  """The measurements as Markdown."""
  lines = [
      *measured.introduction("Synchronisation strategies: time simulated, training real", figures),
      "Time is simulated on clusters that are assumed; nothing here was timed. The digits CNN is "
      f"trained on {figures['ranks']} simulated", f"workers with {figures['batch']} images each, "
                                                  f"for {figures['steps']} steps (or as many "
                                                  "gradients, one by one), mean of "
                                                  f"{figures['seeds']} seeds; old",
      "gradients are as old as the simulated schedule makes them, dropped ones those that it "
      "drops. Of five learning rates the one with", "the least loss over the training images in "
                                                    "the end is kept. Its gradient is tiny: for "
                                                    "time and bytes it stands in for one of",
      "400 MB.", "",
      "- **step**: simulated ms for one gradient of every rank, at 8, 64 and 512 ranks "
      f"({SIZE_STEPS} steps each);",
      "- **to target**: simulated s until the training loss, mean over seeds, is "
      f"{figures['target_loss']:g}, and against synchronous training",
      "  with the same optimizer; with so few seeds a tenth more or less is noise;",
      "- **loss**, **accuracy**: in the end, over all training images and the 360 that were "
      "held out;", "- **age**: updates applied between reading parameters and adding the gradient "
                   "made of them, mean and most;",
      "- **rate**: the learning rate kept, with a star if it is the lowest or highest tried: "
      "others may do better.",
      ""]
  for name, scene in figures["scenes"].items():
    rows = [row for row in figures["rows"] if row["scene"] == name]
    base = {row["optimizer"]: row["seconds_to_target"]
            for row in rows if row["strategy"].startswith("synchronous")}
    lines += [f"## {name}: {scene['about']}", ""]
    lines += measured.table(
        ["strategy", *[f"step, {n}" for n in SIZES], "MB a step", "to target",
         "against synchronous", "loss", "accuracy", "age", "rate"],
        [[row["strategy"], *[f"{row['step_seconds'][str(n)] * 1e3:.0f}" for n in SIZES],
          f"{row['megabytes_a_step']:.0f}", _cell(row["seconds_to_target"]),
          _ratio(row["seconds_to_target"], base.get(row["optimizer"])), f"{row['loss'][-1]:.3f}",
          f"{row['accuracy'][-1]:.3f}", _age(row), _rate(row)] for row in rows])
  return lines


def _cell(seconds: float | None) -> str:
  return "–" if seconds is None else f"{seconds:.1f}"


def _ratio(seconds: float | None, base: float | None) -> str:
  return "–" if seconds is None or not base else f"{seconds / base:.2f}"


def _age(row: dict[str, Any]) -> str:
  if row["dropped"]:
    return f"{row['dropped']:.0%} dropped"
  return f"{row['delay_mean']:.1f}, {row['delay_most']}" if row["delay_most"] else "0"


def _rate(row: dict[str, Any]) -> str:
  tried = OPTIMIZERS[row["optimizer"]][1]
  return f"{row['learning_rate']:g}{'*' if row['learning_rate'] in (tried[0], tried[-1]) else ''}"


def _rounded(values: Any) -> list[float | None]:
  return [float(f"{value:.5g}") if np.isfinite(value) else None
          for value in np.asarray(values, np.float64)]


def main(_: list[str]) -> None:
  around = measured.circumstances("experiments.measure.strategies")
  for found in measure(FLAGS.scenes or list(SCENES), FLAGS.steps, FLAGS.seeds, FLAGS.steps // 4):
    figures = {**around, **found}
    # after each scene: an end too soon keeps some
    measured.write(figures, page(figures), pathlib.Path(FLAGS.out))


FLAGS = flags.FLAGS

if __name__ == "__main__":
  flags.DEFINE_integer("steps", 96,
                       "Steps of training; a multiple of 16, so that local steps end with "
                       "an exchange.", lower_bound=16)
  flags.DEFINE_integer("seeds", 3, "Of parameters and batches.", lower_bound=1)
  flags.DEFINE_multi_enum("scenes", [], list(SCENES), "Scenes; all if none is named.")
  flags.DEFINE_string("out", str(OUT), "JSON file; a page is written beside it.")
  flags.register_validator("steps", lambda steps: steps % 16 == 0, "must be a multiple of 16")
  app.run(main)
