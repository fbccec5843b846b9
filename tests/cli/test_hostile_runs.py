"""Every file of a run may be anything: commands end in a report or in one sentence, in bounded time
and memory.

`JAXPACE_FUZZ_SECONDS=600 pytest tests/cli/test_hostile_runs.py -k fuzz` looks longer, from another
seed each time.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time
import tracemalloc

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.cells import cell_len

from jaxpace.cli.main import main
from jaxpace.diagnose.diagnose import diagnose
from jaxpace.diagnose.follower import Follower
from jaxpace.files.folders import ForeignFileError
from jaxpace.hang import read_rings
from jaxpace.runs import rundir, schema
from jaxpace.runs.reader import read_run
from tests.cli import hostile
from tests.cli.sound_runs import JOB, write_inputs, write_observed, write_sound
from tests.quick import QUICK, examples
from tests.synthetic import synthetic_groups, synthetic_runs
from tests.synthetic.synthetic_observed import observed

ROOT = pathlib.Path(__file__).parents[2]
SECONDS = os.environ.get("JAXPACE_FUZZ_SECONDS")


@pytest.fixture(autouse=True)
def _watched_for_a_moment(monkeypatch):
  """Runs that hang are watched for seconds to see who still writes: nobody does."""
  monkeypatch.setattr(read_rings, "WATCHED_SECONDS", 0.01)


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
  path = tmp_path_factory.mktemp("sound") / "run"
  write_sound(path)
  return path


@pytest.fixture
def run(sound, tmp_path):
  """A run of the test's own, to be damaged."""
  return pathlib.Path(shutil.copytree(sound, tmp_path / "run"))


@pytest.mark.long
@pytest.mark.parametrize("write", [write_sound, write_observed], ids=["instrumented", "observed"])
def test_fuzz_every_file_of_a_run_and_what_commands_are_given(tmp_path, write):
  write(tmp_path / "run")
  write_inputs(tmp_path / "run" / "inputs")
  seconds, seed = ((float(SECONDS), int(time.time()) * 1000) if SECONDS
                   else (4.0 if QUICK else 20.0, 1))
  done = subprocess.run(
      [sys.executable, "-m", "tests.cli.hostile_worker", str(tmp_path / "run"), str(tmp_path),
       str(seconds), str(seed)],
      cwd=ROOT, capture_output=True, text=True, timeout=seconds + 1500, check=False,
      env={**os.environ, "JAX_PLATFORMS": "cpu"})
  assert done.stdout.strip(), done.stderr[-4000:]
  found = json.loads(done.stdout.splitlines()[-1])
  print({name: found[name] for name in ("tried", "files", "by_command", "next_seed", "slowest",
                                        "grown_mib")})
  assert not found["failures"], f"{len(found['failures'])} of {found['tried']}:\n" + "\n".join(
      found["failures"][:5])
  assert found["tried"] >= 5


@pytest.mark.parametrize("seed", range(examples(36)))
def test_a_damaged_run_is_reported_with_sound_numbers_or_refused(run, tmp_path, capsys, seed):
  target = tmp_path / "report.json"
  said = hostile.damage(random.Random(seed), run)
  with limit(600):
    status, out, err = jaxpace(capsys, "report", run, "--json", target)
  assert "Traceback" not in out + err, said
  if status:
    assert status == 2 and err.startswith("jaxpace report: ") and err.count("\n") == 1, said
    assert not target.exists()
    return
  document = json.loads(target.read_text(), parse_constant=lambda name: pytest.fail(name))
  for shares in (document["shares"], *document["per_host"].values(),
                 *(row["shares"] for row in document["per_rank"])):
    if shares is not None and any(shares.values()):
      assert sum(shares.values()) == pytest.approx(1, abs=1e-6), said
      assert min(shares.values()) >= -1e-9, said
  for finding in document["findings"]:
    assert -1e-9 <= finding["share"] <= 1 + 1e-9 and 0 <= finding["confidence"] <= 1, said


def jaxpace(capsys, *argv) -> tuple[int, str, str]:
  """Runs a command in this process; a traceback would be an exception here."""
  capsys.readouterr()
  status = main([str(argument) for argument in argv])
  done = capsys.readouterr()
  return status, done.out, done.err


