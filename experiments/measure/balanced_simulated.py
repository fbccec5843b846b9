"""Work shared by speed, simulated at 64 to 4,096 ranks: what is gained, how often counts change,
and the nulls.

    python -m experiments.measure.balanced_simulated

The library's own `share_work(share_by_speed(...))` over made speeds of every rank in every step: 8
micro-batches a rank, room for 16, half a micro-batch of other work a step. Beside it even counts,
and the best counts that a clairvoyant would choose afresh for each step's true speeds, noise left
out. Writes docs/measurements/balanced_simulated.json and .md. Says nothing of the time of the
machine it runs on.
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from absl import app, flags

from experiments.lib import measured
from experiments.lib.paired import estimate
from jaxpace.coordination.balancer import share_by_speed
from jaxpace.simulation.shared_work import best, play

EACH, CAPACITY, REST, STEPS, FROM = 8, 16, 0.5, 600, 200

Speeds = Callable[[int, np.random.Generator], np.ndarray]
"""(ranks, generator) -> [STEPS, ranks] true time of a micro-batch, noise left out; 1 is a healthy
rank's."""


def _constant(slow: float, share: float = 0.0) -> Speeds:
  def made(ranks: int, _: np.random.Generator) -> np.ndarray:
    each = np.ones(ranks)
    each[:max(1, round(share * ranks))] = slow
    return np.broadcast_to(each, (STEPS, ranks))
  return made


def _drift(ranks: int, rng: np.random.Generator) -> np.ndarray:
  """Every rank wanders: a random walk of 0.2 % a step, held within a fifth."""
  return np.exp(np.clip(np.cumsum(rng.normal(0, 0.002, (STEPS, ranks)), axis=0), -0.2, 0.2))


def _throttled(ranks: int, _: np.random.Generator) -> np.ndarray:
  """One rank heats up and cools down: 1.6 times slower for 150 of every 300 steps."""
  each = np.ones((STEPS, ranks))
  each[(np.arange(STEPS) // 150) % 2 == 1, 0] = 1.6
  return each


SCENARIOS: dict[str, tuple[Speeds, float]] = {
    "healthy, 2 % jitter (null)": (_constant(1.0), 0.02),
    "healthy, 5 % jitter (null)": (_constant(1.0), 0.05),
    "healthy, 15 % jitter (null)": (_constant(1.0), 0.15),
    "one rank 1.5 times slower, 5 % jitter": (_constant(1.5), 0.05),
    "one rank 3 times slower, 5 % jitter": (_constant(3.0), 0.05),
    "two speeds: half the ranks 1.4 times slower, 5 % jitter": (_constant(1.4, 0.5), 0.05),
    "one rank throttled half of the time, 5 % jitter": (_throttled, 0.05),
    "all ranks drift, 5 % jitter": (_drift, 0.05),
}


def measure(ranks: int, speeds: Speeds, jitter: float, rounds: int) -> dict[str, Any]:
  """Plays one scenario."""
  gains, reached, changes, wanted = [], [], [], []
  balancer = share_by_speed(EACH * ranks, CAPACITY)
  for seed in range(rounds):
    rng = np.random.default_rng([seed, ranks])
    true = speeds(ranks, rng)
    played = play(balancer, true * np.exp(rng.normal(0, jitter, true.shape)) * 1e-3,
                  rest=REST * 1e-3)
    even, got = played.even[FROM:].mean(), played.seconds[FROM:].mean()
    gains.append((1 - got / even) * 100)
    changes.append(((played.counts[1:] != played.counts[:-1]).any(axis=1)).sum() / STEPS * 1000)
    # Of what the counts cost by the true speeds alone: what noise adds no counts can take away.
    some = range(FROM, STEPS, 40)
    plain = [((true[k] * EACH).max() + REST, (true[k] * played.counts[k]).max() + REST,
              best(true[k], EACH * ranks, CAPACITY) + REST) for k in some]
    lost, left = sum(a - c for a, _, c in plain), sum(b - c for _, b, c in plain)
    if lost > 1e-9:
      reached.append((1 - left / lost) * 100)
      wanted.append((1 - sum(c for _, _, c in plain) / sum(a for a, _, _ in plain)) * 100)
  return {"gain_percent": estimate(np.array(gains)).to_json(),
          "changes_in_1000_steps": float(np.mean(changes)),
          "of_the_best_percent": estimate(np.array(reached)).to_json() if len(reached) > 1
          else None, "best_percent": estimate(np.array(wanted)).to_json() if len(wanted) > 1
          else None}


def lines(figures: dict[str, Any]) -> list[str]:
  """The figures as a page."""
  page = measured.introduction("Work shared by speed, simulated", figures)
  page += [f"{EACH} micro-batches a rank, room for {CAPACITY}, other work worth {REST:g} of one; "
           f"{STEPS} steps, of which the first {FROM} don't count. Gain: of the mean step with "
           "even counts. Best: what counts chosen for the true speeds of each step would gain if "
           "there were no jitter; reached: the part of it that these do. "
           + measured.about_intervals(figures.get("intervals"),
                                      f"{figures['rounds']} runs, 2 at 4,096 ranks"), ""]
  rows = [[name, ranks, _interval(found["gain_percent"]), _interval(found["best_percent"]),
           _interval(found["of_the_best_percent"]), f"{found['changes_in_1000_steps']:.1f}"]
          for name, by_ranks in figures["scenarios"].items() for ranks, found in by_ranks.items()]
  header = ["scenario", "ranks", "gain, %", "best, %", "reached, %", "changes in 1,000 steps"]
  return page + measured.table(header, rows)


def _interval(value: list[float] | None) -> str | None:
  return None if value is None else f"{value[0]:.2f} [{value[1]:.2f}, {value[2]:.2f}]"


def main(_: list[str]) -> None:
  figures: dict[str, Any] = measured.circumstances("experiments.measure.balanced_simulated") | {
      "rounds": flags.FLAGS.rounds, "scenarios": {name: {} for name in SCENARIOS}}
  for ranks in (64, 512, 4096):
    for name, (speeds, jitter) in SCENARIOS.items():
      print(f"  {ranks} ranks, {name}", file=sys.stderr, flush=True)
      figures["scenarios"][name][str(ranks)] = measure(ranks, speeds, jitter,
                                                       flags.FLAGS.rounds if ranks < 4096 else 2)
  measured.write(figures, lines(figures), pathlib.Path(flags.FLAGS.out))


if __name__ == "__main__":
  measured.define_flags("balanced_simulated", 5, "Runs of each scenario, with other noise.")
  app.run(main)
