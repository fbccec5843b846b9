"""Reads run directories as users find them."""

import dataclasses
import json
import os
import pathlib
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxpace.diagnosis.diagnose import diagnose
from jaxpace.trace import synthetic
from jaxpace.trace.reader import read_run
from jaxpace.trace.run import MISSING, RunError
from jaxpace.trace.synthetic import Job

JOB = Job(ranks=4, steps=60, processes=2, noise=0.05, late={3: 5e-3})


@pytest.fixture
def run_dir(tmp_path):
  path = tmp_path / "run"
  truth = synthetic.write(path, JOB, part_steps=20)
  return path, truth


def parts(path, table="steps"):
  return sorted((path / table).glob("*.parquet"))


def rewrite(file: pathlib.Path, change) -> None:
  pq.write_table(change(pq.read_table(file)), file)


def said(run, *words) -> bool:
  return any(all(word in problem for word in words) for problem in run.problems)


def test_every_value_comes_back(run_dir):
  path, truth = run_dir
  run = read_run(path)
  assert (run.id, run.ranks, run.steps.tolist()) == ("synthetic", 4, list(range(60)))
  assert run.problems == ()
  (collective,) = run.collectives
  # Two clocks' origins differ: only differences on one rank are facts.
  np.testing.assert_array_equal(np.diff(collective.exit_ns), np.diff(truth.exit[0]))
  np.testing.assert_array_equal(collective.exit_ns - collective.enter_ns, truth.exit[0] - truth.enter[0])
  for name in ("forward", "backward", "update"):
    np.testing.assert_allclose(run.durations[name], getattr(truth, name) * 1e-9, rtol=1e-6)
  assert np.isnan(run.durations["gap"][:, 0]).all()
  np.testing.assert_allclose(run.durations["gap"][:, 1:], truth.gap[:, 1:] * 1e-9, rtol=1e-6)
  assert (collective.name, collective.bytes) == ("psum", 4096)
  assert run.process_of_rank.tolist() == [0, 0, 1, 1]
  assert [run.host_of_rank(r) for r in range(4)] == ["host0", "host0", "host1", "host1"]


def test_several_collectives_come_back_in_the_order_they_are_passed(tmp_path):
  truth = synthetic.write(tmp_path, Job(ranks=2, steps=20, processes=1, collectives=3))
  for file in parts(tmp_path, "collectives"):  # slots are numbered as they were found, not as they run
    rewrite(file, lambda t: t.set_column(t.schema.get_field_index("collective"), "collective",
                                         pa.compute.subtract(pa.scalar(2, pa.int32()), t["collective"])))
  run = read_run(tmp_path)
  assert [c.slot for c in run.collectives] == [2, 1, 0]
  for collective, enter, leave in zip(run.collectives, truth.enter, truth.exit, strict=True):
    np.testing.assert_array_equal(collective.exit_ns - collective.enter_ns, leave - enter)


def test_the_last_attempt_wins(run_dir):
  path, _ = run_dir
  again = synthetic.write(path, dataclasses.replace(JOB, steps=30, seed=9), attempt=1, first_step=40)
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
  for table in ("steps", "collectives"):  # process 0's newest part holds rows of both attempts, the newer first
    file = parts(path, table)[2]

    def both(t):
      at = t.schema.get_field_index("attempt")
      newer = t.set_column(at, t.schema.field(at), pa.array([1] * len(t), pa.int32()))
      return pa.concat_tables([newer, t])
    rewrite(file, both)
  run = read_run(path)
  assert (run.attempt[:2, 40:] == 1).all()
  assert (run.attempt[2:, 40:] == 0).all()
  # The other process never made that attempt: its rows of those steps don't belong to the same execution.
  assert diagnose(run).totals.present.tolist() == [58, 58, 39, 39]


def test_a_window_reads_the_step_before_it_too(run_dir):
  path, truth = run_dir
  run = read_run(path, window=(25, 40))
  assert run.steps.tolist() == list(range(24, 40))
  diagnosis = diagnose(run)
  assert diagnosis.recorded == diagnosis.counted.size == 15
  expected = np.diff(truth.exit[0, 0])[24:39].mean() * 1e-9
  assert diagnosis.step_time.mean == pytest.approx(expected)
  with pytest.raises(RunError, match="steps 0 to 59"):
    read_run(path, window=(100, 200))


