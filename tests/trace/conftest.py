import pytest

from tests.synthetic import made_up_runs
from tests.trace.written import JOB


@pytest.fixture
def run_dir(tmp_path):
  """A run's directory, and what was written there."""
  path = tmp_path / "run"
  truth = made_up_runs.write(path, JOB, part_steps=20)
  return path, truth
