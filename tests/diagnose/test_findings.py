"""Every failure mode in synthetic jobs: found, blamed on the right rank or host, with the share it
really has."""

import dataclasses
import re

import numpy as np
import pytest

from jaxpace.diagnose.diagnose import diagnose
from jaxpace.diagnose.diagnosis import to_json
from jaxpace.diagnose.words.codes import Verdict, codes
from jaxpace.diagnose.words.evidence import Evidence
from jaxpace.diagnose.words.notes import Note
from jaxpace.hosts.locality.types import Device, Gpu, Locality, Nic
from jaxpace.runs.run import HostCauses
from tests.diagnose.synthetic import evaluating, run_of, true_shares
from tests.diagnose.traces import known, with_bytes
from tests.lib.said import numbers, only
from tests.quick import examples
from tests.synthetic.synthetic_faults import Fault
from tests.synthetic.synthetic_runs import SyntheticJob

BASE = {"ranks": 8, "steps": 300, "processes": 4, "hosts": 4, "noise": 0.02, "transfer_noise": 0.1,
        "host_columns": True}


def job(*faults, **kwargs) -> SyntheticJob:
  return SyntheticJob(**{**BASE, **kwargs}, faults=faults)


STRAGGLER = Fault("compute", 5e-3, (5,), mechanism="work")
LATER = Fault("compute", 6e-3, (2, 3), begin=0.4, mechanism="preempted")
TURNS = Fault("rotating", 8e-3)
WANDERS = Fault("rotating", 10e-3, period=25)
COLLECTS = Fault("pause", 40e-3, (4, 5), probability=0.1, mechanism="gc")
CHECKPOINTS = Fault("pause", 60e-3, aligned=True, probability=0.08, mechanism="checkpoint")
TRUNK = Fault("contention", 8e-3, begin=0.5)
SLOW_HOST = Fault("contention", 6e-3, (6, 7), begin=0.3)

CASES = {
    "straggler": (job(STRAGGLER), {Verdict.PERSISTENT: ((5,), ("host2",), "work")}),
    "later": (job(LATER), {Verdict.PERSISTENT: ((2, 3), ("host1",), "preempted")}),
    "turns": (job(TURNS), {Verdict.AMPLIFICATION: ((), (), None)}),
    "wanders": (job(WANDERS), {Verdict.AMPLIFICATION: ((), (), None)}),
    "collects": (job(COLLECTS), {Verdict.JITTER: ((4, 5), ("host2",), "gc")}),
    "checkpoints": (job(CHECKPOINTS), {Verdict.JITTER: ((), (), "checkpoint")}),
    "trunk": (job(TRUNK), {Verdict.CONTENTION: ((), (), "trunk")}),
    "slow host": (job(SLOW_HOST), {Verdict.CONTENTION: ((6, 7), ("host3",), "slow_host")}),
    "two at once": (job(STRAGGLER, TRUNK),
                    {Verdict.PERSISTENT: ((5,), ("host2",), "work"),
                     Verdict.CONTENTION: ((), (), "trunk")}),
    "another two": (job(LATER, COLLECTS), {Verdict.PERSISTENT: ((2, 3), ("host1",), "preempted"),
                                           Verdict.JITTER: ((4, 5), ("host2",), "gc")}),
    "turns and pauses": (job(TURNS, CHECKPOINTS),
                         {Verdict.AMPLIFICATION: ((), (), None),
                          Verdict.JITTER: ((), (), "checkpoint")}),
}


@pytest.fixture(scope="module")
def diagnosed():
  return {name: (diagnose(run), truth)
          for name, (run, truth) in ((n, run_of(c[0])) for n, c in CASES.items())}


@pytest.mark.parametrize("name", CASES)
def test_each_mode_is_found_and_nothing_else(diagnosed, name):
  found = {f.mode: (tuple(sorted(f.ranks)), f.hosts, f.causes[0] if f.causes else None)
           for f in diagnosed[name][0].findings}
  assert found == CASES[name][1]
  assert all(f.confidence >= 0.99 and f.evidence and f.advice for f in diagnosed[name][0].findings)
  if name == "straggler":
    assert "rank 5 " in diagnosed[name][0].verdict


@pytest.mark.parametrize("name", CASES)
def test_shares_are_those_of_the_truth_within_two_points(diagnosed, name):
  diagnosis, truth = diagnosed[name]
  expected = true_shares(truth, CASES[name][0].transfer)
  for share, value in expected.items():
    assert diagnosis.shares[share] == pytest.approx(value, abs=0.02), share


