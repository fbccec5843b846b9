"""Findings with what a link probe measured, and with what other programs on the hosts do."""

import dataclasses

import numpy as np
import pytest

from jaxpace.diagnose import tcp
from jaxpace.diagnose.diagnose import diagnose
from jaxpace.diagnose.diagnosis import to_json
from jaxpace.diagnose.links import Culprit, ProbedLinks
from jaxpace.diagnose.mechanism import of_lateness, of_pauses
from jaxpace.diagnose.words.codes import Verdict, codes
from jaxpace.diagnose.words.evidence import Evidence
from jaxpace.diagnose.worth import parse
from jaxpace.hosts.locality.types import Device, Gpu, Locality, Nic
from jaxpace.runs.run import HostCauses
from tests.diagnose.synthetic import case_of, run_of
from tests.diagnose.traces import barrier, make_run
from tests.lib.said import numbers
from tests.synthetic.synthetic_faults import Fault
from tests.synthetic.synthetic_runs import SyntheticJob

BASE = {"ranks": 8, "steps": 300, "processes": 4, "hosts": 4, "noise": 0.02, "transfer_noise": 0.1,
        "host_columns": True}
HOSTS = ("host0", "host1", "host2", "host3")


def probe(*culprits, cannot_tell="") -> ProbedLinks:
  times = np.full((4, 4), 1e-3)
  return ProbedLinks(HOSTS, 1 << 20, times, times, culprits, cannot_tell, 1.0, 12345)


@pytest.fixture(scope="module")
def crowded():
  run, _ = run_of(SyntheticJob(**BASE, faults=(Fault("contention", 8e-3, begin=0.5),)))
  return dataclasses.replace(run, host_samples=None)


@pytest.mark.parametrize(("culprits", "hosts", "ranks"), [
    ((Culprit("host", ("host2",), (2,), 2.5, 0.99),), ("host2",), (4, 5)),
    ((Culprit("link", ("host0", "host3"), (0, 3), 2.5, 0.99),), ("host0", "host3"), (0, 1, 6, 7)),
    ((Culprit("host", ("elsewhere",), (2,), 2.5, 0.99),), (), ()),
    ((), (), ()),
])
def test_a_link_probe_names_the_slow_host_or_link(crowded, culprits, hosts, ranks):
  diagnosis = diagnose(crowded, links=probe(*culprits))
  (found,) = diagnosis.findings
  assert (found.mode, found.hosts, found.ranks) == (Verdict.CONTENTION, hosts, ranks)
  assert (Evidence.PROBE if culprits else Evidence.PROBE_NOTHING) in codes(found.evidence)
  document = to_json(diagnosis)["link_probe"]
  assert document["when_unix_ns"] == 12345 and len(document["culprits"]) == len(culprits)
  assert not diagnose(crowded).findings[0].hosts


def test_a_probe_alone_makes_no_finding():
  run, _ = run_of(SyntheticJob(**BASE))
  assert diagnose(run, links=probe(Culprit("host", ("host2",), (2,), 2.5, 0.99))).findings == ()


def test_a_host_whose_processors_are_taken_is_late_and_slow_to_send_at_once():
  late = Fault("compute", 8e-3, (5,), mechanism="preempted")
  run, _ = run_of(SyntheticJob(**BASE, faults=(late, Fault("contention", 8e-3, begin=0.5))))
  report = diagnose(run, asked=[parse("rank:5"), parse("rank:5,contention"), parse("rank:4")])
  (found,) = report.findings
  assert (found.mode, found.ranks) == (Verdict.PERSISTENT, (5,))
  assert Evidence.SLOW_AS_WELL in codes(found.evidence)
  # One fault: mending the host mends its transfers, too. Another rank's mending doesn't.
  healthy = diagnose(run_of(SyntheticJob(**BASE))[0]).step_time.mean
  alone, both, other = [after.step_time for _, after in report.asked]
  assert alone == pytest.approx(healthy, rel=0.01) == both
  assert other > healthy + 10e-3
  assert report.without_rank[5].step_time == alone


