"""Faults of synthetic jobs: what goes wrong, on which ranks, when, and what the host would show of
it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxpace.runs.run import PAUSES

KINDS = ("compute", "gap", "pause", "rotating", "jitter", "contention")
MECHANISMS = ("work", "preempted", "stopped", *PAUSES, "none")


@dataclasses.dataclass(frozen=True)
class Fault:
  """One thing that goes wrong in a synthetic job.

  Kinds: "compute" and "gap" make the forward pass or the gap of `ranks` longer in every step;
  "pause" stops ranks in the gap now and then; "rotating" makes another rank's forward pass longer
  every `period` steps; "jitter" makes everyone's forward pass longer by an exponential amount;
  "contention" makes transfers longer.
  """

  kind: str
  seconds: float
  ranks: tuple[int, ...] = ()
  """Ranks struck; none means all. For "contention", those whose host's link is the slow one; none
  means the trunk."""
  begin: float = 0.0
  end: float = 1.0
  """From and to which share of the run."""
  probability: float = 1.0
  """That it strikes a rank in a step; for "contention" a step, for "pause" with `aligned` all ranks
  at once."""
  period: int = 1
  """Steps after which "rotating" passes on to the next rank; "contention" comes and goes in
  stretches this long."""
  aligned: bool = False
  """Whether "pause" strikes all ranks in the same steps."""
  mechanism: str = "none"
  """What the host's columns show of it, one of `MECHANISMS`."""

  def __post_init__(self) -> None:
    for value, known in ((self.kind, KINDS), (self.mechanism, MECHANISMS)):
      if value not in known:
        raise ValueError(f"{value!r} is not one of {', '.join(known)}.")


@dataclasses.dataclass(frozen=True)
class Extra:
  """What all faults of a job add. R ranks, K steps; seconds."""

  forward: np.ndarray  # [R, K]
  gap: np.ndarray  # [R, K]
  transfer: np.ndarray  # [K]
  busy: np.ndarray  # [R, K] of the links, beyond what the transfer needs on a quiet fabric
  shown: dict[str, np.ndarray]  # [R, K] by mechanism


def strike(faults: Sequence[Fault], ranks: int, steps: int, seed: int) -> Extra:
  """Lays out when and where the faults strike. A fault strikes alike whatever others there are."""
  shape = ranks, steps
  extra = Extra(np.zeros(shape), np.zeros(shape), np.zeros(steps), np.zeros(shape),
                {name: np.zeros(shape) for name in MECHANISMS})
  for i, fault in enumerate(faults):
    random = np.random.default_rng((seed, i + 1))
    own = list(fault.ranks) or list(range(ranks))
    during = np.zeros(steps, bool)
    during[round(fault.begin * steps):round(fault.end * steps)] = True
    if fault.kind == "contention":
      stretch = np.arange(steps) // fault.period
      struck = during & (random.random(int(stretch[-1]) + 1) < fault.probability)[stretch]
      extra.transfer[struck] += fault.seconds
      extra.busy[np.array(own)[:, None], np.flatnonzero(struck)] += fault.seconds
      continue
    amount = np.zeros(shape)
    if fault.kind == "rotating":
      turn = np.array(own)[np.arange(steps) // fault.period % len(own)]
      amount[turn, np.arange(steps)] = fault.seconds
    elif fault.kind == "jitter":
      amount[own] = random.exponential(fault.seconds, (len(own), steps))
    else:
      chance = random.random((1, steps) if fault.aligned else (len(own), steps))
      amount[own] = fault.seconds * (chance < fault.probability)
    amount *= during
    target = extra.gap if fault.kind in ("gap", "pause") else extra.forward
    target += amount
    extra.shown[fault.mechanism][:] += amount
  return extra
