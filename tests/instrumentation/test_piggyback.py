"""Arrivals and delays survive the sum over ranks exactly, in every dtype that can carry them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpace.instrumentation import piggyback
from jaxpace.instrumentation.piggyback import Carrier
from tests.quick import examples

PACKED = jax.jit(piggyback.operand, static_argnums=(4, 5))
UNPACKED = jax.jit(piggyback.unpack, static_argnums=(1, 2, 3, 4))
# Half a nanosecond to an hour; below that lie the subnormal numbers a bfloat16 part may not have.
seconds = st.one_of(st.just(0.0), st.floats(2.0**-31, 3600.0, width=32))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@settings(max_examples=examples(25))
@given(ranks=st.sampled_from([1, 2, 7]), data=st.data())
def test_the_sum_of_all_ranks_operands_gives_everyone_s_numbers(dtype, ranks, data):
  known = [data.draw(st.one_of(seconds, st.just(float("nan")))) for _ in range(ranks)]
  delays = [data.draw(seconds) for _ in range(ranks)]
  steps = [data.draw(st.one_of(seconds, st.just(float("nan")))) for _ in range(ranks)]
  transfers = [data.draw(st.one_of(st.floats(2.0**-20, 3600.0, width=32), st.just(float("nan"))))
               for _ in range(ranks)]
  job = [np.asarray(pair, np.float32) for pair in zip(steps, transfers, strict=True)]
  parts = [np.asarray(PACKED(jnp.float32(a), jnp.float32(d), jnp.asarray(j), jnp.int32(r), ranks,
                             dtype))
           for r, (a, d, j) in enumerate(zip(known, delays, job, strict=True))]
  assert {str(part.dtype) for part in parts} == {dtype}
  # The order of addition is the network's.
  total = sum(data.draw(st.permutations(parts)), np.zeros_like(parts[0]))
  arrivals, applied, shared, _ = UNPACKED(jnp.asarray(total), ranks, dtype, 1, 2)
  np.testing.assert_array_equal(np.asarray(arrivals), np.asarray(known, np.float32))
  np.testing.assert_array_equal(np.asarray(applied), np.asarray(delays, np.float32))
  np.testing.assert_array_equal(shared.step_time, np.float32(steps[0]))
  np.testing.assert_allclose(shared.transfers, [np.mean(transfers), np.nan],
                             rtol=2e-6 if dtype == "float32" else 0.03)


def test_an_operand_is_small_and_silent_at_other_ranks_places():
  def packed(dtype, *job):
    seconds = jnp.float32(0.25), jnp.float32(0.5), jnp.asarray(job, jnp.float32)
    return np.asarray(piggyback.operand(*seconds, jnp.int32(3), 8, dtype))

  assert packed("float32").size == 16 and np.count_nonzero(packed("float32")) == 2
  assert packed("bfloat16").size == 48
  # Of the step time rank 0's is sent, of a transfer the eighth part.
  np.testing.assert_array_equal(packed("float32", 3.0, 8.0)[16:], [0.0, 1.0])


@pytest.mark.parametrize("carrier, words", [
    (None, "no sum"),
    (Carrier(0, "float16", ("data",)), "float16"),
    (Carrier(0, "int32", ("data",)), "int32"),
    (Carrier(0, "float32", ("model",)), "model"),
    (Carrier(0, "float32", ("data", "model")), "not over data alone"),
])
def test_refusals_say_why(carrier, words):
  assert words in piggyback.refusal(carrier, ("data",))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("axes", [("host", "device")])
def test_no_refusal(dtype, axes):
  assert piggyback.refusal(Carrier(0, dtype, axes), axes[::-1]) == ""
