"""Reads run directories as users find them."""

import dataclasses
import json
import os
import shutil

import numpy as np
import pyarrow as pa
import pytest

from jaxpace.diagnose.diagnose import diagnose
from jaxpace.diagnose.follower import Follower
from jaxpace.diagnose.words.codes import Verdict, codes
from jaxpace.diagnose.words.notes import Note
from jaxpace.record import columns
from jaxpace.record.parts import PartStore
from jaxpace.runs.reader import read_run
from jaxpace.runs.run import RunError
from jaxpace.runs.rundir import TOGETHER
from tests.runs.written import JOB, both, parts, replace, rewrite, said
from tests.synthetic import synthetic_runs
from tests.synthetic.synthetic_runs import SyntheticJob


def test_every_value_comes_back(run_dir):
  path, truth = run_dir
  run = read_run(path)
  assert (run.id, run.ranks, run.steps.tolist()) == ("synthetic", 4, list(range(60)))
  assert run.problems == ()
  (collective,) = run.collectives
  # Two clocks' origins differ: only differences on one rank are facts.
  np.testing.assert_array_equal(np.diff(collective.exit_ns), np.diff(truth.exit[0]))
  np.testing.assert_array_equal(collective.exit_ns - collective.enter_ns,
                                truth.exit[0] - truth.enter[0])
  for name in ("forward", "backward", "update"):
    np.testing.assert_allclose(run.durations[name], getattr(truth, name) * 1e-9, rtol=1e-6)
  assert np.isnan(run.durations["gap"][:, 0]).all()
  np.testing.assert_allclose(run.durations["gap"][:, 1:], truth.gap[:, 1:] * 1e-9, rtol=1e-6)
  assert (collective.name, collective.bytes) == ("psum", 4096)
  assert run.process_of_rank.tolist() == [0, 0, 1, 1]
  assert [run.host_of_rank(r) for r in range(4)] == ["host0", "host0", "host1", "host1"]


def test_several_collectives_come_back_in_the_order_they_are_passed(tmp_path):
  truth = synthetic_runs.write(tmp_path, SyntheticJob(ranks=2, steps=20, processes=1,
                                                      collectives=3))
  # slots are numbered as they were found, not as they run
  replace(parts(tmp_path, "collectives"), "collective", lambda slot: 2 - slot)
  run = read_run(tmp_path)
  assert [c.slot for c in run.collectives] == [2, 1, 0]
  for collective, enter, leave in zip(run.collectives, truth.enter, truth.exit, strict=True):
    np.testing.assert_array_equal(collective.exit_ns - collective.enter_ns, leave - enter)


def test_the_last_attempt_wins(run_dir):
  path, _ = run_dir
  again = synthetic_runs.write(path, dataclasses.replace(JOB, steps=30, seed=9), attempt=1,
                             first_step=40)
  run = read_run(path)
  assert run.steps[-1] == 69
  assert (run.attempt[:, :40] == 0).all()
  assert (run.attempt[:, 40:] == 1).all()
  np.testing.assert_array_equal(np.diff(run.collectives[0].exit_ns[:, 40:]), np.diff(again.exit[0]))
  assert run.duplicates == 80
  assert said(run, "last attempt counts")
  assert not np.isfinite(diagnose(run).totals.per_step["step"][40])


def test_an_older_attempts_rows_never_win_whatever_the_order_of_parts(run_dir):
  path, _ = run_dir
  # process 0's newest part holds rows of both attempts, the newer first
  for table in ("steps", "collectives"):
    file = parts(path, table)[2]

    def both(t):
      at = t.schema.get_field_index("attempt")
      newer = t.set_column(at, t.schema.field(at), pa.array([1] * len(t), pa.int32()))
      return pa.concat_tables([newer, t])
    rewrite(file, both)
  run = read_run(path)
  assert (run.attempt[:2, 40:] == 1).all()
  assert (run.attempt[2:, 40:] == 0).all()
  # The other process never made that attempt: its rows of those steps don't belong to the same
  # execution.
  assert diagnose(run).totals.present.tolist() == [58, 58, 39, 39]


