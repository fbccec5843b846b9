"""What was heard before collectives, from a ring's row to the run that is read."""

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpace.core import ring, stamped
from jaxpace.core.plan import Collective, Mark, Plan
from jaxpace.execution import words
from jaxpace.trace import decode
from jaxpace.trace.intake import Batch, Intake, Losses
from jaxpace.trace.parts import PartStore
from jaxpace.trace.reader import read_run
from jaxpace.trace.run import MISSING

PLAN = Plan(
    axis="data", ranks=2, clock="test", holds=True,
    marks=(Mark("start", "gap"), *(Mark(kind, "sync", slot) for slot in range(3)
                                   for kind in ("enter", "exit")), Mark("end", "update")),
    collectives=tuple(Collective(slot, f"psum.{slot}", ("psum",), "data", 4, 1, ("float32",),
                                 "backward") for slot in range(3)))
WIDTH = ring.row_width(3, holds=True)
BEGIN = ring.STAMPS + 2 * len(PLAN.marks)


def bits(value):
  return np.asarray(value, np.float32).view(np.uint32)


def row(step, held, readings, number=None):
  """A ring's row: of each collective (lost ns, asked s, heard s, listened) or None, and s heard and
  told."""
  made = np.zeros(WIDTH, np.uint32)
  made[ring.STEP], made[ring.FLAGS] = step, ring.VALID
  for i in range(len(PLAN.marks)):
    made[ring.STAMPS + 2 * i:ring.STAMPS + 2 * i + 2] = words.from_ns(1000 * (step * 100 + i + 1))
  for slot, each in enumerate(held):
    at = BEGIN + ring.HELD * slot
    if each is None:
      made[at:at + 2], made[at + 2:at + 4] = ring.NOT_HELD, bits([np.nan, np.nan])
    else:
      lost, asked, heard, listened = each
      made[at:at + 2], made[at + 2:at + 4] = words.from_ns(lost), bits([asked, heard])
      made[at + 4] = listened
  at = BEGIN + ring.HELD * 3
  made[at] = len(readings) if number is None else number
  kept = np.asarray(readings[:ring.READINGS], np.float32).reshape(-1)
  made[at + 1:at + 1 + len(kept)] = bits(kept)
  return made


def test_every_column_of_known_steps():
  rows = np.stack([
      row(4, [(500, np.nan, np.nan, 0)] * 3, []),
      row(5, [(2000, 3e-3, 4e-5, 2), None, (0, 1e-3, 7e-5, 1)],
          [(2e-5, 0), (4e-5, 1e-5), (7e-5, 0)])])
  steps, collectives = decode.decode(rows, PLAN, 1, 0, 0)
  assert steps["held_ns"].tolist() == [1500, 2000]
  assert collectives["held_ns"].tolist() == [500, 500, 500, 2000, None, 0]
  assert collectives["enter_ns"].tolist() == [402_500, 404_500, 406_500, 504_000, 504_000, 506_000]
  assert collectives["asked_ns"].tolist() == [None, None, None, 3_000_000, None, 1_000_000]
  assert collectives["listened"].tolist() == [None, None, None, 2, None, 1]
  assert collectives["heard_ns"].tolist() == [None, None, None, 40_000, None, 70_000]
  heard = decode.listening(rows, PLAN, 1, 0, 2)
  assert {name: values.tolist() for name, values in heard.items()} == {
      "step": [5] * 3, "rank": [1] * 3, "process": [0] * 3, "attempt": [2] * 3,
      "collective": [0, 0, 2], "turn": [0, 1, 0], "heard_ns": [20_000, 40_000, 70_000],
      "told_ns": [0, 10_000, 0]}


@given(st.lists(st.integers(0, 40), min_size=3, max_size=3))
def test_the_first_readings_of_a_step_are_kept_in_order(times):
  """Oracle: a list of all of them, cut."""
  every = [(slot, turn) for slot, number in enumerate(times) for turn in range(number)]
  readings = [(1e-6 * (i + 1), 1e-6 * i) for i in range(len(every))]
  heard = decode.listening(
      row(7, [(0, 0.0, 0.0, number) for number in times], readings)[None], PLAN, 0, 0, 0)
  kept = every[:ring.READINGS]
  assert list(zip(heard["collective"].tolist(), heard["turn"].tolist(), strict=True)) == kept
  assert heard["heard_ns"].tolist() == [1000 * (i + 1) for i in range(len(kept))]
  assert heard["told_ns"].tolist() == [1000 * i for i in range(len(kept))]


