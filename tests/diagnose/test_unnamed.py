"""What the verdict sends its reader to the notes for is in the notes."""

import dataclasses

import numpy as np
import pytest

from jaxpace.diagnose.diagnose import diagnose
from jaxpace.diagnose.words.codes import Verdict, codes
from jaxpace.diagnose.words.notes import Note
from jaxpace.runs.run import PAUSES, HostCauses, HostSamples
from tests.diagnose.traces import barrier, make_run
from tests.lib.said import numbers, only

MS, RANKS, STEPS = 1_000_000, 4, 200


def noisy(compute: float = 10.0, noise: float = 0.02, steps: int = STEPS):
  """[R, K] ms of compute."""
  return compute * (1 + noise * np.random.default_rng(0).standard_normal((RANKS, steps)))


def run_of(compute, gap, gaps: bool = True, **columns):
  """[R, K] ms before 2 ms of transfer; columns, [R, K] ms, are what each process's host shows."""
  run = make_run(*barrier(((compute + gap) * MS).astype(np.int64), 2 * MS),
                 gap=gap * MS if gaps else None)
  return dataclasses.replace(run, host_causes=HostCauses(np.arange(len(gap)), {
      name: values.astype(np.float32) * 1e-3 for name, values in columns.items()}))


def paused(pause_ms: float, at: list[int], shown: str | None, steps: int = STEPS):
  """Every rank pauses before the steps `at`."""
  gap = np.full((RANKS, steps), 0.1)
  gap[:, at] += pause_ms
  return run_of(noisy(steps=steps), gap, **({shown: gap - 0.1} if shown else {}))


@pytest.mark.parametrize("shown", ["checkpoint", "gc", "data"])
def test_two_long_pauses_of_a_run_are_told_with_their_cost(shown):
  diagnosis = diagnose(paused(900.0, [50, 150], shown))
  assert diagnosis.findings == ()
  share = 1800 / (diagnosis.step_time.mean * 1e3 * diagnosis.selected.size)
  assert diagnosis.verdict.code == Verdict.FEW_PAUSES
  assert 0.4 < share < 0.45 and [round(100 * share), 2] == numbers(diagnosis.verdict)[:2]
  note = only(diagnosis.notes, Note.FEW_PAUSES)
  assert (PAUSES[shown].label in note and numbers(note)[0] == 1800
          and numbers(note)[-3:] == [2, 50, 150])


def test_what_one_process_of_four_does_counts_for_a_quarter():
  run = paused(900.0, [50, 150], "gc")
  run.host_causes.columns["gc"][1:] = 0.0
  notes = [note for note in diagnose(run).notes if note.code == Note.FEW_PAUSES]
  (gc,) = [note for note in notes if PAUSES["gc"].label in note]
  # What no column shows is on three of the four.
  (rest,) = [note for note in notes if note is not gc]
  assert "on process 0 (host0), and waiting for it, took 450.0 ms" in gc
  assert numbers(rest)[0] == 1350


@pytest.mark.parametrize("at", [[50, 150], [50, 51, 150, 151]])
def test_what_others_wait_for_the_one_process_that_pauses_counts_too(at):
  gap = np.full((RANKS, STEPS), 0.1)
  gap[2, at] += 900.0
  diagnosis = diagnose(run_of(noisy(), gap, checkpoint=gap - 0.1))
  share = 900 * len(at) / (diagnosis.step_time.mean * 1e3 * diagnosis.selected.size)
  assert diagnosis.findings == () and diagnosis.verdict.code == Verdict.FEW_PAUSES
  said = "checkpoints on process 2 (host2), and waiting for it, took "
  assert f"{said}{100 * share:.0f} % of the time in {len(at)} steps" in diagnosis.verdict
  took = numbers(only(diagnosis.notes, Note.FEW_PAUSES).partition(said)[2])
  assert took[0] == pytest.approx(900 * len(at), rel=0.01)


def test_a_pause_that_the_devices_hide_costs_nothing():
  run = paused(0.0, [], "checkpoint")
  columns = {"checkpoint": np.zeros((RANKS, STEPS), np.float32)}
  columns["checkpoint"][:, [50, 150]] = 0.9
  diagnosis = diagnose(dataclasses.replace(run, host_causes=HostCauses(np.arange(RANKS), columns)))
  assert diagnosis.verdict.code == Verdict.HEALTHY and Note.FEW_PAUSES not in codes(diagnosis.notes)


@pytest.mark.parametrize("gaps", [True, False])
@pytest.mark.parametrize("at", [[50, 150], list(range(40, STEPS, 20))])
def test_pauses_of_all_ranks_without_a_cause_that_was_measured_are_not_called_healthy(at, gaps):
  run = paused(400.0 / len(at), at, None)
  diagnosis = diagnose(run if gaps else dataclasses.replace(run, durations={}))
  share = 400 / (diagnosis.step_time.mean * 1e3 * diagnosis.selected.size)
  assert diagnosis.findings == () and diagnosis.verdict.code == Verdict.FEW_PAUSES
  assert [round(100 * share), len(at)] == numbers(diagnosis.verdict)[:2]
  assert numbers(only(diagnosis.notes, Note.FEW_PAUSES))[-len(at):] == at


