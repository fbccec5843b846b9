"""`jaxpace control` as a user meets it."""

import json
import os

import pytest

from jaxpace.cli.main import main
from jaxpace.live import control_file
from jaxpace.live.control_file import ControlRequest
from tests.synthetic import synthetic_runs
from tests.synthetic.synthetic_runs import SyntheticJob


def control(*arguments) -> int:
  return main(["control", *map(str, arguments)])


def written(path):
  return json.loads((path / "control.json").read_text())


def test_changes_add_up_and_reset_undoes_them(tmp_path, capsys):
  assert control(tmp_path) == 0 and not (tmp_path / "control.json").exists()
  assert "pacing on, as the pacer was made" in capsys.readouterr().out
  assert control(tmp_path, "--off") == 0 and written(tmp_path) == {"enabled": False}
  assert (control(tmp_path, "--max-delay", "5ms", "--threshold", "0.1", "--ranks", "0-2,9",
                  "--from-step", "100") == 0)
  expected = {"enabled": False, "max_delay": 5e-3, "threshold": 0.1, "ranks": [0, 1, 2, 9],
              "from_step": 100}
  assert written(tmp_path) == expected
  assert (control(tmp_path, "--on", "--ranks", "all", "--max-delay", "made", "--until-step", "500")
          == 0)
  assert (written(tmp_path) == {"enabled": True, "threshold": 0.1, "from_step": 100,
                                "until_step": 500})
  capsys.readouterr()
  assert control(tmp_path) == 0
  out = capsys.readouterr().out
  assert ("pacing on, threshold 0.1, from step 100, until step 500" in out
          and "applied  nothing yet" in out)
  control_file.note(tmp_path / "control.json", 1234, 0, ControlRequest(enabled=False))
  assert control(tmp_path, "--reset") == 0 and written(tmp_path) == {"enabled": True}
  assert "applied  pacing off, from step 1,234 on" in capsys.readouterr().out
  assert (sorted(path.name for path in tmp_path.iterdir())
          == ["control.applied.jsonl", "control.json"])


def test_nodes_are_the_ranks_of_the_first_hosts(tmp_path, capsys):
  synthetic_runs.write(tmp_path, SyntheticJob(ranks=8, steps=20, processes=4, hosts=2))
  assert control(tmp_path, "--nodes", "1") == 0 and written(tmp_path)["ranks"] == [0, 1, 2, 3]
  assert control(tmp_path, "--nodes", "3") == 2 and "has 2 hosts, not 3" in capsys.readouterr().err


@pytest.mark.parametrize("arguments, words", [
    (["--max-delay", "nan"], "'nan' is not a finite number"),
    (["--threshold", "inf"], "'inf' is not a finite number"),
    (["--threshold=-1"], "must be at least 0, not -1"),
    (["--from-step", "9", "--until-step", "5"], "until_step=5 must be above from_step=9: no step "
     "lies between them. `jaxpace control RUN --off` switches pacing off.\n"),
    *((given, "") for given in (
        ["--max-delay", "5"], ["--max-delay", "0.02"], ["--max-delay", "inf"],
        ["--max-delay", "nanms"], ["--max-delay", "5m"], ["--max-delay", "-1"],
        ["--max-delay", "mades"], ["--max-delay", "11s"], ["--threshold", "5"],
        ["--threshold", "x"], ["--ranks", "made"], ["--ranks", "3-1"], ["--ranks", ""],
        ["--from-step", "-1"], ["--on", "--off"], ["--nodes", "1", "--ranks", "0"]))])
def test_slips_are_told_and_change_nothing(tmp_path, arguments, words, capsys):
  assert control(tmp_path, *arguments) == 2 and words in capsys.readouterr().err
  assert not (tmp_path / "control.json").exists()


def test_no_run_and_a_broken_file_are_sentences(tmp_path, capsys):
  assert (control(tmp_path / "none", "--off") == 2
          and "There is no directory" in capsys.readouterr().err)
  (tmp_path / "control.json").write_text("{")
  assert control(tmp_path, "--threshold", "0.1") == 2 and "--reset" in capsys.readouterr().err
  assert control(tmp_path, "--reset", "--ranks", "0") == 0 and written(tmp_path)["ranks"] == [0]


@pytest.mark.parametrize("what", ["broken", "pipe", "huge", "notes", "run"])
def test_off_works_whatever_stands_there(tmp_path, what, capsys):
  synthetic_runs.write(tmp_path, SyntheticJob(ranks=2, steps=2))
  target = tmp_path / "control.json"
  if what == "broken":
    target.write_text("[" * 100_000)
  elif what == "huge":
    target.write_bytes(b" " * (1 << 21))
  else:
    for name in {"pipe": ["control.json"], "notes": ["control.applied.jsonl"],
                 "run": ["process/0.json"]}[what]:
      (tmp_path / name).unlink(missing_ok=True)
      os.mkfifo(tmp_path / name)
  assert control(tmp_path, "--off") == 0 and written(tmp_path) == {"enabled": False}
  assert ("This overwrites it" in capsys.readouterr().err) == (what in ("broken", "pipe", "huge"))
  if what == "run":
    assert control(tmp_path, "--nodes", "1") == 2 and "which ranks are" in capsys.readouterr().err
