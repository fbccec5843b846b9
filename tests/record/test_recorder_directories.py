"""Run directories as the recorder finds them, and disks that fail it."""

import contextlib
import errno
import os
import shutil
import signal
import socket
import subprocess
import sys
import time

import pyarrow.parquet as pq
import pytest

from jaxpace.files.folders import Folder, ForeignFileError
from jaxpace.record.recorder import Recorder
from jaxpace.runs import rundir
from jaxpace.runs.reader import read_run
from tests.record import fake_step as fake
from tests.record.recording import (
  assert_complete,
  one_warning,
  process_file,
  table,
  train,
  write_often,
)


def test_an_earlier_run_is_set_aside_and_foreign_files_stay(tmp_path, caplog):
  with Recorder(tmp_path, fake.FakePaced()) as first:
    train(first, 5)
  (tmp_path / "notes.txt").write_text("mine")
  (tmp_path / "steps" / "other.parquet").write_text("mine")
  (tmp_path / "process" / "x.json").write_text("{}")
  (tmp_path / "locality").mkdir(exist_ok=True)
  (tmp_path / "locality" / "0.json").write_text("{}")
  with Recorder(tmp_path, fake.FakePaced()) as second:
    train(second, 7)
  assert f"The earlier run in {tmp_path} is kept" in caplog.text
  old = tmp_path / ".previous" / str(first.run)
  # A table's rows may lie in one part or, where writing was slow, in a merged one of another
  # number.
  assert sorted(str(p.relative_to(old)).partition(".00")[0]
                for p in old.rglob("*") if p.is_file()) == sorted(
                    ["run.json", "process/0.json", "locality/0.json", "marks/0.plan.json",
                     "marks/0.ring",
                     *(f"{t}/{first.run}-p00000" for t in ("steps", "collectives", "hosts"))])
  assert first.run != second.run
  assert ((tmp_path / "notes.txt").read_text() == (tmp_path / "steps" / "other.parquet").read_text()
          == "mine")
  assert (tmp_path / "process" / "x.json").exists()
  (tmp_path / "steps" / "other.parquet").unlink()
  assert_complete(tmp_path, range(7))


def test_a_foreign_run_file_is_left_alone(tmp_path, caplog):
  (tmp_path / "run.json").write_text('{"name": "somebody else\'s"}')
  with Recorder(tmp_path, fake.FakePaced()) as recorder:
    train(recorder, 3)
  one_warning(caplog, "was not written by jaxpace")
  assert not recorder.recording
  assert [p.name for p in tmp_path.iterdir()] == ["run.json"]


def until_stopped(recorder):
  """Trains until the recording has ended; returns how many steps that took."""
  deadline, steps, pace = time.monotonic() + 120, 0, None
  while recorder.recording:
    assert time.monotonic() < deadline
    pace, steps = train(recorder, 20, pause=0.003, pace=pace), steps + 20
  return steps


@pytest.mark.parametrize("code, text", [(30, "can't be written"), (5, "OSError")])
def test_trouble_while_writing_stops_recording_with_one_warning(tmp_path, caplog, monkeypatch, code,
                                                                text):
  written = pq.write_table

  def failing(data, path, **options):
    if "000001" in str(path):
      raise OSError(code, os.strerror(code))
    written(data, path, **options)

  monkeypatch.setattr(pq, "write_table", failing)
  write_often(monkeypatch)
  with Recorder(tmp_path, fake.FakePaced()) as recorder:
    recorded = until_stopped(recorder)
  one_warning(caplog, text)
  assert "training goes on" in caplog.text
  steps = {r["step"] for r in table(tmp_path)}
  assert steps == set(range(len(steps))) and 0 < len(steps) < recorded
  assert process_file(tmp_path)["stopped"] and not process_file(tmp_path)["closed_cleanly"]