def means(truth) -> tuple[np.ndarray, float]:
  """[R, K] arrivals and the mean step, s."""
  arrival = truth.busy.sum(axis=0)[:, 1:] * 1e-9
  return arrival, float((arrival.max(axis=0) + truth.transfer.sum(axis=0)[1:] * 1e-9).mean())


@pytest.mark.parametrize(("name", "mode"), [
    ("straggler", Verdict.PERSISTENT), ("later", Verdict.PERSISTENT),
    ("turns", Verdict.AMPLIFICATION), ("wanders", Verdict.AMPLIFICATION),
    ("trunk", Verdict.CONTENTION), ("collects", Verdict.JITTER),
    ("slow host", Verdict.CONTENTION), ("checkpoints", Verdict.JITTER)])
def test_the_share_of_a_finding_is_what_the_fault_costs(diagnosed, name, mode):
  """Against the definition, from the truth alone, and within two points."""
  diagnosis, truth = diagnosed[name]
  arrival, step = means(truth)
  fault = CASES[name][0].faults[0]
  ranks = len(arrival)
  if mode == Verdict.PERSISTENT:  # of all ranks, those in time wait, for as long as it lasts
    cost = fault.seconds * (1 - len(fault.ranks) / ranks) * (fault.end - fault.begin)
  elif mode == Verdict.CONTENTION:
    cost = truth.extra.transfer[1:].mean()
  elif mode == Verdict.AMPLIFICATION:
    cost = (arrival.max(axis=0) - arrival.mean(axis=0)).mean()
  else:
    own = truth.extra.gap[:, 1:]
    cost = own.max(axis=0).mean()  # the pause itself on some, waiting for it on the others
  share = next(f.share for f in diagnosis.findings if f.mode == mode)
  assert share == pytest.approx(cost / step, abs=0.02)


@pytest.mark.parametrize("seed", range(examples(6)))
@pytest.mark.parametrize("shape", [{"ranks": 2, "processes": 2, "hosts": 2}, {},
                                   {"ranks": 64, "processes": 8, "hosts": 8, "steps": 100}])
def test_healthy_jobs_say_healthy(shape, seed):
  run, _ = run_of(job(seed=seed, **{"noise": 0.015, **shape}))
  diagnosis = diagnose(run)
  assert diagnosis.findings == ()
  assert diagnosis.verdict.code == Verdict.HEALTHY and diagnosis.without_rank == {}


def test_a_mechanism_that_does_not_show_is_left_open():
  (finding,) = diagnose(run_of(job(Fault("compute", 5e-3, (5,), mechanism="stopped")))[0]).findings
  assert finding.causes == ()
  assert Evidence.ASLEEP in codes(finding.evidence)
  (finding,) = diagnose(run_of(job(Fault("compute", 5e-3, (5,)), host_columns=False))[0]).findings
  assert (finding.ranks, finding.causes) == ((5,), ())


def test_without_the_hosts_counters_the_slow_link_can_not_be_named():
  run, _ = run_of(job(SLOW_HOST, host_columns=False))
  (finding,) = diagnose(run).findings
  assert (finding.mode, finding.ranks, finding.hosts) == (Verdict.CONTENTION, (), ())
  assert Evidence.NO_COUNTERS in codes(finding.evidence)


def test_on_one_host_slow_transfers_are_the_hosts_not_a_networks():
  run, _ = run_of(job(TRUNK, processes=1, hosts=1))
  diagnosis = diagnose(run)
  (finding,) = diagnosis.findings
  assert (finding.mode, finding.causes) == (Verdict.CONTENTION, ("shared_host",))
  assert Evidence.ONE_HOST in codes(finding.evidence)
  assert Evidence.NO_COUNTERS not in codes(finding.evidence)
  assert "switch" not in finding.advice and "a crowded host" in str(diagnosis.verdict)


def test_contention_of_the_whole_run_shows_against_a_known_floor_only():
  crowded = job(Fault("contention", 6e-3))
  run, _ = run_of(crowded)
  assert [f.mode for f in diagnose(run).findings] == []
  run = with_bytes(run, 4096)
  # 2 (P - 1) α on a ring of 8
  diagnosis = diagnose(run, fabric=known(crowded.transfer / 14))
  (finding,) = diagnosis.findings
  assert finding.mode == Verdict.CONTENTION
  assert finding.share == pytest.approx(6.2e-3 / diagnosis.step_time.mean, abs=0.01)
  assert diagnosis.floor.known
  assert "made up" in diagnosis.floor.source
  assert Note.LOWER_BOUND not in codes(diagnosis.notes)