def reported(capsys, run, *more) -> str:
  """What the report of a run says, in one line."""
  status, out, _ = jaxpace(capsys, "report", run, *more)
  assert status == 0
  return " ".join(out.split())


def alter(run, table, **columns) -> None:
  """Gives columns of all parts of a table other values."""
  for file in sorted((run / table).glob("*.parquet")):
    rows = pq.read_table(file)
    for name, make in columns.items():
      made = make(rows) if callable(make) else pa.array([make] * rows.num_rows)
      rows = rows.set_column(rows.column_names.index(name), name, made)
    pq.write_table(rows, file)


def document(run, name, change) -> None:
  path = run / name
  value = json.loads(path.read_text())
  change(value)
  path.write_text(json.dumps(value))


JSON_FILES = ("run.json", "process/0.json", "locality/0.json", "links.json", "watchdog/0.jsonl",
              "control.json", "control.applied.jsonl")
EVERY = (("report",), ("watch", "--once"), ("report", "--forecast", "8"),
         ("replay", "--pacer", "pace_early_ranks()"))


def all_end_well(capsys, run, sound, commands=EVERY) -> list[str]:
  """Every command ends in a report, or in one sentence; returns the sentences."""
  sentences = []
  for command, *rest in (*commands, ("compare", sound)):
    status, out, err = jaxpace(capsys, command, run, *rest)
    assert status in (0, 2), (command, status, err)
    assert "Traceback" not in out + err
    if status:
      assert err.startswith(f"jaxpace {command}: ")
      assert err.count("\n") == 1
      sentences.append(err)
  return sentences


def test_steps_without_a_sign_are_read_as_others(run, sound, capsys):
  for table in ("steps", "collectives"):
    alter(run, table, step=lambda rows: rows["step"].cast(pa.uint64()))
  expected, same = (json.loads(jaxpace(capsys, "report", path, "--json", "-")[1])
                    for path in (sound, run))
  assert (same["verdict"], same["step_time"]) == (expected["verdict"], expected["step_time"])
  alter(run, "steps", step=lambda rows: pa.array(np.full(len(rows), 2**64 - 1, np.uint64)))
  assert "whose step is not a number from 0 to" in reported(capsys, run)


@pytest.fixture(scope="module")
def hung(tmp_path_factory):
  path = tmp_path_factory.mktemp("hung") / "run"
  write_observed(path)
  return path


@pytest.mark.parametrize("kind, table", [
    ("instrumented", "steps"), ("instrumented", "collectives"), ("instrumented", "hosts"),
    ("instrumented", "listening"), ("observed", "steps"), ("observed", "collectives")])
def test_no_column_of_a_table_is_needed(tmp_path, kind, table):
  run = tmp_path / kind
  if kind == "instrumented":
    synthetic_runs.write(run, dataclasses.replace(JOB, steps=6))
    write_listening(run)
  else:
    synthetic_groups.write(run, observed(layers=1, steps=6, every=2), run="observed")
  files = {file: pq.read_table(file) for file in sorted((run / table).glob("*.parquet"))}
  for name in sorted({name for rows in files.values() for name in rows.column_names}):
    for lacking in (list(files)[1:], list(files)):  # some parts, and all of them
      for file in lacking:
        pq.write_table(files[file].drop_columns([name]), file)
      diagnose(read_run(run))
      Follower(run).poll(0.0, 0.0)
    for file, rows in files.items():
      pq.write_table(rows, file)


def write_listening(run) -> None:
  (run / "listening").mkdir()
  for file in (run / "steps").iterdir():
    pq.write_table(pa.table({name: np.arange(4) for name in schema.LISTENING.names}),
                   run / "listening" / file.name)


@pytest.mark.parametrize("described, column", [
    (True, "process"), (True, "bytes"), (False, "name")])
def test_one_part_of_several_lacks_a_column(hung, tmp_path, capsys, described, column):
  run = pathlib.Path(shutil.copytree(hung, tmp_path / "run"))
  file = min((run / "collectives").glob("*.parquet"))
  data = pq.read_table(file)
  if column in data.column_names:
    pq.write_table(data.drop_columns([column]), file)
  if not described:
    (run / "run.json").unlink()
  # With what is left there may be too few steps to compare.
  said = all_end_well(capsys, run, hung, commands=(("report",), ("watch", "--once")))
  assert [one for one in said if not one.startswith("jaxpace compare: ")] == []


