"""What was heard before collectives, from a step's events to the run that is read."""

import dataclasses
import itertools
import json

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxpace.core import durations
from jaxpace.core.plan import Plan, Timestamp
from jaxpace.core.ring_layout import (
  ASKED,
  HEARD,
  LISTENED,
  LOST,
  READING,
  STEP_VALUE,
  TELLING,
  held_value,
  timestamp_tags,
)
from jaxpace.observation.clocks import words
from jaxpace.record.parts import PartStore
from jaxpace.record.ring.executions import Executions
from jaxpace.runs.reader import read_run
from jaxpace.runs.run import MISSING
from tests.record.ring.programs import traced
from tests.record.ring.replayed import Replayed, rows_of

PLAN = Plan(
    axis="data", ranks=2, clock="test", holds=True,
    marks=(Timestamp("start", "gap"), *(Timestamp(kind, "sync", slot) for slot in range(3)
                                   for kind in ("enter", "exit")), Timestamp("end", "update")),
    collectives=tuple(traced(slot, f"psum.{slot}") for slot in range(3)))


def bits(value):
  return np.asarray(value, np.float32).view(np.uint32)


def executions(*rows):
  """Executions of (number, of each collective (lost ns, asked s, heard s, listened) or None, and s
  heard and told)."""
  events = []
  for place, (number, held, readings) in enumerate(rows):
    said = iter(readings)
    events.append((place, STEP_VALUE, number))
    events += [(place, tag, 1000 * (number * 100 + i + 1))
               for i, tag in enumerate(timestamp_tags(PLAN.marks)) if 0 < i < len(PLAN.marks) - 1]
    for slot, cell in enumerate(held):
      if cell is None:
        continue
      values = (cell[0], bits(cell[1]), bits(cell[2]), cell[3])
      events += [(place, held_value(slot, which), int(value))
                 for which, value in zip((LOST, ASKED, HEARD, LISTENED), values, strict=True)]
      for heard, told in itertools.islice(said, cell[3]):
        events += [(place, held_value(slot, READING), int(bits(heard))),
                   (place, held_value(slot, TELLING), int(bits(told)))]
  of, tag, ns = np.array(events, np.int64).T
  ends = (np.array([1000 * (row[0] * 100 + at) for row in rows]) for at in (1, len(PLAN.marks)))
  return Executions(np.arange(len(rows)), *ends, of, tag.astype(np.uint32), ns)


def test_every_column_of_known_steps():
  rows = executions(
      (4, [(500, np.nan, np.nan, 0)] * 3, []),
      (5, [(2000, 3e-3, 4e-5, 2), None, (0, 1e-3, 7e-5, 1)],
       [(2e-5, 0), (4e-5, 1e-5), (7e-5, 0)]))
  steps, collectives, heard = rows_of(PLAN, rows, 1, 0, 2)
  assert steps["held_ns"].tolist() == [1500, 2000]
  assert collectives["held_ns"].tolist() == [500, 500, 500, 2000, None, 0]
  assert collectives["enter_ns"].tolist() == [402_500, 404_500, 406_500, 504_000, 504_000, 506_000]
  assert collectives["asked_ns"].tolist() == [None, None, None, 3_000_000, None, 1_000_000]
  assert collectives["listened"].tolist() == [None, None, None, 2, None, 1]
  assert collectives["heard_ns"].tolist() == [None, None, None, 40_000, None, 70_000]
  assert {name: values.tolist() for name, values in heard.items()} == {
      "step": [5] * 3, "rank": [1] * 3, "process": [0] * 3, "attempt": [2] * 3,
      "collective": [0, 0, 2], "turn": [0, 1, 0], "heard_ns": [20_000, 40_000, 70_000],
      "told_ns": [0, 10_000, 0]}


def test_a_plan_of_which_nothing_is_held_has_no_readings():
  ran = executions((1, [None] * 3, []))
  assert rows_of(dataclasses.replace(PLAN, holds=False), ran)[2] == {}


@given(st.integers(0, 2**32 - 1))
def test_a_reading_is_kept_to_the_last_bit(nanoseconds):
  """Also where float32 has not room for every nanosecond."""
  seconds = np.float32(durations.elapsed_seconds(np.int64(nanoseconds)))
  assert seconds == np.float32(words.seconds_between(words.from_ns(0), words.from_ns(nanoseconds)))
  heard = rows_of(PLAN, executions((1, [(0, 0.0, 0.0, 1), None, None], [(seconds, seconds)])))[2]
  for name in ("heard_ns", "told_ns"):
    assert bits(durations.elapsed_seconds(heard[name]))[0] == bits(seconds)


def test_what_is_heard_is_written_by_one_process_ahead_of_its_steps(tmp_path):
  own = executions(*((step, [(0, 1e-4, 3e-5, 1), None, None], [(3e-5, 0)]) for step in range(4)))
  for process, readings in ((0, 4), (1, 0)):
    ranks = [2 * process, 2 * process + 1]
    replayed = Replayed(tmp_path, PLAN, ranks, process)
    replayed.rows(dict.fromkeys(ranks, own), [])
    found = replayed.tables.get("listening", {})
    assert len(found.get("step", ())) == readings and not replayed.intake.take()
    assert set(np.asarray(found.get("rank", [2 * process])).tolist()) == {2 * process}


def written(path, heard, attempts=(0,), **changed):
  """A run of three steps on one rank and its readings, whatever they are."""
  (path / "process").mkdir(parents=True)
  (path / "run.json").write_text(json.dumps({"schema_version": 1, "run": "a", "ranks": 1}))
  for attempt in attempts:
    rows = executions(*((step, [(0, 1e-4, 3e-5, 1), None, None], [(3e-5, 0)])
                           for step in range(3)))
    for table, columns in zip(("steps", "collectives"), rows_of(PLAN, rows, attempt=attempt),
                              strict=False):
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
