import gc
import json
import logging
import os
import pathlib
import threading
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow.parquet as pq
import pytest

from jaxpace.trace import parts, ringcopy, writer
from jaxpace.trace import recorder as recorder_module
from jaxpace.trace.reader import read_run
from jaxpace.trace.recorder import Recorder
from tests.trace import fake_step as fake


def table(directory: pathlib.Path, name: str = "steps") -> list[dict]:
  return [row for path in sorted((directory / name).glob("*.parquet")) for row in pq.read_table(path).to_pylist()]


def process_file(directory: pathlib.Path) -> dict:
  return json.loads((directory / "process" / "0.json").read_text())


def train(recorder: Recorder, steps: int, rows: int = 16, pause: float = 0.0, every: int = 1, first: int = 0):
  mesh = fake.mesh()
  step, pace = fake.make_step(mesh), fake.init(mesh, rows, first)
  for i in range(steps):
    pace = step(pace)
    if i % every == every - 1:
      recorder.record(pace)
    if pause:
      time.sleep(pause)
  return pace


def assert_complete(directory: pathlib.Path, steps: range) -> None:
  """Every row of every rank, with the stamps the step wrote."""
  rows = table(directory)
  assert sorted((r["rank"], r["step"]) for r in rows) == [(r, s) for r in range(jax.device_count()) for s in steps]
  for r in rows:
    assert r["start_ns"] == fake.stamp(r["step"], r["rank"], 0)
    assert r["end_ns"] == fake.stamp(r["step"], r["rank"], 7)
    gap = None if r["step"] == steps[0] else fake.PERIOD - sum(fake.DURATIONS)
    assert (r["forward_ns"], r["sync_ns"], r["gap_ns"], r["compute_ns"]) == (200_000, 45_000, gap, None)
  for r in table(directory, "collectives"):
    assert r["exit_ns"] == fake.stamp(r["step"], r["rank"], 5)
  assert len(table(directory, "collectives")) == len(rows)


@pytest.mark.parametrize("rows", [4, 16, 64])
def test_every_step_of_eight_donated_ranks_is_recorded(tmp_path, rows):
  assert jax.device_count() == 8
  with Recorder(tmp_path / "run", fake.FakePaced()) as recorder:
    train(recorder, 150, rows)
  assert_complete(tmp_path / "run", range(150))
  info = process_file(tmp_path / "run")
  assert (info["closed_cleanly"], info["lost_rows"], info["holes"], info["ranks"]) == (True, 0, 0, list(range(8)))
  assert (info["rows_written"], info["last_step"], info["stopped"]) == (1200, 149, None)
  assert len(list((tmp_path / "run" / "steps").iterdir())) == 1


def test_run_file_says_what_the_run_is(tmp_path):
  with Recorder(tmp_path, fake.FakePaced(), config={"lr": 0.1, "model": {"path": tmp_path}}) as recorder:
    assert json.loads((tmp_path / "run.json").read_text())["plan"] is None
    train(recorder, 3)
  run = json.loads((tmp_path / "run.json").read_text())
  assert fake.PLAN.from_json(run["plan"]) == fake.PLAN
  assert (run["run"], run["clock"], run["axis"], run["ranks"], run["attempt"]) == (recorder.run, "fake", "data", 8, 0)
  assert run["config"] == {"lr": 0.1, "model": {"path": str(tmp_path)}}
  assert run["versions"]["jax"] == jax.__version__


def test_rows_before_the_recorder_opened_are_not_its_own(tmp_path):
  """Warm-up steps, or a pace state restored from a checkpoint with another process's stamps in its ring."""
  mesh = fake.mesh()
  step, pace = fake.make_step(mesh), fake.init(mesh, 16)
  for _ in range(5):
    pace = step(pace)
  with Recorder(tmp_path, fake.FakePaced()) as recorder:
    for _ in range(10):
      pace = step(pace)
      recorder.record(pace)
  assert {r["step"] for r in table(tmp_path)} == set(range(5, 15))


def test_record_every_few_steps_still_records_every_step(tmp_path):
  with Recorder(tmp_path, fake.FakePaced(), every_seconds=0.01) as recorder:
    train(recorder, 300, rows=16, every=5, pause=0.001)
  steps = {r["step"] for r in table(tmp_path)}
  assert recorder.lost["lost_rows"] == 8 * (296 - len(steps - set(range(4))))
  assert set(range(200, 300)) <= steps
  assert all(r["cpu_ns"] is None for r in table(tmp_path) if r["step"] > 4)


