"""The fault labs: their plans, their truth, their judge on synthetic runs, and two tiny labs for
real."""

import dataclasses
import functools
import importlib
import inspect
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs import fault_lab, observed_lab
from experiments.labs import ablation, observed_processes
from experiments.labs.faults import judge, make, plan, scores, truth
from experiments.labs.faults.observed import layer_of
from experiments.labs.faults.rules import RULES
from experiments.labs.faults.schedule import schedule
from experiments.labs.faults.scores import Found, Injected, Judged
from experiments.labs.faults.spec import (
  AMPLIFICATION,
  CONTENTION,
  LOCALITY,
  MODES,
  RUNTIME,
  STRAGGLER,
  Fault,
  Spec,
)
from tests.patience import patiently
from tests.quick import examples
from tests.synthetic import synthetic_runs
from tests.synthetic.synthetic_runs import SyntheticJob


def spec_of(*faults, layout="in4", name="run", twin="twin"):
  return Spec(name, layout, 3, 200, 10e-3, 0.02, None, None, faults, twin)


def fault_of(kind, targets, seconds, onset=0, chance=1.0):
  return Fault(kind, targets, seconds, onset, 200, 0.1, chance)


def injected(mode, ranks=(), hosts=(), cost=0.1):
  return Injected("kind", mode, ranks, hosts, 0, cost, cost)


def found(mode, ranks=(), hosts=()):
  return Found(mode, 0.1, 0.99, ranks, hosts)


def judged(faults, findings, layout="4x1", name="run"):
  return Judged(name, layout, 4, not faults, tuple(faults), tuple(findings), {})


# Plans and schedules.


# What the truth is.


def by_hand(inside, pauses):
  """The accounting, step by step and rank by rank."""
  ranks, steps = inside.shape
  work_waits = pause_waits = 0.0
  for k in range(steps):
    busy = inside[:, k] + pauses[:, k]
    last = int(busy.argmax())
    for r in range(ranks):
      work = max(inside[last, k] - inside[r, k], 0)
      pause = max(pauses[last, k] - pauses[r, k], 0)
      if work + pause > 0:
        work_waits += (busy[last] - busy[r]) * work / (work + pause)
        pause_waits += (busy[last] - busy[r]) * pause / (work + pause)
  means, skew = inside.mean(axis=1), work_waits / ranks / steps
  chronic = min(means.max() - means.mean(), skew)
  return {"chronic": chronic, "wandering": skew - chronic,
          "runtime": pause_waits / ranks / steps + pauses.sum() / ranks / steps}


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 5), st.integers(1, 12))
def test_truth_accounts_as_by_hand(seed, ranks, steps):
  rng = np.random.default_rng(seed)
  inside = rng.gamma(4.0, 1.0, (ranks, steps)) + 3.0 * (np.arange(ranks) == 0)[:, None]
  pauses = np.where(rng.random((ranks, steps)) < 0.3, rng.random((ranks, steps)) * 5, 0.0)
  accounted, busy = truth.accounting(inside, pauses), inside + pauses
  for group, seconds in by_hand(inside, pauses).items():
    assert accounted[group] == pytest.approx(seconds, abs=1e-9)
  assert (sum(accounted.values()) == pytest.approx((busy.max(axis=0) - busy.mean(axis=0)).mean()
                                                   + pauses.mean()))


# The judge.


