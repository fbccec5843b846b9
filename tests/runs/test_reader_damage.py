"""Reads run directories whose files are damaged: what is lost, and that nothing wrong is read."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxpace.diagnose.diagnose import diagnose
from jaxpace.runs.reader import read_run
from jaxpace.runs.run import MISSING, RunError
from tests.quick import examples, long
from tests.runs.written import both, parts, replace, rewrite, said


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
  merged.write_bytes(merged.read_bytes()[:500])
  run = read_run(path)
  np.testing.assert_allclose(run.durations["forward"], truth.forward * 1e-9, rtol=1e-6)
  assert said(run, merged.name)


@pytest.mark.parametrize("table", [*long("steps"), "collectives"])
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
      "plan": {"ranks": -1, "collectives": "none", "unstamped": 3, "notices": [1],
               "overflow": "x"}}))
  (path / "process" / "0.json").write_text(
      json.dumps({"process": 0, "ranks": "all", "lost_rows": "some"}))
  diagnosis = diagnose(read_run(path))
  assert diagnosis.findings[0].ranks == (3,)


def test_step_numbers_far_apart_take_no_memory(run_dir):
  path, _ = run_dir
  replace(both(path), "step", lambda step: np.where(step < 30, step, step + 10**12))
  run = read_run(path)
  assert len(run.steps) == 60
  assert run.steps[30] == 10**12 + 30
  assert diagnose(run).selected.size == 58


@pytest.mark.parametrize(("number", "words"), [
    (2**31 - 1, ("'steps'", "whose rank is not a number from 0 to 16,777,215")),
    (2**24 - 9, ("1 rank left out: numbers from 16,777,207 on",))])
def test_absurd_rank_numbers_cost_only_their_rows(run_dir, number, words):
  path, _ = run_dir
  replace(parts(path)[:1], "rank", lambda rank: np.full_like(rank, number))
  run = read_run(path)
  assert run.ranks == 4 and said(run, *words)
  replace(both(path), "rank", lambda rank: np.full_like(rank, number))
  with pytest.raises(RunError):
    read_run(path)


@pytest.mark.parametrize(("table", "column", "values"), [
    ("steps", "step", "text"), ("steps", "forward_ns", 0.5), ("collectives", "exit_ns", None)])
def test_columns_of_another_kind_cost_only_their_part(run_dir, table, column, values):
  path, _ = run_dir
  if values is None:
    rewrite(parts(path, table)[0], lambda t: t.drop_columns([column]))
  else:
    replace(parts(path, table)[:1], column, lambda old: np.full(len(old), values))
  run = read_run(path)
  assert said(run, column, parts(path, table)[0].name)
  assert sum(diagnose(run).shares.values()) == pytest.approx(1)


@pytest.mark.parametrize("seed", range(examples(30)))
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
