"""Observed runs: hundreds of collectives of mixed groups, some steps in detail, the others by their
sums."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxpace.core.detail import is_detailed
from jaxpace.diagnose.compare import compare
from jaxpace.diagnose.diagnose import diagnose
from jaxpace.diagnose.diagnosis import to_json
from jaxpace.diagnose.follower import Follower
from jaxpace.diagnose.words.codes import Verdict, codes
from jaxpace.diagnose.words.evidence import Evidence
from jaxpace.diagnose.words.notes import Note
from jaxpace.hosts.locality.types import Cpu, Device, Locality
from jaxpace.runs import collectives
from jaxpace.runs.reader import read_run
from jaxpace.runs.run import HostSamples
from tests.lib.said import numbers
from tests.synthetic.synthetic_groups import STEP_GAP, Cause, Job, Place, play, write
from tests.synthetic.synthetic_observed import observed


def job(*causes: Cause, **changes) -> Job:
  return observed(**{"tensor": 2, "steps": 240, "noise": 0.01, "uneven": 0.3, "every": 3, "seed": 1,
                     **changes}, causes=causes)


LATE = Cause("late", 6e-3, (5,), layer=2)
SLOTS = len(job().places)


def told(folder, job: Job):
  truth = write(folder, job)
  return diagnose(read_run(folder)), truth


def at(diagnosis) -> str:
  (said,) = [s for s in diagnosis.findings[0].evidence if s.code == Evidence.AT]
  return said


def test_a_healthy_job_blames_nobody_and_its_shares_are_the_truth(tmp_path):
  diagnosis, truth = told(tmp_path, job())
  assert diagnosis.findings == ()
  assert sum(diagnosis.shares.values()) == pytest.approx(1, abs=1e-9)
  full = diagnosis.run.steps[diagnosis.selected.mask]
  step = truth.step
  assert diagnosis.step_time.mean == pytest.approx(step[:, 1:].mean(), rel=1e-6)
  # Transfer is what is left of the waits without waiting for others; gaps are compute's neighbour.
  wait = (truth.exit - truth.enter).sum(axis=0)
  compute = (step - wait - truth.gap)[:, full].mean() / step[:, full].mean()
  transfer = truth.transfer.sum(axis=0)[:, full].mean() / step[:, full].mean()
  assert diagnosis.shares["compute"] == pytest.approx(compute, abs=1e-6)
  assert (diagnosis.shares["transfer"]
          + diagnosis.shares["contention"] == pytest.approx(transfer, abs=1e-6))
  assert ((diagnosis.counted, diagnosis.selected.size)
          == (239, int(is_detailed(np.arange(1, 240), 3).sum())))
  assert codes(diagnosis.notes).count(Note.IN_FULL) == 1


@pytest.mark.parametrize(("norm", "phase", "layer", "collective"), [
    (True, "forward", 2, "all-gather.0, iteration 2 of 4 (model.py:64, forward)"),
    (False, "backward", 0, "all-gather.2, iteration 3 of 4 (model.py:64, backward)")])
def test_a_rank_late_in_one_layer_is_named_with_the_layer(tmp_path, norm, phase, layer, collective):
  late = Cause("late", 6e-3, (5,), layer=layer, phase=phase)
  diagnosis, _ = told(tmp_path, made := job(late, norm=norm))
  (finding,) = diagnosis.findings
  assert (finding.mode, finding.ranks, finding.first_step) == (Verdict.PERSISTENT, (5,), None)
  assert diagnosis.lateness.mean[5] == pytest.approx(6e-3, rel=0.05)
  assert collective in at(diagnosis)
  assert diagnosis.totals.blame.argmax() == 5
  # The step without the fault, played.
  without = play(made, [late]).step_time(1)
  assert diagnosis.without_rank[5].step_time == pytest.approx(without, rel=0.01)
  assert finding.share == pytest.approx(7 / 8 * 6e-3 / diagnosis.step_time.mean, rel=0.1)


def test_when_it_began_is_told_by_steps_that_are_not_in_full(tmp_path):
  begin = next(step for step in range(100, 140)
               if not is_detailed(np.arange(step - 1, step + 2), 3).any())
  diagnosis, _ = told(tmp_path, job(Cause("late", 6e-3, (1,), layer=1, begin=begin / 240)))
  (finding,) = diagnosis.findings
  assert (finding.ranks, finding.first_step, finding.last_step) == ((1,), begin, None)


@pytest.mark.parametrize(("fault", "mode"), [
    (Cause("jitter", 14e-3), Verdict.AMPLIFICATION),
    (Cause("rotating", 14e-3, layer=1), Verdict.AMPLIFICATION),
    (Cause("pause", 70e-3, probability=0.08), Verdict.JITTER),
    (Cause("contention", 15e-3 / 12, axis="fsdp", begin=0.3, end=0.7), Verdict.CONTENTION)])
def test_other_modes(tmp_path, fault, mode):
  diagnosis, _ = told(tmp_path, job(fault, processes=4, every=1))
  assert diagnosis.findings[0].mode == mode
  assert diagnosis.findings[0].ranks == ()
  said = codes(diagnosis.findings[0].evidence)
  assert (Evidence.MOST_WAITED in said) == (mode == Verdict.AMPLIFICATION)
  if mode == Verdict.CONTENTION:
    (where,) = [s for s in diagnosis.findings[0].evidence if s.code == Evidence.MOST_CONTENDED]
    assert "along fsdp" in where
    assert (diagnosis.shares["contention"]
            == pytest.approx(0.4 * 15e-3 / diagnosis.step_time.mean, rel=0.15))


@pytest.mark.parametrize("norm", [True, False])
def test_waiting_for_pauses_is_told_as_such_wherever_it_is_waited(tmp_path, norm):
  diagnosis, _ = told(tmp_path, job(Cause("pause", 70e-3, probability=0.08), every=1, processes=4,
                                    norm=norm))
  lost = diagnosis.step_time.mean - play(job(norm=norm)).step_time(1)
  share = (lost + STEP_GAP) / diagnosis.step_time.mean
  assert diagnosis.shares["runtime"] == pytest.approx(share, rel=0.03)
  (finding,) = [f for f in diagnosis.findings if f.mode == Verdict.JITTER]
  assert finding.share == pytest.approx(lost / diagnosis.step_time.mean, rel=0.05)


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("cores, switched, seconds, machine", [
    ("0-1", 40.0, 12e-3, True), ("0-3", 40.0, 12e-3, False), ("0-1", 0.5, 12e-3, False),
    ("0-1", 40.0, 120e-3, False)])
def test_devices_that_take_turns_on_few_cores_are_not_told_to_even_out_their_work(
    tmp_path, cores, switched, seconds, machine, sampled):
  """Four forced devices of one process: the host's counters tell whether they wait for cores; by
  that, no more than a quarter of the step. Iterations of one program have samples alone."""
  write(tmp_path, observed(steps=200, processes=1, noise=0.005, causes=(Cause("jitter", seconds),)))
  run = read_run(tmp_path)
  columns = run.host_causes.columns | {"nivcsw": np.full((1, len(run.steps)), switched, np.float32)}
  if sampled:
    times, zero = run.collectives[-1].exit_ns[0], np.zeros(len(run.steps), np.int32)
    run = dataclasses.replace(run, host_samples=HostSamples(
        zero, zero, times, {"nivcsw": switched * np.arange(len(times), dtype=float)}))
    columns["nivcsw"] = np.full((1, len(run.steps)), np.nan, np.float32)
  place = Locality(process=0, hostname="host0", cpu=Cpu(allowed=cores),
                   devices=tuple(Device(platform="cpu") for _ in range(4)))
  found = diagnose(dataclasses.replace(
      run, locality=(place,), host_causes=dataclasses.replace(run.host_causes, columns=columns)))
  assert found.findings[0].mode == Verdict.AMPLIFICATION
  assert ("shared_cores" in found.findings[0].causes) == machine
  assert (numbers(found.findings[0].advice)[:2] == [4, 2]) == machine
  assert ("sequence lengths" in found.verdict) != machine


def test_the_json_says_where(tmp_path):
  diagnosis, _ = told(tmp_path, job(LATE))
  document = json.loads(json.dumps(to_json(diagnosis)))
  waits = document["waits"]
  assert ([row["waiting"] for row in waits] == sorted((row["waiting"] for row in waits),
                                                      reverse=True))
  assert (sum(row["waiting"] for row in waits)
          == pytest.approx(diagnosis.lateness.earliness, rel=1e-9))
  assert sum(row["turns"] for row in waits) == len(document["collectives"])
  row = next(row for row in waits if row["collective"] == "all-gather.0")
  assert (row["worst_turn"]["loops"] == [["while.0", 2, 4]]
          and (row["rank"], row["source"]) == (5, "model.py:64"))
  assert row["rank_share"] > 0.8
  assert (document["steps_counted"], document["steps_in_full"]) == (239, diagnosis.selected.size)


def changed(folder, plan) -> None:
  """Has a run's collectives told otherwise in its plan."""
  info = json.loads((folder / "run.json").read_text())
  info["plan"] |= plan(info["plan"]["collectives"])
  (folder / "run.json").write_text(json.dumps(info))


