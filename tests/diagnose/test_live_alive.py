"""Whether a run lives: by its processes' files and the age of its rows."""

import json
import os

import pytest

from jaxpace.diagnose.alive import EventFollower, ProcessFiles, judge, longest_quiet
from jaxpace.diagnose.follower import Follower
from jaxpace.hang.alarms import EventFile, Late, LateProcess
from tests.lib.said import numbers
from tests.show.growing import Growing
from tests.synthetic.synthetic_runs import SyntheticJob

UNIX = 1.7e9


class Folder:
  """The folder `process` of a job of three processes on hosts a, b and c."""

  def __init__(self, path):
    self.path, self.files = path, ProcessFiles(path)
    path.mkdir()

  def write(self, process, unix=UNIX, **values):
    file = self.path / f"{process}.json"
    file.write_text(
        json.dumps({"run": "r", "process": process, "hostname": "abc"[process], "ranks": [process],
                    "closed_cleanly": False} | values))
    os.utime(file, (unix, unix))

  def judge(self, now, age=1.0, declared=3, step=10, step_time=0.1, unix=UNIX):
    self.files.poll("r", now, unix)
    return judge(self.files.seen, declared, age, step, step_time, now)


@pytest.fixture
def folder(tmp_path):
  folder = Folder(tmp_path / "process")
  for process in range(3):
    folder.write(process)
  return folder


def test_fresh_rows_are_a_running_job(folder):
  assert folder.judge(100.0).code == "running"


def test_before_the_first_rows_it_waits(tmp_path, folder):
  empty = Folder(tmp_path / "other")
  told = [empty.judge(100.0, None), folder.judge(100.0, None),
          folder.judge(100.0, None, declared=5)]
  assert [(state.code, numbers(state)) for state in told] == [
      ("waiting", []), ("waiting", [3]), ("waiting", [3, 5])]


@pytest.mark.parametrize("age, step_time, kind", [(61.0, 0.1, "quiet"), (70.0, 60.0, "running")])
def test_processes_that_rewrite_their_files_hang_unless_steps_take_that_long(folder, age, step_time,
                                                                             kind):
  folder.judge(100.0)
  for process in range(3):
    folder.write(process, UNIX + 60)
  state = folder.judge(160.0, age=age, step_time=step_time)
  assert state.code == kind and (kind == "running" or numbers(state) == [61])
  assert longest_quiet(None) == longest_quiet(0.01) == 10 and longest_quiet(60.0) == 305


def test_one_silent_process_is_named(folder):
  folder.judge(100.0)
  for process in (0, 2):
    folder.write(process, UNIX + 40)
  state = folder.judge(140.0, age=39.0)
  assert state.code == "dead" and numbers(state) == [1, 40] and "(b)" in state


def test_all_silent_is_a_dead_run_whatever_the_clocks_say(folder):
  # the file system's clock is ahead: no negative age
  assert folder.judge(100.0, unix=UNIX - 3600).code == "running"
  assert folder.judge(115.0, age=15.0, unix=UNIX - 3585).code == "quiet"
  state = folder.judge(130.0, age=30.0, unix=UNIX - 3570)
  assert state.code == "dead" and numbers(state) == [30]


def test_a_run_found_long_dead_is_told_at_first_sight(folder):
  assert numbers(folder.judge(100.0, age=1e4, unix=UNIX + 1e4)) == [2, 46]


def test_an_end_is_told_from_a_death(folder):
  for process in range(3):
    folder.write(process, closed_cleanly=True, ended_by="SIGTERM")
  state = folder.judge(500.0, age=400.0)
  assert state.code == "ended" and numbers(state) == [10] and "SIGTERM" in state
  assert folder.judge(500.0, age=400.0, declared=4).code != "ended"


def test_one_that_closed_is_not_missed_when_the_others_are_silent(folder):
  folder.write(0, closed_cleanly=True)
  folder.judge(100.0)
  state = folder.judge(130.0, age=30.0)
  assert state.code == "dead" and numbers(state) == [30]


