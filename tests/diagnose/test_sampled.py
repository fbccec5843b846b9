"""What a run that was sampled by the profiler can't tell is no finding, and the report says so."""

import dataclasses

import numpy as np
import pytest

from jaxpace.diagnose.diagnose import diagnose
from jaxpace.diagnose.findings import never_grouped, turns
from jaxpace.diagnose.selected_steps import count_steps
from jaxpace.diagnose.words.codes import Verdict, codes
from jaxpace.diagnose.words.notes import Note
from jaxpace.hosts.locality.types import Cgroup, Cpu, Device, Locality
from jaxpace.runs.groups import RankGroups
from tests.diagnose.traces import barrier, make_run
from tests.lib.said import numbers, only

MS = 1_000_000


def sampled(enter, leave, cores="0-1", platform="cpu", clock="profiler", processes=None,
            limit=None):
  ranks = enter.shape[1]
  processes = np.zeros(ranks, np.int32) if processes is None else np.asarray(processes)
  run = make_run(enter, leave, processes=processes)
  places = tuple(Locality(process=int(p), hostname=f"host{p}", cpu=Cpu(allowed=cores),
                          cgroup=Cgroup(cpu_limit=limit),
                          devices=tuple(Device(platform=platform)
                                        for _ in np.flatnonzero(processes == p)))
                 for p in np.unique(processes))
  return dataclasses.replace(run, info={"plan": {"clock": clock}}, locality=places)


def late_rank(late_ms, ranks=8):
  busy = 5 * MS + np.random.default_rng(0).integers(0, MS // 10, (ranks, 120))
  # as devices are launched one by one
  busy += np.linspace(0, 0.5 * MS, ranks).astype(np.int64)[:, None]
  busy[3] += int(late_ms * MS)
  return barrier(busy, MS)


def test_a_rank_as_late_as_its_turn_is_not_blamed():
  made = late_rank(1.0)
  # that somebody is late for good is right; why, isn't
  assert diagnose(sampled(*made, clock="native")).findings
  found = diagnose(sampled(*made))
  assert not found.findings and found.verdict.code == Verdict.DOUBT
  assert numbers(found.verdict)[:2] == [8, 2], "devices and cores, and before them no rank"
  assert "as ranks 3, 6, 7 do not" in only(found.notes, Note.TURNS)


def test_a_rank_that_stands_out_from_its_turn_is():
  for late_ms in (20.0, 60.0):
    assert diagnose(sampled(*late_rank(late_ms))).findings[0].ranks == (3,)


@pytest.mark.parametrize("where", [{"cores": "0-8"}, {"platform": "gpu"}, {"clock": "native"}])
def test_devices_with_a_core_each_are_judged_as_ever(where):
  found = diagnose(sampled(*late_rank(1.0), **where))
  assert 3 in found.findings[0].ranks and not found.doubt
  assert Note.TURNS not in codes(found.notes)


def test_pauses_of_devices_that_share_cores_are_no_fault():
  rng = np.random.default_rng(1)
  made = barrier(5 * MS + rng.exponential(2 * MS, (8, 200)).astype(np.int64), MS)
  assert diagnose(sampled(*made, cores="0-15")).findings
  found = diagnose(sampled(*made))
  assert not found.findings and found.verdict.code == Verdict.DOUBT


@pytest.mark.parametrize("seed", [2, 3, 4])
@pytest.mark.parametrize("cores", ["0-7", "0-1"])
def test_the_device_of_an_observed_run_whose_turn_comes_last_is_not_named(cores, seed):
  random = np.random.default_rng(seed)
  busy = 20 + random.exponential(4, (4, 24))
  busy[3] += random.exponential(6, 24)
  made = sampled(*barrier((MS * busy).astype(np.int64), MS), cores=cores, clock="marks")
  made.info["plan"]["collectives"] = [{"slot": 0, "name": "psum", "of": 0}]
  found = diagnose(made)
  assert [finding.ranks for finding in found.findings] == ([(3,)] if cores == "0-7" else [])
  assert (found.verdict.code == Verdict.DOUBT) == (cores == "0-1")


@pytest.mark.parametrize(("processes", "named"), [
    ([0, 0, 1, 1], [(0, 1)]),  # turns are taken within a host
    ([0, 1, 0, 1], []),
    ([0, 0, 0, 0], []),
    ([0, 0, 1, 2], [])])  # fewer devices, fewer turns
def test_a_whole_host_that_is_late_is_named_though_its_devices_take_turns(processes, named):
  busy = 5 + np.random.default_rng(5).exponential(0.2, (4, 120))
  busy[:2] += 4
  made = sampled(*barrier((MS * busy).astype(np.int64), MS), clock="marks", processes=processes)
  made.info["plan"]["collectives"] = [{"slot": 0, "name": "psum", "of": 0}]
  assert [finding.ranks for finding in diagnose(made).findings] == named


def test_turns_are_those_of_the_fullest_host():
  made = late_rank(1.0)
  assert turns(sampled(*made)) == (7, 8, 2)
  assert turns(sampled(*made, cores="0-4")) == (1, 8, 5)
  assert turns(sampled(*made, cores="0-15", limit=3.0)) == (3, 8, 3)
  assert turns(sampled(*made, processes=[0, 0, 0, 0, 0, 0, 1, 1], cores="0-3")) == (1, 6, 4)
  assert turns(sampled(*made, cores="")) == (0, 0, 0)  # not known


def test_ranks_that_never_meet_are_not_compared_in_earnest():
  slow, quick = np.full((2, 100), 15 * MS), np.full((2, 100), 10 * MS)
  one, other = barrier(slow, 2 * MS), barrier(quick, 2 * MS)
  enter, leave = (np.concatenate([a, b], axis=1) for a, b in zip(one, other, strict=True))
  run = sampled(enter, leave, cores="0-15")
  assert never_grouped(run) == ["psum0"]
  found = diagnose(run)
  assert not found.findings and found.verdict.code == Verdict.DOUBT
  assert "psum0" in only(found.notes, Note.NEVER_MEET)
  # Where the groups are recorded, ranks are compared within them.
  known = RankGroups(np.array([0, 0, 1, 1]))
  run = dataclasses.replace(run,
                            collectives=tuple(dataclasses.replace(c, rank_groups=known)
                                              for c in run.collectives))
  assert never_grouped(run) == []
  found = diagnose(run)
  assert (not found.findings and not found.doubt
          and found.verdict.code not in (Verdict.DOUBT, Verdict.UNTOLD))


def test_ranks_of_two_processes_are_not_compared_by_their_clocks():
  enter, leave = late_rank(1.0, ranks=4)
  shift = np.array([0, 0, 10**12, 10**12])[None, :, None]
  assert never_grouped(sampled(enter + shift, leave + shift, processes=[0, 0, 1, 1])) == []


def test_a_session_is_no_attempt_that_warms_up():
  busy = np.full((2, 400), 20 * MS)
  busy[:, 1] *= 100
  busy[:, [100, 101, 200]] *= 10
  enter, leave = barrier(busy, 2 * MS)
  kept = np.flatnonzero(np.arange(400) % 10 < 6)
  attempt = np.full((2, 400), -1)
  attempt[:, kept] = 0
  run = make_run(enter, leave, attempt=attempt)
  assert count_steps(run).warmup.tolist() == [1]
