"""Recorders in processes that are killed, terminated, or that share a run."""

import json
import os
import pathlib
import signal
import subprocess
import threading
import time

import pyarrow.parquet as pq
import pytest

from tests.multiprocess import jobs
from tests.patience import awaited, patiently

SILENCE = 1.0  # s


class Worker:
  """A `recorder_worker.py`, its output line by line."""

  def __init__(self, *args: object, devices: int = 1):
    self.process = jobs.start("recorder_worker.py", *args, devices=devices)
    self.lines: list[str] = []
    self.reader: threading.Thread | None = None

  def wait_for(self, start: str) -> str:
    assert self.process.stdout
    for line in self.process.stdout:
      self.lines.append(line.rstrip())
      if line.startswith(start):
        return line.rstrip()
    raise AssertionError(f"{start!r} never came: {self.lines[-20:]}")

  def wait_for_silence(self, seconds: float) -> None:
    """Until nothing has been said for so long."""
    assert self.process.stdout

    def read() -> None:
      for line in self.process.stdout:
        self.lines.append(line.rstrip())

    self.reader = threading.Thread(target=read, daemon=True)
    self.reader.start()
    before = -1
    while before < len(self.lines):
      before = len(self.lines)
      time.sleep(seconds)

  def finish(self, seconds: float = jobs.LONGEST) -> int:
    if self.reader:
      self.process.wait(seconds)
      self.reader.join(seconds)
    else:
      self.lines += (self.process.communicate(timeout=seconds)[0] or "").splitlines()
    return self.process.returncode

  def last_step(self) -> tuple[int, float]:
    return max(self.step_times().items())

  def step_times(self) -> dict[int, float]:
    words = [line.split() for line in self.lines if line.startswith("step ")]
    return {int(w[1]): float(w[3]) for w in words}


@pytest.fixture
def start():
  workers = []

  def starter(*args, **options) -> Worker:
    workers.append(Worker(*args, **options))
    return workers[-1]

  yield starter
  for worker in workers:
    if worker.process.poll() is None:
      worker.process.kill()
    worker.process.communicate()


def steps(directory: pathlib.Path) -> dict[int, list[int]]:
  """Steps by rank; every part must be readable."""
  found: dict[int, list[int]] = {}
  for path in sorted((directory / "steps").glob("*.parquet")):
    for row in pq.read_table(path, columns=["rank", "step"]).to_pylist():
      found.setdefault(row["rank"], []).append(row["step"])
  return {rank: sorted(values) for rank, values in sorted(found.items())}


def info(directory: pathlib.Path, process: int = 0) -> dict:
  return json.loads((directory / "process" / f"{process}.json").read_text())


def pair(start, directory: pathlib.Path, steps: int, pause: float, mode: str, *options: object,
         **more) -> list[Worker]:
  """Two processes of one job."""
  port = jobs.free_high_port()
  return [start(directory, steps, pause, "--processes", 2, "--index", index, "--port", port,
                "--mode", mode, *options, **more) for index in range(2)]


@pytest.mark.long
def test_kill_9_loses_at_most_five_seconds(tmp_path, start):
  lost = []
  # Where other work keeps the writer from a core for seconds, it is tried again.
  while not lost or (lost[-1] > 5.0 and len(lost) < 10):
    directory = tmp_path / str(len(lost))
    worker = start(directory, 100_000, 0.01, devices=2)
    worker.wait_for("step 600 ")
    worker.process.kill()
    worker.finish()
    at = worker.step_times()
    last, died = worker.last_step()
    found = steps(directory)
    assert set(found) == {0, 1}
    for values in found.values():
      assert values == list(range(len(values)))
      assert len(values) > 100
    lost.append(max(died - at[min(values[-1] + 1, last)] for values in found.values()))
    assert not info(directory)["closed_cleanly"]
  assert lost[-1] <= 5.0, lost


@pytest.mark.long
def test_sigterm_in_a_stuck_main_thread_dies_after_the_grace_time(tmp_path, start):
  worker = start(tmp_path, 1000, 0.01, "--mode", "stuck", "--grace", 1.0)
  worker.wait_for("stuck")
  sent = time.monotonic()
  worker.process.send_signal(signal.SIGTERM)
  # Without the recorder it would sleep for an hour, and then go on.
  assert worker.finish() == -signal.SIGTERM
  assert time.monotonic() - sent > 0.8
  values = steps(tmp_path)[0]
  # What was on the host is on the disk, without a second's wait for the next flush.
  assert values == list(range(len(values))) and values
  assert info(tmp_path)["ended_by"] == "SIGTERM"


@pytest.mark.long
def test_two_processes_share_one_run(tmp_path, start):
  workers = pair(start, tmp_path, 40, 0.0, "gloo", devices=2)
  assert [worker.finish() for worker in workers] == [0, 0], workers[0].lines
  assert steps(tmp_path) == {rank: list(range(40)) for rank in range(4)}
  run = json.loads((tmp_path / "run.json").read_text())
  assert [info(tmp_path, p)["run"] for p in range(2)] == [run["run"]] * 2
  assert [info(tmp_path, p)["ranks"] for p in range(2)] == [[0, 1], [2, 3]]
  assert run["processes"] == 2


