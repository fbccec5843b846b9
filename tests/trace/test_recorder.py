import gc
import json
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxpace.trace import copies, ringcopy
from jaxpace.trace.reader import read_run
from jaxpace.trace.recorder import Recorder
from tests.trace import fake_step as fake
from tests.trace.recording import assert_complete, process_file, table, train


@pytest.mark.parametrize("rows", [4, 16, 64])
def test_every_step_of_eight_donated_ranks_is_recorded(tmp_path, rows):
  assert jax.device_count() == 8
  with Recorder(tmp_path / "run", fake.FakePaced()) as recorder:
    train(recorder, 150, rows)
  assert_complete(tmp_path / "run", range(150))
  info = process_file(tmp_path / "run")
  assert ((info["closed_cleanly"], info["lost_rows"], info["holes"], info["ranks"])
          == (True, 0, 0, list(range(8))))
  assert (info["rows_written"], info["last_step"], info["stopped"]) == (1200, 149, None)
  assert len(list((tmp_path / "run" / "steps").iterdir())) == 1


def test_run_file_says_what_the_run_is(tmp_path):
  with Recorder(tmp_path, fake.FakePaced(),
                config={"lr": 0.1, "model": {"path": tmp_path}}) as recorder:
    assert json.loads((tmp_path / "run.json").read_text())["plan"] is None
    train(recorder, 3)
  run = json.loads((tmp_path / "run.json").read_text())
  assert fake.PLAN.from_json(run["plan"]) == fake.PLAN
  assert ((run["run"], run["clock"], run["axis"], run["ranks"], run["attempt"])
          == (recorder.run, "fake", "data", 8, 0))
  assert run["config"] == {"lr": 0.1, "model": {"path": str(tmp_path)}}
  assert run["versions"]["jax"] == jax.__version__


def test_rows_before_the_recorder_opened_are_not_its_own(tmp_path):
  """Warm-up steps, or a pace state restored from a checkpoint with another process's stamps in its
  ring."""
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
    while recorder._copies:
      recorder._hand_over(recorder._copies.finished())
    train(recorder, 20, first=10)
  rows = table(tmp_path)
  before = {r["step"] for r in rows if r["attempt"] == 0}
  assert before == set(range(len(before))) and 32 < len(before) <= 40
  assert (recorder.lost["lost_rows"] == 8
          * (40 - len(before))), "the pace state before was given up uncopied"
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
  assert (rows[9]["data_ns"] is None and rows[10]["data_ns"] >= 20_000_000
          and rows[11]["data_ns"] == 0)
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
  assert any("was ended by ZeroDivisionError: no such." in problem
             for problem in read_run(tmp_path).problems)


UNCLOSED = """
import sys
from jaxpace.trace.recorder import Recorder
from tests.trace import fake_step as fake
step, pace = fake.make_step(fake.mesh()), fake.init(fake.mesh())
recorder = Recorder(sys.argv[1], fake.FakePaced())
recorder.open()
for i in range(5):
  pace = step(pace)
  recorder.record(pace)
exec(sys.argv[2])
"""


@pytest.mark.parametrize("end, words", [
    pytest.param("", "the end of the program, without close()", marks=pytest.mark.long),
    pytest.param("sys.exit(3)", "the end of the program, without close()",
                 marks=pytest.mark.long),
    ("raise ValueError('no such luck')", "ValueError: no such luck"),
    pytest.param("recorder.close()", None, marks=pytest.mark.long)])
def test_a_program_that_ends_without_closing_says_so(tmp_path, end, words):
  subprocess.run([sys.executable, "-c", UNCLOSED, str(tmp_path), end], stderr=subprocess.DEVNULL,
                 check=False)
  assert {r["step"] for r in table(tmp_path)} == set(range(5))
  assert process_file(tmp_path)["ended_by"] == words


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


def test_devices_that_lag_do_not_hold_the_loop_up(tmp_path, monkeypatch):
  """Copies that never get ready: `record` returns at once, and keeps a bounded number of them."""
  monkeypatch.setattr(ringcopy.RingCopy, "ready", lambda self: recorder.closing)
  monkeypatch.setattr(copies, "_PENDING_BYTES", 6 * 8 * 8 * fake.WIDTH * 4)
  with Recorder(tmp_path, fake.FakePaced(), every_steps=2) as recorder:
    recorder.closing = False
    train(recorder, 100, rows=8)
    assert len(recorder._copies) == 6
    assert not table(tmp_path)
    recorder.closing = True
  steps = {r["step"] for r in table(tmp_path)}
  assert set(range(92, 100)) <= steps
  assert recorder.lost["lost_rows"] == 8 * (100 - len(steps))


def test_rows_reach_the_disk_while_training_runs(tmp_path):
  step, pace, steps = fake.make_step(fake.mesh()), fake.init(fake.mesh(), 16), 0
  deadline = time.monotonic() + 300
  with Recorder(tmp_path, fake.FakePaced(), every_seconds=0.1) as recorder:
    while (len({r["step"] for r in table(tmp_path)}) < 5
           or process_file(tmp_path)["rows_written"] < 40):
      assert time.monotonic() < deadline, "nothing was written"
      pace, steps = step(pace), steps + 1
      recorder.record(pace)
      time.sleep(0.005)
  assert_complete(tmp_path, range(steps))


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
  thread.join(300)
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


def test_steps_of_a_pace_state_that_was_made_anew_before_they_were_copied_are_counted_as_lost(
    tmp_path, caplog):
  mesh = fake.mesh()
  step = fake.make_step(mesh)
  with Recorder(tmp_path, fake.FakePaced(), every_steps=10, every_seconds=1e6) as recorder:
    for calls in (25, 12):
      pace = fake.init(mesh, 16)
      for _ in range(calls):
        pace = step(pace)
        recorder.record(pace)
  ranks = len(mesh.devices.flat)
  rows = table(tmp_path)
  assert ([sorted({r["step"] for r in rows if r["attempt"] == a}) for a in (0, 1)]
          == [list(range(20)), list(range(12))])
  assert (recorder.lost["lost_rows"], recorder.lost["holes"]) == (5 * ranks, 1)
  assert f"with losses: {5 * ranks} rows in 1 hole." in caplog.text
