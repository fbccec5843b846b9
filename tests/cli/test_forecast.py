"""`jaxpace report --forecast` as a user meets it."""

import json
import os

import pytest

from jaxpace.cli.main import main
from jaxpace.diagnose.words.codes import Silence
from tests.synthetic import synthetic_runs
from tests.synthetic.synthetic_runs import SyntheticJob


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  path = tmp_path_factory.mktemp("forecast") / "run"
  synthetic_runs.write(path, SyntheticJob(ranks=8, steps=300, processes=8, hosts=1, noise=0.1))
  return path


def call(*arguments):
  return main(["report", *map(str, arguments)])


def test_text_and_json_say_the_same(run, tmp_path, capsys):
  target = tmp_path / "forecast.json"
  assert call(run, "--forecast", "8,32,4096", "--ranks-per-host", "5000", "--json", target) == 0
  text = capsys.readouterr().out
  document = json.loads(target.read_text())["forecast"]
  assert document["ranks"] == 8 and document["steps"] == 299 and document["hosts"] == 1
  same, more, far = document["forecasts"]
  assert same["step_time"]["estimate"] == pytest.approx(document["recorded"]["step_time"], rel=2e-3)
  assert more["step_time"]["low"] < more["step_time"]["estimate"] < more["step_time"]["high"]
  assert more["step_time"]["estimate"] > same["step_time"]["estimate"]
  assert far["step_time"] is None and far["silent_code"] == Silence.TOO_SHORT
  assert f"{1e3 * more['step_time']['estimate']:.1f} ms" in text and "4,096   unknown" in text
  assert ("4,096 ranks can't be forecast. The run is too short" in " ".join(text.split())
          and "silent" not in text)


def test_a_described_fabric_is_used(run, tmp_path, capsys):
  fabric = tmp_path / "fabric.json"
  fabric.write_text(
      json.dumps({"levels": [{"level": "flat", "ranks": 64, "alpha": 1e-4, "beta": 0}]}))
  assert call(run, "--forecast", "16,65", "--floor", fabric, "--json", "-") == 0
  document = json.loads(capsys.readouterr().out)["forecast"]
  near, far = document["forecasts"]
  assert (near["transfer"] == pytest.approx(2e-3 + 16e-4, rel=1e-6)
          and near["transfer_source"] == "fabric")
  assert far["silent_code"] == Silence.BEYOND_FABRIC


@pytest.mark.parametrize("text", ["", "x", "0", "8,", "1.5", "99999999"])
def test_numbers_that_are_none_are_refused(text, run, capsys):
  assert call(run, "--forecast", text) == 2
  assert "write them like 128,512,2048" in capsys.readouterr().err


def test_a_fabric_that_is_no_file_is_not_waited_for(tmp_path, capsys):
  synthetic_runs.write(tmp_path / "run", synthetic_runs.SyntheticJob(steps=120))
  os.mkfifo(tmp_path / "fabric.json")
  assert call(tmp_path / "run", "--floor", tmp_path / "fabric.json") == 2
  assert "is a FIFO, not a regular file" in capsys.readouterr().err