@pytest.mark.parametrize("damage", [
    lambda file: file.write_bytes(b""),
    lambda file: file.write_bytes(file.read_bytes()[:-100]),
    lambda file: file.write_bytes(b"not parquet at all"),
    lambda file: file.write_bytes(file.read_bytes()[:4] + bytes(200) + file.read_bytes()[204:]),
])
def test_a_damaged_part_costs_only_its_own_rows(run_dir, damage):
  path, _ = run_dir
  damage(parts(path, "collectives")[0])
  run = read_run(path)
  assert run.skipped["torn"] == 1
  assert said(run, parts(path, "collectives")[0].name)
  assert (run.collectives[0].exit_ns[:2, :20] == MISSING).all()
  assert (run.collectives[0].exit_ns[2:] != MISSING).all()
  assert sum(diagnose(run).shares.values()) == pytest.approx(1)


def test_leftovers_of_a_merge_are_not_read_twice_but_save_a_torn_one(run_dir):
  path, truth = run_dir
  files = parts(path, "steps")[:3]
  merged = files[0].with_name(files[0].name.replace("-000000.parquet", "-000002.parquet"))
  pq.write_table(pa.concat_tables([pq.read_table(f) for f in files]), merged)
  run = read_run(path)
  assert run.duplicates == 0
  assert run.skipped["leftover"] == 3
  merged.write_bytes(merged.read_bytes()[:500])
  run = read_run(path)
  np.testing.assert_allclose(run.durations["forward"], truth.forward * 1e-9, rtol=1e-6)
  assert said(run, merged.name)


def test_temporaries_foreign_parts_and_strangers_are_left_out(run_dir):
  path, _ = run_dir
  files = parts(path)
  shutil.copy(files[0], path / "steps" / f".{files[0].name}.tmp")
  shutil.copy(files[0], path / "steps" / files[0].name.replace("synthetic", "yesterday"))
  (path / "steps" / "notes.txt").write_text("mine")
  (path / ".previous" / "old" / "steps").mkdir(parents=True)
  shutil.copy(files[0], path / ".previous" / "old" / "steps")
  run = read_run(path)
  assert (run.skipped["temporary"], run.skipped["foreign"], run.skipped["unknown"]) == (1, 1, 1)
  assert said(run, "1 part of other runs")
  assert run.duplicates == 0


def test_unknown_and_missing_columns_are_no_trouble(run_dir):
  path, _ = run_dir
  for file in parts(path):
    rewrite(file, lambda t: t.append_column("moon_phase", pa.array(["full"] * len(t))).append_column(
        "phase_augment_ns", pa.array([3_000_000] * len(t), pa.int64())).drop_columns(["gap_ns", "attempt", "process"]))
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
  assert "No collective was recorded" in diagnosis.verdict


def test_missing_ranks_and_processes_are_named(run_dir):
  path, _ = run_dir
  for table in ("steps", "collectives"):
    for file in parts(path, table)[3:]:
      file.unlink()
  run = read_run(path)
  assert run.ranks == 4
  assert said(run, "2 ranks of 4 recorded nothing", "2, 3")
  assert run.host_of_rank(3) == "host1"
  assert sum(diagnose(run).shares.values()) == pytest.approx(1)


def test_a_process_that_died_early_is_named(run_dir):
  path, _ = run_dir
  for table in ("steps", "collectives"):
    parts(path, table)[-1].unlink()
  info = path / "process" / "1.json"
  info.write_text(json.dumps({**json.loads(info.read_text()), "closed_cleanly": False, "lost_rows": 12, "holes": 2}))
  run = read_run(path)
  assert said(run, "stopped recording before the others, after step 39", "2, 3")
  assert said(run, "did not close the recording")
  assert said(run, "lost 12 rows in 2 holes")


def test_ranks_along_other_axes_of_the_mesh_that_recorded_nothing_are_named(run_dir):
  path, _ = run_dir
  info = json.loads((path / "run.json").read_text())
  info["plan"]["ranks"] = 2  # along the data axis of 2 x 2 devices
  (path / "run.json").write_text(json.dumps({**info, "ranks": 2, "devices": 4}))
  for table in ("steps", "collectives"):
    for file in parts(path, table):
      if "-p00001." in file.name:
        file.unlink()
  run = read_run(path)
  assert run.ranks == 4 and said(run, "2 ranks of 4 recorded nothing: 2, 3")