def test_a_window_reads_the_step_before_it_too(run_dir):
  path, truth = run_dir
  run = read_run(path, window=(25, 40))
  assert run.steps.tolist() == list(range(24, 40))
  diagnosis = diagnose(run)
  assert diagnosis.selected.recorded == diagnosis.selected.size == 15
  expected = np.diff(truth.exit[0, 0])[24:39].mean() * 1e-9
  assert diagnosis.step_time.mean == pytest.approx(expected)
  with pytest.raises(RunError, match="steps 0 to 59"):
    read_run(path, window=(100, 200))


def test_temporaries_foreign_parts_and_strangers_are_left_out(run_dir):
  path, _ = run_dir
  files = parts(path)
  shutil.copy(files[0], path / "steps" / f".{files[0].name}.tmp")
  shutil.copy(files[0], path / "steps" / files[0].name.replace("synthetic", "yesterday"))
  (path / "steps" / "notes.txt").write_text("mine")
  (path / ".previous" / "old" / "steps").mkdir(parents=True)
  shutil.copy(files[0], path / ".previous" / "old" / "steps")
  run = read_run(path)
  assert said(run, "1 part of other runs") and said(run, "1 file in 'steps' left out (notes.txt)")
  assert run.duplicates == 0


def test_unknown_and_missing_columns_are_no_trouble(run_dir):
  path, _ = run_dir
  for file in parts(path):
    rewrite(file,
            lambda t: t.append_column("moon_phase", pa.array(["full"] * len(t))).append_column(
                "phase_augment_ns", pa.array([3_000_000] * len(t), pa.int64())).drop_columns(
                    ["gap_ns", "attempt", "process"]))
  run = read_run(path)
  assert "gap" not in run.durations
  np.testing.assert_allclose(run.durations["phase_augment"], 3e-3)
  assert diagnose(run).shares["runtime"] == 0
  assert "augment" in diagnose(run).phases


def test_missing_tables(run_dir, tmp_path):
  path, truth = run_dir
  other = tmp_path / "other"
  shutil.copytree(path, other)
  shutil.rmtree(path / "steps")
  run = read_run(path)
  assert said(run, "'steps' is missing")
  assert diagnose(run).findings[0].ranks == (3,)
  shutil.rmtree(other / "collectives")
  run = read_run(other)
  diagnosis = diagnose(run)
  assert said(run, "'collectives' is missing")
  assert diagnosis.findings == ()
  assert diagnosis.shares["skew"] == 0
  assert sum(diagnosis.shares.values()) == pytest.approx(1)
  assert diagnosis.step_time.mean == pytest.approx(np.diff(truth.end).mean() * 1e-9)
  assert diagnosis.verdict.code == Verdict.NO_COLLECTIVES


@pytest.mark.parametrize("declared", [{}, {"ranks": 2, "devices": 4}])
def test_missing_ranks_and_processes_are_named(run_dir, declared):
  """Those along other axes of the mesh, too: of 2 x 2 devices, two are along the data axis."""
  path, _ = run_dir
  info = json.loads((path / "run.json").read_text()) | declared
  info["plan"]["ranks"] = info["ranks"]
  (path / "run.json").write_text(json.dumps(info))
  for file in both(path):
    if "-p00001." in file.name:
      file.unlink()
  run = read_run(path)
  assert run.ranks == 4 and said(run, "2 ranks of 4 recorded nothing: 2, 3")
  assert run.host_of_rank(3) == "host1"
  assert sum(diagnose(run).shares.values()) == pytest.approx(1)


def test_a_process_that_died_early_is_named(run_dir):
  path, _ = run_dir
  for table in ("steps", "collectives"):
    parts(path, table)[-1].unlink()
  info = path / "process" / "1.json"
  info.write_text(json.dumps({**json.loads(info.read_text()), "closed_cleanly": False,
                              "lost_rows": 12, "holes": 2}))
  run = read_run(path)
  assert said(run, "stopped recording before the others, after step 39", "2, 3")
  assert said(run, "did not close the recording")
  assert said(run, "lost 12 rows in 2 holes")


