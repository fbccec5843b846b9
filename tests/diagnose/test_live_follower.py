"""What the live view reads of a run that grows: all that is new, once, in bounded memory."""

import json
import pathlib

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpace.diagnose import stream
from jaxpace.diagnose.diagnose import diagnose
from jaxpace.diagnose.follower import Follower
from jaxpace.diagnose.selected_steps import WARMUP_STEPS
from jaxpace.diagnose.words.notes import Note
from jaxpace.runs import growing as parts
from jaxpace.runs.growing import PartFollower
from jaxpace.runs.reader import read_run
from jaxpace.runs.run import MISSING
from jaxpace.runs.table_reader import TableFiles
from jaxpace.show.watch import line
from tests.lib.said import numbers, only
from tests.quick import examples
from tests.show.growing import Growing
from tests.synthetic.synthetic_faults import Fault
from tests.synthetic.synthetic_runs import SyntheticJob

JOB = SyntheticJob(ranks=4, steps=320, processes=2, noise=0.02, transfer_noise=0.1, collectives=2,
                late={2: 4e-3})


@pytest.fixture(scope="module")
def written(tmp_path_factory):
  return tmp_path_factory.mktemp("written")


@pytest.fixture
def growing(tmp_path, written):
  return Growing(tmp_path / "run", JOB, written)


@pytest.fixture
def follower(growing):
  return PartFollower(growing.directory / "collectives", "collectives", "growing")


def read(follower, steps=8192):
  return list(follower.poll(parts.COLLECTIVES_COLUMNS, steps))


def keys(rows):
  return {key for new in rows
          for key in zip(*(new[name].tolist() for name in ("step", "rank", "collective")),
                         strict=True)}


def test_each_row_comes_and_what_was_merged_is_not_opened_again(growing, follower, monkeypatch):
  opened, seen = [], []
  monkeypatch.setattr(parts, "TableFiles",
                      lambda table, found: opened.extend(found) or TableFiles(table, found))
  for step in range(20, 221, 20):
    growing.write(step)
    seen += read(follower)
    assert read(follower) == []
  assert keys(seen) == {(s, r, c) for s in range(220) for r in range(4) for c in range(2)}
  assert len(opened) == 2 * 11 and len(list((growing.directory / "collectives").iterdir())) < 2 * 11
  for store in growing.stores.values():
    store.compact()
  assert read(follower) == [] and len(opened) == 2 * 11


def test_a_late_reader_takes_the_merged_part_and_only_the_newest_steps(growing, follower):
  for step in range(10, 51, 10):
    growing.write(step)
  assert {key[0] for key in keys(read(follower, 10))} == set(range(40, 50))
  for step in range(60, 101, 10):  # what was read lies in a merged part now, beside what was not
    growing.write(step)
  assert set(range(50, 100)) <= {key[0] for key in keys(read(follower))}


def test_a_part_that_vanishes_while_it_is_opened_is_read_with_the_one_that_holds_it(
    growing, follower, monkeypatch):
  for step in (10, 20, 30):
    growing.write(step)

  def merging(table, found):
    if growing._upto[0] == 30:
      growing.write(40)  # the fourth part: all four become one, the three listed are gone
    return TableFiles(table, found)

  monkeypatch.setattr(parts, "TableFiles", merging)
  before, after = keys(read(follower)), keys(read(follower))
  assert (not before and {key[0] for key in after} == set(range(40))
          and {key[1] for key in after} == {0, 1, 2, 3})


def test_a_torn_part_is_named_and_read_once_it_is_whole(growing, follower):
  growing.write(20)
  part = next((growing.directory / "collectives").glob("*p00001*"))
  whole = part.read_bytes()
  part.write_bytes(whole[:100])
  assert {key[1] for key in keys(read(follower))} == {0, 1}
  assert len(follower.problems) == 1 and part.name in follower.problems[0]
  growing.write(40)
  assert {key[:2] for key in keys(read(follower))} >= {(39, 2), (39, 3)}
  part.write_bytes(whole)
  assert {key[1] for key in keys(read(follower))} == {2, 3}
  assert follower.problems == []


@settings(max_examples=8, deadline=None)
@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=8), merge=st.integers(2, 4),
       looks=st.integers(1, 3), shown=st.integers(20, 90))