def test_going_back_to_an_earlier_step_is_another_attempt(tmp_path):
  with Recorder(tmp_path, fake.FakePaced()) as recorder:
    train(recorder, 40)
    while recorder._pending:
      recorder._collect()
    train(recorder, 20, first=10)
  rows = table(tmp_path)
  before = {r["step"] for r in rows if r["attempt"] == 0}
  assert before == set(range(len(before))) and 32 < len(before) <= 40
  assert recorder.lost["lost_rows"] == 8 * (40 - len(before)), "the pace state before was given up uncopied"
  assert {r["step"] for r in rows if r["attempt"] == 1} == set(range(10, 30))


def test_host_causes_belong_to_the_step_the_loop_was_at(tmp_path):
  mesh = fake.mesh()
  step, pace = fake.make_step(mesh), fake.init(mesh)
  pace = step(pace)  # Compiles outside.
  with Recorder(tmp_path, fake.FakePaced()) as recorder:
    for i in range(1, 30):
      if i == 10:
        with recorder.measure("data"):
          time.sleep(0.02)
      if i == 12:
        gc.collect()
      if i == 14:
        start = time.process_time()
        while time.process_time() - start < 0.05:
          pass
      pace = step(pace)
      recorder.record(pace, load=i / 2, **({"checkpoint_ns": 77} if i == 16 else {}))
  rows = {r["step"]: r for r in table(tmp_path) if r["rank"] == 3}
  assert rows[9]["data_ns"] is None and rows[10]["data_ns"] >= 20_000_000 and rows[11]["data_ns"] == 0
  assert rows[12]["gc_ns"] > 100_000
  assert rows[14]["cpu_ns"] >= 50_000_000
  assert rows[16]["checkpoint_ns"] == 77
  assert all(rows[i]["host_load"] == i / 2 for i in range(1, 30))
  assert sum(r["nivcsw"] for r in rows.values()) >= 0
  assert recorder._causes._on_gc not in gc.callbacks


def test_the_steps_are_recorded_when_the_loop_raises(tmp_path):
  with pytest.raises(ZeroDivisionError), Recorder(tmp_path, fake.FakePaced()) as recorder:
    train(recorder, 21)
    raise ZeroDivisionError("no such\nluck")
  assert_complete(tmp_path, range(21))
  assert process_file(tmp_path)["ended_by"] == "ZeroDivisionError: no such"
  assert any("was ended by ZeroDivisionError: no such." in problem for problem in read_run(tmp_path).problems)


def test_the_last_pace_donated_elsewhere_counts_as_lost(tmp_path, caplog):
  with Recorder(tmp_path, fake.FakePaced(), every_steps=8) as recorder:
    pace = train(recorder, 20)
    fake.make_step(fake.mesh())(pace)
  recorded = {r["step"] for r in table(tmp_path)}
  assert recorder.lost["lost_rows"] == 8 * (20 - len(recorded)) > 0
  assert "losses" in caplog.text


def test_no_step_at_all(tmp_path):
  with Recorder(tmp_path, fake.FakePaced()):
    pass
  assert process_file(tmp_path)["closed_cleanly"] and not table(tmp_path)


