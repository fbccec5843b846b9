"""The Recorder of observed steps in a process that is ended."""

import contextlib
import resource
import shutil
import signal
import subprocess
import sys

import jax
import pytest

from jaxpace.cli.main import main
from jaxpace.files.reading import UnreadableError
from jaxpace.hang.read_rings import read_flight
from jaxpace.record.recorder import Recorder
from jaxpace.runs import ring_file
from jaxpace.runs.ring_file import read_plan
from tests.multiprocess.jobs import ROOT, clean_environment
from tests.patience import awaited
from tests.record.recording import process_file, table
from tests.record.ring.handmade import Handmade
from tests.record.ring.test_copier import DAMAGES

_WORKER = """
import sys, time, pathlib
import pytest
from jaxpace.record.recorder import Recorder
from tests.record.recording import write_often
from tests.record.ring.handmade import Handmade
write_often(pytest.MonkeyPatch())
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
    path = tmp_path / "marks" / "0.ring"
    assert awaited(lambda: sum(row["rank"] == 0 for row in table(tmp_path)) > 200
                   and (ring := ring_file.read_ring(path)).alive_ns > ring.monotonic_ns
                   # rows are there before the copy of their events
                   and (ring.heads > 200 * 11).all())
    process.stdout.close()
    process.send_signal(number)
    process.wait(300)
  finally:
    process.kill()
    process.wait()
  assert process.returncode == -number
  ring, meaning = ring_file.read_ring(tmp_path / "marks" / "0.ring"), read_plan(tmp_path, 0)
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
  kept = ring_file.read_ring(tmp_path / "marks" / "0.previous.ring")
  assert (kept.heads.tolist() == ring.heads.tolist()
          and (tmp_path / "marks" / "0.previous.plan.json").exists())
  assert {row["attempt"] for row in table(tmp_path)} == {0, 1}


_PATIENT = """
import sys
import jax
import pytest
from jaxpace.record.recorder import Recorder
from tests.record.recording import write_often
from tests.record.ring.handmade import Handmade
write_often(pytest.MonkeyPatch())
step = Handmade()
x = step.inputs()
with Recorder(sys.argv[1], step) as recorder:
  for line in sys.stdin:
    for _ in range(20):
      x = step(x)
      recorder.record()
    print(float(jax.block_until_ready(x).sum()).hex(), flush=True)
"""


def test_whatever_is_done_to_its_ring_training_goes_on_and_a_killed_process_leaves_it(tmp_path,
                                                                                      capfd):
  run, rounds = tmp_path / "run", 1 + len(DAMAGES)
  path = run / "marks" / "0.ring"
  process = subprocess.Popen(
      [sys.executable, "-c", _PATIENT, str(run)], cwd=ROOT, stdin=subprocess.PIPE,
      stdout=subprocess.PIPE, text=True,
      env=clean_environment(XLA_FLAGS="--xla_force_host_platform_device_count=2"))

  def trained() -> str:
    process.stdin.write("more\n")
    process.stdin.flush()
    return process.stdout.readline()

  def whole() -> bool:
    # 11 events a step, and 2 of each start.
    with contextlib.suppress(UnreadableError, OSError):
      return not path.is_symlink() and bool((ring_file.read_ring(path).heads >= 20 * 11).all())
    return False

  try:
    found = [trained()]
    for damage in DAMAGES.values():
      assert awaited(whole)
      other = tmp_path / "other"
      shutil.copyfile(path, other)
      damage(path, other)
      found.append(trained())
    assert awaited(whole)
    assert awaited(lambda: ring_file.read_ring(path).heads.tolist() == [20 * 11 * rounds] * 2)
    # rows are written every few seconds
    assert awaited(lambda: any((run / "steps").glob("*.parquet")))
  finally:
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()
  step = Handmade(jax.devices()[:2])
  x, expected = step.inputs(), []
  for _ in range(rounds):
    for _ in range(20):
      x = step(x)
    expected.append(float(jax.block_until_ready(x).sum()).hex() + "\n")
  assert found == expected
  flight = read_flight(run)
  assert [flight.positions[rank].current.number for rank in range(2)] == [20 * rounds - 1] * 2
  assert not flight.left_out and main(["report", str(run)]) == 0
  assert "is made anew, with the timestamps" in capfd.readouterr().err


@pytest.mark.long
def test_a_limit_to_the_size_of_files_ends_no_training(tmp_path):
  """Beyond it the system sends a signal that ends a process, unless somebody ignores it."""
  done = subprocess.run(
      [sys.executable, "-c", _PATIENT, str(tmp_path)], cwd=ROOT, input="more\n", text=True,
      capture_output=True, timeout=600, check=False,
      preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)),
      env=clean_environment(XLA_FLAGS="--xla_force_host_platform_device_count=2"))
  assert (done.returncode, done.stdout.count("\n")) == (0, 1), done.stderr[-3000:]
  assert "Timestamps are kept in memory" in done.stderr and "File too large" in done.stderr
  assert len(table(tmp_path)) == 40 and not (tmp_path / "marks" / "0.ring").exists()