def test_a_step_in_full_on_some_ranks_only_is_not_in_the_shares(tmp_path):
  write(tmp_path, job(every=1), keep=lambda c: (c["rank"] < 2) | (c["step"] % 2 == 0))
  run = read_run(tmp_path)
  assert (run.steps % 2 == 0).all() and len(run.steps) == 120
  assert any("by some ranks only" in problem for problem in run.problems)
  diagnosis = diagnose(run)
  assert diagnosis.findings == () and sum(diagnosis.shares.values()) == pytest.approx(1)


@pytest.mark.parametrize(("stretch", "taken"), [(3, 80), (10, 100)])
def test_slow_steps_that_are_in_full_as_well_count_for_no_more(tmp_path, stretch, taken):
  """With few drawn steps all that are in detail are taken: those drawn, and here the first 84."""
  drawn = is_detailed(np.arange(240), stretch)
  write(tmp_path, job(every=1), keep=lambda c: drawn[c["step"]] | (c["step"] < 84))
  changed(tmp_path, lambda entries: {"detail": {"every": stretch}})
  run = read_run(tmp_path)
  assert len(run.steps) == taken
  assert not any("by some ranks only" in problem for problem in run.problems)


def test_a_turn_that_did_not_run_has_no_rows_and_costs_nothing(tmp_path):
  write(tmp_path, job(LATE, every=1), keep=lambda c: (c["collective"] != 4) | (c["step"] % 5 > 1))
  diagnosis = diagnose(read_run(tmp_path))
  assert diagnosis.selected.size == 239
  assert diagnosis.findings[0].ranks == (5,)
  assert sum(diagnosis.shares.values()) == pytest.approx(1)