def test_f1_and_confusion_count_each_mode():
  late = found(STRAGGLER, (1,))
  runs = [judged([injected(STRAGGLER, (1,))], [late]),
          judged([injected(STRAGGLER, (1,))], [found(RUNTIME)]),
          judged([injected(STRAGGLER, (1,)), injected(AMPLIFICATION)],
                 [found(AMPLIFICATION), late]),
          judged([], []), judged([], [found(AMPLIFICATION)]),
          judged([injected(RUNTIME, cost=0.01)], [found(STRAGGLER, (2,))], name="cheap"),
          dataclasses.replace(judged([], [found(STRAGGLER, (2,))]), control=False)]
  modes = scores.by_mode(runs)
  assert {m: (e["right"], e["missed"], e["false"]) for m, e in modes.items()} == {
      STRAGGLER: (2, 1, 0), AMPLIFICATION: (1, 0, 1), RUNTIME: (0, 0, 1), LOCALITY: (0, 0, 0),
      CONTENTION: (0, 0, 0)}
  assert (modes[STRAGGLER]["f1"], modes[AMPLIFICATION]["f1"]) == pytest.approx((0.8, 2 / 3))
  assert scores.macro_f1(modes) == pytest.approx((0.8 + 2 / 3 + 0) / 3)
  table = scores.confusion(runs)
  assert table[STRAGGLER][STRAGGLER] == 2 and table[STRAGGLER][RUNTIME] == 1
  assert table["healthy"] == {**dict.fromkeys(MODES, 0), AMPLIFICATION: 1, "healthy": 1}
  assert sum(sum(row.values()) for row in table.values()) == 6


@pytest.mark.parametrize(("ranks", "hosts", "right"), [
    ((2, 3), ("h1",), True), ((), ("h1",), True), ((2,), ("h1",), True), ((2, 3), (), True),
    ((2,), (), False), ((1, 2, 3), ("h1",), False), ((), ("h0",), False), ((), (), False)])
def test_blame_is_exact_and_names_nobody_innocent(ranks, hosts, right):
  run = judged([injected(STRAGGLER, (2, 3), ("h1",))], [found(STRAGGLER, ranks, hosts)], "2x2")
  assert scores.blame(run, run.injected[0]) is right


def write_run(root, spec, job):
  """A run of the lab as it would have been made, had the synthetic job run in it."""
  made, todo = synthetic_runs.write(root / spec.name / "run", job), schedule(spec)
  (root / spec.name / "injected").mkdir()
  np.savez(root / spec.name / "injected" / "0.npz", ranks=np.arange(4), work=todo.work,
           spin=todo.spin, extra=todo.extra, work_asked=todo.work, spin_asked=todo.spin,
           extra_asked=todo.extra, began_ns=0, ends_ns=made.end[0])
  label = {**make.label(root, spec), "load": [1.0, 2.0]}
  (root / spec.name / make.LABEL).write_text(json.dumps(label))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
  """A healthy run and one with a straggler."""
  root = tmp_path_factory.mktemp("lab")
  job = SyntheticJob(ranks=4, steps=200, processes=1, hosts=1, forward=10e-3, backward=0.0,
                     update=0.0, noise=0.02)
  healthy = spec_of(name="in4-healthy-000", twin=None)
  write_run(root, healthy, job)
  write_run(root, spec_of(fault_of("straggler", (2,), 6e-3), name="in4-001-straggler",
                          twin=healthy.name), dataclasses.replace(job, late={2: 6e-3}))
  return root


def test_the_judge_reads_labelled_runs(runs):
  ready = judge.labelled(runs)
  done = []
  by_way = judge.judge(ready, lambda *now: done.append(now))
  assert set(by_way) == set(judge.WAYS) and done[-1] == (2, 2)
  for fault, healthy in by_way.values():
    assert [finding.mode for finding in fault.found] == [STRAGGLER]
    assert scores.blame(fault, fault.injected[0]) is True
    assert healthy.control and not healthy.found
    assert fault.what_if[0] == pytest.approx(fault.what_if[1], rel=0.02)
    error, = scores.share_errors([fault])["chronic"]
    assert abs(error) < 2 and not healthy.false_alarms and not fault.detected
  assert [one.spec.name for one in judge.labelled(runs, ["healthy"])] == ["in4-healthy-000"]
  with pytest.raises(ValueError, match="no run with a label of that name"):
    judge.labelled(runs, ["nothing"])


# The ablation.


