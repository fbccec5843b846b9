"""Dates of changes, to the step."""

import numpy as np
import pytest

from jaxpace.diagnose.lateness import series_change
from tests.diagnose.synthetic import case_of, run_of
from tests.synthetic.synthetic_runs import SyntheticJob


@pytest.mark.parametrize("pause", [None, 0, 1, -3, -1])
def test_a_level_is_dated_to_the_step_and_a_single_pause_is_none(pause):
  """A tenth more from the fourth of ten steps on; a pause of a hundred times that would make the
  better split."""
  run, _ = run_of(SyntheticJob(ranks=2, steps=600, processes=2, noise=0.01))
  selected = case_of(run).selected
  inside = run.steps[selected.within(9, 11)]
  begin = inside[3]
  values = 1.0 + 0.1 * (run.steps >= begin) + 0.005 * np.random.default_rng(0).standard_normal(600)
  if pause is not None:
    values[inside[pause]] += 10
  assert series_change(run, selected, values, 10) == begin