def test_a_footer_whose_row_group_names_a_column_in_no_text(run, sound, capsys):
  for file in (run / "hosts").glob("*.parquet"):
    before, name, after = file.read_bytes().rpartition(b"retransmits")
    file.write_bytes(before + name[:-1] + b"\x90" + after)
  assert all_end_well(capsys, run, sound, commands=(("report",),)) == []


def test_round_trips_that_take_no_time(sound, tmp_path, capsys):
  synthetic_runs.write(tmp_path / "run", dataclasses.replace(JOB, steps=50))
  alter(tmp_path / "run", "hosts", tcp_rtt_ns=0)
  assert all_end_well(capsys, tmp_path / "run", sound, commands=(("report",),)) == []


def test_a_note_of_what_was_applied_that_is_anything(run, capsys):
  for text in ("[" * 10_000, '{"step": ' + "[" * 900 + "]" * 900 + "}", "[]", "null", "3",
               '{"step": 3, "unix_ns": 1, "settings": []}',
               '{"step": 1e400, "unix_ns": 1, "settings": {}}'):
    (run / "control.applied.jsonl").write_text(text + "\n")
    status, out, err = jaxpace(capsys, "control", run)
    assert (status, err) == (0, "") and "applied  nothing yet" in out


@pytest.mark.parametrize("deep", ["[" * 100_000, '{"run": ' + "[" * 900 + "]" * 900 + "}"],
                         ids=["torn", "whole"])
def test_json_nested_deeply(run, sound, capsys, deep):
  for name in JSON_FILES:
    (run / name).write_text(deep)
  assert (all_end_well(capsys, run, sound, commands=(("report",), ("watch", "--once"), ("doctor",)))
          == [])
  said = reported(capsys, run)
  for name in ("run.json", "process/0.json", "locality/0.json"):
    assert f"{name} nests more than 40 objects and lists inside each other" in said


def test_a_wrong_value_costs_only_itself_and_is_named(run, capsys):
  document(run, "run.json", lambda info: info["plan"].update(overflow="many"))
  document(run, "process/0.json", lambda info: info.update(lost_rows=[3]))
  out = reported(capsys, run)
  assert "run.json: 'plan.overflow' is left out: expected `int`" in out
  assert "process/0.json: 'lost_rows' is left out: expected `int`" in out
  assert "inside scan" in out  # the rest of the plan is there


def test_a_long_text_instead_of_notices(run, capsys):
  document(run, "run.json",
           lambda info: info["plan"].update(notices="n" * 10_000_000, collectives="c" * 1_000_000))
  tracemalloc.start()
  out = reported(capsys, run)
  peak = tracemalloc.get_traced_memory()[1]
  tracemalloc.stop()
  assert "'plan.notices' is left out: expected `array`, got `str`" in out
  assert peak < 300e6


@pytest.mark.parametrize("kind", ["fifo", "device"])
def test_a_fifo_or_a_device_in_a_files_place(run, sound, capsys, kind):
  parts = [sorted((run / table).glob("*.parquet"))[0]
           for table in ("steps", "collectives", "hosts")]
  for path in (*(run / name for name in JSON_FILES), *parts):
    path.unlink()
    if kind == "fifo":
      os.mkfifo(path)
    else:
      path.symlink_to("/dev/zero")
  with limit(600):
    assert all_end_well(capsys, run, sound, commands=(("report",), ("watch", "--once"))) == []


@pytest.mark.parametrize("name", ["run.json", "process/0.json"])
def test_a_recorder_starts_where_a_fifo_lies(run, name):
  (run / name).unlink()
  os.mkfifo(run / name)
  with limit(600):
    if name == "run.json":
      with pytest.raises(ForeignFileError, match="was not written by jaxpace"):
        rundir.claim(run, False, 10**18)
    else:
      identity = rundir.claim(run, False, 10**18)
      assert identity.attempt == 0


