"""What a setting may be, in words that are the same everywhere."""

import math

import numpy as np
import pytest

from jaxpace.core import fields
from jaxpace.core.fields import SettingsError


@pytest.mark.parametrize("value", [3, np.int32(3), np.uint8(3), 0, 10])
def test_whole_numbers_of_any_kind(value):
  assert fields.whole("n", value, 0, 10) == value and type(fields.whole("n", value, 0, 10)) is int
  assert type(fields.number("n", value, 0, 10)) is float


@pytest.mark.parametrize("value", [True, np.True_, 3.0, "3", None, -1, 11, 10**400, math.nan, [3]])
def test_what_is_no_whole_number_of_the_range(value):
  assert not fields.is_whole(value, 0, 10)
  with pytest.raises(SettingsError, match=r"^n=.* must be a whole number from 0 to 10\.$"):
    fields.whole("n", value, 0, 10)


@pytest.mark.parametrize("value", [True, "3", None, -1e-9, 10.1, 10**400, math.nan, math.inf,
                                   np.float32("nan"), [3]])
def test_what_is_no_number_of_the_range(value):
  assert not fields.is_number(value, 0, 10)
  with pytest.raises(SettingsError, match=r"^n=.* must be a number from 0 to 10: seconds\.$"):
    fields.number("n", value, 0, 10, "seconds")


def test_no_number_is_infinite_and_the_ends_may_be_left_out():
  assert not fields.is_number(math.inf) and not fields.is_number(-np.float32("inf"), -math.inf)
  assert fields.is_number(0, 0, 1) and not fields.is_number(0, 0, 1, strictly=True)
  assert fields.is_number(np.float32(0.5), 0, 1, strictly=True)


def test_truth_is_python_s_or_numpy_s():
  assert fields.truth("n", True) is True and fields.truth("n", np.False_) is False
  for value in (1, "yes", None, np.ones(2, bool), np.int8(1)):
    with pytest.raises(SettingsError, match="must be True or False"):
      fields.truth("n", value)


@pytest.mark.parametrize("check, said", [
    (lambda: fields.whole("n", 0, 1), "n=0 must be a whole number, at least 1."),
    (lambda: fields.whole("n", 0, 1, of="steps"),
     "n=0 must be a whole number of steps, at least 1."),
    (lambda: fields.whole("n", 0, 1, 10**6, of="steps"),
     "n=0 must be a whole number of steps, from 1 to 1,000,000."),
    (lambda: fields.whole("n", 0, 1, 4, more=" (ranks)"),
     "n=0 must be a whole number from 1 to 4 (ranks)."),
    (lambda: fields.number("n", 1, 0, 1, "a share", strictly=True),
     "n=1 must be a number strictly between 0 and 1: a share."),
    (lambda: fields.choice("n", [], ("a", "b")), "n=[] must be one of a, b."),
    (lambda: fields.truth("n", 1), "n=1 must be True or False."),
    (lambda: fields.section("n", 1), "n=1 must be a dict of fields."),
    (lambda: fields.known("at", {"n": 1}, ("b", "a")), "at.n is no field; there are a, b."),
])
def test_sentences(check, said):
  with pytest.raises(SettingsError) as refused:
    check()
  assert str(refused.value) == said
