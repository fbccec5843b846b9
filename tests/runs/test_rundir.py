import json
import os

import pytest

from jaxpace.runs import rundir


def test_json_is_replaced_as_a_whole(tmp_path, monkeypatch):
  path = tmp_path / "process" / "0.json"
  rundir.write_json(path, {"a": 1})
  with monkeypatch.context() as patch:
    patch.setattr(os, "replace", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
      rundir.write_json(path, {"a": 2})
  assert rundir.read_json(path) == {"a": 1}
  assert [p.name for p in path.parent.iterdir()] == ["0.json"]


@pytest.mark.parametrize("text", ["", "[1]", '{"a":', "\xff"])
def test_what_is_no_json_object_reads_as_none(tmp_path, text):
  (tmp_path / "x.json").write_text(text, encoding="latin-1")
  assert rundir.read_json(tmp_path / "x.json") is None
  assert rundir.read_json(tmp_path / "missing.json") is None


def test_ids_differ_and_say_when(tmp_path):
  now = 1_767_323_045_000_000_000  # 2026-01-02 03:04:05 UTC
  first = rundir.claim(tmp_path / "a", False, now)
  second = rundir.claim(tmp_path / "b", True, now)
  assert first.run != second.run
  assert first.run.startswith("20260102T030405-") and (first.attempt, second.attempt) == (0, 0)


def test_a_process_moves_only_its_own_leftovers(tmp_path):
  """On a disk of its own host, process 1 sets aside what it wrote for an earlier run, and nothing
  else."""
  names = ["old-p00001.000000-000000.parquet", "old-p00002.000000-000000.parquet",
           "new-p00001.000000-000000.parquet"]
  (tmp_path / "steps").mkdir()
  for name in names:
    (tmp_path / "steps" / name).touch()
  for process, run in ((1, "old"), (2, "old")):
    rundir.write_json(tmp_path / "process" / f"{process}.json", {"run": run, "schema_version": 1})
  assert rundir.set_aside(tmp_path, "new", process=1) == 2
  assert sorted(p.name for p in (tmp_path / "steps").iterdir()) == sorted(names[1:])
  assert [p.name for p in (tmp_path / "process").iterdir()] == ["2.json"]
  assert (tmp_path / ".previous" / "old" / "steps" / names[0]).exists()


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_id_can_not_lead_out_of_the_directory(tmp_path, resume):
  rundir.write_json(tmp_path / "run" / "run.json", {"run": "../../escaped", "schema_version": 1})
  assert rundir.claim(tmp_path / "run", resume, 0).attempt == 0
  assert sorted(p.name for p in tmp_path.iterdir()) == ["run"]
  assert (tmp_path / "run" / ".previous" / "escaped" / "run.json").exists()


@pytest.mark.parametrize("name", ["a\0b", "..", "x" * 190, "\ud800", "a/../.."])
def test_a_run_id_that_can_be_no_folders_name_keeps_no_run_from_being_recorded(tmp_path, name):
  rundir.write_json(tmp_path / "process" / "0.json", {"run": name, "schema_version": 1})
  rundir.write_json(tmp_path / "run.json", {"run": name, "schema_version": 1})
  assert rundir.claim(tmp_path, False, 0).attempt == 0
  assert sorted(path.name for path in tmp_path.iterdir()) == [".previous", "process"]
  aside, = (tmp_path / ".previous").iterdir()
  assert sorted(path.name for path in aside.iterdir()) == ["process", "run.json"]


# What processes say of themselves.

def write(folder, name, value):
  """What a process says of itself, or damage."""
  (folder / "process").mkdir(exist_ok=True)
  (folder / "process" / name).write_text(value if isinstance(value, str) else json.dumps(value))


def test_those_of_the_run_are_read_and_all_else_is_a_problem(tmp_path):
  write(tmp_path, "0.json", {"run": "a", "process": 0, "hostname": "x"})
  write(tmp_path, "3.json", {"run": "a"})
  write(tmp_path, "4.json", {"run": "b", "process": 4})
  write(tmp_path, "5.json", "{")
  write(tmp_path, "mine.json", {"run": "a"})
  problems = []
  first, second = rundir.read_processes(tmp_path, "a", problems)
  assert (first.process, first.host, second.process) == (0, "x", 3)
  assert len(problems) == 3
  for name, problem in zip(("4", "5", "mine"), problems, strict=True):
    assert problem.startswith(f"process/{name}.json ")
  assert [p.process for p in rundir.read_processes(tmp_path, None, [])] == [0, 3, 4]


def test_a_file_that_may_not_be_read_is_a_problem(tmp_path, monkeypatch):
  write(tmp_path, "0.json", {"run": "a"})

  def refuse(path, schema):
    raise PermissionError(13, "Permission denied")

  monkeypatch.setattr("jaxpace.runs.rundir.read_document", refuse)
  problems = []
  assert not list(rundir.read_processes(tmp_path, "a", problems))
  assert "Permission denied" in problems[0]