def test_a_process_that_ran_nothing_of_the_step_is_named_and_its_devices_are_no_ranks(run_dir):
  path, _ = run_dir
  for file in path.glob("*/*-p00001.*"):
    file.unlink()
  (path / "process" / "1.json").write_text(json.dumps({
      **json.loads((path / "process" / "1.json").read_text()), "ranks": [], "rows_written": 0}))
  info = json.loads((path / "run.json").read_text())
  (path / "run.json").write_text(json.dumps({key: info[key] for key in ("run", "processes")}))
  run = read_run(path)
  assert run.ranks_in_all == 2
  assert said(run, "1 process of 2 ran nothing of the step and left no rows: 1.")


def test_processes_that_left_no_word_are_named(run_dir):
  path, _ = run_dir
  assert not said(read_run(path), "in the folder 'process'") and not said(read_run(path), "no plan")
  (path / "process" / "1.json").unlink()
  assert said(read_run(path), "1 process of 2 left no file in the folder 'process'", ": 1.")
  shutil.rmtree(path / "process")
  assert said(read_run(path), "The folder 'process' is missing or empty", "2 processes")
  (path / "run.json").unlink()  # the rows still tell of two processes
  assert said(read_run(path), "The folder 'process' is missing or empty", "2 processes")


@pytest.mark.parametrize("gone", [0, 1])
def test_of_one_hosts_part_it_is_said_that_others_are_elsewhere(run_dir, gone):
  path, _ = run_dir
  here = path / "process" / f"{1 - gone}.json"
  here.write_text(json.dumps({**json.loads(here.read_text()), "processes": 2, "devices": 4}))
  for file in (*path.glob(f"*/*-p{gone:05d}.*"), path / "process" / f"{gone}.json",
               *[path / "run.json"] * (gone == 0)):
    file.unlink()
  run = read_run(path)
  assert run.ranks_in_all == 4 and run.silent.tolist() == [2 * gone, 2 * gone + 1]
  assert said(run, "1 process of 2 left no file in the folder 'process'", TOGETHER)
  assert f"Nothing is known of ranks {2 * gone}, {2 * gone + 1}" in diagnose(run).verdict
  look = Follower(path).poll(0.0, 0.0)
  assert look.state.code == "quiet" and "of 1 more nothing is here" in look.state
  assert Note.PARTS_AWAY in codes(look.notes) and look.numbers.shares["contention"] == 0


def test_directories_without_a_run(tmp_path, run_dir):
  path, _ = run_dir
  for folder in ("empty", "photos", "begun/marks"):
    (tmp_path / folder).mkdir(parents=True)
  (tmp_path / "photos" / "cat.jpg").touch()
  (tmp_path / "begun" / "marks" / "0.ring").touch()
  within = f"Give its directory: {path}"
  for given, why in (
      ("nowhere", "no such directory"), ("empty", "is empty"), ("photos", "holds no recorded run"),
      ("begun", "has only begun: its job ended within half a second"), ("", f"give {path}"),
      (path / "run.json", within), (parts(path)[0], within), (path / "process", within),
      ("photos/cat.jpg", "is a file")):
    with pytest.raises(RunError, match=why):
      read_run(tmp_path / given)


def test_a_folder_of_several_runs_is_told_from_one_of_parts_of_a_run(tmp_path, run_dir):
  path, _ = run_dir
  shutil.copytree(path, tmp_path / "node2")
  for part, process in ((path, 1), (tmp_path / "node2", 0)):
    (part / "process" / f"{process}.json").unlink()
  with pytest.raises(RunError, match="parts of one: .*node2, .*run. Copy what these hold into one"):
    read_run(tmp_path)
  for files in ({0: "another"}, {0: "synthetic", 1: "synthetic"}):  # another run; a copy
    for process, run in files.items():
      (path / "process" / f"{process}.json").write_text(json.dumps({"run": run}))
    with pytest.raises(RunError, match="several: give one of .*node2, .*run"):
      read_run(tmp_path)


