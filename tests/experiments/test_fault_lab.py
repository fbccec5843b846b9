"""The fault lab's judge on made-up runs, and one tiny lab for real."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import numpy as np
import pytest

from configs import fault_lab
from experiments.labs.faults import judge, make, plan, scores, truth
from experiments.labs.faults.schedule import schedule
from experiments.labs.faults.spec import STRAGGLER, Spec
from tests.experiments.faults_made_up import fault_of, spec_of
from tests.synthetic import made_up_runs
from tests.synthetic.made_up_runs import MadeUpJob


def write_run(root: pathlib.Path, spec: Spec, job: MadeUpJob) -> None:
  """A run of the lab as it would have been made, had the synthetic job run in it."""
  found = made_up_runs.write(root / spec.name / "run", job)
  todo = schedule(spec)
  (root / spec.name / "injected").mkdir()
  np.savez(root / spec.name / "injected" / "0.npz", ranks=np.arange(4), work=todo.work,
           spin=todo.spin, extra=todo.extra, work_asked=todo.work, spin_asked=todo.spin,
           extra_asked=todo.extra, began_ns=0, ends_ns=found.end[0])
  label = {**make.label(root, spec), "load": [1.0, 2.0]}
  (root / spec.name / make.LABEL).write_text(json.dumps(label))


def test_the_judge_reads_labelled_runs(tmp_path: pathlib.Path) -> None:
  job = MadeUpJob(ranks=4, steps=200, processes=1, hosts=1, forward=10e-3, backward=0.0, update=0.0,
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