def test_files_of_other_runs_and_torn_ones_count_for_nothing(folder):
  folder.write(1, run="earlier")
  (folder.path / "2.json").write_text("{")
  (folder.path / "notes.json").write_text("{}")
  folder.files.poll("r", 0.0, UNIX)
  assert [seen.process.process for seen in folder.files.seen] == [0]


def test_many_processes_files_are_read_every_few_seconds_but_seen_at_once(tmp_path):
  folder = Folder(tmp_path / "process")
  for process in range(40):
    (folder.path / f"{process}.json").write_text(
        json.dumps({"process": process, "run": "r", "n": 0}))
  folder.files.poll("r", 100.0, UNIX)
  for process in range(40):
    (folder.path / f"{process}.json").write_text(
        json.dumps({"process": process, "run": "r", "n": 1}))
    os.utime(folder.path / f"{process}.json", (UNIX + 1, UNIX + 1))
  folder.files.poll("r", 101.0, UNIX + 1)
  assert {(s.changed, s.process.info["n"]) for s in folder.files.seen} == {(101.0, 0)}
  folder.files.poll("r", 106.0, UNIX + 6)
  assert {(s.changed, s.process.info["n"]) for s in folder.files.seen} == {(101.0, 1)}


def test_age_of_the_newest_rows(tmp_path):
  growing = Growing(tmp_path / "run", SyntheticJob(ranks=2, steps=60, processes=1),
                    tmp_path / "whole")
  growing.write(30)
  for file in growing.directory.rglob("*.parquet"):
    os.utime(file, (UNIX, UNIX))
  follower = Follower(growing.directory, 20)
  assert follower.poll(50.0, UNIX + 7).age == pytest.approx(7)  # at first sight by the file's clock
  assert follower.poll(53.0, UNIX + 1e6).age == pytest.approx(10)  # from then on by this machine's
  growing.write(60)
  assert follower.poll(54.0, UNIX + 2e6).age == 0
  for store in growing.stores.values():
    store.compact()
  assert follower.poll(59.0, UNIX).age == pytest.approx(5)  # merged parts are no new rows


def test_the_watchdogs_word(tmp_path):
  events = EventFollower(tmp_path)
  assert events.poll("r") == ()
  late = Late(21, 3.8, (LateProcess(1, "outside", "b", 7, 20, "", 3.7, "a stack\nof lines"), ),
              (0, 2), 0)
  EventFile(tmp_path, 0, "r").write("late", int(UNIX * 1e9), late.to_json())
  found, = events.poll("r")
  assert not found.over and found.unix == UNIX
  assert numbers(found.sentence)[:3] == [21, 3.8, 1] and "host b" in found.sentence
  assert "stack" not in found.sentence
  EventFile(tmp_path, 0, "r").write("resumed", int(UNIX * 1e9) + 1, {"process": 0, "seconds": 75.0})
  EventFile(tmp_path, 0, "another").write("late", 1, late.to_json())
  assert [(event.over, numbers(event.sentence)) for event in events.poll("r")][1:] == [(True, [75])]


@pytest.mark.parametrize("values", [
    {}, {"late": 3, "step": "x", "waited": "y"},
    {"late": [3, {}, {"process": [], "state": "silent", "seconds": "x"}]},
    {"late": [{"process": 1, "state": "silent", "host": "\x1b[2J", "phase": None, "odd": 1}],
     "waited": 1e300}])
def test_events_that_others_wrote_are_data(tmp_path, values):
  (tmp_path / "watchdog").mkdir()
  line = json.dumps({"event": "late", "run": "r", "when_unix_ns": 1, **values})
  (tmp_path / "watchdog" / "0.jsonl").write_text(line + "\n[]\nnull\n{\n")
  event, = EventFollower(tmp_path).poll("r")
  assert event.sentence.startswith("Watchdog: ") and "\x1b" not in event.sentence
