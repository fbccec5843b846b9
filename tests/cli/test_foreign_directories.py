"""Commands that read runs, given what is none: a sentence and status 2, never a traceback."""

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
NO_PARQUET = bytes(range(250)) * 2
WRONG = {"nothing": None, "empty": {}, "a file": NO_PARQUET,
         "foreign": {"steps/data.parquet": NO_PARQUET, "run.json": b"{}"},
         **{f"run.json of {text}": {"run.json": text.encode()}
            for text in ("[]", "null", "{", '{"run": 3, "ranks": "x", "plan": []}', "")}}
"""What stands in the place of a run: files by name, a file's bytes, or nothing."""


@pytest.fixture(scope="module")
def good(tmp_path_factory):
  path = tmp_path_factory.mktemp("good") / "run"
  synthetic_runs.write(path,
                       SyntheticJob(ranks=3, steps=150, processes=3, noise=0.1, collectives=2))
  return path


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_no_run_is_a_sentence(tmp_path, capsys, name, wrong, good):
  run = tmp_path / "run"
  if isinstance(WRONG[wrong], bytes):
    run.write_bytes(WRONG[wrong])
  elif WRONG[wrong] is not None:
    run.mkdir()
    for file, content in WRONG[wrong].items():
      (run / file).parent.mkdir(exist_ok=True)
      (run / file).write_bytes(content)
  arguments = [str({"RUN": run, "GOOD": good}.get(word, word)) for word in COMMANDS[name]]
  assert main(arguments) == 2
  captured = capsys.readouterr()
  assert captured.err.startswith(f"jaxpace {arguments[0]}: ") and not captured.out
  assert captured.err.strip().count("\n") == 0 and "Traceback" not in captured.err
