import pytest

from tests.runs.written import JOB
from tests.synthetic import synthetic_runs


@pytest.fixture
def run_dir(tmp_path):
  """A run's directory, and what was written there."""
  path = tmp_path / "run"
  truth = synthetic_runs.write(path, JOB, part_steps=20)
  return path, truth