def two_shapes(folder, which, *causes, **changes):
  """A run whose steps are of another shape where `which` says so, of their numbers."""
  def twice(entries):
    return {"collectives": [{**e, "program": 0} for e in entries] + [
        {**e, "slot": e["slot"] + SLOTS, "of": e["of"] + 20, "program": 1} for e in entries]}

  def moved(columns) -> np.ndarray:
    columns["collective"] = (columns["collective"]
                             + np.where(which(columns["step"]), SLOTS, 0).astype(np.int32))
    return np.ones(len(columns["step"]), bool)

  write(folder, job(*causes, **changes), keep=moved)
  changed(folder, twice)
  return read_run(folder)


def test_where_few_steps_say_which_shape_they_are_of_step_times_are_of_all(tmp_path):
  run = two_shapes(tmp_path, lambda steps: steps % 5 < 2, every=6)
  diagnosis = diagnose(run)
  assert diagnosis.counted == 239 and diagnosis.selected.size < 40
  assert any("step times of all" in problem for problem in run.problems)
  assert Note.OTHER_SHAPES not in codes(diagnosis.notes)


def test_of_several_shapes_the_report_is_on_the_one_that_ran_most(tmp_path):
  run = two_shapes(tmp_path, lambda steps: steps % 10 == 0, every=1)
  assert len(run.collectives) == SLOTS and (run.steps % 10 > 0).all() and len(run.steps) == 216
  diagnosis = diagnose(run)
  assert sum(diagnosis.shares.values()) == pytest.approx(1)
  # What the shares are shares of is these steps' time alone: the others may hold an evaluation.
  assert diagnosis.counted == diagnosis.selected.size == 216
  said, = (note for note in diagnosis.notes if note.code == Note.OTHER_SHAPES)
  assert "23 steps of others" in said and "9.6 % of the time, are left out." in said
  assert diagnosis.verdict.code == Verdict.HEALTHY and "shape" not in diagnosis.verdict


@pytest.mark.parametrize("ranks, who", [((5,), "rank 5 alone"), ((), "all ranks")])
def test_pauses_before_steps_of_another_shape_are_told_with_their_ranks(tmp_path, ranks, who):
  run = two_shapes(tmp_path, lambda steps: steps % 10 == 9,
                   Cause("pause", 0.3, ranks, every=10), every=1)
  diagnosis = diagnose(run)
  assert diagnosis.findings == () and diagnosis.verdict.code == Verdict.OTHER_SHAPES
  assert "Healthy" not in diagnosis.verdict and "took 36 % of the time" in diagnosis.verdict
  said, = (note for note in diagnosis.notes if note.code == Note.OTHER_SHAPES)
  assert f"left out: before each, {who} spent 300.5 ms between steps." in said
  told, = (note for note in compare(diagnosis, diagnosis).notes
           if note.code == Note.SHAPES_LEFT_OUT)
  assert "36 % of A's time, and 36 % of B's" in told