def test_one_pause_of_a_short_run_says_that_nothing_is_known_of_how_often_it_comes():
  diagnosis = diagnose(paused(900.0, [15], None, steps=24))
  assert diagnosis.findings == () and diagnosis.verdict.code == Verdict.FEW_PAUSES
  assert numbers(diagnosis.verdict)[1:] == [15, diagnosis.selected.size]


@pytest.mark.parametrize("on, code, where", [
    ([0], "pauses_few", "pauses between steps:"), (slice(None), "pause_alike", "on all ranks:")])
def test_pauses_too_few_to_blame_one_of_two_for_are_not_said_to_be_on_all_ranks(on, code, where):
  gap = np.full((2, 800), 0.1)
  gap[on, 100::100] += 300.0
  diagnosis = diagnose(run_of(noisy(steps=800)[:2], gap, checkpoint=gap - 0.1))
  (found,) = diagnosis.findings
  assert (found.mode, found.ranks) == (Verdict.JITTER, ()) and code in codes(found.evidence)
  assert where in diagnosis.verdict


def with_long_transfers(at: list[int]):
  """4 s more of transfer in the steps `at` together."""
  transfer = np.full(STEPS, 2.0)
  transfer[at] += 4000 / len(at)
  return diagnose(make_run(*barrier((noisy() * MS).astype(np.int64),
                                    (transfer * MS).astype(np.int64))))


@pytest.mark.parametrize("at", [[120], [50, 120]])
def test_transfers_that_stand_still_once_are_not_slow_throughout(at):
  diagnosis = with_long_transfers(at)
  assert diagnosis.findings == () and diagnosis.verdict.code == Verdict.FEW_PAUSES
  share = 4000 / (diagnosis.step_time.mean * 1e3 * diagnosis.selected.size)
  assert numbers(diagnosis.verdict)[:2] == [round(100 * share), at[0] if len(at) == 1 else 2]
  assert numbers(only(diagnosis.notes, Note.FEW_PAUSES))[-len(at):] == at


def test_a_pause_that_is_most_of_what_all_took_is_told_by_its_step():
  transfer = np.full(STEPS, 2.0)
  transfer[[20, 50, 120]] += [300, 4000, 500]
  diagnosis = diagnose(make_run(*barrier((noisy() * MS).astype(np.int64),
                                         (transfer * MS).astype(np.int64))))
  assert numbers(diagnosis.verdict)[1:] == [3, 50]
  assert numbers(only(diagnosis.notes, Note.FEW_PAUSES))[-5:] == [20, 50, 120, 4000, 50]


@pytest.mark.parametrize("seconds, told", [(3.0, [120]), (0.0, [])])
def test_a_link_that_is_down_once_is_told_among_transfers_that_are_all_uneven(seconds, told):
  """As those are of processes that share processors."""
  transfer = 2 + np.random.default_rng(0).exponential(12.0, STEPS)
  transfer[120] += 1000 * seconds
  found = diagnose(make_run(*barrier((noisy() * MS).astype(np.int64),
                                     (transfer * MS).astype(np.int64))))
  assert (found.verdict.code == Verdict.FEW_PAUSES) == bool(told)
  assert [numbers(note)[-1] for note in found.notes if note.code == Note.FEW_PAUSES] == told


@pytest.mark.parametrize("late_ms, told", [(4, True), (40, False)])
def test_a_pause_that_costs_more_than_the_finding_is_told_beside_it(late_ms, told):
  compute, transfer = noisy(), np.full(STEPS, 2 * MS)
  compute[2] += late_ms
  transfer[120] += 1500 * MS
  found = diagnose(make_run(*barrier((compute * MS).astype(np.int64), transfer)))
  assert found.verdict.code == Verdict.PERSISTENT and found.findings[0].ranks == (2,)
  assert ("Besides, one long pause" in found.verdict and "step 120" in found.verdict) == told


@pytest.mark.parametrize("diagnosed, mode", [
    (lambda: with_long_transfers(list(range(3, STEPS, 4))), "fabric_contention"),
    (lambda: diagnose(paused(60.0, list(range(10, STEPS, 10)), "checkpoint")), "runtime_jitter")])
def test_what_is_slow_in_many_steps_is_a_finding_and_not_told_twice(diagnosed, mode):
  diagnosis = diagnosed()
  assert [finding.mode for finding in diagnosis.findings] == [mode]
  assert Note.FEW_PAUSES not in codes(diagnosis.notes)


def test_processor_time_between_steps_is_no_uneven_work():
  """Longer sequences make compute longer; a process that takes longer between its steps runs
  Python then."""
  compute, gap = noisy(noise=0.01), np.full((RANKS, STEPS), 0.1)
  gap[3] += 4
  (found,) = diagnose(run_of(compute, gap, cpu=compute + gap)).findings
  assert found.ranks == (3,) and found.causes == ("work",)
  assert "between steps" in found.advice and "sequences" not in found.advice


