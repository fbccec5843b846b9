"""What was heard before collectives, from a step's events to the run that is read."""

import json

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxpace.core import durations
from jaxpace.core.plan import Collective, Plan, Timestamp
from jaxpace.observation.clocks import words
from jaxpace.record import decode
from jaxpace.record.decode import Held, TimestampedSteps
from jaxpace.record.intake import Batch, Intake, Losses
from jaxpace.record.parts import PartStore
from jaxpace.runs.reader import read_run
from jaxpace.runs.run import MISSING

PLAN = Plan(
    axis="data", ranks=2, clock="test", holds=True,
    marks=(Timestamp("start", "gap"), *(Timestamp(kind, "sync", slot) for slot in range(3)
                                   for kind in ("enter", "exit")), Timestamp("end", "update")),
    collectives=tuple(Collective(slot, f"psum.{slot}", ("psum",), "data", 4, 1, ("float32",),
                                 "backward") for slot in range(3)))


def bits(value):
  return np.asarray(value, np.float32).view(np.uint32)


def timestamped_steps(*rows):
  """Steps of (number, of each collective (lost ns, asked s, heard s, listened) or None, and s heard
  and told)."""
  number, held, readings = zip(*rows, strict=True)
  cells = [[(-1, np.nan, np.nan, 0) if each is None else each for each in own] for own in held]
  lost, asked, heard, listened = np.moveaxis(np.array(cells, object), 2, 0)
  listened = listened.astype(np.int64)
  turns = [(row, place, turn) for row, own in enumerate(listened.tolist())
           for place, times in enumerate(own) for turn in range(times)]
  of = np.array(turns, np.int64).reshape(-1, 3).T
  said = np.array([pair for own in readings for pair in own], np.float32).reshape(-1, 2).T
  zeros = np.zeros(len(rows), np.float32)
  return TimestampedSteps(
      np.array(number), np.array([[1000 * (step * 100 + i + 1) for i in range(len(PLAN.marks))]
                                  for step in number]), zeros, zeros, zeros[:, None],
      Held(lost.astype(np.int64), asked.astype(np.float32), heard.astype(np.float32), listened,
           *of, *said))


def test_every_column_of_known_steps():
  rows = timestamped_steps(
      (4, [(500, np.nan, np.nan, 0)] * 3, []),
      (5, [(2000, 3e-3, 4e-5, 2), None, (0, 1e-3, 7e-5, 1)],
       [(2e-5, 0), (4e-5, 1e-5), (7e-5, 0)]))
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


def test_a_plan_of_which_nothing_is_held_has_no_readings():
  steps = timestamped_steps((1, [None] * 3, []))._replace(held=None)
  assert decode.listening(steps, PLAN, 0, 0, 0) == {}


@given(st.integers(0, 2**32 - 1))
def test_a_reading_is_kept_to_the_last_bit(nanoseconds):
  """Also where float32 has not room for every nanosecond."""
  seconds = np.float32(durations.elapsed_seconds(np.int64(nanoseconds)))
  assert seconds == np.float32(words.seconds_between(words.from_ns(0), words.from_ns(nanoseconds)))
  heard = decode.listening(
      timestamped_steps((1, [(0, 0.0, 0.0, 1), None, None], [(seconds, seconds)])), PLAN, 0, 0, 0)
  for name in ("heard_ns", "told_ns"):
    assert bits(durations.elapsed_seconds(heard[name]))[0] == bits(seconds)


def test_what_is_heard_is_written_by_one_process_ahead_of_its_steps():
  own = timestamped_steps(*((step, [(0, 1e-4, 3e-5, 1), None, None], [(3e-5, 0)])
                            for step in range(4)))
  for process, readings in ((0, 4), (1, 0)):
    intake = Intake(process, 0, Losses())
    batch = Batch(PLAN, [2 * process, 2 * process + 1], [np.arange(4)] * 2, [own] * 2, {})
    intake.add(batch._replace(plan=intake.plan_of(batch)))
    intake.decode(PLAN)
    found = intake.take_listening()
    assert len(found.get("step", ())) == readings and not intake.take_listening()
    assert set(np.asarray(found.get("rank", [2 * process])).tolist()) == {2 * process}


def written(path, heard, attempts=(0,), **changed):
  """A run of three steps on one rank and its readings, whatever they are."""
  (path / "process").mkdir(parents=True)
  (path / "run.json").write_text(json.dumps({"schema_version": 1, "run": "a", "ranks": 1}))
  for attempt in attempts:
    rows = timestamped_steps(*((step, [(0, 1e-4, 3e-5, 1), None, None], [(3e-5, 0)])
                           for step in range(3)))
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