def test_off(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  with Recorder(None, None) as recorder:
    train(recorder, 3)
    with recorder.measure("data"):
      pass
  recorder.close()
  assert not recorder.recording and not list(tmp_path.iterdir())


# Mistakes.


def mistake(directory, pace, error, text, paced=None):
  with pytest.raises(error, match=text), Recorder(directory, paced or fake.FakePaced()) as recorder:
    recorder.record(pace)


def test_mistakes_are_named(tmp_path):
  mesh = fake.mesh()
  step, pace = fake.make_step(mesh), fake.init(mesh)
  after = step(pace)
  mistake(tmp_path / "1", {"params": 1}, TypeError, "is it the train state")
  mistake(tmp_path / "2", (after, 3), TypeError, "pass the pace state alone")
  mistake(tmp_path / "3", pace, ValueError, "donated")
  mistake(tmp_path / "4", jax.tree.map(np.asarray, after), TypeError, "unconverted")
  mistake(tmp_path / "5", after, ValueError, "do not instrument twice", fake.FakePaced(None))
  with pytest.raises(TypeError, match="inside a function that JAX is tracing"), Recorder(
      tmp_path / "6", fake.FakePaced()) as recorder:
    jax.jit(recorder.record)(after)
  with pytest.raises(TypeError, match="device value"), Recorder(tmp_path / "7", fake.FakePaced()) as recorder:
    recorder.record(after, loss=jnp.float32(1))
  with pytest.raises(ValueError, match='"data" or "checkpoint"'), Recorder(
      tmp_path / "8", fake.FakePaced()) as recorder, recorder.measure("nap"):
    pass
  with pytest.raises(TypeError, match="jax.jit"):
    Recorder(tmp_path / "9", step)
  with pytest.raises(ValueError, match="positive"):
    Recorder(tmp_path / "9", fake.FakePaced(), every_steps=0)
  recorder = Recorder(tmp_path / "9", fake.FakePaced())
  with pytest.raises(RuntimeError, match="`with`"):
    recorder.record(after)
  with recorder:
    recorder.record(after)
  with pytest.raises(RuntimeError, match="`with`"):
    recorder.record(after)
  with pytest.raises(RuntimeError, match="once"):
    recorder.open()


def test_a_pace_state_that_is_not_threaded_is_noticed(tmp_path, caplog):
  mesh = fake.mesh()
  pace = fake.make_step(mesh)(fake.init(mesh))
  with Recorder(tmp_path, fake.FakePaced(), every_steps=2) as recorder:
    for _ in range(20):
      recorder.record(pace)
      jax.block_until_ready(pace)
  assert caplog.text.count("does not advance") == 1
  assert {r["step"] for r in table(tmp_path)} == {0}


# Directories.


def test_an_earlier_run_is_set_aside_and_foreign_files_stay(tmp_path):
  with Recorder(tmp_path, fake.FakePaced()) as first:
    train(first, 5)
  (tmp_path / "notes.txt").write_text("mine")
  (tmp_path / "steps" / "other.parquet").write_text("mine")
  (tmp_path / "process" / "x.json").write_text("{}")
  (tmp_path / "locality").mkdir()
  (tmp_path / "locality" / "0.json").write_text("{}")
  with Recorder(tmp_path, fake.FakePaced()) as second:
    train(second, 7)
  old = tmp_path / ".previous" / str(first.run)
  assert sorted(str(p.relative_to(old)) for p in old.rglob("*") if p.is_file()) == sorted(
      ["run.json", "process/0.json", "locality/0.json",
       *(f"{t}/{parts.PartId(str(first.run), 0, 0, 0).file_name}" for t in ("steps", "collectives"))])
  assert first.run != second.run
  assert (tmp_path / "notes.txt").read_text() == (tmp_path / "steps" / "other.parquet").read_text() == "mine"
  assert (tmp_path / "process" / "x.json").exists()
  (tmp_path / "steps" / "other.parquet").unlink()
  assert_complete(tmp_path, range(7))


def test_resume_goes_on_with_the_run_as_its_next_attempt(tmp_path):
  with Recorder(tmp_path, fake.FakePaced(), resume=True) as first:
    train(first, 5)
  with Recorder(tmp_path, fake.FakePaced(), resume=True) as second:
    train(second, 6, first=3)
  assert first.run == second.run
  rows = [r for r in table(tmp_path) if r["rank"] == 0]
  assert [(r["attempt"], r["step"]) for r in rows] == [(0, s) for s in range(5)] + [(1, s) for s in range(3, 9)]
  run = json.loads((tmp_path / "run.json").read_text())
  assert run["attempt"] == 1 and [a["attempt"] for a in run["attempts"]] == [0, 1]


def one_warning(caplog, text: str) -> None:
  warnings = [r.message for r in caplog.records if r.levelno >= logging.WARNING]
  assert len(warnings) == 1 and text in warnings[0], warnings


def test_a_foreign_run_file_is_left_alone(tmp_path, caplog):
  (tmp_path / "run.json").write_text('{"name": "somebody else\'s"}')
  with Recorder(tmp_path, fake.FakePaced()) as recorder:
    train(recorder, 3)
  one_warning(caplog, "was not written by jaxpace")
  assert not recorder.recording
  assert [p.name for p in tmp_path.iterdir()] == ["run.json"]


def test_a_directory_that_is_a_file(tmp_path, caplog):
  (tmp_path / "run").write_text("a file")
  with Recorder(tmp_path / "run", fake.FakePaced()) as recorder:
    train(recorder, 3)
  one_warning(caplog, "not a directory")


@pytest.mark.parametrize("code, text", [(28, "no space is left"), (122, "no space is left"), (30, "can't be written"),
                                        (13, "can't be written"), (5, "OSError")])
def test_trouble_while_writing_stops_recording_with_one_warning(tmp_path, caplog, monkeypatch, code, text):
  written = pq.write_table

  def failing(data, path, **options):
    if "000001" in str(path):
      raise OSError(code, os.strerror(code))
    written(data, path, **options)

  monkeypatch.setattr(pq, "write_table", failing)
  monkeypatch.setattr(writer.Writer.__init__, "__kwdefaults__", {
      **writer.Writer.__init__.__kwdefaults__, "flush_seconds": 0.05})
  with Recorder(tmp_path, fake.FakePaced(), every_steps=4) as recorder:
    train(recorder, 100, pause=0.003)
    assert not recorder.recording
  one_warning(caplog, text)
  assert "training goes on" in caplog.text
  steps = {r["step"] for r in table(tmp_path)}
  assert steps == set(range(len(steps))) and 0 < len(steps) < 100
  assert process_file(tmp_path)["stopped"] and not process_file(tmp_path)["closed_cleanly"]


def test_a_directory_deleted_meanwhile(tmp_path, caplog, monkeypatch):
  monkeypatch.setattr(writer.Writer.__init__, "__kwdefaults__", {
      **writer.Writer.__init__.__kwdefaults__, "flush_seconds": 0.05})
  directory = tmp_path / "run"
  with Recorder(directory, fake.FakePaced(), every_steps=4) as recorder:
    train(recorder, 30)
    directory.rename(tmp_path / "moved")
    train(recorder, 60, pause=0.003, first=30)
  one_warning(caplog, "moved or deleted")
  assert not directory.exists()


# Memory and speed.


def test_a_disk_that_is_too_slow_drops_the_oldest_and_counts(tmp_path, monkeypatch):
  gate = threading.Event()
  written = pq.write_table

  def slow(*args, **options):
    gate.wait(30)
    written(*args, **options)

  monkeypatch.setattr(pq, "write_table", slow)
  ring_bytes = 8 * 8 * fake.WIDTH * 4
  monkeypatch.setattr(writer.Writer.__init__, "__kwdefaults__", {
      **writer.Writer.__init__.__kwdefaults__, "flush_seconds": 0.01, "queue_bytes": 3 * ring_bytes})
  with Recorder(tmp_path, fake.FakePaced(), every_steps=4) as recorder:
    pace = train(recorder, 400, rows=8, pause=0.0005)
    jax.block_until_ready(pace)
    assert len(recorder._writer._queue) <= 3
    assert recorder._writer._queued_bytes <= 3 * ring_bytes
    assert len(recorder._pending) <= recorder._max_pending
    gate.set()
  steps = {r["step"] for r in table(tmp_path)}
  assert recorder.lost["dropped_batches"] > 20
  assert recorder.lost["lost_rows"] == 8 * (400 - len(steps)) > 0
  assert recorder.lost["holes"] >= 1
  assert process_file(tmp_path)["closed_cleanly"]
  hosts = {r["step"]: r["cpu_ns"] for r in table(tmp_path)}
  assert all(hosts[step] is not None for step in steps), "samples of dropped copies stay aligned to their steps"


def test_devices_that_lag_do_not_hold_the_loop_up(tmp_path, monkeypatch):
  """Copies that never get ready: `record` returns at once, and keeps a bounded number of them."""
  monkeypatch.setattr(ringcopy.RingCopy, "ready", lambda self: recorder.closing)
  monkeypatch.setattr(recorder_module, "_PENDING_BYTES", 6 * 8 * 8 * fake.WIDTH * 4)
  with Recorder(tmp_path, fake.FakePaced(), every_steps=2) as recorder:
    recorder.closing = False
    train(recorder, 100, rows=8)
    assert len(recorder._pending) == 6
    assert not table(tmp_path)
    recorder.closing = True
  steps = {r["step"] for r in table(tmp_path)}
  assert set(range(92, 100)) <= steps
  assert recorder.lost["lost_rows"] == 8 * (100 - len(steps))


def test_rows_reach_the_disk_while_training_runs(tmp_path):
  with Recorder(tmp_path, fake.FakePaced(), every_seconds=0.1) as recorder:
    train(recorder, 60, pause=0.05)
    assert len({r["step"] for r in table(tmp_path)}) >= 5
    assert process_file(tmp_path)["rows_written"] >= 40
  assert_complete(tmp_path, range(60))


def test_a_thread_of_the_program_may_record(tmp_path):
  """Signals are not watched there; everything else works."""
  result = SimpleNamespace(error=None)

  def loop():
    try:
      with Recorder(tmp_path, fake.FakePaced()) as recorder:
        train(recorder, 12)
    except BaseException as error:
      result.error = error

  thread = threading.Thread(target=loop)
  thread.start()
  thread.join(60)
  assert result.error is None
  assert_complete(tmp_path, range(12))


def test_pmap(tmp_path):
  mesh = fake.mesh()
  pace = jax.tree.map(np.asarray, fake.init(mesh, 8))
  step = jax.pmap(lambda pace: jax.tree.map(lambda leaf: leaf[0], fake.advance(
      jax.tree.map(lambda leaf: leaf[None], pace))), axis_name="data", donate_argnums=0)
  pace = fake.FakePace(*pace)
  with Recorder(tmp_path, fake.FakePaced()) as recorder:
    for _ in range(30):
      pace = step(pace)
      recorder.record(pace)
  assert_complete(tmp_path, range(30))