@pytest.mark.parametrize("table", ["steps", "collectives"])
def test_damaged_bytes_are_never_read_as_times(run_dir, table):
  path, _ = run_dir
  whole = read_run(path)
  file = parts(path, table)[1]
  intact = file.read_bytes()
  end = len(intact) - 8 - int.from_bytes(intact[-8:-4], "little")  # where the footer begins
  noticed = 0
  for at in range(4, end, max(1, end // 40)):
    file.write_bytes(intact[:at] + bytes([intact[at] ^ 0x55]) + intact[at + 1:])
    run = read_run(path)
    noticed += bool(run.problems)
    if run.problems:
      continue
    np.testing.assert_array_equal(run.collectives[0].enter_ns, whole.collectives[0].enter_ns)
    for name, values in whole.durations.items():
      np.testing.assert_array_equal(run.durations[name], values)
  assert noticed > 10


def test_processes_that_left_no_word_are_named(run_dir):
  path, _ = run_dir
  assert not said(read_run(path), "in the folder 'process'") and not said(read_run(path), "no plan")
  (path / "process" / "1.json").unlink()
  assert said(read_run(path), "1 process of 2 left no file in the folder 'process'", ": 1.")
  shutil.rmtree(path / "process")
  assert said(read_run(path), "The folder 'process' is missing or empty", "2 processes")
  (path / "run.json").unlink()  # the rows still tell of two processes
  assert said(read_run(path), "The folder 'process' is missing or empty", "2 processes")


def test_a_run_without_a_plan_says_so(run_dir):
  path, _ = run_dir
  info = json.loads((path / "run.json").read_text())
  (path / "run.json").write_text(json.dumps(info | {"plan": None}))
  assert said(read_run(path), "run.json holds no plan")


@pytest.mark.parametrize("text", ["", "{", "[1]", "nonsense"])
def test_torn_json_is_no_obstacle(run_dir, text):
  path, _ = run_dir
  (path / "run.json").write_text(text)
  (path / "process" / "0.json").write_text(text)
  run = read_run(path)
  assert (run.id, run.ranks) == ("synthetic", 4)
  assert said(run, "run.json can't be read")
  assert said(run, "process/0.json")
  assert run.host_of_rank(0) == ""


def test_absurd_json_values_are_no_obstacle(run_dir):
  path, _ = run_dir
  (path / "run.json").write_text(json.dumps({
      "run": 7, "ranks": "many", "processes": None, "clock": 3,
      "plan": {"ranks": -1, "collectives": "none", "unstamped": 3, "notices": [1], "overflow": "x"}}))
  (path / "process" / "0.json").write_text(json.dumps({"process": 0, "ranks": "all", "lost_rows": "some"}))
  diagnosis = diagnose(read_run(path))
  assert diagnosis.findings[0].ranks == (3,)


def test_step_numbers_far_apart_take_no_memory(run_dir):
  path, _ = run_dir
  for table in ("steps", "collectives"):
    for file in parts(path, table):
      rewrite(file, lambda t: t.set_column(t.schema.get_field_index("step"), "step", pa.array(
          np.where(t["step"].to_numpy() < 30, t["step"].to_numpy(), t["step"].to_numpy() + 10**12))))
  run = read_run(path)
  assert len(run.steps) == 60
  assert run.steps[30] == 10**12 + 30
  assert diagnose(run).counted.size == 58


def test_absurd_rank_numbers_are_refused(run_dir):
  path, _ = run_dir
  rewrite(parts(path)[0], lambda t: t.set_column(
      t.schema.get_field_index("rank"), "rank", pa.array([2**31 - 1] * len(t), pa.int32())))
  with pytest.raises(RunError, match="damaged"):
    read_run(path)


def test_directories_without_a_run(tmp_path, run_dir):
  path, _ = run_dir
  with pytest.raises(RunError, match="no such directory"):
    read_run(tmp_path / "nowhere")
  (tmp_path / "empty").mkdir()
  with pytest.raises(RunError, match="is empty"):
    read_run(tmp_path / "empty")
  (tmp_path / "photos").mkdir()
  (tmp_path / "photos" / "cat.jpg").touch()
  with pytest.raises(RunError, match="holds no recorded run"):
    read_run(tmp_path / "photos")
  with pytest.raises(RunError, match=f"give {path}"):
    read_run(tmp_path)
  with pytest.raises(RunError, match=f"Give its directory: {path}"):
    read_run(path / "run.json")
  with pytest.raises(RunError, match=f"Give its directory: {path}"):
    read_run(parts(path)[0])
  with pytest.raises(RunError, match=f"Give its directory: {path}"):
    read_run(path / "process")
  with pytest.raises(RunError, match="is a file"):
    read_run(tmp_path / "photos" / "cat.jpg")


def test_runs_without_a_row(run_dir):
  path, _ = run_dir
  for table in ("steps", "collectives"):
    for file in parts(path, table):
      file.rename(file.with_name(file.name.replace("synthetic", "other")))
  with pytest.raises(RunError, match="only 12 parts of other runs"):
    read_run(path)
  for table in ("steps", "collectives"):
    for file in parts(path, table):
      file.rename(file.with_name(file.name.replace("other", "synthetic")))
  for table in ("steps", "collectives"):
    for file in parts(path, table):
      file.write_bytes(b"PAR1")
  with pytest.raises(RunError, match="12 parts torn or corrupt"):
    read_run(path)
  shutil.rmtree(path / "steps")
  shutil.rmtree(path / "collectives")
  with pytest.raises(RunError, match="without a single recorded step yet"):
    read_run(path)


def test_a_newer_schema_is_refused(run_dir):
  path, _ = run_dir
  (path / "run.json").write_text(json.dumps({"run": "synthetic", "schema_version": 99}))
  with pytest.raises(RunError, match="schema 99.*Upgrade"):
    read_run(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize("name", [".", "steps", "run.json"])
def test_no_permission(run_dir, name):
  path, _ = run_dir
  (path / name).chmod(0)
  try:
    with pytest.raises(RunError, match="No permission to read"):
      read_run(path)
  finally:
    (path / name).chmod(0o755)


def test_no_permission_whoever_runs_the_tests(run_dir, monkeypatch):
  path, _ = run_dir

  def refuse(*args, **kwargs):
    raise PermissionError(13, "Permission denied", str(path / "run.json"))
  monkeypatch.setattr(pathlib.Path, "read_text", refuse)
  with pytest.raises(RunError, match=r"No permission to read .*run\.json"):
    read_run(path)


@pytest.mark.parametrize(("table", "column", "values"), [
    ("steps", "step", "text"), ("steps", "forward_ns", 0.5), ("collectives", "exit_ns", None)])
def test_columns_of_another_kind_cost_only_their_part(run_dir, table, column, values):
  path, _ = run_dir

  def change(t):
    if values is None:
      return t.drop_columns([column])
    return t.set_column(t.schema.get_field_index(column), column, pa.array([values] * len(t)))
  rewrite(parts(path, table)[0], change)
  run = read_run(path)
  assert run.skipped["torn"] == 1
  assert said(run, column, parts(path, table)[0].name)
  assert sum(diagnose(run).shares.values()) == pytest.approx(1)


@pytest.mark.parametrize("seed", range(40))
def test_what_crashes_leave_behind_never_ends_in_a_traceback(run_dir, seed):
  """Files cut short anywhere, and blocks that never reached the disk and read as zeros."""
  path, _ = run_dir
  random = np.random.default_rng(seed)
  for file in sorted(f for f in path.rglob("*") if f.is_file()):
    if random.random() < 0.4:
      content = bytearray(file.read_bytes())
      at = random.integers(0, len(content))
      if random.random() < 0.5:
        del content[at:]
      else:
        content[at:at + 512] = bytes(len(content[at:at + 512]))
      file.write_bytes(content)
  try:
    diagnosis = diagnose(read_run(path))
  except RunError as error:
    assert len(str(error)) > 20
  else:
    assert diagnosis.shares is None or sum(diagnosis.shares.values()) == pytest.approx(1, abs=1e-6)
