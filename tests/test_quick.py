"""Programs of the tests are compiled quickly, and those of files marked `optimized` as a user's
are."""

import jax
import numpy as np
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
  assert options(True) == quick.known() and not options(False)
  assert quick.known()["xla_cpu_parallel_codegen_split_count"] == 1, "every jax so far has it"


def test_a_programs_own_options_count():
  step = jax.jit(lambda x: x + 1, compiler_options={"xla_cpu_use_onednn": True})
  assert step(1) == 2


def test_a_program_is_compiled_once_for_its_devices_and_options():
  quick.install()

  def executable(double, device, **options):
    step = jax.jit(lambda x: 2 * x if double else x / 3, compiler_options=options)
    found = step.lower(jax.device_put(5.25, device)).compile()
    assert found(jax.device_put(5.25, device)) == (10.5 if double else 1.75)
    return found.runtime_executable()

  one, other = jax.devices()[:2]
  same = executable(True, one)
  assert executable(True, one) is same
  assert all(executable(*arguments) is not same for arguments in ((True, other), (False, one)))
  assert executable(True, one, xla_cpu_use_onednn=True) is not same


def test_a_program_calls_the_functions_of_its_own():
  quick.install()
  for number in (1, 2):
    def called(number=number):
      return np.int32(number)

    assert (
        jax.jit(lambda called=called: jax.pure_callback(
            called, jax.ShapeDtypeStruct((), np.int32)))() == number)
