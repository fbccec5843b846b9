"""Jobs of two processes that hang in a layer and are killed: the script of docs/how_to/hang.md,
word for word; and an instrumented step, one process of which is stopped in a turn of its loop."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import pytest

from jaxpace.cli.main import main
from jaxpace.hang.read_rings import read_flight
from jaxpace.runs.alarms import read_events
from tests.docs.blocks import written
from tests.multiprocess import jobs

PAGE = "docs/how_to/hang.md"
# The layer's; from jax 0.11 on what gathers a scan's weights is given the line of the scan.
SOURCE = "train.py:25" if jax.__version_info__ < (0, 11) else "train.py:30"
LOOP_HANG = pathlib.Path(__file__).parent / "loop_hang_worker.py"
SUM = next(number for number, line in enumerate(LOOP_HANG.read_text().splitlines(), 1)
           if "lax.psum" in line)


HELD = """\
    # Once its marks are in their file: the first of two copies may have been under way.
    import ctypes, os
    copied = lambda: os.stat("runs/hang/marks/1.ring").st_mtime_ns
    for _ in range(2):
      before = copied()
      while copied() == before:
        time.sleep(0.01)
    ctypes.PyDLL(None).sleep(3600)
"""


def awaited(question, seconds):
  deadline = time.monotonic() + seconds
  while time.monotonic() < deadline:
    if found := question():
      return found
    time.sleep(0.1)
  return None


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
  """The directory of the job after it was killed, and the watchdog's words."""
  script, = (block.text for block in written("python") if block.page == PAGE)
  return hung_and_killed(tmp_path_factory.mktemp("hang"), script)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
  """The same of an instrumented job, one process of which was stopped in a turn of a loop."""
  return hung_and_killed(tmp_path_factory.mktemp("loop_hang"), LOOP_HANG.read_text())


@pytest.fixture(scope="module")
def held(tmp_path_factory):
  """The same of the first, where what does not come back holds Python's interpreter lock: no thread
  of that process says anything any more."""
  script, = (block.text for block in written("python") if block.page == PAGE)
  assert script.count("    time.sleep(3600)\n") == 1
  return hung_and_killed(tmp_path_factory.mktemp("held"), script.replace(
      "    time.sleep(3600)\n", HELD))


def hung_and_killed(folder, script):
  """Runs a script in two processes until the watchdog speaks, and kills them."""
  (folder / "train.py").write_text(script)
  with open(folder / "output", "w") as output:
    job = subprocess.Popen(
        [sys.executable, "-m", "jaxpace", "run", "--nproc", "2", "--",
         sys.executable, "train.py"], cwd=folder,
        text=True, stdout=output, stderr=subprocess.STDOUT,
        env=jobs.clean_environment(PATH=os.environ["PATH"], PYTHONPATH=str(jobs.ROOT)))
    directory = folder / "runs" / "hang"
    try:
      events = awaited(lambda: [event for event in read_events(directory)
                                if event["event"] == "late"], 600)
      awaited(lambda: "in the step" in (folder / "output").read_text(), 120)
    finally:
      # Its processes go with it, by the same signal.
      job.send_signal(signal.SIGKILL)
      job.wait()
  assert events, (folder / "output").read_text()
  assert awaited(lambda: not read_flight(directory).running,
                 300), "the kernel ends them a moment later"
  return folder, events


@pytest.mark.long
def test_the_watchdog_names_the_collective_the_layer_and_the_rank(killed):
  folder, events = killed
  assert (events[0]["causes"][0] == {"kind": "absent", "ranks": [1],
                                     "collective": "all-gather"}), events
  said = events[0]["marks"][0]
  assert f"all-gather, iteration 5 of 8 ({SOURCE}), over data among ranks 0, 1 for rank 1" in said
  assert ("rank 1 (process 1" in events[0]["marks"][1].lower()
          and "iteration 4 of 8" in events[0]["marks"][1])
  assert "in the step: Call 6 of train_step: rank 0 has waited" in (folder / "output").read_text()


@pytest.mark.long
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
          == ([0], [1], SOURCE, [0, 1]))
  place, = cause["places"]
  assert place["last"]["turn"] == 4 and place["last"]["left"] and place["process"] == 1
  assert f"all-gather, iteration 5 of 8 ({SOURCE})" in " ".join(
      capsys.readouterr().out.replace("│", " ").split())


@pytest.mark.long
def test_a_process_stopped_in_a_loop_of_an_instrumented_step_is_named_with_turn_and_line(stopped):
  _, events = stopped
  line = f"psum.0, iteration 5 of 8 (train.py:{SUM})"
  assert events[0]["causes"][0] == {"kind": "absent", "ranks": [1], "collective": "psum.0"}, events
  assert line in events[0]["marks"][0] and "for rank 1" in events[0]["marks"][0]
  assert [(late["process"], late["state"]) for late in events[0]["late"]] == [(1, "silent")]


@pytest.mark.long
def test_of_the_stopped_process_the_ring_tells_where_it_was(stopped, tmp_path):
  folder, _ = stopped
  # What rows there are is not needed.
  for table in ("steps", "collectives"):
    for part in (folder / "runs" / "hang" / table).glob("*.parquet"):
      part.unlink()
  assert (main(["report", str(folder / "runs" / "hang"), "--json", str(tmp_path / "report.json")])
          == 0)
  cause, = json.loads((tmp_path / "report.json").read_text())["hang"]["causes"]
  assert (cause["code"], cause["ranks"]) == ("absent", [1])
  wait, = cause["waits"]
  assert (wait["kind"], wait["axes"], wait["call"], wait["turn"], wait["loops"][0][1:]) == (
      "all-reduce", ["data"], 6, 5, [5, 8])
  assert ((wait["waiting"], wait["absent"], wait["source"], wait["group"])
          == ([0], [1], f"train.py:{SUM}", [0, 1]))
  place, = cause["places"]
  assert place["last"]["turn"] == 4 and place["last"]["left"] and place["process"] == 1


@pytest.mark.long
def test_a_process_whose_interpreter_stands_still_is_named_from_the_files(held, tmp_path):
  folder, events = held
  assert events[0]["causes"][0]["ranks"] == [1], events
  assert (main(["report", str(folder / "runs" / "hang"), "--json", str(tmp_path / "report.json")])
          == 0)
  cause, = json.loads((tmp_path / "report.json").read_text())["hang"]["causes"]
  wait, = cause["waits"]
  assert ((cause["code"], cause["ranks"], wait["call"], wait["turn"], wait["waiting"])
          == ("absent", [1], 6, 5, [0]))
  place, = cause["places"]
  assert place["last"]["turn"] == 4 and place["last"]["left"] and place["process"] == 1