def test_numbers_are_those_of_the_report_on_the_same_steps(written, tmp_path_factory, sizes, merge,
                                                           looks, shown):
  """However the rows came: the report of the whole, cut to the window, is the oracle."""
  tmp_path = tmp_path_factory.mktemp("any")
  growing = Growing(tmp_path / "run", JOB, written, merge_parts=merge)
  follower, step = Follower(growing.directory, shown), 30
  for number, size in enumerate(sizes):
    step += size
    growing.write(step)
    if number % looks == 0:
      look = follower.poll(float(number), 0.0)
  look = follower.poll(99.0, 0.0)
  first = max(step - shown, 0)
  report = diagnose(read_run(growing.directory, window=(first if first else None, step)))
  numbers = look.numbers
  assert (numbers.last, look.step) == (step - 1, step - 1)
  assert (numbers.step_time.mean == pytest.approx(report.step_time.mean)
          and numbers.step_time.p99 == pytest.approx(report.step_time.p99))
  assert numbers.late[0].rank == 2 and numbers.late[0].lateness == pytest.approx(4e-3, rel=0.2)
  assert (numbers.late[0].cost
          == pytest.approx(report.totals.blame[2] / np.nansum(report.totals.per_step["step"])))
  assert sum(numbers.shares.values()) == pytest.approx(1)
  for name in ("compute", "skew", "runtime", "pacing"):
    assert numbers.shares[name] == pytest.approx(report.shares[name], abs=1e-9)
  # The floor is the lowest so far, over all windows: contention is at least that of the window
  # alone.
  assert numbers.shares["contention"] >= report.shares["contention"] - 1e-9


def test_memory_is_bounded_and_the_newest_steps_stay(growing, monkeypatch):
  monkeypatch.setattr(parts, "LEAST", 64)
  monkeypatch.setattr(parts, "CELLS", 1)
  follower = Follower(growing.directory, 20)
  for step in range(16, 321, 16):
    growing.write(step)
    look = follower.poll(step / 10, 0.0)
  assert follower._window.size == 64 and look.numbers.steps == 20 and look.numbers.last == 319
  report = diagnose(read_run(growing.directory, window=(300, 320)))
  assert look.numbers.step_time.mean == pytest.approx(report.step_time.mean)


def test_processes_that_write_at_different_times_are_compared_on_the_steps_that_all_have(growing):
  follower = Follower(growing.directory, 50)
  growing.write(100)
  growing.write(140, [0])
  look = follower.poll(0.0, 0.0)
  assert (look.step, look.numbers.last, look.numbers.silent) == (139, 99, ())
  growing.write(120, [1])
  assert follower.poll(1.0, 0.0).numbers.last == 119


def test_a_process_that_died_is_not_waited_for(growing):
  follower = Follower(growing.directory, 50)
  growing.write(100)
  follower.poll(0.0, 0.0)
  growing.write(200, [0])
  assert follower.poll(5.0, 0.0).numbers.last == 99
  growing.write(201, [0])
  look = follower.poll(30.0, 0.0)
  assert look.numbers.last == 200 and look.numbers.silent == (2, 3)
  assert "2, 3" in only(look.notes, Note.SILENT_RANKS)


def test_another_loop_of_the_program_begins_anew_and_that_is_said(tmp_path):
  growing = Growing(tmp_path / "run", JOB, tmp_path / "a")
  follower, path = Follower(tmp_path / "run"), tmp_path / "run" / "run.json"
  growing.write(150)
  follower.poll(0.0, 0.0)
  told = json.loads(path.read_text())
  told["settings"] = {"step": {"programs": ["fit"], "why": "fit, which trains", "first_step": 200}}
  path.write_text(json.dumps(told))
  growing.write(260)
  look = follower.poll(1.0, 1.0)
  assert (look.numbers.first, look.step) == (201, 259)
  assert [alert.sentence for alert in look.alerts if alert.over] == [
      "From step 200 on the step is fit, which trains."]


