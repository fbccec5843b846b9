"""What the measurement of observing makes of its figures."""

import pytest

from experiments.measure import observed_overhead


def figures(percent):
  row = {"case": "data parallel, scan", "marks": 20, "bare_ms": [20.0, 19.0, 21.0],
         "writer_percent": 2.5, "percent": {"recorded": percent, "bare again": [0.1, -0.2, 0.4]},
         "percent_of_medians": {"recorded": percent, "bare again": [0.0, -0.1, 0.1]},
         "bare_compile_s": 0.5, "stamped_compile_s": None}
  machine = {"cores": 2, "platform": "here", "jax": "0.10", "python": "3.11"}
  return {"command": "python", "date": "2026-11-22", "machine": machine,
          "load_average_at_start": 1.0, "devices": 2, "rounds": 3, "rows": [row]}


def test_the_table_has_each_figure_beside_its_null():
  line = observed_overhead.table(figures([0.7, 0.5, 0.9])).splitlines()[-1]
  cells = [cell.strip() for cell in line.strip("|").split("|")]
  assert cells == ["data parallel, scan", "20", "20.0 ms", "+0.7 % [0.5, 0.9]",
                   "+0.1 % [-0.2, 0.4]", "+0.7 % [0.5, 0.9]", "+0.0 % [-0.1, 0.1]", "2.50 %", ""]


def test_the_page_says_whether_it_ran_with_real_time_priority():
  assert "real-time priority" not in observed_overhead.table(figures([0.7, 0.5, 0.9]))
  assert "real-time priority" in observed_overhead.table(
      {**figures([0.7, 0.5, 0.9]), "real_time": True})


@pytest.mark.long
def test_both_cases_train_alike_with_marks_and_without():
  import jax
  import numpy as np

  import jaxpace
  for case in observed_overhead.CASES:
    fresh, weights, batch = observed_overhead.make(case, 16, 32)
    observed = jaxpace.observe(fresh())
    for bare, marked in zip(fresh()(weights, batch), observed(weights, batch), strict=True):
      np.testing.assert_array_equal(np.asarray(bare), np.asarray(marked))
    assert not observed.plan.programs[0].bare and observed.plan.programs[0].collectives
    jax.block_until_ready(weights)
