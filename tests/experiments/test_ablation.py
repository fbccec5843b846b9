"""Rules of the diagnosis taken out one at a time."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import pathlib
from typing import Any

import pytest

from experiments.labs import ablation
from experiments.labs.faults import judge
from experiments.labs.faults.rules import RULES
from experiments.labs.faults.spec import STRAGGLER
from tests.experiments.faults_made_up import fault_of, spec_of
from tests.experiments.test_fault_lab import write_run
from tests.synthetic.synthetic_runs import SyntheticJob


def target(place: str) -> Any:
  module, name = place.split(":")
  return functools.reduce(getattr, name.split("."),
                          importlib.import_module(f"jaxpace.diagnose.{module}"))


def rule(name: str) -> Any:
  return next(rule for rule in RULES if rule.name == name)


@pytest.fixture
def runs(tmp_path: pathlib.Path) -> pathlib.Path:
  job = SyntheticJob(ranks=4, steps=200, processes=1, hosts=1, forward=10e-3, backward=0.0,
                     update=0.0,
                  noise=0.02)
  twin = dataclasses.replace(spec_of(), name="in4-healthy-000", twin=None)
  late = dataclasses.replace(spec_of(fault_of("straggler", (2,), 6e-3)), name="in4-001-straggler",
                             twin=twin.name)
  write_run(tmp_path, twin, job)
  write_run(tmp_path, late, dataclasses.replace(job, late={2: 6e-3}))
  return tmp_path


def test_every_rule_names_something_and_its_neutral_answer_is_called_alike() -> None:
  assert len({rule.name for rule in RULES}) == len({rule.says for rule in RULES}) == len(RULES)
  for place, neutral in ((place, neutral) for rule in RULES
                         for place, neutral in rule.neutral.items()):
    real = target(place)
    assert callable(real) == callable(neutral) or isinstance(real, functools.cached_property)
    if callable(real) and callable(neutral):
      signature = inspect.signature(neutral)
      required = [p for p in inspect.signature(real).parameters.values() if p.default is p.empty]
      signature.bind(*(None for _ in required))


def test_a_rule_is_out_only_while_it_is_taken_out() -> None:
  before = {place: target(place) for rule in RULES for place in rule.neutral}
  for one in RULES:
    with ablation.without(one):
      assert all(target(place) is neutral for place, neutral in one.neutral.items())
    assert all(target(place) is before[place] for place in before)


def test_without_a_rule_that_finds_the_fault_it_is_missed(runs: pathlib.Path) -> None:
  ready, read = judge.labelled(runs), {}
  whole = ablation.judged(ready, None, read)
  assert ([finding.mode for finding in whole["all"][0].found] == [STRAGGLER]
          and not whole["all"][1].found)
  assert set(read) == {one.path for one in ready}
  told = ablation.figures_of(whole["all"])
  assert ((told["macro_f1"], told["blamed_rightly"], told["to_blame"], told["changed"])
          == (1.0, 1, 1, None))
  # Nobody is late by 100 steps, nor with any confidence.
  blind = dataclasses.replace(whole["all"][0], found=())
  worse = ablation.figures_of([blind, whole["all"][1]], whole["all"])
  assert ((worse["macro_f1"], worse["blamed_rightly"], worse["changed"], worse["misjudged"])
          == (0.0, 0, 1, 1))
  loud = ablation.judged(ready, rule("turns.costly"), read, ("bare",))
  assert list(loud) == ["bare"]
  assert ablation.figures_of(loud["bare"], whole["bare"])["controls_with_findings"] == 1
  idle = ablation.figures_of(ablation.judged(ready, rule("place.late"), read, ("all",))["all"],
                             whole["all"])
  assert idle["changed"] == 0
