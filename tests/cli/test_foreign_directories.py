"""Commands that read runs, given what is none: a sentence and status 2;
never a traceback."""

import json

import numpy as np
import pytest

from jaxpace.cli.main import main
from tests.synthetic import synthetic_runs
from tests.synthetic.synthetic_runs import SyntheticJob

COMMANDS = {
    "report": ["report", "RUN", "--without", "rank:0", "--without", "jitter", "--json", "-"],
    "forecast": ["report", "RUN", "--forecast", "2,64", "--json", "-"],
    "compare": ["compare", "RUN", "RUN", "--fail-above", "3%", "--json", "-"],
    "fabric": ["report", "GOOD", "--floor", "RUN", "--json", "-"],
}


@pytest.fixture(scope="module")
def good(tmp_path_factory):
  path = tmp_path_factory.mktemp("good") / "run"
  synthetic_runs.write(path,
                       SyntheticJob(ranks=3, steps=150, processes=3, noise=0.1, collectives=2))
  return path


def empty(path, random):
  path.mkdir()


def a_file(path, random):
  path.write_bytes(random.bytes(200))


def nothing(path, random):
  pass


def foreign(path, random):
  (path / "steps").mkdir(parents=True)
  (path / "steps" / "data.parquet").write_bytes(random.bytes(500))
  (path / "run.json").write_text("{}")


def json_of_others(path, random):
  path.mkdir()
  (path / "run.json").write_text(
      random.choice(["[]", "null", "{", '{"run": 3, "ranks": "x", "plan": []}', ""]))


WRONG = (empty, a_file, nothing, foreign, json_of_others)


def check(capsys, name, good, run):
  arguments = [str({"RUN": run, "GOOD": good}.get(a, a)) for a in COMMANDS[name]]
  status = main(arguments)
  captured = capsys.readouterr()
  assert "Traceback" not in captured.err
  if status == 2:
    assert (captured.err.startswith(f"jaxpace {arguments[0]}: ")
            and len(captured.err.strip().splitlines()) == 1)
    assert not captured.out
  else:
    assert status in (0, 1)
    json.loads(captured.out, parse_constant=lambda c: pytest.fail(f"{c} in the JSON"))
  return status


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("make", WRONG)
def test_what_is_no_run_is_a_sentence(tmp_path, capsys, name, make, good):
  make(tmp_path / "run", np.random.default_rng(0))
  assert check(capsys, name, good, tmp_path / "run") == 2
