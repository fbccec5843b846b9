"""What JSON can hold, of what the package works with."""

import json
from typing import NamedTuple

import numpy as np

from jaxpace.files.plain import to_plain


class Pair(NamedTuple):
  one: float
  two: tuple = ()


def test_named_tuples_arrays_and_numbers_of_numpy_inside_each_other():
  value = {7: Pair(np.float32(0.5), (Pair(1, ()), None, "x")), "a": np.array([[1, 2], [3, 4]]),
           "b": np.bool_(True), "c": [np.int64(5), 1.5], "d": np.array([1.0, np.nan])}
  plain = to_plain(value)
  assert plain == {"7": {"one": 0.5, "two": [{"one": 1, "two": []}, None, "x"]},
                   "a": [[1, 2], [3, 4]], "b": True, "c": [5, 1.5], "d": [1.0, None]}
  assert json.loads(json.dumps(plain, allow_nan=False)) == plain


def test_what_is_not_finite_is_null_and_digits_round_floats_alone():
  assert to_plain([float("inf"), -np.inf, np.float32("nan"), 1 / 3, 123456789, True], 3) == [
      None, None, None, 0.333, 123456789, True]
  assert to_plain(1 / 3) == 1 / 3
