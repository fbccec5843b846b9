"""What the fault lab says is true of its runs, against truth worked out by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.labs.faults import truth
from experiments.labs.faults.schedule import schedule
from experiments.labs.faults.spec import Spec, layout
from tests.experiments.faults_made_up import fault_of, spec_of
from tests.quick import examples


def by_hand(inside: np.ndarray, pauses: np.ndarray) -> dict[str, float]:
  """The accounting, step by step and rank by rank."""
  ranks, steps = inside.shape
  waited = {"work": 0.0, "pause": 0.0}
  for k in range(steps):
    busy = [inside[r, k] + pauses[r, k] for r in range(ranks)]
    last = max(range(ranks), key=lambda r: busy[r])
    for r in range(ranks):
      work = max(inside[last, k] - inside[r, k], 0)
      pause = max(pauses[last, k] - pauses[r, k], 0)
      if work + pause > 0:
        waited["work"] += (busy[last] - busy[r]) * work / (work + pause)
        waited["pause"] += (busy[last] - busy[r]) * pause / (work + pause)
  means = [sum(inside[r]) / steps for r in range(ranks)]
  chronic = max(means) - sum(means) / ranks
  skew = waited["work"] / ranks / steps
  chronic = min(chronic, skew)
  return {"chronic": chronic, "wandering": skew - chronic,
          "runtime": waited["pause"] / ranks / steps + sum(map(sum, pauses)) / ranks / steps}


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 5), st.integers(1, 12))
def test_truth_accounts_as_by_hand(seed: int, ranks: int, steps: int) -> None:
  rng = np.random.default_rng(seed)
  inside = rng.gamma(4.0, 1.0, (ranks, steps)) + 3.0 * (np.arange(ranks) == 0)[:, None]
  pauses = np.where(rng.random((ranks, steps)) < 0.3, rng.random((ranks, steps)) * 5, 0.0)
  found = truth.accounting(inside, pauses)
  for group, seconds in by_hand(inside, pauses).items():
    assert found[group] == pytest.approx(seconds, abs=1e-9)
  busy = inside + pauses
  assert (sum(found.values()) == pytest.approx((busy.max(axis=0) - busy.mean(axis=0)).mean()
                                               + pauses.mean()))


def measured(spec: Spec, transfer: float = 1e-3) -> truth.Measured:
  """What perfect injectors would measure."""
  todo = schedule(spec)
  inside = (todo.work + todo.spin + todo.extra).astype(float)
  pause = {cause: np.repeat(values, layout(spec.layout).devices, axis=0).astype(float)
           for cause, values in todo.pause.items()}
  step = (inside + sum(pause.values(), np.zeros_like(inside))).max(axis=0) + transfer
  step[0] = np.nan
  return truth.Measured((todo.work + todo.spin).astype(float), todo.extra.astype(float),
                        todo.spin.astype(float), pause, step)


def test_truth_of_a_straggler_and_of_a_pause() -> None:
  spec = dataclasses.replace(spec_of(fault_of("straggler", (1,), 5e-3, onset=100)), jitter=0.0)
  twin = dataclasses.replace(spec, faults=(), twin=None)
  found = truth.truth(spec, measured(spec), measured(twin))
  part = 100 / 199  # the first step has none before it
  mean = 11e-3 + part * 5e-3
  assert found.step_time == pytest.approx(mean, rel=1e-6)
  assert found.shares["chronic"] == pytest.approx(part * 5e-3 * 3 / 4 / mean, rel=1e-5)
  assert found.shares["wandering"] == pytest.approx(0, abs=1e-6)
  fault, = found.faults
  assert (fault.ranks, fault.hosts, fault.onset) == ((1,), (), 100)
  assert fault.cost == pytest.approx(part * 5e-3 / mean, rel=1e-5)
  assert fault.cost_active == pytest.approx(5 / 16, rel=1e-5)

  spec = dataclasses.replace(spec_of(fault_of("loading", (1,), 30e-3, chance=0.1), name="2x2"),
                             jitter=0.0)
  found = truth.truth(spec, measured(spec), measured(twin))
  struck = (measured(spec).pause["data"][2, 1:] > 0).mean()
  assert found.shares["runtime"] == pytest.approx(struck * 30e-3 / found.step_time, rel=1e-5)
  assert found.faults[0].ranks == (2, 3) and found.faults[0].hosts == ("h1",)
  assert found.faults[0].cost == pytest.approx(found.shares["runtime"], rel=1e-5)
