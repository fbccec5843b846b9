"""The stream of alarms in runs of the lab: judged by the lab's own rules, every figure on the
page."""

import dataclasses
import json
import pathlib

import pytest

from experiments.labs import stream_lab
from experiments.lib import measured
from tests.experiments.faults_made_up import fault_of, spec_of
from tests.experiments.test_fault_lab import write_run
from tests.synthetic import made_up_faults
from tests.synthetic.made_up_runs import MadeUpJob


def test_runs_of_a_seed_are_judged_together(tmp_path: pathlib.Path) -> None:
  job = MadeUpJob(ranks=4, steps=200, processes=1, hosts=1, forward=10e-3, backward=0.0, update=0.0,
                  noise=0.02)
  twin = dataclasses.replace(spec_of(), name="in4-healthy-000", twin=None)
  fault = dataclasses.replace(fault_of("straggler", (2,), 6e-3), onset=100)
  late = dataclasses.replace(spec_of(fault), name="in4-001-straggler", twin=twin.name)
  write_run(tmp_path, twin, job)
  struck = made_up_faults.Fault("compute", 6e-3, (2,), begin=0.5)
  write_run(tmp_path, late, dataclasses.replace(job, faults=(struck,)))
  (tmp_path / "plan.json").write_text(json.dumps({"config": {"seed": 7}}))
  seeds = stream_lab.judged([tmp_path])
  one = seeds["7"]
  assert ((one["runs"], one["controls"], one["steps_of_controls"], one["false_alarms_in_controls"])
          == (2, 1, 200, 0))
  (steps,) = one["by_kind"]["straggler"]
  assert one["faults"] == one["within_30"] == 1 and 10 < steps <= 30
  assert stream_lab.judged([tmp_path], bare=True)["7"]["by_kind"]["straggler"] == [steps]
  page = "\n".join(stream_lab.page({**measured.circumstances("experiments.labs.stream_lab"),
                                    "note": "a word", "seeds": seeds}))
  assert ("a word" in page and "| 7 | 2 | 1 | 200 | 0 | 0 | 0 | 0 % |" in page
          and f"| 7 | straggler | {steps} |" in page)
  with pytest.raises(OSError):
    stream_lab.judged([tmp_path / "nothing"])
