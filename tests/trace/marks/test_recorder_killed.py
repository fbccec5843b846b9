"""The Recorder of observed steps in a process that is ended."""

import signal
import subprocess
import sys
import time

import jax
import pytest

from jaxpace.trace.marks import ringfile
from jaxpace.trace.marks.plans import read_plan
from jaxpace.trace.recorder import Recorder
from tests.multiprocess.jobs import ROOT, clean_environment
from tests.trace.marks.handmade import Handmade
from tests.trace.recording import process_file, table

_WORKER = """
import sys, time, pathlib
from jaxpace.trace.recorder import Recorder
from tests.trace.marks.handmade import Handmade
step = Handmade()
x = step.inputs()
with Recorder(sys.argv[1], step, grace_seconds=2.0) as recorder:
  for k in range(100000):
    x = step(x)
    recorder.record()
    time.sleep(0.002)
    if k == 200:
      print("READY", flush=True)
"""


@pytest.mark.parametrize("number", [
    signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_a_process_that_is_ended_leaves_its_ring_and_its_run(tmp_path, number):
  process = subprocess.Popen(
      [sys.executable, "-c", _WORKER, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True,
      env=clean_environment(XLA_FLAGS="--xla_force_host_platform_device_count=2"))
  try:
    assert any(line == "READY\n" for line in process.stdout)
    path, deadline = tmp_path / "marks" / "0.ring", time.monotonic() + 60
    while (sum(row["rank"] == 0 for row in table(tmp_path)) <= 200
           or (ring := ringfile.read_ring(path)).alive_ns <= ring.monotonic_ns):
      assert time.monotonic() < deadline, "nothing was written"
      time.sleep(0.1)
    process.stdout.close()
    process.send_signal(number)
    process.wait(60)
  finally:
    process.kill()
    process.wait()
  assert process.returncode == -number
  ring, meaning = ringfile.read_ring(tmp_path / "marks" / "0.ring"), read_plan(tmp_path, 0)
  assert not ring.closed and ring.ranks.tolist() == [0, 1] and ring.alive_ns > ring.monotonic_ns
  assert len(meaning.plan.programs) == 1 and (ring.heads > 200 * 11).all()
  rows = table(tmp_path)
  found = {rank: [row["step"] for row in rows if row["rank"] == rank] for rank in range(2)}
  assert sorted(found[0]) == sorted(found[1]) == list(range(len(found[0]))) and len(found[0]) > 200
  if number == signal.SIGTERM:
    # 11 events a step and 2 of each start
    assert len(found[0]) >= int(ring.heads[0]) // 11 - 1
    assert process_file(tmp_path)["ended_by"] == "SIGTERM"
  step = Handmade(jax.devices()[:2], layers=1)
  with Recorder(tmp_path, step, resume=True) as recorder:
    step(step.inputs())
    recorder.record()
  kept = ringfile.read_ring(tmp_path / "marks" / "0.previous.ring")
  assert (kept.heads.tolist() == ring.heads.tolist()
          and (tmp_path / "marks" / "0.previous.plan.json").exists())
  assert {row["attempt"] for row in table(tmp_path)} == {0, 1}