def test_a_plan_of_which_nothing_is_held_has_no_readings_and_rows_too_narrow_are_refused():
  assert decode.listening(np.zeros((1, WIDTH), np.uint32),
                          dataclasses.replace(PLAN, holds=False), 0, 0, 0) == {}
  narrow = row(1, [None] * 3, [])[None, :BEGIN + ring.held_width(3) - 1]
  for read in (decode.decode, decode.listening):
    with pytest.raises(ValueError, match="belongs to another pace state"):
      read(narrow, PLAN, 0, 0, 0)


@given(st.integers(0, 2**32 - 1))
def test_a_reading_is_kept_to_the_last_bit(nanoseconds):
  """Also where float32 has not room for every nanosecond."""
  seconds = np.float32(stamped.measured(np.int64(nanoseconds)))
  assert seconds == np.float32(words.seconds_between(words.from_ns(0), words.from_ns(nanoseconds)))
  heard = decode.listening(row(1, [(0, 0.0, 0.0, 1), None, None], [(seconds, seconds)])[None], PLAN,
                           0, 0, 0)
  for name in ("heard_ns", "told_ns"):
    assert bits(stamped.measured(heard[name]))[0] == bits(seconds)


def test_what_is_heard_is_written_by_one_process_ahead_of_its_steps(tmp_path):
  rows = np.stack([row(step, [(0, 1e-4, 3e-5, 1), None, None], [(3e-5, 0)]) for step in range(4)])
  rings = np.broadcast_to(rows, (2, *rows.shape))
  for process, readings in ((0, 4), (1, 0)):
    intake = Intake([2 * process, 2 * process + 1], process, 0, Losses())
    intake.add(Batch(rings, PLAN, [(None,) * 5] * 4, [{}] * 4))
    intake.decode(PLAN)
    found = intake.take_listening()
    assert len(found.get("step", ())) == readings and not intake.take_listening()
    assert set(np.asarray(found.get("rank", [2 * process])).tolist()) == {2 * process}


def written(path, heard, attempts=(0,), **changed):
  """A run of three steps on one rank and its readings, whatever they are."""
  (path / "process").mkdir(parents=True)
  (path / "run.json").write_text(json.dumps({"schema_version": 1, "run": "a", "ranks": 1}))
  for attempt in attempts:
    rows = np.stack([row(step, [(0, 1e-4, 3e-5, 1), None, None], []) for step in range(3)])
    for table, columns in zip(("steps", "collectives"), decode.decode(rows, PLAN, 0, 0, attempt),
                              strict=True):
      PartStore(path, table, "a", 0).append(columns)
  names = ("step", "rank", "process", "attempt", "collective", "turn", "heard_ns", "told_ns")
  values = np.asarray(heard, np.int64).reshape(-1, len(names)).T
  columns = dict(zip(names, values, strict=True)) | changed
  PartStore(path, "listening", "a", 0).append(columns)
  return read_run(path)


def test_readings_are_read_in_order_and_of_the_newest_attempt_alone(tmp_path):
  run = written(tmp_path / "run", [
      (2, 0, 0, 1, 0, 0, 7, 0), (1, 0, 0, 1, 2, 0, 6, 0), (1, 0, 0, 1, 0, 1, 5, 1),
      (1, 0, 0, 1, 0, 0, 4, 0), (1, 0, 0, 0, 0, 2, 3, 0), (1, 0, 0, 1, 0, 0, 8, 0),
      (9, 0, 0, 1, 0, 0, 9, 0)], attempts=(0, 1))
  assert np.stack(run.listening).T.tolist() == [
      [1, 0, 0, 8, 0], [1, 0, 1, 5, 1], [1, 2, 0, 6, 0], [2, 0, 0, 7, 0]]
  held = run.collectives[0].held
  assert held.listened.tolist() == [[1] * 3] and held.asked_ns.tolist() == [[100_000] * 3]
  assert (run.collectives[1].held.listened == MISSING).all()


def test_damaged_readings_are_left_out_and_said(tmp_path):
  heard = [(1, 0, 0, 0, 0, 0, 4, 0), (1, 0, 0, 0, 0, -3, 5, 0)]
  run = written(tmp_path / "run", heard)
  assert run.listening.heard_ns.tolist() == [4]
  assert any("'listening' holds rows whose turn" in problem for problem in run.problems)
  for file in (tmp_path / "run" / "listening").glob("*.parquet"):
    file.write_bytes(file.read_bytes()[:40])
  run = read_run(tmp_path / "run")
  assert run.listening is None and any("listening/" in problem for problem in run.problems)
