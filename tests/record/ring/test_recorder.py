"""The Recorder of observed steps, with programs whose timestamps are put in by hand."""

import logging
import os
import time

import jax
import numpy as np
import pytest

from jaxpace.core.detail import is_detailed
from jaxpace.observation.clocks import host_ring
from jaxpace.observation.clocks.native import library
from jaxpace.record import recorder as recorders
from jaxpace.record.recorder import Recorder
from jaxpace.record.ring import collect, copier
from jaxpace.runs import ring_file
from jaxpace.runs.reader import read_run
from jaxpace.runs.ring_file import read_plan
from tests.patience import patiently
from tests.record.recording import one_warning, process_file, run_file, table
from tests.record.ring.handmade import delays

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
    parts = [row[f"{name}_ns"] or 0
             for name in ("forward", "backward", "compute", "sync", "update")]
    assert sum(parts) == row["end_ns"] - row["start_ns"]
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
  with Recorder(tmp_path, observed, config={"lr": 0.1}) as recorder:
    observed(observed.inputs())
    recorder.record()
  info = run_file(tmp_path)
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
  meaning = read_plan(tmp_path, 0)
  assert (meaning.run, meaning.plan) == (recorder.run, observed.plan)
  ring = ring_file.read_ring(tmp_path / "marks" / "0.ring")
  assert (ring.run, ring.closed, ring.process) == (recorder.run, True, 0)
  assert ring.monotonic_ns <= ring.alive_ns <= time.monotonic_ns()


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
                      lambda clock: "The native clock is not part of it.")
  with caplog.at_level(logging.WARNING, "jaxpace"), Recorder(tmp_path, observed) as recorder:
    observed(observed.inputs())
    recorder.record()
  one_warning(caplog, "The native clock is not part of it.")
