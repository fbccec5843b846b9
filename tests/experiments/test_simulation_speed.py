"""The speed benchmark on a tiny case: the same bytes each time, and what it takes to be within."""

import jax
import numpy as np
import pytest

from experiments.measure import simulation_speed as speed


@pytest.mark.long
def test_a_case_is_compiled_once_and_gives_the_same_bytes_each_time():
  case = speed.Case("tiny", 40, 1.0, speed.one(16, None, seeds=2))
  found = speed.inside(case, repeats=3, shorter=4)
  assert len(found["run_s"]) == len(found["cpu_s"]) == 3 and len(found["hashes"]) == 1
  assert found["peak_gib"] > 0.01


def test_the_hash_is_of_every_byte():
  tree = {"a": np.arange(4.0), "b": jax.numpy.ones(3)}
  changed = {**tree, "a": np.array([0.0, 1, 2, np.nextafter(3, 4)])}
  assert speed.hashed(tree) == speed.hashed({**tree}) != speed.hashed(changed)


@pytest.mark.parametrize(("change", "within"), [
    ({}, True), ({"run_s": [1.0, 5.1]}, False), ({"peak_gib": 2.1}, False),
    ({"same_bytes": False}, False), ({"limit_s": None, "run_s": [99.0]}, True)])
def test_within_takes_the_longest_run_the_memory_and_the_bytes(change, within):
  case = {"about": "c", "limit_s": 5.0, "run_s": [1.0, 4.9], "peak_gib": 1.9, "same_bytes": True,
          **change}
  assert speed.within(case) is within
  circumstances = {"command": "c", "date": "d", "load_average_at_start": 0.0,
                   "machine": {"cores": 1, "platform": "p", "jax": "j", "python": "3"}}
  text = "\n".join(speed.page({**circumstances, "cores": 2, "shorter": 3,
                               "cases": {"c": {**case, "within": within}}}))
  assert "1/3 of the steps" in text and ("| yes |" if within else "| no |") in text.splitlines()[-1]
