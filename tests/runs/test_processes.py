"""What processes say of themselves."""

import json

from jaxpace.runs.rundir import read_processes


def write(folder, name, value):
  (folder / "process").mkdir(exist_ok=True)
  (folder / "process" / name).write_text(value if isinstance(value, str) else json.dumps(value))


def test_those_of_the_run_are_read_and_all_else_is_a_problem(tmp_path):
  write(tmp_path, "0.json", {"run": "a", "process": 0, "hostname": "x"})
  write(tmp_path, "3.json", {"run": "a"})
  write(tmp_path, "4.json", {"run": "b", "process": 4})
  write(tmp_path, "5.json", "{")
  write(tmp_path, "mine.json", {"run": "a"})
  problems = []
  found = dict(read_processes(tmp_path, "a", problems))
  assert list(found) == [0, 3] and found[0]["hostname"] == "x"
  assert len(problems) == 3
  for name, problem in zip(("4", "5", "mine"), problems, strict=True):
    assert problem.startswith(f"process/{name}.json ")
  assert sorted(dict(read_processes(tmp_path, None, []))) == [0, 3, 4]


def test_a_file_that_may_not_be_read_is_a_problem(tmp_path, monkeypatch):
  write(tmp_path, "0.json", {"run": "a"})

  def refuse(path, schema):
    raise PermissionError(13, "Permission denied")

  monkeypatch.setattr("jaxpace.runs.rundir.read_document", refuse)
  problems = []
  assert not list(read_processes(tmp_path, "a", problems)) and "Permission denied" in problems[0]
