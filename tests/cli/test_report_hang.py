"""`jaxpace report` of a job that hangs or was killed in a hang: the first cause from the files
alone."""

import json
import shutil

import pytest

from jaxpace.cli.main import main
from jaxpace.hang import read_rings
from tests.hang.test_read import Directory
from tests.synthetic import synthetic_runs
from tests.synthetic.synthetic_runs import SyntheticJob

ENDED = "What the job waited for last"
"""The section of a job that no longer writes."""


@pytest.fixture(autouse=True)
def nobody_writes(monkeypatch):
  """The made-up processes write nothing, however long their rings are watched."""
  monkeypatch.setattr(read_rings, "WATCHED_SECONDS", 0.01)


def shown(capsys):
  out, err = capsys.readouterr()
  return " ".join(out.replace("│", " ").split()), err


def test_a_job_that_hung_before_any_row_was_written_is_told_from_its_rings(tmp_path, capsys):
  (tmp_path / "run").mkdir()
  Directory(tmp_path / "run", at=(4, 0))
  assert main(["report", str(tmp_path / "run"), "--json", str(tmp_path / "report.json")]) == 0
  words, errors = shown(capsys)
  document = json.loads((tmp_path / "report.json").read_text())
  cause, = document["hang"]["causes"]
  assert (cause["code"], cause["ranks"]) == ("absent", [3]) and errors
  assert "all-reduce.0 (model.py:10)" in words
  assert cause["sentences"] and all(sentence in words for sentence in cause["sentences"])
  assert document["run"] == "run" and document["problems"]


def test_a_recorded_run_that_was_killed_in_a_hang_says_so_above_its_report(tmp_path, capsys):
  run, report = tmp_path / "run", tmp_path / "report.json"
  synthetic_runs.write(run, SyntheticJob(ranks=4, steps=120, processes=4, noise=0.02))
  assert main(["report", str(run), "--json", str(report)]) == 0
  words, _ = shown(capsys)
  assert ENDED not in words and json.loads(report.read_text())["hang"] is None
  job = Directory(run, run="synthetic")
  for process in range(4):
    job.process(process, wall=0)
  assert (main(["report", str(run), "--json", str(report), "--html", str(tmp_path / "report.html")])
          == 0)
  words, _ = shown(capsys)
  document = json.loads(report.read_text())
  assert ENDED in words
  assert all(sentence in words for sentence in document["hang"]["causes"][0]["sentences"])
  assert document["hang"]["causes"][0]["code"] == "absent" and document["steps"] == 120
  assert document["hang"]["running"] is False and document["verdict_code"] == "healthy"
  assert ENDED in (tmp_path / "report.html").read_text()
  shutil.rmtree(run / "marks")
  assert main(["report", str(run), "--json", str(report)]) == 0
  assert json.loads(report.read_text())["hang"] is None


def test_without_rings_there_is_no_more_to_say_than_before(tmp_path, capsys):
  (tmp_path / "run").mkdir()
  Directory(tmp_path / "run")
  shutil.rmtree(tmp_path / "run" / "marks")
  assert main(["report", str(tmp_path / "run")]) == 2
  assert "without a single recorded step" in shown(capsys)[1]
