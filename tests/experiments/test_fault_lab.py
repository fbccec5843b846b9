"""The fault lab's judge on synthetic runs, and one tiny lab for real."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs import fault_lab
from experiments.labs.faults import judge, make, plan, scores, truth
from experiments.labs.faults.schedule import schedule
from experiments.labs.faults.scores import Found, Injected, Judged
from experiments.labs.faults.spec import AMPLIFICATION, LOCALITY, MODES, RUNTIME, STRAGGLER, Spec
from tests.experiments.faults_made_up import fault_of, one, spec_of
from tests.quick import examples
from tests.synthetic import synthetic_runs
from tests.synthetic.synthetic_runs import SyntheticJob


def write_run(root: pathlib.Path, spec: Spec, job: SyntheticJob) -> None:
  """A run of the lab as it would have been made, had the synthetic job run in it."""
  found = synthetic_runs.write(root / spec.name / "run", job)
  todo = schedule(spec)
  (root / spec.name / "injected").mkdir()
  np.savez(root / spec.name / "injected" / "0.npz", ranks=np.arange(4), work=todo.work,
           spin=todo.spin, extra=todo.extra, work_asked=todo.work, spin_asked=todo.spin,
           extra_asked=todo.extra, began_ns=0, ends_ns=found.end[0])
  label = {**make.label(root, spec), "load": [1.0, 2.0]}
  (root / spec.name / make.LABEL).write_text(json.dumps(label))


def test_the_judge_reads_labelled_runs(tmp_path: pathlib.Path) -> None:
  job = SyntheticJob(ranks=4, steps=200, processes=1, hosts=1, forward=10e-3, backward=0.0,
                     update=0.0,
                  noise=0.02)
  twin = dataclasses.replace(spec_of(), name="in4-healthy-000", twin=None)
  late = dataclasses.replace(spec_of(fault_of("straggler", (2,), 6e-3)), name="in4-001-straggler",
                             twin=twin.name)
  write_run(tmp_path, twin, job)
  write_run(tmp_path, late, dataclasses.replace(job, late={2: 6e-3}))
  ready = judge.labelled(tmp_path)
  assert [one.spec for one in ready] == [late, twin]
  done: list[tuple[int, int]] = []
  judged = judge.judge(ready, lambda *now: done.append(now))
  assert set(judged) == set(judge.WAYS)
  for fault, healthy in judged.values():
    assert ([finding.mode for finding in fault.found] == [STRAGGLER]
            and scores.blame(fault, fault.injected[0]) is True)
    assert healthy.control and not healthy.found
    assert (fault.what_if is not None
            and fault.what_if[0] == pytest.approx(fault.what_if[1], rel=0.02))
    error, = scores.share_errors([fault])["chronic"]
    assert abs(error) < 2
    assert not healthy.false_alarms and not fault.detected
  assert done[-1] == (2, 2)
  assert [one.spec.name for one in judge.labelled(tmp_path, ["healthy"])] == [twin.name]
  with pytest.raises(ValueError, match="no run with a label of that name"):
    judge.labelled(tmp_path, ["nothing"])


def tiny(steps: int = 30) -> Any:
  config = fault_lab.get_config()
  config.steps.in2, config.work_ms.in2, config.rest_ms.in2 = steps, 2.0, 1.0
  config.healthy = {"in2": 1}
  config.severities = (0.5,)
  return config


@pytest.mark.long
def test_a_tiny_lab_is_made_and_goes_on_where_it_was_stopped(tmp_path: pathlib.Path,
                                                             monkeypatch: pytest.MonkeyPatch
                                                             ) -> None:
  specs = [spec for spec in plan.plan(tiny()) if not spec.faults
           or spec.faults[0].kind == "straggler"]
  shown: list[tuple[str, int, int]] = []
  monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "")
  failed = make.make(specs, tiny(), tmp_path, lambda *now: shown.append(now), lambda sentence: None)
  assert not failed and [done for _, done, _ in shown] == list(range(1, len(specs) + 1))
  label = json.loads((tmp_path / specs[1].name / make.LABEL).read_text())
  assert label["modes"] == [STRAGGLER] and label["ranks"] == list(specs[1].faults[0].targets)
  slept = truth.read(tmp_path / specs[1].name, specs[1])
  onset, late = specs[1].faults[0].onset, specs[1].faults[0].targets[0]
  assert ((slept.extra[late, onset:] >= 0.99 * specs[1].faults[0].seconds).all()
          and not slept.extra[1 - late].any())
  assert judge.judge(judge.labelled(tmp_path), lambda *now: None)["all"][0].trouble == ""

  def never(*arguments: Any) -> None:
    raise AssertionError("nothing is left to be made")

  monkeypatch.setattr(make, "Cluster", never)
  assert make.make(specs, tiny(), tmp_path, lambda *now: None, lambda sentence: None) == {}


@pytest.fixture(scope="module")
def specs() -> list[Spec]:
  return plan.plan(fault_lab.get_config())


def test_the_default_plan_is_large_enough_and_says_twice_the_same(specs: list[Spec]) -> None:
  assert sum(bool(spec.faults) for spec in specs) >= 200
  assert sum("healthy" in spec.name for spec in specs) >= 150
  assert len({spec.name for spec in specs}) == len(specs)
  assert {mode for spec in specs for mode in spec.modes} == set(MODES)
  assert {fault.onset > 0 for spec in specs for fault in spec.faults} == {True, False}
  assert sum(len(spec.faults) == 2 for spec in specs) >= 20
  assert plan.plan(fault_lab.get_config()) == specs


def test_schedules_hold_what_the_faults_say() -> None:
  late = schedule(spec_of(fault_of("straggler", (1, 2), 3e-3, onset=80))).extra
  np.testing.assert_allclose(late[1:3, 80:], 3e-3, rtol=1e-6)
  assert not late[:, :80].any() and not late[[0, 3]].any()
  turns = schedule(spec_of(fault_of("rotating", (), 4e-3))).extra
  assert ((turns > 0).sum(axis=0) == 1).all() and len(set(turns.argmax(axis=0))) == 4
  both = schedule(spec_of(fault_of("rotating", (), 4e-3), fault_of("rotating", (), 4e-3))).extra
  assert (np.count_nonzero(both, axis=0) == 2).sum() > 100  # two faults are drawn apart
  unequal = schedule(spec_of(fault_of("imbalance", (), 2e-3))).extra.astype(np.float64)
  assert (unequal.max(axis=0) - unequal.mean(axis=0)).mean() == pytest.approx(2e-3, rel=1e-5)
  saved = schedule(spec_of(fault_of("checkpointing", (0,), 0.1, chance=25.0), name="4x1")).pause[
      "checkpoint"]
  assert np.flatnonzero(saved[0]).tolist() == list(range(24, 200, 25)) and not saved[1:].any()
  paused = schedule(spec_of(fault_of("collecting", (2, 3), 0.02, chance=0.1,
                                     onset=50), name="4x1")).pause["gc"]
  assert not paused[:2].any() and not paused[:, :50].any() and 15 < (paused > 0).sum() < 50


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


def run_of(name: str, injected: tuple[Injected, ...], found: tuple[Found, ...],
           layout_: str = "4x1", **more: Any
           ) -> Judged:
  return Judged(name, layout_, 4, not injected, injected, found, more.pop("shares", {}), **more)


def told(mode: str, ranks: tuple[int, ...] = (), hosts: tuple[str, ...] = (),
         share: float = 0.1) -> Found:
  return Found(mode, share, 0.99, ranks, hosts)


def test_f1_and_confusion_count_each_mode() -> None:
  runs = [run_of("a", (one(STRAGGLER, (1,)),), (told(STRAGGLER, (1,)),)),
          run_of("b", (one(STRAGGLER, (1,)),), (told(RUNTIME),)),
          run_of("c", (one(STRAGGLER, (1,)), one(AMPLIFICATION)),
                 (told(AMPLIFICATION), told(STRAGGLER, (1,)))),
          run_of("d", (), ()), run_of("e", (), (told(AMPLIFICATION),)),
          run_of("cheap", (one(RUNTIME, cost=0.01),), (told(STRAGGLER, (2,)),)),
          dataclasses.replace(run_of("reference", (), (told(STRAGGLER, (2,)),)), control=False)]
  modes = scores.by_mode(runs)
  assert {m: (e["right"], e["missed"], e["false"]) for m, e in modes.items()} == {
      STRAGGLER: (2, 1, 0), AMPLIFICATION: (1, 0, 1), RUNTIME: (0, 0, 1), LOCALITY: (0, 0, 0),
      "fabric_contention": (0, 0, 0)}
  assert (modes[STRAGGLER]["f1"] == pytest.approx(0.8)
          and modes[AMPLIFICATION]["f1"] == pytest.approx(2 / 3))
  assert scores.macro_f1(modes) == pytest.approx((0.8 + 2 / 3 + 0) / 3)
  table = scores.confusion(runs)
  assert table[STRAGGLER][STRAGGLER] == 2 and table[STRAGGLER][RUNTIME] == 1
  assert table["healthy"] == {**dict.fromkeys(MODES, 0), AMPLIFICATION: 1, "healthy": 1}
  assert sum(sum(row.values()) for row in table.values()) == 6


@pytest.mark.parametrize(("ranks", "hosts", "right"), [
    ((2, 3), ("h1",), True), ((), ("h1",), True), ((2,), ("h1",), True), ((2, 3), (), True),
    ((2,), (), False), ((1, 2, 3), ("h1",), False), ((), ("h0",), False), ((), (), False)])
def test_blame_is_exact_and_names_nobody_innocent(ranks: tuple[int, ...], hosts: tuple[str, ...],
                                                  right: bool) -> None:
  run = run_of("a", (one(STRAGGLER, (2, 3), ("h1",)),), (told(STRAGGLER, ranks, hosts),), "2x2")
  assert scores.blame(run, run.injected[0]) is right
