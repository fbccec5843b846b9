"""`jaxpace report --stability`: text and JSON, of a run long enough and of one that is not."""

import json

import pytest

from jaxpace.trace import synthetic
from jaxpace.trace.synthetic import Job
from tests.reporting.test_command import report


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
  path = tmp_path_factory.mktemp("runs") / "calm"
  synthetic.write(path, Job(ranks=2, steps=400, noise=0.02))
  return path


def test_text_and_json_say_the_same(calm, tmp_path, capsys):
  file = tmp_path / "report.json"
  assert report(calm, "--stability", "--json", file) == 0
  text = " ".join(capsys.readouterr().out.split())
  found = json.loads(file.read_text())["stability"]
  assert "Structural stability" in text and found["decision"] in text
  assert found["growth"]["windows"] == [2, 4] and not found["growth"]["rises"]
  assert len(found["growth"]["low"]) == len(found["growth_without_drift"]["ratio"]) == 2
  assert found["drift"]["low"] <= found["drift"]["change"] <= found["drift"]["high"]
  assert (found["restarts"], found["rerun_fraction"], found["knee"]) == (0, 0, None)
  assert all(sentence in text for sentence in found["silent"])


def test_a_short_run_is_told_so(calm, capsys):
  assert report(calm, "--stability", "--steps", "0:100") == 0
  text = " ".join(capsys.readouterr().out.split())
  assert "99 steps count, 200 are needed" in text and "Not decided" in text


def test_without_the_flag_nothing_changes(calm, capsys):
  assert report(calm, "--json", "-") == 0
  assert "stability" not in json.loads(capsys.readouterr().out)
