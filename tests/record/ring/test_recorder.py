"""The Recorder of observed steps, with programs whose timestamps are put in by hand."""

import contextlib
import logging
import os
import resource
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from jaxpace.cli.main import main
from jaxpace.core.detail import is_detailed
from jaxpace.files.reading import UnreadableError
from jaxpace.hang.read_rings import read_flight
from jaxpace.observation.clocks import host_ring
from jaxpace.observation.clocks.native import library
from jaxpace.record import recorder as recorders
from jaxpace.record.recorder import Recorder
from jaxpace.record.ring import collect, copier
from jaxpace.runs import ring_file
from jaxpace.runs.reader import read_run
from jaxpace.runs.ring_file import read_plan
from tests.multiprocess.jobs import ROOT, clean_environment
from tests.patience import awaited, patiently
from tests.record.recording import one_warning, parts, process_file, run_file, table
from tests.record.ring.handmade import Handmade, delays
from tests.record.ring.test_copier import DAMAGES

LATE = 0.03  # s


@patiently(LATE=0.03)
def test_a_delay_comes_back_in_its_step_layer_and_rank(tmp_path, observed):
  x = observed.inputs()
  with Recorder(tmp_path, observed) as recorder:
    for k in range(12):
      x = observed(x, delays(observed, *([(2, 1, LATE)] if k >= 6 else [])))
      recorder.record(loss=float(k))
  rows = table(tmp_path)
  assert (sorted((row["rank"], row["step"]) for row in rows)
          == [(r, s) for r in range(4) for s in range(12)])
  assert {row["step"]: row["host_loss"] for row in rows} == {k: float(k) for k in range(12)}
  for row in rows:
    assert sum(parts(row)) == row["end_ns"] - row["start_ns"]
    assert row["backward_ns"] is row["update_ns"] is row["delay_ns"] is None
    assert (row["gap_ns"] is None) == (row["step"] == 0)
  waits = table(tmp_path, "collectives")
  assert len(waits) == 12 * 4 * 4
  names = {0: "all-reduce.0", 1: "all-reduce.0@1", 2: "all-reduce.0@2", 3: "all-reduce.1"}
  assert {row["collective"]: row["name"] for row in waits} == names
  at = {(row["step"], row["rank"], row["collective"]): row for row in waits}
  # [rank, step] of the second collective; other work on the machine makes single steps longer.
  arrivals, lengths = (np.asarray([[at[k, rank, 1][last] - at[k, rank, before][first]
                                    for k in range(12)] for rank in range(4)])
                       for last, before, first in (("enter_ns", 0, "exit_ns"),
                                                   ("exit_ns", 1, "enter_ns")))
  assert (arrivals[2, 6:] >= LATE * 1e9).all()
  assert (np.median(arrivals[:, :6], axis=1) < 0.8e9 * LATE).all()
  usual, waits = np.median(arrivals[:, 6:], axis=1), np.median(lengths[:, 6:], axis=1)
  assert usual.argmax() == 2 and waits.argmin() == 2
  assert (waits[[0, 1, 3]] > waits[2] + 0.13e9 * LATE).all()
  for rank in range(4):
    own = [at[7, rank, slot] for slot in range(4)]
    assert all(a["exit_ns"] <= b["enter_ns"] for a, b in zip(own, own[1:], strict=False))
    row = next(row for row in rows if (row["step"], row["rank"]) == (7, rank))
    assert row["sync_ns"] == sum(each["exit_ns"] - each["enter_ns"] for each in own)
    assert row["last_exit_ns"] == own[-1]["exit_ns"] <= row["end_ns"]


