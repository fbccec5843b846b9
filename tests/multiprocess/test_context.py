"""What the training loop has in context, a mesh or none, changes nothing of what is recorded beside
it."""

import pathlib

import jax
import pytest
from jax.sharding import AxisType

from jaxpace.record.recorder import Recorder
from jaxpace.runs.reader import read_run
from tests.multiprocess.test_distributed import launch
from tests.record import fake_step as fake

WORKER = pathlib.Path(__file__).with_name("context_worker.py")


@pytest.mark.long
@pytest.mark.parametrize("context", ["set", "set for good", "explicit", "legacy", "abstract"])
def test_two_processes_record_every_step_whatever_mesh_is_in_context(tmp_path, context):
  status, output, logs = launch(tmp_path, WORKER, arguments=(str(tmp_path / "run"), context))
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
        recorder.record()
  assert read_run(tmp_path).steps.tolist() == list(range(20))
