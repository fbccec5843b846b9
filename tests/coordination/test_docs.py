"""The examples of docs/pacing.md run."""

import doctest
import pathlib

import jax

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "pacing.md"


def test_the_page_on_pacing():
  # JAX's own promotion, as a reader has it.
  with jax.numpy_dtype_promotion("standard"):
    result = doctest.testfile(str(PAGE), module_relative=False, optionflags=doctest.NORMALIZE_WHITESPACE)
  assert result.attempted > 5 and not result.failed
