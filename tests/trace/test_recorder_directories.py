"""Run directories as the recorder finds them, and disks that fail it."""

import json
import os
import threading

import jax
import pyarrow.parquet as pq
import pytest

from jaxpace.trace import parts, writer
from jaxpace.trace.recorder import Recorder
from tests.trace import fake_step as fake
from tests.trace.recording import assert_complete, one_warning, process_file, table, train


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