def test_a_step_of_two_programs_has_the_collectives_of_both(tmp_path):
  late = dataclasses.replace(LATE, phase="backward")
  for name in ("two", "one"):
    write(tmp_path / name, job(late))
  changed(tmp_path / "two", lambda entries: {"collectives": [
      {**entry, "program": int(entry["phase"] != "forward")} for entry in entries]})
  two, one = (diagnose(read_run(tmp_path / name)) for name in ("two", "one"))
  assert len(two.run.collectives) == SLOTS and two.run.problems == one.run.problems
  assert two.findings[0].ranks == (5,) and two.shares == one.shares


def test_more_than_fits_is_thinned_evenly(tmp_path, monkeypatch):
  write(tmp_path, job(every=1))
  monkeypatch.setattr(collectives, "MOST_CELLS", 60 * 8 * SLOTS)
  run = read_run(tmp_path)
  assert len(run.steps) == 60 and run.steps[0] == 0 and run.steps[-1] == 239
  assert any("evenly spread" in problem for problem in run.problems)
  assert read_run(tmp_path, window=(100, 140)).steps.tolist() == list(range(99, 140))


def test_a_restart_counts_by_its_last_attempt(tmp_path):
  write(tmp_path, job(every=1, steps=100))
  truth = write(tmp_path, job(every=1, steps=80, seed=9), attempt=1, first_step=60)
  run = read_run(tmp_path)
  assert run.duplicates > 0
  at_once = run.attempt.max(axis=0)
  assert (at_once[run.steps >= 60] == 1).all() and (at_once[run.steps < 60] == 0).all()
  np.testing.assert_allclose((run.collectives[3].exit_ns - run.collectives[3].enter_ns)[:, 60]
                             * 1e-9, (truth.exit - truth.enter)[3][:, 0], atol=2e-9)
  diagnosis = diagnose(run)
  # The first step of each attempt has no exit before it.
  assert diagnosis.counted == 138


def test_steps_without_any_row_of_collectives(tmp_path):
  write(tmp_path, job(), keep=lambda c: np.zeros(len(c["step"]), bool))
  diagnosis = diagnose(read_run(tmp_path))
  assert diagnosis.findings == ()


def test_a_growing_run_is_followed_by_the_sums_of_its_steps(tmp_path):
  truth = write(tmp_path, job(LATE, every=10))
  look = Follower(tmp_path).poll(0.0, 0.0)
  numbers = look.numbers
  assert numbers.late[0].rank == 5 and numbers.late[0].lateness == pytest.approx(6e-3, rel=0.05)
  assert (numbers.step_time.mean
          == pytest.approx(truth.step[:, -100:].mean(), rel=0.01))
  assert sum(numbers.shares.values()) == pytest.approx(1)
  assert numbers.silent == () and numbers.inconclusive == ""


def test_a_growing_run_compares_no_ranks_that_nothing_joins(tmp_path):
  """Two halves of four ranks, one of them twice as busy: nobody is late in either."""
  ranks = range(8)
  halves = tuple(tuple(half) for half in (ranks[:4], ranks[4:]))
  place = Place("half", halves, {rank: 10e-3 * (1 + rank // 4) for rank in ranks}, 1e-3)
  write(tmp_path, dataclasses.replace(job(), mesh={"half": 2, "data": 4}, places=(place,)))
  numbers = Follower(tmp_path).poll(0.0, 0.0).numbers
  assert max(abs(late.lateness) for late in numbers.late) < 1e-3
  assert numbers.shares["skew"] < 0.1


def test_one_that_stays_open_through_a_step_hides_nothing(tmp_path):
  """An all-reduce of a gradient that is there early is open while layers compute and meet; it ends
  last."""
  before, _ = told(tmp_path, job(Cause("late", 6e-3, (5,), layer=0, phase="backward")))
  for part in (tmp_path / "collectives").glob("*.parquet"):
    table = pq.read_table(part)
    step, rank, enter, leave = (table.column(name).to_numpy()
                                for name in ("step", "rank", "enter_ns", "exit_ns"))
    of = step * (int(rank.max()) + 1) + rank
    order = np.lexsort((leave, of))
    first = np.flatnonzero(np.concatenate([[True], np.diff(of[order]) != 0]))
    last = order[np.append(first[1:], len(order)) - 1]
    opened = enter.copy()
    opened[last] = np.minimum.reduceat(enter[order], first)
    pq.write_table(table.set_column(table.schema.get_field_index("enter_ns"), "enter_ns",
                                    pa.array(opened)), part)
  after = diagnose(read_run(tmp_path))
  assert at(after) == at(before)
  assert [row.place.name for row in after.waits] == [row.place.name for row in before.waits]
  # What ranks compute before it begins can't be seen any more: it counts as its transfer.
  assert after.shares["skew"] == pytest.approx(before.shares["skew"], rel=0.05)
  assert 0 < before.shares["compute"] - after.shares["compute"] < 0.15