@pytest.mark.parametrize("gaps", [True, False])
@pytest.mark.parametrize("stops", [4, 8])
def test_the_rank_that_stops_now_and_then_is_named_where_gaps_are_not_recorded_too(gaps, stops):
  """The others wait for it, whether its stops are known as gaps or count as compute."""
  gap = np.full((RANKS, STEPS), 0.1)
  gap[2, STEPS // stops // 2::STEPS // stops] += 1600 / stops
  diagnosis = diagnose(run_of(noisy(30.0, 0.01), gap, gaps))
  assert 2 in numbers(diagnosis.verdict)
  assert diagnosis.verdict.code not in (Verdict.HEALTHY, Verdict.PERSISTENT)
  assert all(finding.ranks == (2,) for finding in diagnosis.findings)


def test_steps_that_hold_half_of_the_waiting_are_named():
  busy = noisy(noise=0.005)
  for rank, step in ((0, 60), (1, 61), (2, 120), (3, 180)):
    busy[rank, step] += 200
  diagnosis = diagnose(run_of(busy, np.zeros((RANKS, STEPS))))
  assert diagnosis.findings == () and diagnosis.verdict.code == Verdict.UNNAMED_WAITING
  note = only(diagnosis.notes, Note.WAITING_FOR)
  # All four but not the everyday 0.05 ms or so a step: half of it is in two or three of them.
  named = {int(word) for word in note.partition(": ")[2].rstrip(".").split(", ")}
  assert named < {60, 61, 120, 180} and len(named) in (2, 3)
  assert {100, len(named), diagnosis.selected.size} <= {*numbers(note)}


def test_collectives_without_stamps_are_told_once_a_reason():
  run = paused(0.0, [], None)
  entries = [{"primitive": "psum", "reason": "more collectives than slots"}] * 40 + [
      {"primitive": "psum", "reason": "inside jax.lax.scan: it runs many times a step"}]
  notes = diagnose(dataclasses.replace(run, info={"plan": {"unstamped": entries}})).notes
  many, one = (note for note in notes if note.code == Note.NOT_STAMPED)
  assert numbers(many) == [40] and entries[0]["reason"] in many
  assert numbers(one) == [] and entries[-1]["reason"] in one


@pytest.mark.parametrize("stopped", [(1,), (), (0, 1, 2, 3)])
def test_a_process_that_is_stopped_inside_a_collective_is_named_by_the_samples_it_did_not_take(
    stopped):
  """Six seconds in one transfer. Where all processes went on, or none did, nobody is to blame."""
  transfer = np.full(STEPS, 2 * MS)
  transfer[120] += 6000 * MS
  run = make_run(*barrier((noisy(80.0) * MS).astype(np.int64), transfer))
  last = run.collectives[0].exit_ns
  samples = []
  for process in range(RANKS):
    times = np.arange(last[process, 0], last[process, -1], 1000 * MS)
    inside = (times > last[process, 119]) & (times < last[process, 120])
    samples.append(times[~inside] if process in stopped else times)
  run = dataclasses.replace(run, process_of_rank=np.arange(RANKS), host_samples=HostSamples(
      np.repeat(np.arange(RANKS), [len(times) for times in samples]).astype(np.int32),
      np.zeros(sum(map(len, samples)), np.int32), np.concatenate(samples), {}))
  found = diagnose(run)
  assert found.verdict.code == Verdict.FEW_PAUSES and "step 120" in found.verdict
  named = [process for process in range(RANKS) if f"process {process}" in found.verdict]
  assert named == ([1] if stopped == (1,) else [])
  assert ("took no samples" in only(found.notes, Note.FEW_PAUSES)) == bool(named)


@pytest.mark.parametrize("gap_ms", [1, 20])
def test_devices_that_stand_idle_in_every_step_alike_are_not_called_healthy(gap_ms):
  found = diagnose(run_of(noisy(), np.full((RANKS, STEPS), float(gap_ms))))
  idle = gap_ms > 10
  assert found.verdict.code == (Verdict.IDLE_BETWEEN if idle else Verdict.HEALTHY)
  assert ("20.0 ms" in found.verdict and "(62 %" in found.verdict) == idle


@pytest.mark.parametrize("late_ms, gap_ms, own_gap_ms, idle", [
    (4, 20, 20, True), (80, 20, 20, False), (0, 1, 40, False)])
def test_gaps_of_all_that_cost_more_than_the_finding_are_told_beside_it(
    late_ms, gap_ms, own_gap_ms, idle):
  compute, gap = noisy(), np.full((RANKS, STEPS), float(gap_ms))
  compute[2] += late_ms
  gap[2] = own_gap_ms
  found = diagnose(run_of(compute, gap))
  assert found.verdict.code == Verdict.PERSISTENT and found.findings[0].ranks == (2,)
  assert ("Devices stand idle between steps for 20.0 ms" in found.verdict) == idle
  assert idle or "idle" not in found.verdict