def test_a_restart_begins_anew_and_says_so(tmp_path):
  first = Growing(tmp_path / "run", JOB, tmp_path / "a")
  follower = Follower(tmp_path / "run", 50)
  first.write(200)
  assert follower.poll(0.0, 0.0).attempt == 0
  slow = SyntheticJob(ranks=4, steps=100, processes=2, forward=30e-3, collectives=2)
  again = Growing(tmp_path / "run", slow, tmp_path / "b", attempt=1, first_step=120)
  again.write(160)
  look = follower.poll(1.0, 0.0)
  assert (look.attempt, look.step, look.numbers.first) == (1, 159, 121)
  assert look.numbers.step_time.mean == pytest.approx(55.5e-3, rel=0.01)
  assert [numbers(alerts.sentence) for alerts in look.alerts] == [[79, 2, 10, 19], [2, 120]]
  late_comer = Follower(tmp_path / "run", 50).poll(1.0, 0.0)
  assert ((late_comer.attempt, late_comer.step, late_comer.numbers.step_time.mean)
          == (1, 159, pytest.approx(look.numbers.step_time.mean)))


def test_another_run_in_the_same_directory_replaces_the_first(tmp_path):
  first = Growing(tmp_path / "run", JOB, tmp_path / "a")
  follower = Follower(tmp_path / "run", 50)
  first.write(200)
  assert follower.poll(0.0, 0.0).step == 199
  first.remove()
  other = Growing(tmp_path / "run", SyntheticJob(ranks=2, steps=50, processes=1), tmp_path / "b",
                  run="other")
  assert follower.poll(1.0, 0.0).state.code == "waiting"
  other.write(40)
  look = follower.poll(2.0, 0.0)
  assert (look.run, look.step, look.ranks, look.alerts) == ("other", 39, 2, ())


