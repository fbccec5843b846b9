"""A watchdog in a process that is alone, and real ones."""

import json
import threading
import time
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

import jaxpace
from jaxpace.hang.alarms import EventFile, read_events
from tests.hang import real_jobs
from tests.patience import awaited, patiently

LIMIT, TIMEOUT = 1.0, 1.5


def test_a_loop_that_hangs_is_told_with_its_stack_once_and_goes_on(tmp_path, caplog):
  found = []

  def page(late):
    found.append(late)
    raise ConnectionError("nobody is there")

  with jaxpace.Watchdog(1.0, directory=tmp_path, on_late=page) as watchdog:
    step = watchdog.watch(lambda x: x + 1)
    assert float(step(jnp.zeros(()))) == 1.0
    awaited(lambda: found)
    # Time to tell it a second time.
    time.sleep(0.5)
    # Nor is it late while this waits for the news, however long.
    with watchdog.pause("looking"):
      step(jnp.zeros(()))
      awaited(lambda: "complete again" in caplog.text)
  assert "on_late has failed, the watchdog goes on: ConnectionError: nobody" in caplog.text
  assert len(found) == 1 and found[0].late[0].state == "outside" and found[0].step == 2
  assert "test_a_loop_that_hangs" in found[0].late[0].stack
  assert f"step {found[0].step} " in caplog.text
  events = read_events(tmp_path)
  assert [event["event"] for event in events] == ["late", "resumed"]
  assert events[0]["late"][0]["phase"] == "between steps"


@patiently(LIMIT=1.0)
def test_an_announced_pause_is_no_alarm_and_threads_end(tmp_path):
  with jaxpace.Watchdog(LIMIT, directory=tmp_path) as watchdog:
    watchdog.watch(lambda: None)()
    with watchdog.pause("checkpoint"):
      time.sleep(1.6 * LIMIT)
  assert watchdog.latest is None and not read_events(tmp_path)
  assert not [t for t in threading.enumerate() if t.name.startswith("jaxpace-watchdog")]


def test_the_limit_follows_the_steps_and_the_first_has_its_own(monkeypatch):
  watchdog = jaxpace.Watchdog(first_timeout=300.0)
  assert watchdog._limit() == 300.0
  watchdog._progress.completed = 5
  monkeypatch.setattr(watchdog._progress, "usual", lambda: 2.0)
  assert watchdog._limit() == 40.0
  monkeypatch.setattr(watchdog._progress, "usual", lambda: 0.01)
  assert watchdog._limit() == 10.0
  watchdog = jaxpace.Watchdog(30.0, first_timeout=20.0)
  assert watchdog._limit() == 30.0


def test_slips_are_said():
  for timeout in (0.5, float("nan"), float("inf"), "60"):
    with pytest.raises(ValueError, match="at least 1 s"):
      jaxpace.Watchdog(timeout)
  with pytest.raises(TypeError, match="recorder takes a jaxpace.Recorder.*this is a str"):
    jaxpace.Watchdog(recorder="runs/demo")
  with pytest.raises(TypeError, match="on_late=3 must be a function"):
    jaxpace.Watchdog(on_late=3)
  watchdog = jaxpace.Watchdog(5.0)
  with pytest.raises(TypeError, match="step's function"):
    watchdog.watch(3)
  with pytest.raises(ValueError, match="limit"), watchdog.pause("x", 0):
    pass
  with watchdog:
    pass
  with pytest.raises(RuntimeError, match="once"):
    watchdog.__enter__()


def test_a_step_that_raises_raises(tmp_path):
  with jaxpace.Watchdog(5.0) as watchdog, pytest.raises(ZeroDivisionError):
    watchdog.watch(lambda: 1 / 0)()


def test_a_directory_that_cant_be_written_is_one_warning(tmp_path, caplog):
  (tmp_path / "watchdog").write_text("in the way")
  events = EventFile(tmp_path, 0, None)
  events.write("late", 1, {})
  events.write("late", 2, {})
  assert caplog.text.count("not recorded") == 1


def test_torn_and_foreign_lines_are_left_out(tmp_path):
  (tmp_path / "watchdog").mkdir()
  lines = [json.dumps({"event": "late", "run": "a", "when_unix_ns": 2}), "{torn", "[]",
           json.dumps({"event": "x"})]
  (tmp_path / "watchdog" / "0.jsonl").write_text("\n".join(lines))
  EventFile(tmp_path, 1, "b").write("late", 1, {})
  assert [e["run"] for e in read_events(tmp_path)] == ["b", "a"]
  assert [e["run"] for e in read_events(tmp_path, "a")] == ["a"]
  assert read_events(tmp_path / "none") == []


def test_events_of_a_process_keep_their_order_where_its_clock_is_set_back(tmp_path):
  first, other = EventFile(tmp_path, 0, "r"), EventFile(tmp_path, 1, "r")
  first.write("late", 100, {"step": 1})
  first.write("resumed", 40, {"seconds": 7.0})
  other.write("late", 90, {"step": 2})
  assert [(e["event"], e["when_unix_ns"]) for e in read_events(tmp_path)] == [
      ("late", 90), ("late", 100), ("resumed", 40)]


@pytest.mark.long
@pytest.mark.parametrize("scenario",
                         ["starving", "left", "zero stopped"])
@patiently(TIMEOUT=1.5)
def test_real_processes(scenario, tmp_path):
  expected = real_jobs.SCENARIOS[scenario]
  events, logs = real_jobs.run(scenario, tmp_path, timeout=TIMEOUT, processes=2)
  assert events, "\n".join(logs)
  for event in events:
    assert [one["process"] for one in event["late"]] == [expected.culprit], "\n".join(logs)
    assert event["late"][0]["state"] == expected.state
  late = events[0]["late"][0]
  if scenario == "starving":
    assert "next_batch" in late["stack"]
  if scenario != "zero stopped":
    assert late["last_step"] == real_jobs.BAD_STEP
  if scenario == "left":
    assert events[0]["step"] == real_jobs.BAD_STEP + 1


def test_in_large_jobs_few_processes_read_at_a_time_and_late_ones_later():
  def reads(process, processes, over):
    watchdog = jaxpace.Watchdog(30.0)
    watchdog._process, watchdog._processes = process, processes
    asked = []
    watchdog._store_thread = SimpleNamespace(carry=lambda heartbeat, read: asked.append(read))
    heartbeat = watchdog._heartbeat(time.monotonic(), 30.0 + over, False, over >= 0)
    assert not heartbeat.stack or len(heartbeat.stack) <= (3000 if processes <= 64 else 1000)
    watchdog._carry(heartbeat, time.monotonic(), over)
    watchdog._overdue_since = time.monotonic()
    watchdog._carry(heartbeat, time.monotonic(), over)  # not yet time for the next word
    return asked

  assert reads(3, 8, -20.0) == [True]
  assert reads(3, 1000, -20.0) == [False] and reads(3, 1000, -3.0) == [True]
  assert reads(20, 1000, -3.0) == [False] and reads(20, 1000, 0.0) == [True]
  assert reads(999, 1000, 60.0) == [False] and reads(999, 1000, 125.0) == [True]