def test_pauses_that_some_processes_hold_by_chance_name_nobody():
  named = []
  for probability, ranks in ((0.1, (4, 5)), (0.008, (0, 1, 2, 3, 4, 5, 6, 7))):
    for seed in range(4):
      run, _ = run_of(SyntheticJob(**BASE, seed=seed,
                                faults=(Fault("pause", 40e-3 / probability / 10, ranks,
                                              mechanism="gc",
                                              probability=probability),)))
      named += [(len(ranks), f.ranks) for f in diagnose(run).findings if f.mode == Verdict.JITTER]
  assert {found for number, found in named if number == 2} == {(4, 5)}
  assert {found for number, found in named if number == 8} == {()}


@pytest.mark.parametrize("kind", ["uneven", "load"])
def test_uneven_work_is_told_by_the_median_step_that_other_load_leaves_alone(kind):
  random, shape = np.random.default_rng(2), (8, 300)
  _, truth = run_of(SyntheticJob(**BASE))
  more = (random.gamma(2.0, 0.5e6, shape) if kind == "uneven"
          else (random.random(shape) < 0.01) * 9e6)
  ragged = (random.random(shape) < 0.01) * 12e6
  enter, leave = barrier(truth.busy[0] + (more + ragged).astype(np.int64), truth.transfer[0])
  diagnosis = diagnose(make_run(enter, leave, gap=truth.gap + ragged))
  turns, step = float(diagnosis.lateness.intermittent.seconds), diagnosis.step_time.mean
  # neither work nor gaps alone
  assert turns >= 0.05 * step and turns - diagnosis.lateness.intermittent.for_gaps < 0.05 * step
  found = {f.mode for f in diagnosis.findings}
  assert found == ({Verdict.AMPLIFICATION} if kind == "uneven" else set())


@pytest.mark.parametrize("far", [False, True])
def test_of_two_hosts_a_slow_link_of_the_one_that_waits_is_the_late_ones_doing(monkeypatch, far):
  """What connections say of two hosts, one of which stands still now and then: the other seems to
  have a slow link, though its cards be far from its GPUs."""
  run, _ = run_of(SyntheticJob(**{**BASE, "ranks": 4, "processes": 2, "hosts": 2}, transfer=6e-3,
                            faults=(Fault("compute", 15e-3, (2, 3)),)))
  gpu = Gpu(pci="0000:10:00.0", numa_node=0, nic="mlx5_0")
  run = dataclasses.replace(run, locality=tuple(
      Locality(process=process, hostname=f"host{process}", gpus=(gpu,),
               devices=(Device(gpu=gpu.pci),) * 2,
               nics=(Nic(name="mlx5_0", kind="infiniband", numa_node=int(far and process == 0),
                         up=True, rate_gbps=400.0),))
      for process in range(2)))
  said = {}
  for slow in (0, 1):
    monkeypatch.setattr(tcp, "whose", lambda *_, slow=slow: tcp.BusyLinks(
        {slow: 17e-3, 1 - slow: 7e-3}, (slow,), 0.6, False))
    said[slow] = diagnose(run).findings
  assert [(f.mode, set(f.ranks)) for f in said[0]] == [(Verdict.PERSISTENT, {2, 3})]
  assert Evidence.SLOW_AS_WELL in codes(said[0][0].evidence)
  assert ({f.mode for f in said[1]} == {Verdict.PERSISTENT, Verdict.CONTENTION}
          ), "the late host's own link is another matter"


# What the hosts' columns are taken to show: always of one process against the others.

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


def test_where_all_are_preempted_the_late_one_is_not_said_to_sleep():
  """Whether it lost more by that than the others is not known."""
  assert kinds(shown({"nivcsw": [90.0, 110.0, 60.0, 90.0], "cpu": [0.01] * 4}), 40e-3) == []


@pytest.mark.parametrize("lateness", [0.0, -1e-3, 1e-5])
def test_a_lateness_of_nothing_has_no_cause(lateness):
  """What no process has more of than the others holds any part of nothing."""
  case = shown({"data": [0.0] * 4, "gc": [0.0] * 4, "cpu": [0.01] * 4},
               samples={"throttled_ns": [0.0] * 4, "steal_ns": [0.0] * 4})
  assert kinds(case, lateness) == []
  without = dataclasses.replace(case, run=dataclasses.replace(
      case.run, host_causes=HostCauses(np.arange(4), {}), host_samples=None))
  assert kinds(without, lateness) == []