def target(place):
  module, name = place.split(":")
  return functools.reduce(getattr, name.split("."),
                          importlib.import_module(f"jaxpace.diagnose.{module}"))


def test_every_rule_names_something_and_is_out_only_while_it_is_taken_out():
  assert len({rule.name for rule in RULES}) == len({rule.says for rule in RULES}) == len(RULES)
  before = {place: target(place) for rule in RULES for place in rule.neutral}
  for rule in RULES:
    for place, neutral in rule.neutral.items():
      real = before[place]
      assert callable(real) == callable(neutral) or isinstance(real, functools.cached_property)
      if callable(real) and callable(neutral):
        required = [p for p in inspect.signature(real).parameters.values() if p.default is p.empty]
        inspect.signature(neutral).bind(*(None for _ in required))
    with ablation.without(rule):
      assert all(target(place) is neutral for place, neutral in rule.neutral.items())
    assert all(target(place) is before[place] for place in before)


# For real.


@pytest.mark.long
def test_a_tiny_lab_is_made_and_goes_on_where_it_was_stopped(tmp_path, monkeypatch):
  config = fault_lab.get_config()
  config.steps.in2, config.work_ms.in2, config.rest_ms.in2 = 30, 2.0, 1.0
  config.healthy, config.severities = {"in2": 1}, (0.5,)
  healthy, late = [spec for spec in plan.plan(config)
                   if not spec.faults or spec.faults[0].kind == "straggler"][:2]
  monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "")
  shown = []
  failed = make.make([healthy, late], config, tmp_path, lambda *now: shown.append(now),
                     lambda sentence: None)
  assert not failed and [done for _, done, _ in shown] == [1, 2]
  label, fault = json.loads((tmp_path / late.name / make.LABEL).read_text()), late.faults[0]
  assert label["modes"] == [STRAGGLER] and label["ranks"] == list(fault.targets)
  slept, rank = truth.read(tmp_path / late.name, late).extra, fault.targets[0]
  assert (slept[rank, fault.onset:] >= 0.99 * fault.seconds).all() and not slept[1 - rank].any()
  assert judge.judge(judge.labelled(tmp_path), lambda *now: None)["all"][0].trouble == ""
  monkeypatch.setattr(make, "Cluster", lambda *_: pytest.fail("nothing is left to be made"))
  assert make.make([healthy, late], config, tmp_path, lambda *_: None, lambda _: None) == {}


SLEEP = 60e-3


@pytest.mark.long
@patiently(SLEEP=60e-3)
def test_an_observed_process_sleeps_as_asked_and_its_report_names_the_layer(tmp_path, monkeypatch):
  """Two processes on this host, late by more than taking turns on its cores may make a rank."""
  monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "")
  monkeypatch.setattr(make.machine, "why_not", lambda *_: "not here")
  config = observed_lab.get_config()
  fault = next(spec for spec in plan.plan(config) if spec.layout == "2x1"
               and spec.family == "straggler").faults[0]
  config.healthy, config.steps = {"2x1": 1}, {"2x1": 80}
  twin = dataclasses.replace(plan.plan(config)[0], seed=1)
  late = dataclasses.replace(twin, name="2x1-000-straggler", twin=twin.name, faults=(
      dataclasses.replace(fault, targets=(1,), seconds=SLEEP, onset=0, until=80),))
  assert not make.make([twin, late], config, tmp_path, lambda *_: None, lambda said: None)
  slept = truth.read(tmp_path / late.name, late)
  assert (slept.extra[1] >= SLEEP).all() and not slept.extra[0].any()
  assert (slept.work >= 0.9 * 24e-3).all() and np.isfinite(slept.step[1:]).all()
  said = {one.spec.name: observed_processes.judged(one,
                                                   layer_of(one.spec) if one.spec.faults else None)
          for one in judge.labelled(tmp_path)}
  assert said[late.name]["right"] and said[late.name]["layer_named"], said
  assert "iteration 1 of 3" in said[late.name]["at"] and said[twin.name]["right"]
