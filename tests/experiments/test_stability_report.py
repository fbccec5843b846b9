"""`experiments.stability.report`: text and JSON, of a run long enough and of one that is not."""

import json

import pytest

from experiments.stability.report import main
from jaxpace.testing import made_up_runs
from jaxpace.testing.made_up_runs import MadeUpJob


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
  path = tmp_path_factory.mktemp("runs") / "calm"
  made_up_runs.write(path, MadeUpJob(ranks=2, steps=400, noise=0.02))
  return path


def test_text_and_json_say_the_same(calm, tmp_path, capsys):
  file = tmp_path / "report.json"
  assert main([str(calm), "--json", str(file)]) == 0
  text = " ".join(capsys.readouterr().out.split())
  found = json.loads(file.read_text())
  assert "Structural stability" in text and found["decision"] in text
  assert found["growth"]["windows"] == [2, 4] and not found["growth"]["rises"]
  assert len(found["growth"]["low"]) == len(found["growth_without_drift"]["ratio"]) == 2
  assert found["drift"]["low"] <= found["drift"]["change"] <= found["drift"]["high"]
  assert (found["restarts"], found["rerun_fraction"], found["knee"]) == (0, 0, None)
  assert all(sentence in text for sentence in found["silent"])


def test_a_short_run_is_told_so(calm, capsys):
  assert main([str(calm), "--steps", "0:100"]) == 0
  text = " ".join(capsys.readouterr().out.split())
  assert "99 steps count, 200 are needed" in text and "Not decided" in text


def test_what_is_no_run_is_refused_in_a_sentence(tmp_path, capsys):
  assert main([str(tmp_path / "nowhere")]) == 2
  assert "experiments.stability.report: " in capsys.readouterr().err
