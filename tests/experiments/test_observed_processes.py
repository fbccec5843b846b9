"""The fault lab on an observed trainer: its plan, its judgement, and one run for real."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re

import numpy as np
import pytest

from configs import observed_lab
from experiments.labs import observed_processes
from experiments.labs.faults import judge, make, plan, truth
from experiments.labs.faults.observed import LAYERS, layer_of
from experiments.labs.faults.scores import Found, Judged
from experiments.labs.faults.spec import AMPLIFICATION, CONTENTION, STRAGGLER, Spec
from tests.experiments.faults_made_up import one


def specs(seed: int = 3) -> list[Spec]:
  config = observed_lab.get_config()
  config.seed = seed
  return plan.plan(config)


def test_forty_runs_ten_of_them_healthy_each_twin_first() -> None:
  made = specs()
  assert len(made) == len({spec.name for spec in made}) == 40 and specs() == made != specs(4)
  assert sum(not spec.faults for spec in made) == 10
  before: set[str] = set()
  for spec in made:
    assert not spec.faults or spec.twin in before
    before.add(spec.name)
  for layout in ("2x1", "4x1"):
    kinds = [spec.faults[0].kind for spec in made if spec.layout == layout and spec.faults]
    assert sorted(kinds) == sorted(kind for kind, *_ in plan.OBSERVED)
  assert {layer_of(spec) for spec in made} == {None, *range(LAYERS)}


def run_of(*found: Found, injected: tuple = (), layout: str = "4x1") -> Judged:
  return Judged("run", layout, 4, not injected, injected, found, {})


def found(mode: str, ranks: tuple[int, ...] = ()) -> Found:
  return Found(mode, 0.1, 0.99, ranks, tuple(f"h{rank}" for rank in ranks))


@pytest.mark.parametrize(("said", "injected", "right"), [
    ([], (), True),
    ([found(AMPLIFICATION)], (), True),
    ([found(STRAGGLER, (1,))], (), False),
    ([found(STRAGGLER, (1,))], (one(STRAGGLER, (1,)),), True),
    ([found(STRAGGLER, (1, 2))], (one(STRAGGLER, (1,)),), False),
    ([], (one(STRAGGLER, (1,)),), False),
    ([found(STRAGGLER, (1,)), found(AMPLIFICATION)], (one(STRAGGLER, (1,)),), True),
    ([found(STRAGGLER, (1,)), found(CONTENTION, (2,))], (one(STRAGGLER, (1,)),), False),
    ([found(AMPLIFICATION)], (one(AMPLIFICATION),), True),
    ([found(AMPLIFICATION), found(STRAGGLER, (0,))], (one(AMPLIFICATION),), False),
])
def test_what_is_right(said: list[Found], injected: tuple, right: bool) -> None:
  assert observed_processes.right(run_of(*said, injected=injected)) is right


@pytest.mark.long
def test_an_observed_process_sleeps_as_asked_and_its_report_names_the_layer(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  """Two processes on this host, late by more than taking turns on its cores may make a rank."""
  monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "")
  monkeypatch.setattr(make.machine, "why_not", lambda *_: "not here")
  config = observed_lab.get_config()
  config.healthy = {"2x1": 1}
  config.steps = {"2x1": 80}
  twin = dataclasses.replace(plan.plan(config)[0], seed=1)
  fault = next(spec for spec in specs() if spec.layout == "2x1"
               and spec.family == "straggler").faults[0]
  late = dataclasses.replace(twin, name="2x1-000-straggler", twin=twin.name, faults=(
      dataclasses.replace(fault, targets=(1,), seconds=60e-3, onset=0, until=80),))
  failed = make.make([twin, late], config, tmp_path, lambda *_: None, lambda said: None)
  assert not failed
  slept = truth.read(tmp_path / late.name, late)
  assert (slept.extra[1] >= 60e-3).all() and not slept.extra[0].any()
  assert (slept.work >= 0.9 * 24e-3).all() and np.isfinite(slept.step[1:]).all()
  label = json.loads((tmp_path / late.name / make.LABEL).read_text())
  assert label["modes"] == [STRAGGLER] and label["ranks"] == [1]
  told = {one.spec.name: observed_processes.judged(one,
                                                   layer_of(one.spec) if one.spec.faults else None)
          for one in judge.labelled(tmp_path)}
  assert told[late.name]["right"] and told[late.name]["layer_named"], told
  assert re.search(r"iteration 1 of 3", told[late.name]["at"])
  assert told[twin.name]["right"]
