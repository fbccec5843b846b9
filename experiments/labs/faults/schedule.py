"""What every rank and process is to do in every step of a run, from its seed alone. Pure.

Each process computes its own part and nobody needs to be told: the same spec gives the same
schedule everywhere.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from experiments.labs.faults.spec import PAUSES, Fault, Spec, layout

SPIN_SHARE = 0.25
"""Part of its work for which a spinning rank computes instead of sleeping."""


class Schedule(NamedTuple):
  """Seconds asked for. R ranks, P processes, K steps."""

  work: np.ndarray  # [R, K] float32, what a healthy rank sleeps
  spin: np.ndarray  # [R, K] float32, what it computes
  extra: np.ndarray  # [R, K] float32, injected on top, in the step
  # [P, K] float32 by cause ("gc", "data", "checkpoint"), injected between steps
  pause: dict[str, np.ndarray]


def schedule(spec: Spec) -> Schedule:
  """Draws the schedule of a run.

  The work depends on seed and layout only, so that a run and its healthy twin work alike.
  """
  shape = layout(spec.layout)
  ranks, steps = shape.ranks, spec.steps
  drawn = np.random.default_rng([spec.seed, ranks]).standard_normal((ranks, steps))
  work = spec.work * np.clip(1 + spec.jitter * drawn, 0.2, None)
  spin = np.zeros_like(work)
  if spec.spinning is not None:
    spin[spec.spinning] = SPIN_SHARE * spec.work
    work[spec.spinning] -= spin[spec.spinning]
  extra = np.zeros_like(work)
  pause: dict[str, np.ndarray] = {}
  for number, fault in enumerate(spec.faults):
    rng = np.random.default_rng([spec.seed, ranks, 1 + number])
    now = np.zeros(steps, bool)
    now[fault.onset:fault.until] = True
    if fault.kind in PAUSES:
      own = pause.setdefault(PAUSES[fault.kind], np.zeros((shape.processes, steps)))
      own += np.where(_struck(fault, shape.processes, steps, rng) & now, fault.seconds, 0.0)
    else:
      extra += np.where(now, _extra(fault, ranks, steps, rng), 0.0)
  return Schedule(work.astype(np.float32), spin.astype(np.float32), extra.astype(np.float32),
                  {cause: values.astype(np.float32) for cause, values in pause.items()})


def _struck(fault: Fault, processes: int, steps: int, rng: np.random.Generator) -> np.ndarray:
  """[P, K] where a pause strikes: by chance, or at every so many steps if `chance` is more than
  1."""
  if fault.chance > 1:
    struck = np.broadcast_to(np.arange(steps) % round(fault.chance) == round(fault.chance) - 1,
                             (processes, steps))
  else:
    struck = rng.random((processes, steps)) < fault.chance
  return struck & np.isin(np.arange(processes), fault.targets)[:, None]


def _extra(fault: Fault, ranks: int, steps: int, rng: np.random.Generator) -> np.ndarray:
  """[R, K] seconds that a fault inside the step adds; none for what is injected from outside."""
  if fault.kind in ("straggler", "misplaced"):
    return (np.where(np.isin(np.arange(ranks), fault.targets)[:, None], fault.seconds, 0.0)
            * np.ones(steps))
  if fault.kind == "rotating":
    return np.where(np.arange(ranks)[:, None] == rng.integers(0, ranks, steps), fault.seconds, 0.0)
  if fault.kind == "imbalance":
    # Lengths as language data have them, most short, some long; `seconds` is the mean of the
    # longest less the mean.
    drawn = rng.gamma(2.0, 1.0, (ranks, steps))
    return drawn * fault.seconds / max(float((drawn.max(axis=0) - drawn.mean(axis=0)).mean()), 1e-9)
  return np.zeros((ranks, steps))
