"""Programs of the tests are compiled quickly, and those of files marked `optimized` as a user's are."""

import jax
import pytest
from jax._src import compiler  # noqa: TID251

from tests import quick


@pytest.fixture
def options():
  """Whether most optimizations are left out -> the options that a program is compiled with then."""
  before = jax.config.read("jax_disable_most_optimizations")

  def made(quickly):
    jax.config.update("jax_disable_most_optimizations", quickly)
    return dict(compiler.get_compile_options(1, 1).env_option_overrides)

  yield made
  jax.config.update("jax_disable_most_optimizations", before)


def test_options_are_those_of_the_file_that_runs(options):
  quick.install()
  assert options(True) == quick.OPTIONS and not options(False)


def test_a_programs_own_options_count():
  step = jax.jit(lambda x: x + 1, compiler_options={"xla_cpu_use_onednn": True})
  assert step(1) == 2