def test_the_run_file_says_what_the_slots_are(tmp_path, observed):
  with Recorder(tmp_path, observed, config={"lr": 0.1, "model": {"at": tmp_path}}) as recorder:
    observed(observed.inputs())
    recorder.record()
  info = run_file(tmp_path)
  assert info["config"] == {"lr": 0.1, "model": {"at": str(tmp_path)}}
  assert (info["run"], info["versions"]["jax"]) == (recorder.run, jax.__version__)
  plan = info["plan"]
  assert (info["clock"], info["ranks"], info["settings"]["source"]) == ("marks", 4, "observe")
  assert (process_file(tmp_path)["ranks"] == [0, 1, 2,
                                              3]), "devices that no program runs on are no ranks"
  assert [(each["slot"], each["name"], each["kind"], each["of"],
           each["loops"]) for each in plan["collectives"]] == [
               (0, "all-reduce.0", "all-reduce", 0, [["while.1", 0, 3]]),
               (1, "all-reduce.0@1", "all-reduce", 0, [["while.1", 1, 3]]),
               (2, "all-reduce.0@2", "all-reduce", 0, [["while.1", 2, 3]]),
               (3, "all-reduce.1", "all-reduce", 1, [])]
  assert all(each["groups"] == [[0, 1, 2, 3]] and each["source"] for each in plan["collectives"])
  assert plan["detail"] == {"every": 1, "asked": "auto"}
  assert info["settings"]["mesh"] == {"data": 4} and info["settings"]["axis"] == ["data"]
  run = read_run(tmp_path)
  assert (run.ranks, run.ranks_in_all, run.silent.tolist()) == (4, 4, [])
  assert read_plan(tmp_path, 0) == (recorder.run, 0, observed.plan)
  ring = ring_file.read_ring(tmp_path / "marks" / "0.ring")
  assert (ring.run, ring.closed) == (recorder.run, True)
  assert 0 < ring.alive_ns <= time.monotonic_ns()


@patiently(LATE=0.03)
def test_what_ran_before_and_what_is_under_way_belongs_to_no_step(tmp_path, observed):
  x = observed.inputs()
  for _ in range(3):
    x = observed(x, delays(observed, (0, 0, 2 * LATE)))  # still running when the recorder opens
  with Recorder(tmp_path, observed) as recorder:
    for _ in range(5):
      x = observed(x)
      recorder.record()
  rows = table(tmp_path)
  assert (sorted((row["rank"], row["step"]) for row in rows)
          == [(r, s) for r in range(4) for s in range(5)])
  first = {row["rank"]: row for row in table(tmp_path, "collectives") if row["step"] == 0
           and row["collective"] == 0}
  assert all(row["exit_ns"] - row["enter_ns"] < 1.5e9 * LATE for row in first.values())
  assert process_file(tmp_path)["lost_rows"] == 0


def test_record_calls_without_a_step_record_nothing_and_lose_nothing(
    tmp_path, observed, monkeypatch):
  # What is over by then is not waited for.
  monkeypatch.setattr(recorders, "_IDLE_SECONDS", 0.1)
  with Recorder(tmp_path, observed) as recorder:
    recorder.record()
    jax.block_until_ready(observed(observed.inputs()))
    recorder.record()
    recorder.record()
  assert {row["step"] for row in table(tmp_path)} == {0}
  assert process_file(tmp_path)["lost_rows"] == 0


def test_a_resumed_run_goes_on_with_the_next_step_and_attempt(tmp_path, observed):
  for resume in (False, True):
    with Recorder(tmp_path, observed, resume=resume) as recorder:
      for _ in range(4):
        observed(observed.inputs())
        recorder.record()
  with Recorder(tmp_path, observed, resume=True, first_step=2) as recorder:
    observed(observed.inputs())
    recorder.record()
  found = sorted({(row["attempt"], row["step"]) for row in table(tmp_path)})
  assert found == [(0, k) for k in range(4)] + [(1, k) for k in range(4, 8)] + [(2, 2)]
  assert sorted(os.listdir(tmp_path / "marks")) == ["0.plan.json", "0.ring"]
  assert [each["attempt"] for each in run_file(tmp_path)["attempts"]] == [0, 1, 2]
  assert read_run(tmp_path).ranks >= 4


def test_a_recorder_outlives_one_that_was_opened_before_it(tmp_path, observed):
  first, second = Recorder(tmp_path / "a", observed), Recorder(tmp_path / "b", observed)
  first.open()
  second.open()
  for k in range(8):
    if k == 4:
      first.close()
    observed(observed.inputs())
    if k < 4:
      first.record()
    second.record()
  second.close()
  assert {row["step"] for row in table(tmp_path / "a")} == set(range(4))
  assert {row["step"] for row in table(tmp_path / "b")} == set(range(8))
  assert second.lost["lost_rows"] == 0


def test_events_that_were_written_over_are_lost_steps_not_wrong_ones(
    tmp_path, observed, monkeypatch):
  x, held, collect_now = observed.inputs(), [True], collect.Collector.collect
  monkeypatch.setattr(collect.Collector, "collect",
                      lambda *args: None if held[0] else collect_now(*args))
  with Recorder(tmp_path, observed) as recorder:
    for k in range(10):
      x = jax.block_until_ready(observed(x))
      recorder.record()
      if k == 5:
        capacity = host_ring.current().layout.capacity
        # of device buffer 1: steps 0 to 5 go
        library.functions().jaxpace_mark_here(1, observed.number, 900, capacity - 12)
    held[0] = False
  rows = table(tmp_path)
  steps_of = {rank: {row["step"] for row in rows if row["rank"] == rank} for rank in range(4)}
  assert steps_of[0] == steps_of[2] == steps_of[3] == set(range(10))
  assert steps_of[1] and steps_of[1] < set(range(10)) and max(steps_of[1]) == 9
  info = process_file(tmp_path)
  assert info["lost_rows"] == 10 - len(steps_of[1]) and info["holes"] == 1
  for row in table(tmp_path, "collectives"):
    assert 0 <= row["exit_ns"] - row["enter_ns"] < 900e9