def test_runs_without_a_row(run_dir):
  path, _ = run_dir
  for file in both(path):
    file.rename(file.with_name(file.name.replace("synthetic", "other")))
  why = "6 parts of other runs in 'steps' left out.*directory used twice"
  with pytest.raises(RunError, match=why):
    read_run(path)
  for file in both(path):
    file.rename(file.with_name(file.name.replace("other", "synthetic")))
  for file in both(path):
    file.write_bytes(b"PAR1")
  why = r"steps/.* left out: torn.* \(and 11 more like this\). Was it copied completely"
  with pytest.raises(RunError, match=why):
    read_run(path)
  shutil.rmtree(path / "steps")
  shutil.rmtree(path / "collectives")
  with pytest.raises(RunError, match="without a single recorded step, and .* has ended"):
    read_run(path)
  goes_on = path / "process" / "0.json"
  goes_on.write_text(json.dumps({**json.loads(goes_on.read_text()), "closed_cleanly": False}))
  with pytest.raises(RunError, match="without a single recorded step yet"):
    read_run(path)


def test_a_newer_schema_is_refused(run_dir):
  path, _ = run_dir
  (path / "run.json").write_text(json.dumps({"run": "synthetic", "schema_version": 99}))
  with pytest.raises(RunError, match="schema 99.*Upgrade"):
    read_run(path)


def test_no_permission_whoever_runs_the_tests(run_dir, monkeypatch):
  path, _ = run_dir

  def refuse(*args, **kwargs):
    raise PermissionError(13, "Permission denied", str(path / "run.json"))
  monkeypatch.setattr(os, "open", refuse)
  with pytest.raises(RunError, match=r"No permission to read .*run\.json"):
    read_run(path)


# What counts where a run holds several rows of one rank and step.

@pytest.mark.parametrize(("attempt", "counts"), [(0, True), (1, True), (-1, False)])
def test_the_newest_attempt_counts_and_of_one_attempt_what_was_written_last(
    tmp_path, attempt, counts):
  """Rows of steps 5 to 9 come again, delayed: in the same attempt, a later one, an earlier one."""
  job = SyntheticJob(ranks=2, steps=20, processes=1, hosts=1)
  synthetic_runs.write(tmp_path, job, attempt=1 if attempt < 0 else 0)
  again = synthetic_runs.rows(synthetic_runs.simulate(job), np.arange(2), slice(5, 10), process=0,
                            attempt=max(attempt, 0))
  again["steps"]["delay_applied_ns"] = np.full(10, 7_000_000)
  again["collectives"]["exit_ns"] += 1_000
  for table, rows in again.items():
    PartStore(tmp_path, table, "synthetic", 0).append(rows)
  run = read_run(tmp_path)
  expected = np.zeros((2, 20), np.float32)
  expected[:, 5:10] = 7e-3 * counts
  np.testing.assert_allclose(run.durations["delay_applied"], expected)
  assert run.duplicates == 10 and run.attempt.max() == (0 if attempt == 0 else 1)


def test_steps_end_for_ranks_that_are_in_later_collectives_alone(tmp_path):
  """Rank 1 has no row of the first collective, as the stages of a pipeline; nor are there sums."""
  for slot, ranks in enumerate(([0], [0, 1])):
    step, rank = (each.ravel() for each in np.meshgrid(np.arange(4), ranks))
    enter = 1000 * step + 100 * slot + 10
    PartStore(tmp_path, "collectives", "a", 0).append({
        **columns.whose(step, rank, 0, 0), "collective": np.full(len(step), slot, np.int32),
        "enter_ns": enter, "exit_ns": enter + 50})
  every = read_run(tmp_path).all_steps
  assert (every.attempt == 0).all()
  assert every.end_ns.tolist() == [[1000 * step + 160 for step in range(4)]] * 2
