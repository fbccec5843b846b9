"""A job of two processes that hangs in a layer and is killed: who is missing is told meanwhile, and afterwards."""

import json
import pathlib
import signal
import subprocess
import sys
import time

from jaxpace.cli.main import main
from jaxpace.live.watchdog.events import read_events
from tests.multiprocess import jobs

WORKER = pathlib.Path(__file__).with_name("hang_worker.py")


def awaited(question, seconds):
  deadline = time.monotonic() + seconds
  while time.monotonic() < deadline:
    if found := question():
      return found
    time.sleep(0.1)
  return None


def test_the_collective_the_layer_and_the_rank_are_named_by_watchdog_and_report(tmp_path, capsys):
  run, address = tmp_path / "run", f"127.0.0.1:{jobs.free_high_port()}"
  processes = [subprocess.Popen(
      [sys.executable, str(WORKER)], cwd=jobs.ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
      env=jobs.clean_environment(ADDRESS=address, RUN=str(run), INDEX=str(index))) for index in range(2)]
  try:
    events = awaited(lambda: [event for event in read_events(run) if event["event"] == "late"], 60)
    # It must have hung for some seconds more until it is killed.
    time.sleep(4.0)
  finally:
    for process in processes:
      process.send_signal(signal.SIGKILL)
    outputs = [process.communicate()[0] for process in processes]
  assert events, outputs
  assert events[0]["causes"][0] == {"kind": "absent", "ranks": [1], "collective": "all-reduce.0"}, events
  assert "turn 2 of 4" in events[0]["marks"][0] and "for rank 1" in events[0]["marks"][0]
  assert any("in the step: Call 6 of train_step: rank 0" in output for output in outputs), outputs

  assert main(["report", str(run), "--json", str(tmp_path / "report.json")]) == 0
  hang = json.loads((tmp_path / "report.json").read_text())["hang"]
  cause, = hang["causes"]
  assert (cause["code"], cause["ranks"], hang["running"]) == ("absent", [1], False)
  wait, = cause["waits"]
  assert (wait["collective"], wait["loops"], wait["call"]) == ("all-reduce.0", [["while.1", 2, 4]], 6)
  assert (wait["waiting"], wait["absent"], wait["source"]) == ([0], [1], "model.py:10")
  place, = cause["places"]
  assert place["last"] == {"collective": "all-reduce.0", "turn": 1, "left": True} and place["state"] == "gone"
  assert hang["seconds"] > 3.0 and "all-reduce.0, turn 2 of 4" in capsys.readouterr().out