def test_the_guard_is_that_of_the_lowest_rank_now(tmp_path):
  def guard(columns):
    step = np.asarray(columns["step"])
    on = (step % 40 < 20).astype(np.float32)
    return {"decision_guard_on": on,
            "decision_effect": np.where(step < 60, np.nan, -0.03).astype(np.float32),
            "decision_effect_low": np.where(step < 90, np.nan, -0.05).astype(np.float32),
            "decision_effect_high": np.where(step < 90, np.nan, -0.01).astype(np.float32),
            "decision_pairs": (step // 40).astype(np.float32),
            "decision_guard_pair": (step // 40).astype(np.float32)}

  job = SyntheticJob(ranks=4, steps=200, processes=2, delays={0: 1e-3})
  growing = Growing(tmp_path / "run", job, tmp_path / "whole", extra=guard)
  follower, seen = Follower(growing.directory, 50), []
  for step in (50, 70, 100):
    growing.write(step)
    numbers = follower.poll(float(step), 0.0).numbers
    seen.append(numbers.guard)
  assert [guard.on for guard in seen] == [True, False, True]
  assert [guard.effect for guard in seen] == [None, pytest.approx(-0.03), pytest.approx(-0.03)]
  assert (seen[1].interval is None
          and seen[2].interval == (pytest.approx(-0.05), pytest.approx(-0.01)))
  assert numbers.delayed == pytest.approx(0.25) and seen[2].pairs == 2


def test_what_is_told_live_is_what_a_replay_of_the_run_tells(tmp_path):
  """Pauses with a cause that the processes measure too, of which most parts hold none."""
  job = SyntheticJob(ranks=4, steps=320, processes=2, noise=0.02, host_columns=True,
                  faults=(Fault("pause", 60e-3, (2, 3), begin=0.6, probability=0.1, aligned=True,
                                mechanism="checkpoint"),))
  growing = Growing(tmp_path / "run", job, tmp_path / "written")
  follower, state, replayed = Follower(growing.directory), stream.init(4), []
  for step in range(20, 321, 20):
    growing.write(step)
    alerts = [alerts.sentence for alerts in follower.poll(float(step), 0.0).alerts]
  run = read_run(tmp_path / "written")
  assert run.host_causes.columns["checkpoint"].max() > 0.05
  state = state._replace(until=WARMUP_STEPS - 1)
  replayed = [alarm.sentence() for alarm in stream.follow(state, run)[1]]
  assert alerts == replayed and "pause" in alerts[0]


def test_without_collectives_the_step_time_is_still_told(growing):
  import shutil
  growing.write(100)
  shutil.rmtree(growing.directory / "collectives")
  look = Follower(growing.directory, 50).poll(0.0, 0.0)
  assert (look.numbers.step_time.mean
          == pytest.approx(diagnose(read_run(growing.directory, window=(50, 100))).step_time.mean))
  assert look.numbers.late == ()


@pytest.mark.parametrize("column, value",
                         [("rank", 2**30), ("rank", -5), ("step", 2**60)])
def test_damaged_numbers_are_left_out(growing, column, value):
  growing.write(100)
  part = next((growing.directory / "collectives").glob("*p00000*"))
  table = pq.read_table(part)
  values = table[column].to_numpy().astype(np.int64)
  values[7] = value
  pq.write_table(table.set_column(table.column_names.index(column), column, [values]), part)
  look = Follower(growing.directory, 50).poll(0.0, 0.0)
  assert look.step == 99 and look.ranks == 4
  assert look.numbers.step_time.mean == pytest.approx(40e-3, rel=0.2)


def test_lateness_is_told_after_the_typical_rank(tmp_path):
  job = SyntheticJob(ranks=4, steps=60, processes=2, late={1: 2e-3, 2: 4e-3, 3: 6e-3})
  growing = Growing(tmp_path / "run", job, tmp_path / "whole")
  growing.write(60)
  late = Follower(growing.directory, 20).poll(0.0, 0.0).numbers.late
  assert ([(rank.rank, round(1e3 * rank.lateness, 3)) for rank in late]
          == [(3, 4.0), (2, 2.0), (1, 0.0), (0, -2.0)])


def test_contention_is_measured_from_the_lowest_floor_since_the_view_began(tmp_path):
  job = SyntheticJob(ranks=4, steps=200, processes=2,
                     faults=(Fault("contention", 5e-3, begin=0.5),))
  growing = Growing(tmp_path / "run", job, tmp_path / "whole")
  follower = Follower(growing.directory, 50)
  growing.write(90)
  assert follower.poll(0.0, 0.0).numbers.shares["contention"] == pytest.approx(0, abs=1e-9)
  growing.write(200)
  numbers = follower.poll(1.0, 0.0).numbers
  assert numbers.shares["contention"] * numbers.step_time.mean == pytest.approx(5e-3)


def test_rows_older_than_the_window_change_nothing():
  def rows(steps, exits):
    number = len(steps)
    zeros = dict.fromkeys(("rank", "process", "attempt", "collective"), np.zeros(number, np.int64))
    return {"step": np.array(steps), **zeros, "enter_ns": np.array(exits),
            "exit_ns": np.array(exits)}

  ring = parts.Window(8, 1)
  assert ring.add(rows(list(range(10, 18)), list(range(8))), 0.0)
  assert not ring.add(rows([2, 9], [77, 78]), 1.0)
  run = ring.run(11, 17, pathlib.Path("run"), {}, ())
  assert (run.steps.tolist() == list(range(10, 18))
          and run.collectives[0].exit_ns.tolist() == [list(range(8))])
  assert ring.add(rows([19], [9]), 2.0)
  run = ring.run(13, 19, pathlib.Path("run"), {}, ())
  assert run.collectives[0].exit_ns.tolist() == [[2, 3, 4, 5, 6, 7, MISSING, 9]]


def harm(victim, random):
  """Cuts a file, flips bytes of it, or removes it."""
  how, data = random.integers(3), bytearray(victim.read_bytes())
  if how == 0:
    victim.write_bytes(bytes(data[:random.integers(0, max(1, len(data)))]))
  elif how == 1:
    for at in random.integers(0, max(1, len(data)), 5) if data else ():
      data[at] ^= 0xFF
    victim.write_bytes(bytes(data))
  else:
    victim.unlink()


@pytest.mark.parametrize("seed", range(examples(12)))
def test_a_damaged_run_is_shown_as_far_as_it_can_be_read(tmp_path, written, seed):
  random = np.random.default_rng(seed)
  growing = Growing(tmp_path / "run", JOB, written)
  follower = Follower(growing.directory, 50)
  for step in (60, 120, 180):
    growing.write(step, [int(random.integers(2))])
    files = sorted(file for file in growing.directory.rglob("*") if file.is_file())
    harm(files[random.integers(len(files))], random)
    look = follower.poll(float(step), 0.0)
    assert line(look, []) and look.state.code in ("waiting", "running", "quiet", "dead", "ended")
