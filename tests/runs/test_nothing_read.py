"""Why nothing of a run could be read."""

import jax
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.sharding import PartitionSpec as P

import jaxpace
from jaxpace.runs.reader import RunError, read_run
from tests.observation import observed_steps as steps


def test_of_a_step_that_ran_without_marks_the_reason_is_told(tmp_path):
  mesh = steps.mesh_of(data=2)
  x = steps.put(mesh, np.ones((4, 4), np.float32), P("data"))

  def ordered(x):
    shape = jax.ShapeDtypeStruct((), np.float32)
    return x - io_callback(lambda mean: np.float32(mean), shape, x.mean(), ordered=True)

  observed = jaxpace.observe(jax.jit(ordered))
  with jaxpace.Recorder(tmp_path, observed) as recorder:
    jax.block_until_ready(observed(x))
    recorder.record()
  with pytest.raises(RunError, match="ordered ran unmodified: .*ordered effect"):
    read_run(tmp_path)
