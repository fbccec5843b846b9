"""Jobs of two processes that hang in a layer and are killed: the script of docs/how_to/hang.md,
word for word; and an instrumented step, one process of which is stopped in a turn of its loop."""

import json
import os
import pathlib
import signal
import subprocess
import sys

import jax
import pytest

from jaxpace.cli.main import main
from jaxpace.hang.alarms import read_events
from jaxpace.hang.read_rings import read_flight
from tests.docs.blocks import written
from tests.multiprocess import jobs
from tests.patience import awaited

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


def script():
  """The script of the page."""
  found, = (block.text for block in written("python") if block.page == PAGE)
  return found


def alarm_of_the_hang(directory):
  """The first alarm about the call that hangs: on a busy machine others may come before it."""
  return next((event for event in read_events(directory) if event["event"] == "late"
               and any("Call 6 of " in sentence for sentence in event.get("marks", ()))), None)


def hung_and_killed(folder, script):
  """Runs a script in two processes until the watchdog names the hang, and kills them."""
  (folder / "train.py").write_text(script)
  directory = folder / "runs" / "hang"
  with open(folder / "output", "w") as output:
    job = subprocess.Popen(
        [sys.executable, "-m", "jaxpace", "run", "--nproc", "2", "--",
         sys.executable, "train.py"], cwd=folder,
        text=True, stdout=output, stderr=subprocess.STDOUT,
        env=jobs.clean_environment(PATH=os.environ["PATH"], PYTHONPATH=str(jobs.ROOT)))
    try:
      alarm = awaited(lambda: alarm_of_the_hang(directory), 600)
      awaited(lambda: "in the step: Call 6 of " in (folder / "output").read_text(), 120)
    finally:
      # Its processes go with it, by the same signal.
      job.send_signal(signal.SIGKILL)
      job.wait()
  assert alarm, (folder / "output").read_text()
  assert awaited(lambda: not read_flight(directory).running,
                 300), "the kernel ends them a moment later"
  return folder, alarm


def hang_of(folder, tmp_path):
  """What the report says of the hang, and its only cause, wait and place."""
  target = tmp_path / "report.json"
  assert main(["report", str(folder / "runs" / "hang"), "--json", str(target)]) == 0
  hang = json.loads(target.read_text())["hang"]
  cause, = hang["causes"]
  wait, = cause["waits"]
  place, = cause["places"]
  # Whatever hangs, it is rank 1, in iteration 5 of call 6, and rank 0 waits for it.
  assert (cause["code"], cause["ranks"]) == ("absent", [1]) and hang["seconds"] > 3.0
  assert (wait["call"], wait["turn"], wait["waiting"], wait["absent"], wait["group"]) == (
      6, 5, [0], [1], [0, 1])
  assert place["last"]["turn"] == 4 and place["last"]["left"] and place["process"] == 1
  return wait


@pytest.mark.long
def test_watchdog_and_report_name_the_collective_the_layer_and_the_rank(tmp_path, capsys):
  folder, alarm = hung_and_killed(tmp_path, script())
  assert alarm["causes"][0] == {"kind": "absent", "ranks": [1], "collective": "all-gather"}, alarm
  line = f"all-gather, iteration 5 of 8 ({SOURCE})"
  own, other = alarm["marks"][:2]
  assert f"{line}, over data among ranks 0, 1 for rank 1" in own
  assert "rank 1 (process 1" in other.lower() and "iteration 4 of 8" in other
  assert "in the step: Call 6 of train_step: rank 0 has waited" in (folder / "output").read_text()
  wait = hang_of(folder, tmp_path)
  assert (wait["kind"], wait["axes"], wait["loops"][0][1:], wait["source"]) == (
      "all-gather", ["data"], [5, 8], SOURCE)
  assert line in " ".join(capsys.readouterr().out.replace("│", " ").split())


@pytest.mark.long
def test_a_process_stopped_in_a_loop_of_an_instrumented_step_is_named_with_iteration_and_line(
    tmp_path):
  folder, alarm = hung_and_killed(tmp_path, LOOP_HANG.read_text())
  name = alarm["causes"][0]["collective"]
  assert alarm["causes"][0] == {"kind": "absent", "ranks": [1], "collective": name}, alarm
  said = alarm["marks"][0]
  assert f"{name}, iteration 5 of 8 (train.py:{SUM})" in said and "for rank 1" in said
  assert [(late["process"], late["state"]) for late in alarm["late"]] == [(1, "silent")]
  # The ring alone says where it was: what rows there are is not needed.
  for table in ("steps", "collectives"):
    for part in (folder / "runs" / "hang" / table).glob("*.parquet"):
      part.unlink()
  wait = hang_of(folder, tmp_path)
  assert (wait["kind"], wait["axes"], wait["loops"][0][1:], wait["source"]) == (
      "all-reduce", ["data"], [5, 8], f"train.py:{SUM}")


@pytest.mark.long
def test_a_process_whose_interpreter_stands_still_is_named_from_the_files(tmp_path):
  """What does not come back holds Python's interpreter lock: no thread of that process says
  anything any more."""
  assert script().count("    time.sleep(3600)\n") == 1
  folder, alarm = hung_and_killed(tmp_path, script().replace("    time.sleep(3600)\n", HELD))
  assert alarm["causes"][0]["ranks"] == [1], alarm
  hang_of(folder, tmp_path)