@pytest.mark.long
def test_preemption_announced_by_sigterm_still_reaches_jax(tmp_path, start):
  """jax.distributed's own notifier must be told although the recorder's handler lies over it."""
  workers = pair(start, tmp_path, 100_000, 0.1, "sync")
  workers[1].wait_for("step 5 ")
  workers[1].process.send_signal(signal.SIGTERM)
  assert [worker.finish() for worker in workers] == [0, 0], workers[1].lines
  preempted = [next(line for line in worker.lines if line.startswith("preempted"))
               for worker in workers]
  assert preempted[0] == preempted[1]
  count = int(preempted[0].split()[-1]) + 1
  assert steps(tmp_path) == {rank: list(range(count)) for rank in range(2)}


@pytest.mark.long
@patiently(SILENCE=1.0)
def test_sigterm_while_the_main_thread_waits_in_gloo_writes_what_is_on_the_host(tmp_path, start):
  workers = pair(start, tmp_path, 100_000, 0.05, "gloo")
  workers[0].wait_for("step 30 ")
  workers[1].process.send_signal(signal.SIGSTOP)
  workers[0].wait_for_silence(SILENCE)
  told = time.monotonic()
  workers[0].process.send_signal(signal.SIGTERM)
  assert awaited(lambda: info(tmp_path)["ended_by"]) == "SIGTERM"
  before = steps(tmp_path)[0]
  workers[0].process.kill()
  workers[1].process.kill()
  workers[0].finish()
  last, at = workers[0].last_step()
  assert at < told, "the main thread was to wait in the collective"
  assert before == list(range(len(before)))
  # Copied at least once a second of 50 ms steps.
  assert len(before) >= last - 30
  assert info(tmp_path)["pid"] == workers[0].process.pid


@pytest.mark.long
@pytest.mark.parametrize("told", [(0, 1), (1,)], ids=["both", "one"])
def test_sigterm_ends_a_joined_job_that_never_asks_for_preemption(tmp_path, start, told):
  """JAX's notifier swallowed it: the job went on until it was killed, and nothing said what had
  ended it."""
  workers = pair(start, tmp_path, 100_000, 0.05, "gloo", "--grace", 60)
  workers[0].wait_for("step 30 ")
  for index in told:
    workers[index].process.send_signal(signal.SIGTERM)
  # At the next step but one, long before the grace time, or as the peer of one that did.
  endings = [workers[index].finish() for index in told]
  assert all(ending == -signal.SIGTERM
             for ending in endings), (endings, [worker.lines[-5:] for worker in workers])
  for index in told:
    assert info(tmp_path, index)["ended_by"] == "SIGTERM"
    values = steps(tmp_path)[index]
    assert values == list(range(len(values))) and len(values) > 25
  for worker in workers:
    worker.process.kill()


@pytest.mark.long
def test_a_job_that_is_killed_after_sigterm_says_that_this_came(tmp_path, start):
  """As a launcher or a cluster does with what asks for preemption and does not come to an end in
  time."""
  worker = start(tmp_path, 100_000, 0.05, "--mode", "deaf")
  worker.wait_for("step 20 ")
  worker.process.send_signal(signal.SIGTERM)
  worker.wait_for("told")
  awaited(lambda: info(tmp_path)["ended_by"])
  worker.process.kill()
  worker.finish()
  assert (info(tmp_path)["ended_by"], info(tmp_path)["closed_cleanly"]) == ("SIGTERM", False)


@pytest.mark.long
def test_a_dead_peer_does_not_keep_the_others_from_writing_their_rows(tmp_path, start):
  workers = pair(start, tmp_path, 100_000, 0.02, "gloo")
  workers[0].wait_for("step 40 ")
  workers[1].process.kill()
  workers[1].finish()
  # Comes after the recorder's end. JAX itself then waits for the dead peer.
  workers[0].wait_for("Traceback")
  workers[0].process.kill()
  assert info(tmp_path)["closed_cleanly"]
  last, _ = workers[0].last_step()
  values = steps(tmp_path)[0]
  # Steps in flight were the dead peer's too.
  assert values == list(range(len(values))) and len(values) >= last - 12


@pytest.fixture
def small_disk(tmp_path):
  """A file system of 1 MiB, where the machine allows it; None elsewhere."""
  place = tmp_path / "small"
  place.mkdir()
  if os.geteuid() != 0 or subprocess.run(
      ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs",
       str(place)], capture_output=True).returncode:
    yield None
    return
  yield place
  subprocess.run(["umount", str(place)], check=True)


@pytest.mark.long
def test_a_full_disk_ends_recording_and_not_training(tmp_path, small_disk, start):
  if small_disk is None:
    pytest.skip(
        "needs the right to mount a small file system; tests/record/test_recorder.py covers it "
        "by injection")
  (small_disk / "ballast").write_bytes(b"x" * 960 * 1024)
  worker = start(small_disk, 2500, 0.002, devices=8)
  assert worker.finish() == 0
  warnings = [line for line in worker.lines if "WARNING" in line]
  assert all("no space" in line for line in warnings), worker.lines[-5:]
  assert sum("Recording stopped" in line for line in warnings) == 1, worker.lines[-5:]
  found = steps(small_disk)
  assert not found or len(found) == 8
  assert worker.last_step()[0] == 2499