def test_steps_are_written_in_full_when_drawn_at_first_and_around_slow_ones(tmp_path, observed):
  with Recorder(tmp_path, observed, detail=50) as recorder:
    x = observed.inputs()
    for k in range(160):
      x = jax.block_until_ready(
          observed(x, delays(observed, *([(0, 0, 0.15)] if k == 120 else [(0, 0, 0.004)]))))
      recorder.record()
  assert len(table(tmp_path)) == 640
  full = {row["step"] for row in table(tmp_path, "collectives")}
  drawn = set(np.flatnonzero(is_detailed(np.arange(160), 50)).tolist())
  assert full >= drawn | set(range(64)) | set(range(120, 125)), "drawn, first, slow and after"
  # Where the machine has other work, more steps are slow.
  assert len(full) < 160
  assert run_file(tmp_path)["plan"]["detail"] == {"every": 50, "asked": 50}


def test_a_full_disk_leaves_the_marks_in_memory_and_the_tables_where_they_are(
    tmp_path, observed, monkeypatch, caplog):
  def full(*_):
    raise OSError(28, "No space left on device")
  monkeypatch.setattr(copier.os, "posix_fallocate", full)
  with caplog.at_level(logging.WARNING, "jaxpace"), Recorder(tmp_path, observed) as recorder:
    for _ in range(3):
      observed(observed.inputs())
      recorder.record()
  one_warning(caplog, "Timestamps are kept in memory")
  assert len(table(tmp_path)) == 12 and os.listdir(tmp_path / "marks") == ["0.plan.json"]


@pytest.mark.parametrize("options, said",
                         [({"detail": 0}, "detail=0"), ({"detail": "some"}, "detail='some'"),
                          ({"detail": True}, "detail=True"), ({"first_step": -1}, "first_step=-1")])
def test_options_that_are_none_are_refused(tmp_path, observed, options, said):
  with pytest.raises(ValueError, match=said):
    Recorder(tmp_path, observed, **options)


def test_where_marks_can_not_be_written_training_goes_on(tmp_path, observed, monkeypatch, caplog):
  monkeypatch.setattr(recorders.host_ring, "unavailable",
                      lambda: "The native clock is not part of it.")
  with caplog.at_level(logging.WARNING, "jaxpace"), Recorder(tmp_path, observed) as recorder:
    observed(observed.inputs())
    recorder.record()
  one_warning(caplog, "The native clock is not part of it.")


# The Recorder of observed steps in a process that is ended.

_WORKER = """
import sys, time, pathlib
import pytest
from jaxpace.record.recorder import Recorder
from tests.record.recording import write_often
from tests.record.ring.handmade import Handmade
write_often(pytest.MonkeyPatch())
step = Handmade()
x = step.inputs()
with Recorder(sys.argv[1], step, grace_seconds=2.0) as recorder:
  for k in range(100000):
    x = step(x)
    recorder.record()
    time.sleep(0.002)
    if k == 200:
      print("READY", flush=True)
"""


def opened(path) -> int:
  """The clock when a ring's file was made."""
  return int(ring_file.header(path)["monotonic_ns"])


