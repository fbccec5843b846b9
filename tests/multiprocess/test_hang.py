"""The script of docs/how_to/hang.md, word for word: a job of two processes that hangs in a layer
and is killed."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from jaxpace.cli.main import main
from jaxpace.live.watchdog.events import read_events
from jaxpace.trace.flight.read import read_flight
from tests.docs.blocks import written
from tests.multiprocess import jobs

PAGE = "docs/how_to/hang.md"


def awaited(question, seconds):
  deadline = time.monotonic() + seconds
  while time.monotonic() < deadline:
    if found := question():
      return found
    time.sleep(0.1)
  return None


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
  """The directory of the job after it was killed, what it printed, and the watchdog's words."""
  folder = tmp_path_factory.mktemp("hang")
  script, = (block.text for block in written("python") if block.page == PAGE)
  (folder / "train.py").write_text(script)
  with open(folder / "output", "w") as output:
    job = subprocess.Popen(
        [sys.executable, "-m", "jaxpace", "launch", "--nproc", "2", "--", sys.executable,
         "train.py"], cwd=folder,
        text=True, stdout=output, stderr=subprocess.STDOUT,
        env=jobs.clean_environment(PATH=os.environ["PATH"], PYTHONPATH=str(jobs.ROOT)))
    directory = folder / "runs" / "hang"
    try:
      events = awaited(lambda: [event for event in read_events(directory)
                                if event["event"] == "late"], 60)
      awaited(lambda: "in the step" in (folder / "output").read_text(), 10)
    finally:
      # Its processes go with it, by the same signal.
      job.send_signal(signal.SIGKILL)
      job.wait()
  assert events, (folder / "output").read_text()
  assert awaited(lambda: not read_flight(directory).running,
                 30), "the kernel ends them a moment later"
  return folder, events


@pytest.mark.long
def test_the_watchdog_names_the_collective_the_layer_and_the_rank(killed):
  folder, events = killed
  assert (events[0]["causes"][0] == {"kind": "absent", "ranks": [1],
                                     "collective": "all-gather"}), events
  assert "all-gather, turn 5 of 8 (train.py:25), over data among ranks 0, 1 for rank 1" in events[
      0]["marks"][0]
  assert ("rank 1 (process 1" in events[0]["marks"][1].lower()
          and "turn 4 of 8" in events[0]["marks"][1])
  assert "in the step: Call 6 of train_step: rank 0 has waited" in (folder / "output").read_text()


def test_the_report_names_them_from_the_files_of_the_killed_job(killed, tmp_path, capsys):
  folder, _ = killed
  assert (main(["report", str(folder / "runs" / "hang"), "--json", str(tmp_path / "report.json")])
          == 0)
  hang = json.loads((tmp_path / "report.json").read_text())["hang"]
  cause, = hang["causes"]
  assert (cause["code"], cause["ranks"], hang["seconds"] > 3.0) == ("absent", [1], True)
  wait, = cause["waits"]
  assert (wait["kind"], wait["axes"], wait["call"], wait["turn"], wait["loops"][0][1:]) == (
      "all-gather", ["data"], 6, 5, [5, 8])
  assert ((wait["waiting"], wait["absent"], wait["source"], wait["group"])
          == ([0], [1], "train.py:25", [0, 1]))
  place, = cause["places"]
  assert place["last"]["turn"] == 4 and place["last"]["left"] and place["process"] == 1
  assert "all-gather, turn 5 of 8 (train.py:25)" in " ".join(
      capsys.readouterr().out.replace("│", " ").split())
