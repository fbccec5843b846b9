import gc
import subprocess
import sys
import time

import jax
import pytest

from jaxpace.record.recorder import Recorder
from jaxpace.runs.reader import read_run
from tests.quick import long
from tests.record import fake_step as fake
from tests.record.recording import assert_complete, process_file, table, train


def test_every_step_of_eight_donated_ranks_is_recorded(tmp_path):
  assert jax.device_count() == 8
  with Recorder(tmp_path / "run", fake.FakePaced()) as recorder:
    train(recorder, 150)
  assert_complete(tmp_path / "run", range(150))
  info = process_file(tmp_path / "run")
  assert ((info["closed_cleanly"], info["lost_rows"], info["holes"], info["ranks"])
          == (True, 0, 0, list(range(8))))
  assert (info["rows_written"], info["last_step"], info["stopped"]) == (1200, 149, None)
  assert len(list((tmp_path / "run" / "steps").iterdir())) == 1


class Counting:
  """An exporter that counts rows."""

  rows = 0

  def export(self, steps, collectives):
    self.rows += len(steps["step"])

  def close(self):
    pass


def test_rows_that_come_at_the_end_are_exported_though_no_thread_starts_then(tmp_path,
                                                                             no_more_threads):
  with Recorder(tmp_path, fake.FakePaced(), exporters=[counting := Counting()]) as recorder:
    train(recorder, 3)
    no_more_threads()
  assert_complete(tmp_path, range(3))
  assert counting.rows == 8 * 3


def test_record_every_few_steps_still_records_every_step(tmp_path):
  with Recorder(tmp_path, fake.FakePaced()) as recorder:
    train(recorder, 300, every=5, pause=0.001)
  assert_complete(tmp_path, range(300))
  assert recorder.lost["lost_rows"] == 0
  assert all(r["cpu_ns"] is None for r in table(tmp_path) if r["step"] > 4)


def test_going_back_to_an_earlier_step_is_another_attempt_and_no_slip(tmp_path, caplog):
  with Recorder(tmp_path, fake.FakePaced()) as recorder:
    train(recorder, 40)
    train(recorder, 20, first=10)
  rows = table(tmp_path)
  assert {r["step"] for r in rows if r["attempt"] == 0} == set(range(40))
  assert {r["step"] for r in rows if r["attempt"] == 1} == set(range(10, 30))
  assert len(rows) == 8 * 60 and recorder.lost["lost_rows"] == 0
  assert all(r["cpu_ns"] is not None for r in rows) and "does not advance" not in caplog.text


def test_host_causes_belong_to_the_step_the_loop_was_at(tmp_path):
  mesh = fake.mesh()
  step, pace = fake.make_step(mesh), fake.init(mesh)
  pace = jax.block_until_ready(step(pace))  # Compiles outside.
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
      recorder.record(load=i / 2, **({"checkpoint_ns": 77} if i == 16 else {}))
  rows = {r["step"]: r for r in table(tmp_path) if r["rank"] == 3}
  assert (rows[9]["data_ns"] is None and rows[10]["data_ns"] >= 20_000_000
          and rows[11]["data_ns"] == 0)
  assert rows[12]["gc_ns"] > 0
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
from jaxpace.record.recorder import Recorder
from tests.record import fake_step as fake
step, pace = fake.make_step(fake.mesh()), fake.init(fake.mesh())
recorder = Recorder(sys.argv[1], fake.FakePaced())
recorder.open()
for i in range(5):
  pace = step(pace)
  recorder.record()
exec(sys.argv[2])
"""


@pytest.mark.parametrize("end, words", [
    ("raise ValueError('no such luck')", "ValueError: no such luck"),
    *long(("", "the end of the program, without close()"), ("recorder.close()", None),
          ("sys.exit(3)", "the end of the program, without close()"))])
def test_a_program_that_ends_without_closing_says_so(tmp_path, end, words):
  subprocess.run([sys.executable, "-c", UNCLOSED, str(tmp_path), end], stderr=subprocess.DEVNULL,
                 check=False)
  assert {r["step"] for r in table(tmp_path)} == set(range(5))
  assert process_file(tmp_path)["ended_by"] == words


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
