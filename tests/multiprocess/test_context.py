"""What the training loop has in context, a mesh or none, changes nothing of what is recorded beside
it."""

import logging
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from jaxpace.cli import main as cli
from jaxpace.trace.reader import read_run
from jaxpace.trace.recorder import Recorder
from tests.multiprocess import jobs
from tests.trace import fake_step as fake

WORKER = pathlib.Path(__file__).with_name("context_worker.py")


@pytest.mark.long
@pytest.mark.parametrize("context", ["set", "set for good", "explicit", "legacy", "abstract"])
def test_two_processes_record_every_step_whatever_mesh_is_in_context(tmp_path, context):
  process = subprocess.Popen(
      [sys.executable, "-m", "jaxpace.cli", "run", "--no-record", "--nproc", "2", "--logs",
       str(tmp_path / "logs"), "--", sys.executable, str(WORKER), str(tmp_path / "run"), context],
      cwd=jobs.ROOT, env=jobs.clean_environment(), text=True, stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT)
  [(status, output)] = jobs.finish([process], timeout=120)
  logs = [(tmp_path / "logs" / f"process-{i}.log").read_text() for i in range(2)]
  assert status == 0, output + "".join(logs)
  assert all("links 2" in log and "WARNING" not in log for log in logs), logs
  run = read_run(tmp_path / "run")
  assert run.ranks == 2 and run.steps.tolist() == list(range(60)) and (run.attempt == 0).all()


def others():
  """Meshes that a pace state over all devices is not on."""
  return {"fewer": jax.make_mesh((2,), ("other",), axis_types=(AxisType.Auto,),
                                 devices=jax.devices()[:2]),
          "explicit": jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)}


@pytest.mark.long
@pytest.mark.parametrize("name", ["fewer", "explicit"])
def test_a_mesh_in_context_that_is_not_the_steps(tmp_path, name):
  mesh = fake.mesh()
  step, pace = fake.make_step(mesh), fake.init(mesh)
  with Recorder(tmp_path, fake.FakePaced()) as recorder:
    for _ in range(20):
      pace = step(pace)
      with jax.set_mesh(others()[name]):
        recorder.record(pace)
  assert read_run(tmp_path).steps.tolist() == list(range(20))


@pytest.mark.long
@pytest.mark.parametrize("good", [0, 40])
def test_copies_that_fail_are_told_of_once_at_the_end_and_in_the_report(
    tmp_path, monkeypatch, caplog, capsys, good):
  from jaxpace.trace import ringcopy
  start, calls = ringcopy.start, []

  def broken(pace, with_ranks):
    calls.append(with_ranks)
    if len(calls) > good // 8:
      raise RuntimeError("the devices are busy elsewhere\nand more of the kind")
    return start(pace, with_ranks)

  monkeypatch.setattr(ringcopy, "start", broken)
  mesh = fake.mesh()
  step, pace = fake.make_step(mesh), fake.init(mesh)
  with caplog.at_level(logging.WARNING,
                       "jaxpace"), Recorder(tmp_path, fake.FakePaced()) as recorder:
    for _ in range(100):
      pace = step(pace)
      recorder.record(pace)
      jax.block_until_ready(pace)
  said = [record.getMessage() for record in caplog.records]
  assert (len(said) == 2 and all("RuntimeError: the devices are busy elsewhere" in line
                                 for line in said)), said
  assert ("can't be copied" in said[0] and str(tmp_path) in said[1]
          and "could not be made" in said[1])
  assert recorder.lost["lost_rows"] >= 8 * (100 - good)
  assert recorder.lost["not_copied"].endswith("the devices are busy elsewhere")
  status = cli.main(["report", str(tmp_path)])
  shown = " ".join("".join(capsys.readouterr()).split())
  assert ("the devices are busy elsewhere" in shown
          and "is `recorder.record(pace)` called" not in shown)
  assert (status == 0) == bool(good)


@pytest.mark.long
def test_a_copy_that_can_not_be_read_is_no_secret_and_the_next_makes_up_for_it(
    tmp_path, monkeypatch, caplog):
  from jaxpace.trace import ringcopy
  read, calls = ringcopy.RingCopy.read, []

  def broken(self):
    calls.append(self)
    if len(calls) == 2:
      raise RuntimeError("lost on the way")
    return read(self)

  monkeypatch.setattr(ringcopy.RingCopy, "read", broken)
  mesh = fake.mesh()
  step, pace = fake.make_step(mesh), fake.init(mesh, rows=64)
  with caplog.at_level(logging.WARNING,
                       "jaxpace"), Recorder(tmp_path, fake.FakePaced(), every_steps=10) as recorder:
    for _ in range(60):
      pace = step(pace)
      recorder.record(pace)
      jax.block_until_ready(pace)
  run = read_run(tmp_path)
  assert np.array_equal(run.steps, np.arange(60))
  assert "lost on the way" in caplog.text