def places(far: set[int]) -> tuple[Locality, ...]:
  """Four processes of two ranks; the GPU of the ranks in `far` is on the other socket than its
  NIC."""
  found = []
  for process in range(4):
    gpus, nics = [], []
    for slot in range(2):
      node = int(2 * process + slot in far)
      gpus.append(Gpu(pci=f"0000:1{slot}:00.0", numa_node=0, nic=f"mlx5_{slot}"))
      nics.append(Nic(name=f"mlx5_{slot}", kind="infiniband", numa_node=node, up=True,
                      rate_gbps=400.0))
    found.append(Locality(process=process, hostname=f"host{process}", gpus=tuple(gpus),
                          nics=tuple(nics), devices=tuple(Device(gpu=gpu.pci) for gpu in gpus)))
  return tuple(found)


def placed(run, far):
  return dataclasses.replace(run, locality=places(far))


def test_late_ranks_in_a_bad_place_are_a_matter_of_locality():
  run, _ = run_of(job(Fault("compute", 9e-3, (1, 3, 5, 7))))
  (finding,) = diagnose(placed(run, {1, 3, 5, 7})).findings
  assert ((finding.mode, tuple(sorted(finding.ranks)), finding.causes[0])
          == (Verdict.LOCALITY, (1, 3, 5, 7), "far_nic"))
  head = "The 4 ranks whose GPU sits across the socket from its NIC (1, 3, 5, 7) lose "
  assert finding.evidence[0].startswith(head)
  assert float(finding.evidence[0].removeprefix(head).split()[0]) == pytest.approx(9, abs=0.5)
  # The same lateness of others, or of only some of them, is not.
  for far in ({0, 2, 4, 6}, {1, 2}, set(), set(range(8))):
    assert [f.mode for f in diagnose(placed(run, far)).findings] == [Verdict.PERSISTENT]


def test_a_bad_place_at_no_cost_is_no_finding():
  assert diagnose(placed(run_of(job())[0], {1, 3})).findings == ()


def test_one_process_by_itself_that_pauses_often_is_named_though_no_cause_shows():
  pauses = Fault("pause", 25e-3, (4, 5), probability=0.1, aligned=True)
  (finding,) = diagnose(run_of(job(pauses, host_columns=False))[0]).findings
  assert (finding.mode, finding.ranks, finding.causes) == (Verdict.JITTER, (4, 5), ())
  # The same on all processes, intermittently, may be load on the hosts as well.
  everywhere = Fault("pause", 8e-3, probability=0.1)
  assert Verdict.JITTER not in {f.mode
                        for f in diagnose(run_of(job(everywhere, host_columns=False))[0]).findings}


@pytest.mark.parametrize("cause, said, advice", [
    ("between", "is in its own loop", "what the loop does between steps"),
    # What processes meet in, such as a checkpoint's barriers, are programs as an evaluation is.
    ("others", "as for a checkpoint", "checkpoints and gather")])
def test_pauses_are_found_where_the_loop_is_known_to_stand_still_though_not_for_what(
    cause, said, advice):
  run, truth = run_of(job(Fault("pause", 8e-3, probability=0.1), host_columns=False))
  first = [int(np.flatnonzero(run.process_of_rank == process)[0])
           for process in np.unique(run.process_of_rank)]
  between = HostCauses(np.unique(run.process_of_rank).astype(np.int64),
                       {cause: (truth.gap[first] * 1e-9).astype(np.float32)})
  [finding] = diagnose(dataclasses.replace(run, host_causes=between)).findings
  assert (finding.mode, finding.causes) == (Verdict.JITTER, (cause,))
  assert any(said in sentence for sentence in finding.evidence)
  assert re.search(advice, finding.advice, re.IGNORECASE)


def test_what_all_processes_run_between_steps_is_no_pause():
  """An evaluation every tenth step; the same on one process alone makes the others wait."""
  for struck, mode in (((0, 1), None), ((0,), Verdict.JITTER)):
    found = diagnose(evaluating(struck, np.arange(0, 400, 10)))
    assert [f.mode for f in found.findings] == ([mode] if mode else [])
    # and it would take as long were all gaps as long as usual
    assert (found.no_runtime_jitter.saving < 0.01) == (mode is None)
    said = [note for note in found.notes if note.code == Note.OTHER_PROGRAMS]
    assert bool(said) == (mode is None) and found.few_pauses == ()
    if said:
      assert "evaluate" in said[0] and "up to 60.0 ms" in said[0]
      assert numbers(said[0])[0] == pytest.approx(6, abs=0.3)


