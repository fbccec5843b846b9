"""How soon the stream of alarms tells of a fault in made-up jobs, and how often it tells of none
that is there.

    python -m experiments.measure.stream_alarms            # about two minutes on one core
"""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
from absl import app, flags

from experiments.lib import measured
from jaxpace.diagnosis import stream
from jaxpace.diagnosis.stream import GAP, LATE, TRANSFER, WAITING, NewSteps

NOISES = ("normal", "exponential", "rare pauses", "AR(0.9)")
FAULTS = (LATE, WAITING, TRANSFER, GAP, "pauses")
RANKS = (2, 8)
_BASE, _ONSET, _AFTER = 20e-3, 300, 150
_HEALTHY = 1000
"""Steps of a healthy job: what is usual is least known at its start."""


def made_up(ranks: int, size: int, noise: str, seed: int, fault: str | None = None,
            cost: float = 0.0) -> NewSteps:
  """Steps of a job with noise of 2 % of the work; a fault from step `_ONSET` on.

  Args:
    ranks: of the job.
    size: steps.
    noise: one of `NOISES`.
    seed: of the draws.
    fault: one of `FAULTS`: rank 1 late; another rank late in each step; transfers slow; gaps longer
      on every rank in a tenth of the steps, where no cause is measured; pauses with a cause in a
      tenth of the steps.
    cost: what the fault costs, share of the step with it.
  """
  random = np.random.default_rng(seed)
  shape = (ranks, size)
  jitter = (random.exponential(0.02, shape) if noise == "exponential"
            else random.normal(0, 0.02, shape))
  if noise == "AR(0.9)":
    for step in range(1, size):
      jitter[:, step] = 0.9 * jitter[:, step - 1] + np.sqrt(1 - 0.81) * jitter[:, step]
  if noise == "rare pauses":
    jitter += 0.5 * (random.random(shape) < 0.005)
  arrival, gap = _BASE * (1 + jitter), np.full(shape, 0.5e-3)
  transfer = 2e-3 * (1 + random.exponential(0.3, size))
  pause = np.zeros(size)
  more = cost / (1 - cost) * float(np.median(arrival.max(axis=0) + transfer))
  now = np.arange(_ONSET, size)
  # Some rank is last by its own noise: what a late one adds to that is the cost.
  last = float(np.median(arrival.max(axis=0) - np.median(arrival, axis=0)))
  if fault == LATE:
    arrival[1, now] += more + last
  elif fault == WAITING:
    arrival[random.integers(0, ranks, now.size), now] += more + last
  elif fault == TRANSFER:
    transfer[now] += more
  elif fault in (GAP, "pauses"):
    struck = now[random.random(now.size) < 0.1]
    gap[:, struck] += 10 * more
    arrival[:, struck] += 10 * more
    if fault == "pauses":
      pause[struck] += 10 * more
  return NewSteps(np.arange(size), arrival, transfer, gap, arrival.max(axis=0) + transfer,
                  None if fault == GAP else pause)


def follow(given: NewSteps, ranks: int) -> list[stream.Alarm]:
  """What began, told as new steps come in, 50 at a time."""
  state, found = stream.init(ranks), []
  for begin in range(0, len(given.number), 50):
    state, new = stream.update(state,
                               NewSteps(*(x[..., begin:begin + 50]
                                          for x in given if x is not None)))
    found += [alarm for alarm in new if not alarm.over]
  return found


def measure(steps: int, jobs: int, cost: float) -> dict[str, Any]:
  """False alarms and delays."""
  healthy, delays = [], []
  for ranks in RANKS:
    for noise in NOISES:
      found = [alarm for seed in range(-(-steps // _HEALTHY))
               for alarm in follow(made_up(ranks, min(_HEALTHY, steps - seed * _HEALTHY), noise,
                                           1000 + seed), ranks)]
      healthy.append({"ranks": ranks, "noise": noise, "steps": steps, "alarms": len(found),
                      "naming_a_rank": sum(alarm.kind == LATE for alarm in found),
                      "per_10000_steps": 1e4 * len(found) / steps})
      for fault in FAULTS:
        waited: list[int | None] = []
        for seed in range(jobs):
          kind = GAP if fault == "pauses" else fault
          given = made_up(ranks, _ONSET + _AFTER, noise, seed, fault, cost)
          told = [alarm.step - _ONSET for alarm in follow(given, ranks) if alarm.step >= _ONSET
                  and alarm.kind == kind and alarm.rank in (None, 1)]
          waited.append(told[0] if told else None)
        some = sorted(value for value in waited if value is not None)
        delays.append({"ranks": ranks, "noise": noise, "fault": fault, "jobs": jobs,
                       "told": len(some), "within_30": sum(value <= 30 for value in some),
                       "median": float(np.median(some)) if some else None,
                       "longest": some[-1] if some else None})
  return {"cost": cost, "healthy": healthy, "delays": delays}


def page(figures: dict[str, Any]) -> list[str]:
  """The figures in Markdown."""
  lines = measured.introduction("The stream of alarms, in made-up jobs", figures)
  lines += measured.table(("ranks", "noise", "healthy steps", "alarms", "naming a rank",
                           "alarms in 10,000 steps"),
                          [list(row.values()) for row in figures["healthy"]])
  cost = 100 * figures["cost"]
  lines += [
      f"Faults that cost {cost:g} % of the step; steps from onset to the alarm of their kind:", ""]
  lines += measured.table(("ranks", "noise", "fault", "jobs", "told", "within 30 steps", "median",
                           "longest"),
                          [list(row.values()) for row in figures["delays"]])
  return lines


def define_flags() -> None:
  """Defines this program's flags."""
  flags.DEFINE_string("out", "docs/measurements/stream_alarms.json",
                      "Where the figures go; a table beside it.")
  flags.DEFINE_integer("steps", 20_000, f"Healthy steps, in jobs of {_HEALTHY:,}.", lower_bound=100)
  flags.DEFINE_integer("jobs", 20, "Jobs with each fault.", lower_bound=1)
  flags.DEFINE_float("cost", 0.06, "What a fault costs of the step.", lower_bound=0.0,
                     upper_bound=0.5)


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(
        f"What is {argv[1]!r}? All arguments are flags: --steps, --jobs, --cost, --out.")
  args = flags.FLAGS
  figures = {**measured.circumstances("experiments.measure.stream_alarms"),
             **measure(args.steps, args.jobs, args.cost)}
  measured.write(figures, page(figures), pathlib.Path(args.out))


if __name__ == "__main__":
  define_flags()
  app.run(main)
