"""What the hosts' columns are taken to show: always of one process against the others."""

import dataclasses

import numpy as np
import pytest

from jaxpace.diagnose.mechanism import of_lateness, of_pauses
from jaxpace.diagnose.words.codes import codes
from jaxpace.diagnose.words.evidence import Evidence
from jaxpace.runs.run import HostCauses
from tests.diagnose.synthetic import case_of, run_of
from tests.lib.said import numbers
from tests.synthetic.synthetic_runs import SyntheticJob

STEPS = 100


def shown(causes=None, samples=None, processes=4):
  """A run with these columns of each process, per step. Samples' columns: what a counter rises by,
  or a gauge is."""
  run, _ = run_of(SyntheticJob(ranks=processes, steps=STEPS, processes=processes, noise=0.01,
                            host_columns=True, sample_steps=1))
  columns = {name: np.broadcast_to(np.array(values, np.float32).reshape(processes, -1),
                                   (processes, STEPS))
             for name, values in (causes or {}).items()}
  of_host = dict(run.host_samples.columns)
  for name, values in (samples or {}).items():
    each = np.array(values, float)[run.host_samples.process]
    of_host[name] = each * np.tile(np.arange(STEPS), processes) if name.endswith("_ns") else each
  return case_of(dataclasses.replace(run, host_causes=HostCauses(np.arange(processes), columns),
                                     host_samples=run.host_samples._replace(columns=of_host)))


def kinds(case, lateness, process=2):
  return [found.code for found in of_lateness(case, process, 0, case.selected.blocks, lateness)]


@pytest.mark.parametrize("processes", [2, 4])
def test_a_column_is_compared_with_the_other_processes_alone(processes):
  case = shown({"data": [1e-3] * (processes - 1) + [4e-3]}, processes=processes)
  (found,) = of_lateness(case, processes - 1, 0, case.selected.blocks, 3e-3)
  assert found.code == Evidence.DATA and numbers(found)[-2:] == [4, 3]


def test_what_all_processes_have_explains_no_lateness():
  throttled = shown(samples={"throttled_ns": [1e6, 1e6, 5e6, 1e6]})
  (found,) = of_lateness(throttled, 2, 0, throttled.selected.blocks, 5e-3)
  assert found.code == Evidence.THROTTLED and numbers(found)[-1] == 4
  assert kinds(shown(samples={"throttled_ns": [5e6] * 4}), 5e-3) == []
  assert kinds(shown({"data": [5e-3] * 4}), 5e-3) == []


def test_switches_are_preemption_unless_the_process_has_as_much_more_work():
  switched = {"nivcsw": [0.1, 0.1, 5.1, 0.1]}
  assert kinds(shown(switched | {"cpu": [0.01] * 4}), 5e-3) == ["preempted"]
  assert kinds(shown(switched | {"cpu": [0.01, 0.01, 0.015, 0.01]}), 5e-3) == ["work"]
  assert kinds(shown(switched), 5e-3) == ["preempted"]


@pytest.mark.parametrize("clock, slow", [(1500, True), (1650, False)])
def test_a_gpu_clock_that_is_a_twentieth_lower_is_named(clock, slow):
  assert (kinds(shown(samples={"gpu_clock_mhz": [1700, 1700, clock, 1700]}), 5e-3) == ["gpu_clock"]
          * slow)


def test_pauses_are_divided_among_what_was_measured_in_them():
  """Every tenth step of process 0: 60 ms of garbage collection and 30 ms of data, of 100 ms."""
  struck = np.arange(STEPS) % 10 == 5
  case = shown({"gc": [0.06 * struck, *np.zeros((3, STEPS))],
                "data": [0.03 * struck, *np.zeros((3, STEPS))]})
  share = struck[case.selected.mask].mean()
  found = of_pauses(case, [0], 0.1 * share)
  assert codes(found) == ["gc", "data"]
  assert numbers(found[0]) == [pytest.approx(60 * share, abs=0.006), 60, 10, 60]
  assert numbers(found[1])[1] == 30


def test_switches_explain_no_more_than_the_processor_can_have_been_gone():
  """A process that sleeps for 40 ms on a machine of few cores is switched now and then as well."""
  assert kinds(shown({"nivcsw": [0.1, 0.1, 0.6, 0.1], "cpu": [0.01] * 4}), 40e-3) == ["asleep"]
  case = shown({"nivcsw": [0.1, 0.1, 9.0, 0.1], "cpu": [0.01] * 4})
  assert ([found.code for found in of_lateness(case, 2, 0, case.selected.blocks, 40e-3)]
          == ["preempted"])
  # All of it in the gap between steps, where a process computes next to nothing.
  assert ([found.code for found in of_lateness(case, 2, 0, case.selected.blocks, 40e-3, 39e-3)]
          == ["asleep"])


@pytest.mark.parametrize("lateness", [0.0, -1e-3, 1e-5])
def test_a_lateness_of_nothing_has_no_cause(lateness):
  """What no process has more of than the others holds any part of nothing."""
  case = shown({"data": [0.0] * 4, "gc": [0.0] * 4, "cpu": [0.01] * 4},
               samples={"throttled_ns": [0.0] * 4, "steal_ns": [0.0] * 4})
  assert kinds(case, lateness) == []
  without = dataclasses.replace(case, run=dataclasses.replace(
      case.run, host_causes=HostCauses(np.arange(4), {}), host_samples=None))
  assert kinds(without, lateness) == []