def test_a_disk_without_room_for_one_more_file_still_says_why_the_recording_ends(
    tmp_path, monkeypatch):
  written = pq.write_table

  def no_room(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  def until_full(data, path, **options):
    if "000001" in str(path):
      monkeypatch.setattr(Folder, "write_text", no_room)
      no_room()
    written(data, path, **options)

  monkeypatch.setattr(pq, "write_table", until_full)
  write_often(monkeypatch)
  with Recorder(tmp_path, fake.FakePaced()) as recorder:
    recorded = until_stopped(recorder)
  assert "no space is left" in process_file(tmp_path)["stopped"]
  run = read_run(tmp_path)
  assert recorder.lost["lost_rows"] == 8 * recorded - int((run.attempt >= 0).sum()) > 0
  said = " ".join(run.problems)
  assert "stopped recording: no space is left" in said and "killed" not in said


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")
def test_a_directory_that_can_not_be_made_was_not_deleted(caplog):
  with Recorder("/proc/runs/x", fake.FakePaced()) as recorder:
    train(recorder, 3)
  one_warning(caplog, "/proc/runs/x can't be made: /proc takes no directories")


def test_a_directory_deleted_meanwhile(tmp_path, caplog, monkeypatch):
  write_often(monkeypatch)
  directory = tmp_path / "run"
  with Recorder(directory, fake.FakePaced()) as recorder:
    train(recorder, 30)
    while directory.exists():  # a file may come while they are deleted
      shutil.rmtree(directory, ignore_errors=True)
    train(recorder, 60, pause=0.003, first=30)
  assert "Recording stopped" in caplog.text and "moved or deleted" in caplog.text
  assert not directory.exists()


def test_a_directory_that_is_moved_meanwhile_takes_the_recording_along(tmp_path, caplog,
                                                                       monkeypatch):
  write_often(monkeypatch)
  directory = tmp_path / "run"
  with Recorder(directory, fake.FakePaced()) as recorder:
    pace = train(recorder, 30)
    directory.rename(tmp_path / "moved")
    train(recorder, 60, pause=0.003, pace=pace)
  assert_complete(tmp_path / "moved", range(90))
  assert not caplog.records and not directory.exists()


@pytest.mark.parametrize("name", ["steps", "."])
def test_a_folder_that_is_replaced_by_a_link_meanwhile_is_not_followed(tmp_path, monkeypatch, name):
  write_often(monkeypatch)
  directory, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
  elsewhere.mkdir()
  for inside in ("steps", "collectives", "process", "hosts"):
    (elsewhere / inside).mkdir()
  with Recorder(directory, fake.FakePaced()) as recorder:
    pace = train(recorder, 30)
    (directory / name).resolve().rename(tmp_path / "aside")
    (tmp_path / "run" / name if name != "." else directory).symlink_to(elsewhere)
    train(recorder, 60, pause=0.003, pace=pace)
  assert recorder.lost["lost_rows"] == 0 and recorder.lost["stopped"] is None
  assert not [path for path in elsewhere.rglob("*") if path.is_file()]
  (directory / name if name != "." else directory).unlink()
  (tmp_path / "aside").rename(directory / name if name != "." else directory)
  assert_complete(directory, range(90))


# Two at once.


def test_a_second_recorder_in_the_same_directory_does_not_record(tmp_path, caplog):
  with Recorder(tmp_path, fake.FakePaced()) as first:
    with Recorder(tmp_path, fake.FakePaced(), resume=True) as second:
      second.record()
      train(first, 5)
    one_warning(caplog, "another Recorder of this process is recording to")
    assert first.recording and not second.recording
  assert_complete(tmp_path, range(5))
  assert not (tmp_path / ".previous").exists() and not (tmp_path / ".lock").exists()
  with Recorder(tmp_path, fake.FakePaced()) as third:
    train(third, 4)
  assert_complete(tmp_path, range(4))


HOLDER = """
import os, pathlib, sys, time
from jaxpace.runs.rundir import DirectoryLock
lock = DirectoryLock.take(pathlib.Path(sys.argv[1]))
child = sys.argv[2] == "fork" and not os.fork()
if not child:
  print("held", flush=True)
if sys.argv[2] == "fork" and not child:
  os._exit(0)
time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
  """Starts another process that locks a directory; with "fork" it dies and leaves a child that
  holds the lock."""
  started = []

  def hold(directory, how):
    started.append(subprocess.Popen([sys.executable, "-c", HOLDER, str(directory), how],
                                    stdout=subprocess.PIPE, text=True, start_new_session=True))
    assert started[-1].stdout.readline() == "held\n"
    return started[-1]

  yield hold
  for process in started:
    with contextlib.suppress(ProcessLookupError):
      os.killpg(process.pid, signal.SIGKILL)
    process.stdout.close()
    process.wait()


def test_another_job_in_the_same_directory(tmp_path, caplog, holder):
  other = holder(tmp_path, "stay")
  with Recorder(tmp_path, fake.FakePaced()) as recorder:
    train(recorder, 3)
  one_warning(caplog,
              f"process {other.pid} on {socket.gethostname()} is recording to {tmp_path} at "
              "this moment")
  assert "initialize()" in caplog.text
  assert [path.name for path in tmp_path.iterdir()] == [".lock"]
  other.kill()
  other.wait()
  with Recorder(tmp_path, fake.FakePaced()) as recorder:
    train(recorder, 3)
  assert_complete(tmp_path, range(3))


def test_a_program_that_a_recorded_one_starts_is_told_so(tmp_path):
  lock = rundir.DirectoryLock.take(tmp_path)
  child = subprocess.run([sys.executable, "-c", HOLDER, str(tmp_path), "stay"],
                         capture_output=True, text=True, check=False)
  lock.release()
  assert (f"process {os.getpid()}, which started this one, is recording to {tmp_path}"
          in child.stderr)


def test_a_job_in_another_pid_namespace_keeps_its_lock(tmp_path, holder):
  holder(tmp_path, "stay")
  # Containers of one host may share its name, and neither sees the other's processes.
  (tmp_path / ".lock").write_text(f"{2 ** 22 + 1} {socket.gethostname()}\n")
  with pytest.raises(ForeignFileError, match=f"process {2 ** 22 + 1} on "):
    rundir.DirectoryLock.take(tmp_path)


def test_a_file_system_without_locks(tmp_path, monkeypatch):
  def unsupported(*_):
    raise OSError(errno.ENOLCK, "No locks available")

  monkeypatch.setattr(rundir.fcntl, "flock", unsupported)
  with Recorder(tmp_path, fake.FakePaced()) as recorder:
    train(recorder, 3)
  assert_complete(tmp_path, range(3))
