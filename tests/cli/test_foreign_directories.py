"""Commands that read runs, given what is none, or was one: a sentence and status 2, or an answer;
never a traceback."""

import json
import os

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from jaxpace.cli.main import main
from tests.synthetic import made_up_runs
from tests.synthetic.made_up_runs import MadeUpJob

COMMANDS = {
    "report": ["report", "RUN", "--without", "rank:0", "--without", "jitter", "--json", "-"],
    "forecast": ["report", "RUN", "--forecast", "2,64", "--json", "-"],
    "compare": ["compare", "RUN", "RUN", "--fail-above", "3%", "--json", "-"],
    "fabric": ["report", "GOOD", "--floor", "RUN", "--json", "-"],
}


@pytest.fixture(scope="module")
def good(tmp_path_factory):
  path = tmp_path_factory.mktemp("good") / "run"
  made_up_runs.write(path, MadeUpJob(ranks=3, steps=150, processes=3, noise=0.1, collectives=2))
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


def torn(folder, files, random):
  victim = files[random.integers(len(files))]
  size = victim.stat().st_size
  os.truncate(victim, int(random.integers(0, size)))


def flipped(folder, files, random):
  victim = files[random.integers(len(files))]
  data = bytearray(victim.read_bytes())
  for at in random.integers(0, len(data), 5):
    data[at] ^= 0xFF
  victim.write_bytes(bytes(data))


def gone(folder, files, random):
  files[random.integers(len(files))].unlink()


def rows_changed(folder, files, random):
  """Shuffled rows, repeated rows, ranks twice, clocks that jump."""
  tables = [f for f in files if f.suffix == ".parquet"]
  victim = tables[random.integers(len(tables))]
  table = pq.read_table(victim)
  kind = random.integers(4)
  if kind == 0:
    table = table.take(random.permutation(len(table)))
  elif kind == 1:
    table = table.take(random.integers(0, len(table), len(table)))
  else:
    names = (("rank", "process") if kind == 2
             else [n for n in table.column_names if n.endswith("_ns")])
    name = names[random.integers(len(names))]
    values = table.column(name).to_numpy(zero_copy_only=False).astype(np.float64)
    values[random.integers(len(values)):] += (1 if kind == 2
                                              else float(random.integers(-10**12, 10**12)))
    column = np.nan_to_num(values).astype(table.schema.field(name).type.to_pandas_dtype())
    table = table.set_column(table.column_names.index(name), table.schema.field(name), [column])
  pq.write_table(table, victim)


@pytest.mark.parametrize("name", ["report", "forecast", "compare"])
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10**6),
       harms=st.lists(st.sampled_from([torn, flipped, gone, rows_changed]), min_size=1, max_size=3))
@example(seed=353692, harms=[flipped] * 3)  # a column's name that is no text
@example(seed=120, harms=[flipped] * 2)  # a clock that stands still
def test_a_damaged_run_gives_a_sentence_or_an_answer(tmp_path_factory, capsys, good, name, seed,
                                                     harms):
  import shutil
  folder = tmp_path_factory.mktemp("damaged") / "run"
  shutil.copytree(good, folder)
  random = np.random.default_rng(seed)
  for harm in harms:
    files = sorted(f for f in folder.rglob("*") if f.is_file())
    try:
      harm(folder, files, random)
    except (OSError, ValueError, OverflowError):
      continue  # harmed already beyond that
  check(capsys, name, good, folder)
  shutil.rmtree(folder.parent)
