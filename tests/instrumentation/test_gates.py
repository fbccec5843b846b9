"""What is held back: enough that nothing significant starts before its timestamp, and nothing that
would change a bit."""

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpace.instrumentation import gates, schedule
from tests.instrumentation.traced import flat, layered
from tests.quick import examples


def behind(program, segment, chosen):
  """Equations of a segment that can't start before the values in `chosen` are let go."""
  held, late = set(chosen), set()
  # Gated values are seen held by every reader in the segment, so go over it until nothing is added.
  while True:
    more = {i for i in segment if i not in late and held.intersection(program.equations[i].reads())}
    if not more:
      return late
    late |= more
    held.update(o for i in more for o in program.equations[i].outputs)


def constant(program, segment):
  """Equations of a segment that read nothing but constants."""
  known, found = set(), set()
  for i in segment:
    if known.issuperset(program.equations[i].reads()):
      found.add(i)
      known.update(program.equations[i].outputs)
  return found


@settings(max_examples=examples(25))
@given(st.integers(0, 10**6))
def test_complete_means_that_nothing_major_starts_before_the_stamp(seed):
  step, arguments = layered(seed)
  program = flat(step, *arguments)
  producers = gates.Producers(program)
  significant, major = schedule.significant(program), schedule.major(program)
  segments = [segment.equations for stage in schedule.stages(program, most_segments=16)
              for segment in stage.segments]
  for segment in segments:
    chosen, complete = gates.cover(producers, segment, significant, major)
    assert all(producers.exact(value) for value in chosen)
    assert len(set(chosen)) == len(chosen)
    open_ones = (major.intersection(segment) - behind(program, segment, chosen)
                 - constant(program, segment))
    assert complete == (not open_ones)
  first, complete = gates.cover(producers, segments[0], significant, major)
  assert complete and first, "the step's inputs can always be held"


def covered(step, *arguments):
  """What is gated of the first segment of a step, as the places of the step's arguments; and
  whether that is enough."""
  program = flat(step, *arguments)
  producers = gates.Producers(program)
  segment = [i for i, e in enumerate(program.equations) if not e.collective]
  chosen, complete = gates.cover(producers, segment, schedule.significant(program),
                                 schedule.major(program))
  return [program.inputs.index(v) for v in chosen], complete


def test_the_smallest_value_that_does_is_held():
  product = lambda w, x: jax.lax.psum(jnp.sum(jnp.tanh(x @ w)), "data")  # noqa: E731
  assert covered(product, jnp.ones((64, 64)), jnp.ones((2, 64))) == ([1], True)
  assert covered(product, jnp.ones((64, 2)), jnp.ones((64, 64))) == ([0], True)


def test_what_is_made_of_a_gated_value_is_held_for_all_its_readers():
  def fork(w, v, x):
    scaled = x * 2.0 + 1.0
    return jax.lax.psum(jnp.sum(scaled @ w) + jnp.sum(scaled @ v), "data")

  wide = jnp.ones((64, 4096))  # beside which the scaling weighs nothing
  assert covered(fork, wide, wide, jnp.ones((2, 64))) == ([2], True)


def test_two_branches_need_a_gate_each():
  def branches(w, v, x, y):
    return jax.lax.psum(jnp.sum(x @ w) + jnp.sum(y @ v), "data")

  big, small = jnp.ones((64, 64)), jnp.ones((2, 64))
  assert covered(branches, big, big, small, small) == ([2, 3], True)


def test_what_is_made_of_constants_alone_needs_no_gate():
  def step(x):
    return jax.lax.psum(jnp.sum(jnp.ones((64, 64)) @ jnp.ones((64, 64))) + x, "data")

  assert covered(step, jnp.float32(1))[1]


def made(step, *arguments):
  """The value a step returns last, and its program's producers."""
  program = flat(step, *arguments)
  return gates.Producers(program), program.outputs[-1]


MATRIX, VECTOR = jnp.ones((4, 4)), jnp.ones(4)


@pytest.mark.parametrize("step, argument, exact", [
    (lambda x: x, VECTOR, True),
    (lambda x: x, MATRIX, True),
    (lambda x: x, MATRIX.astype(jnp.bfloat16), True),
    (lambda x: x.reshape(16), MATRIX, True),
    (lambda x: x + 1.0, VECTOR, False),
    (lambda x: (x + 1.0).reshape(2, 2), VECTOR, False),
    (lambda x: x + 1, jnp.ones(4, jnp.int32), True),
    (lambda x: x > 1.0, VECTOR, True),
    (lambda x: jax.lax.psum(x, "data"), VECTOR, True),
    (lambda x: jax.lax.psum(x, "data"), MATRIX, False),
    (lambda x: jax.lax.psum(x, "data"), VECTOR.astype(jnp.bfloat16), False),
    (lambda x: x.T, MATRIX, False),
    (lambda x: x @ x, VECTOR, False),
    (lambda x: jax.lax.fori_loop(0, 3, lambda _, y: y * 2.0, x), VECTOR, True),
    (lambda x: jax.lax.fori_loop(0, 3, lambda _, y: y * 2.0, x), MATRIX, False),
    (lambda x: jax.random.wrap_key_data(x), jnp.zeros(2, jnp.uint32), False),
], ids=["input", "matrix", "half", "reshape", "sum", "reshaped-sum", "integer", "boolean", "psum",
        "psum-matrix", "psum-half", "transpose", "product", "loop", "loop-matrix", "key"])
def test_only_what_is_in_memory_rounded_is_held(step, argument, exact):
  producers, value = made(step, argument)
  assert producers.exact(value) == exact