def test_a_slow_link_in_a_bad_place_is_a_matter_of_locality():
  run, _ = run_of(job(SLOW_HOST))
  (finding,) = diagnose(placed(run, {6})).findings
  assert (finding.mode, finding.hosts) == (Verdict.LOCALITY, ("host3",))


def test_of_two_late_ranks_the_later_one_is_waited_for():
  run, truth = run_of(job(Fault("compute", 6e-3, (2,)), Fault("compute", 3e-3, (4,)), noise=0.005))
  (finding,) = diagnose(run).findings
  assert finding.ranks == (2, 4)
  assert finding.share == pytest.approx((6 - 9 / 8) * 1e-3 / means(truth)[1], abs=2e-3)


def test_a_gap_that_is_long_in_every_step_is_no_jitter():
  run, truth = run_of(job(Fault("gap", 6e-3, (2,), mechanism="data"), Fault("jitter", 3e-3)))
  diagnosis = diagnose(run)
  found = {f.mode: f for f in diagnosis.findings}
  assert Verdict.JITTER not in found
  assert (found[Verdict.PERSISTENT].ranks, found[Verdict.PERSISTENT].causes) == ((2,), ("data",))
  waiting = diagnosis.lateness.intermittent.seconds
  assert waiting > 0.02 * means(truth)[1]
  assert diagnosis.lateness.intermittent.for_gaps < 0.5 * waiting


def test_ranks_in_a_bad_place_get_the_mean_of_what_they_add_first_and_last():
  """Late by 6 ms on three ranks of eight and 8 ms on one: 3.75 alone and 1.25 on top for the three,
  by hand."""
  run, truth = run_of(job(Fault("compute", 6e-3, (1, 3, 5)), Fault("compute", 8e-3, (6,)),
                          noise=0.002))
  findings = {f.mode: f for f in diagnose(placed(run, {1, 3, 5})).findings}
  assert set(findings) == {Verdict.LOCALITY, Verdict.PERSISTENT}
  assert findings[Verdict.PERSISTENT].ranks == (6,)
  whole = diagnose(run).findings[0]
  assert sum(f.share for f in findings.values()) == pytest.approx(whole.share, abs=1e-9)
  # max of some ranks' mean less the mean of all
  both, place, other = 8 - 26 / 8, 6 - 26 / 8, 8 - 26 / 8
  share = 1e-3 * (place + both - other) / 2 / means(truth)[1]
  assert findings[Verdict.LOCALITY].share == pytest.approx(share, abs=1e-3)


def test_a_clock_that_jumps_is_left_out_and_named():
  run, _ = run_of(job())
  (times,) = run.collectives
  hour = 3_600 * 10**9
  for by in (hour, -hour):
    moved = [values.copy() for values in (times.enter_ns, times.exit_ns)]
    for values in moved:
      values[3, 100:] += by
    jumped = dataclasses.replace(run,
                                 collectives=(dataclasses.replace(
                                     times, enter_ns=moved[0], exit_ns=moved[1]),))
    diagnosis = diagnose(jumped)
    assert diagnosis.findings == ()
    assert diagnosis.step_time.mean == pytest.approx(diagnose(run).step_time.mean, rel=1e-3)
    if by > 0:
      assert diagnosis.totals.jumped.tolist() == [0, 0, 0, 1, 0, 0, 0, 0]
      assert numbers(only(diagnosis.notes, Note.CLOCK_JUMPED))[0] == 3


def test_many_hosts_are_counted_and_the_document_names_them_all():
  late = dict.fromkeys(range(0, 64, 2), 0.008)
  diagnosis = diagnose(
      run_of(SyntheticJob(ranks=64, steps=200, processes=64, hosts=64, noise=0.01, late=late))[0])
  (finding,) = diagnosis.findings
  assert set(finding.ranks) == set(late) and len(finding.hosts) == 32
  sentences = [diagnosis.verdict, finding.advice, *finding.evidence]
  assert all(len(re.findall(r"host\d+", sentence)) <= 4 for sentence in sentences)
  first = [f"host{rank}" for rank in finding.ranks[:3]]
  for sentence in (diagnosis.verdict, finding.advice):
    assert ", ".join(first) in sentence and 29 in numbers(sentence)
  document = to_json(diagnosis)["findings"][0]
  assert sorted(document["hosts"]) == sorted(f"host{rank}" for rank in late)