def test_one_rank_number_far_from_the_others_takes_no_memory(run, tmp_path, capsys):
  for table in ("steps", "collectives"):
    alter(run, table, rank=lambda rows: pa.array(np.where(
        rows["rank"].to_numpy() == 0, 100_000, rows["rank"].to_numpy()), pa.int32()))
  for name in ("process/0.json", "process/1.json"):
    (run / name).unlink()
  tracemalloc.start()
  out = reported(capsys, run, "--json", tmp_path / "out.json")
  peak = tracemalloc.get_traced_memory()[1]
  tracemalloc.stop()
  assert peak < 200e6
  assert "1 rank left out: numbers from 100,000 on" in out
  assert json.loads((tmp_path / "out.json").read_text())["ranks"] == 4
  assert jaxpace(capsys, "watch", run, "--once")[0] == 0


def test_a_gap_in_the_rank_numbers_is_no_rank(run, tmp_path, capsys):
  for table in ("steps", "collectives"):
    alter(run, table, rank=lambda rows: pa.array(2 * rows["rank"].to_numpy(), pa.int32()))
  for name in ("run.json", "process/0.json", "process/1.json"):
    (run / name).unlink()
  out = reported(capsys, run, "--json", tmp_path / "out.json")
  assert "4 ranks" in out and "Look at rank 2:" in out
  assert "recorded nothing" not in out
  found = json.loads((tmp_path / "out.json").read_text())
  assert (found["ranks"], found["not_judged"]) == (4, [])
  assert [rank["rank"] for rank in found["per_rank"]] == [0, 2, 4, 6]
  for argv in (("watch", run, "--once"), ("compare", run, run)):
    assert "4 ranks" in " ".join(jaxpace(capsys, *argv)[1].split()), argv[0]


def test_thousands_of_names_in_one_event(run, capsys):
  late = {"process": 1, "state": "outside", "host": "h" * 30, "phase": "data", "seconds": 4.0}
  event = {"event": "late", "run": "synthetic", "when_unix_ns": 2 * 10**18, "step": 9,
           "waited": 5.0, "process": 0, "late": [late] * 20_000}
  (run / "watchdog" / "0.jsonl").write_text(json.dumps(event) + "\n")
  out = reported(capsys, run)
  assert len(out) < 20_000
  assert "19,990 more" in out
  assert jaxpace(capsys, "watch", run, "--once")[0] == 0


@pytest.mark.parametrize("command", [*EVERY, ("compare",)], ids=" ".join)
def test_escapes_in_a_directorys_name_are_shown_not_obeyed(
    sound, tmp_path, capsys, monkeypatch, command):
  # From beside it: a long path would be cut where the line ends.
  monkeypatch.chdir(tmp_path)
  run = pathlib.Path("a\x1b]0;title\x07\x1b[31mrun")
  shutil.copytree(sound, run)
  name, *rest = command
  argv = [name, run, run] if name == "compare" else [name, run, *rest]
  _, out, err = jaxpace(capsys, *argv)
  assert not [c for c in out + err if c < " " and c != "\n"]
  assert "\\x1b[31mrun" in "".join((out + err).split("\n"))


@pytest.mark.parametrize("host", ["ip-10-0-12-7." + "b" * 180 + ".example", "漢" * 90])
def test_long_host_names_make_no_long_lines(run, capsys, host):
  for name in ("process/1.json", "locality/1.json"):
    document(run, name, lambda info: info.update(hostname=host))
  event = (run / "watchdog" / "0.jsonl").read_text().replace("host1", host)
  (run / "watchdog" / "0.jsonl").write_text(event)
  for argv in (("report",), ("watch", "--once"), ("doctor",)):
    status, out, _ = jaxpace(capsys, argv[0], run, *argv[1:])
    assert status == 0 and max(map(cell_len, out.splitlines())) <= 100, argv


@contextlib.contextmanager
def limit(seconds):
  """Ends what hangs, with its stack."""
  def late(*_):
    raise TimeoutError(f"longer than {seconds} s")
  before = signal.signal(signal.SIGALRM, late)
  signal.alarm(seconds)
  try:
    yield
  finally:
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("ranks", ["0-3", [[0]], [2**40]], ids=str)
def test_control_reads_processes_that_say_what_no_process_says(run, capsys, ranks):
  (run / "control.json").unlink()
  for name in ("process/0.json", "process/1.json"):
    document(run, name, lambda info: info.update(ranks=ranks))
  status, _, err = jaxpace(capsys, "control", run, "--nodes", "1")
  assert status == 2
  assert "which ranks are on which host" in err
  assert err.count("\n") == 1
