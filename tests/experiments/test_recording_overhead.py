"""What the measurement of recording makes of its times."""

import numpy as np
import pytest

from experiments.measure import recording_overhead as overhead

CIRCUMSTANCES = {"command": "python", "date": "2026-11-22", "load_average_at_start": 1.0,
                 "machine": {"cores": 2, "platform": "here", "jax": "0.10", "python": "3.11"}}


def test_each_arm_stands_beside_the_null():
  drift = np.array([[1.0], [1.2], [0.9]])  # of a round, in all arms alike
  bare = 20e-3 * drift * np.ones((3, 5))
  bare[1, 0] += 5e-3  # a pause
  found = {overhead.BARE: bare, overhead.AGAIN: bare, overhead.OBSERVED: 1.02 * bare,
           overhead.INSTRUMENTED: 1.05 * bare}
  row = {"case": "shard_map", "marks": 20, "writer_percent": 2.5, **overhead.compared(found)}
  assert overhead.writer_percent(0.01, found) == pytest.approx(
      100 * 0.01 / 2 / sum(times.sum() for times in found.values()))
  assert row["percent"]["recorded"] == pytest.approx([2, 2, 2])
  assert row["percent_of_medians"]["instrumented"] == pytest.approx([5, 5, 5])
  page = overhead.lines({**CIRCUMSTANCES, "devices": 2, "rounds": 3, "rows": [row]})
  assert [line.split("|")[4:6] for line in page if line.startswith("| shard_map")] == [
      [" recorded ", " +2.0 % [2.0, 2.0] "], [" instrumented ", " +5.0 % [5.0, 5.0] "]]
  assert not any("real-time priority" in line for line in page)


@pytest.mark.long
@pytest.mark.parametrize("case", overhead.CASES)
def test_a_case_is_measured_at_a_small_size(case, monkeypatch):
  monkeypatch.setattr(overhead, "sized", lambda *_: (16, 32))
  row = overhead.measure(case, 5e-3, rounds=2, seconds=0.01)
  assert row["marks"] > 0 and row["bare_ms"][0] > 0
  assert ("instrumented" in row["percent"]) == (case == "shard_map")