@pytest.mark.parametrize("number", [
    signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_a_process_that_is_ended_leaves_its_ring_and_its_run(tmp_path, number):
  process = subprocess.Popen(
      [sys.executable, "-c", _WORKER, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True,
      env=clean_environment(XLA_FLAGS="--xla_force_host_platform_device_count=2"))
  try:
    assert any(line == "READY\n" for line in process.stdout)
    path = tmp_path / "marks" / "0.ring"
    assert awaited(lambda: sum(row["rank"] == 0 for row in table(tmp_path)) > 200
                   and (ring := ring_file.read_ring(path)).alive_ns > opened(path)
                   # rows are there before the copy of their events
                   and (ring.heads > 200 * 11).all())
    process.stdout.close()
    process.send_signal(number)
    process.wait(300)
  finally:
    process.kill()
    process.wait()
  assert process.returncode == -number
  ring, (*_, plan) = ring_file.read_ring(tmp_path / "marks" / "0.ring"), read_plan(tmp_path, 0)
  assert not ring.closed and ring.ranks.tolist() == [0, 1] and ring.alive_ns > opened(path)
  assert len(plan.programs) == 1 and (ring.heads > 200 * 11).all()
  rows = table(tmp_path)
  found = {rank: [row["step"] for row in rows if row["rank"] == rank] for rank in range(2)}
  assert sorted(found[0]) == sorted(found[1]) == list(range(len(found[0]))) and len(found[0]) > 200
  if number == signal.SIGTERM:
    # 11 events a step and 2 of each start
    assert len(found[0]) >= int(ring.heads[0]) // 11 - 1
    assert process_file(tmp_path)["ended_by"] == "SIGTERM"
  step = Handmade(jax.devices()[:2], layers=1)
  with Recorder(tmp_path, step, resume=True) as recorder:
    step(step.inputs())
    recorder.record()
  kept = ring_file.read_ring(tmp_path / "marks" / "0.previous.ring")
  assert (kept.heads.tolist() == ring.heads.tolist()
          and (tmp_path / "marks" / "0.previous.plan.json").exists())
  assert {row["attempt"] for row in table(tmp_path)} == {0, 1}


_PATIENT = """
import sys
import jax
import pytest
from jaxpace.record.recorder import Recorder
from tests.record.recording import write_often
from tests.record.ring.handmade import Handmade
write_often(pytest.MonkeyPatch())
step = Handmade()
x = step.inputs()
with Recorder(sys.argv[1], step) as recorder:
  for line in sys.stdin:
    for _ in range(20):
      x = step(x)
      recorder.record()
    print(float(jax.block_until_ready(x).sum()).hex(), flush=True)
"""


def test_whatever_is_done_to_its_ring_training_goes_on_and_a_killed_process_leaves_it(tmp_path,
                                                                                      capfd):
  run, rounds = tmp_path / "run", 1 + len(DAMAGES)
  path = run / "marks" / "0.ring"
  process = subprocess.Popen(
      [sys.executable, "-c", _PATIENT, str(run)], cwd=ROOT, stdin=subprocess.PIPE,
      stdout=subprocess.PIPE, text=True,
      env=clean_environment(XLA_FLAGS="--xla_force_host_platform_device_count=2"))

  def trained() -> str:
    process.stdin.write("more\n")
    process.stdin.flush()
    return process.stdout.readline()

  def whole() -> bool:
    # 11 events a step, and 2 of each start.
    with contextlib.suppress(UnreadableError, OSError):
      return not path.is_symlink() and bool((ring_file.read_ring(path).heads >= 20 * 11).all())
    return False

  try:
    found = [trained()]
    for damage in DAMAGES.values():
      assert awaited(whole)
      other = tmp_path / "other"
      shutil.copyfile(path, other)
      damage(path, other)
      found.append(trained())
    assert awaited(whole)
    assert awaited(lambda: ring_file.read_ring(path).heads.tolist() == [20 * 11 * rounds] * 2)
    # rows are written every few seconds
    assert awaited(lambda: any((run / "steps").glob("*.parquet")))
  finally:
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()
  step = Handmade(jax.devices()[:2])
  x, expected = step.inputs(), []
  for _ in range(rounds):
    for _ in range(20):
      x = step(x)
    expected.append(float(jax.block_until_ready(x).sum()).hex() + "\n")
  assert found == expected
  flight = read_flight(run)
  assert [flight.positions[rank].current.number for rank in range(2)] == [20 * rounds - 1] * 2
  assert not flight.left_out and main(["report", str(run)]) == 0
  assert "is made anew, with the timestamps" in capfd.readouterr().err


@pytest.mark.long
def test_a_limit_to_the_size_of_files_ends_no_training(tmp_path):
  """Beyond it the system sends a signal that ends a process, unless somebody ignores it."""
  done = subprocess.run(
      [sys.executable, "-c", _PATIENT, str(tmp_path)], cwd=ROOT, input="more\n", text=True,
      capture_output=True, timeout=600, check=False,
      preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)),
      env=clean_environment(XLA_FLAGS="--xla_force_host_platform_device_count=2"))
  assert (done.returncode, done.stdout.count("\n")) == (0, 1), done.stderr[-3000:]
  assert "Timestamps are kept in memory" in done.stderr and "File too large" in done.stderr
  assert len(table(tmp_path)) == 40 and not (tmp_path / "marks" / "0.ring").exists()
