"""The flat program: calls opened where needed, evaluated to the same values, collectives found or
noted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpace.instrumentation import gates, program, schedule
from tests.instrumentation.traced import flat, layered
from tests.quick import examples


def evaluate(flat_program, *arguments):
  env = dict(flat_program.constants) | dict(zip(flat_program.inputs, arguments, strict=True))
  look = lambda ref: ref.val if isinstance(ref, program.Literal) else env[ref]  # noqa: E731
  for equation in flat_program.equations:
    env.update(zip(equation.outputs, program.evaluate(equation, [look(r) for r in equation.inputs]),
                   strict=True))
  return [look(ref) for ref in flat_program.outputs]


def test_a_body_called_twice_gives_distinct_values():
  @jax.jit
  def both(x):
    return jnp.sin(x), jax.grad(lambda x: jnp.sum(jnp.cos(x) * x))(x)

  def step(x):
    a, b = both(x)
    c, d = both(a)
    return a, b, c, d

  x = jnp.linspace(0.0, 1.0, 5)
  closed = jax.make_jaxpr(step)(x)
  flat_program = program.flatten(closed, ("data",))
  made = [o for e in flat_program.equations for o in e.outputs]
  assert len(made) == len(set(made))
  for found, expected in zip(evaluate(flat_program, x), step(x), strict=True):
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("call", [
    lambda x: jax.lax.psum(x, "data"), lambda x: jax.lax.pmax(x, "data"),
    lambda x: jax.lax.pmin(x, "data"), lambda x: jax.lax.all_gather(x, "data"),
    lambda x: jax.lax.psum_scatter(x, "data"),
    lambda x: jax.lax.ppermute(x, "data", [(0, 1), (1, 0)]),
    lambda x: jax.lax.all_to_all(x, "data", 0, 0, tiled=True),
], ids=["psum", "pmax", "pmin", "all_gather", "psum_scatter", "ppermute", "all_to_all"])
@pytest.mark.parametrize("nested", [False, True])
def test_every_kind_of_collective_is_found(call, nested):
  found = flat(jax.jit(call) if nested else call, jnp.ones((2, 3)))
  assert sum(e.collective for e in found.equations) == 1
  assert not found.hidden


def test_a_collective_inside_a_custom_gradient_is_found():
  @jax.custom_vjp
  def mean(x):
    return jax.lax.pmean(x, "data")

  mean.defvjp(lambda x: (mean(x), None), lambda _, ct: (jax.lax.pmean(ct, "data"),))
  found = flat(lambda x: jax.value_and_grad(lambda x: jnp.sum(mean(x) * 2.0))(x), jnp.ones(3))
  assert sum(e.collective for e in found.equations) == 2 and not found.hidden


# The order of re-evaluation is a valid one, and puts what no collective feeds before it.

def in_order(stages):
  for stage in stages:
    yield from (i for segment in stage.segments for i in segment.equations)
    yield from stage.bucket


@settings(max_examples=examples(25))
@given(st.integers(0, 10**6), st.sampled_from([1, 16]))
def test_every_equation_once_and_after_what_it_reads(seed, merge):
  step, arguments = layered(seed)
  program = flat(step, *arguments)
  order = list(in_order(schedule.stages(program, most_segments=merge)))
  assert sorted(order) == list(range(len(program.equations)))
  known = {*program.inputs, *program.constants}
  for index in order:
    equation = program.equations[index]
    assert known.issuperset(equation.reads()), f"{equation.primitive.name} comes before its inputs"
    known.update(equation.outputs)
  assert known.issuperset(ref for ref in program.outputs if isinstance(ref, int))


@settings(max_examples=examples(25))
@given(st.integers(0, 10**6))
def test_buckets_hold_all_collectives_and_none_feeds_another_of_its_bucket(seed):
  step, arguments = layered(seed)
  program = flat(step, *arguments)
  buckets = schedule.buckets(program)
  assert sorted(i for bucket in buckets for i in bucket) == [
      i for i, equation in enumerate(program.equations) if equation.collective]
  feeds = {}  # value -> collectives it depends on
  for i, equation in enumerate(program.equations):
    above = (set().union(*(feeds.get(v, set()) for v in equation.reads())) if equation.inputs
             else set())
    for bucket in buckets:
      if i in bucket:
        assert not above & set(bucket)
    for output in equation.outputs:
      feeds[output] = above | ({i} if equation.collective else set())


def test_forward_and_backward_that_a_collective_does_not_feed_come_before_it_the_rest_is_update():
  def step(w, x):
    total = jax.lax.psum(jnp.exp(x), "data")
    # cos, of the backward pass, feeds no collective
    slope = jax.grad(lambda w: jnp.sum(jnp.sin(w)))(w)
    return total + 1.0, slope, jnp.log(w)

  program = flat(step, jnp.ones(3), jnp.ones(3))
  first, last = schedule.stages(program, most_segments=16)

  def names(stage):
    return {program.equations[i].primitive.name for segment in stage.segments
            for i in segment.equations}

  assert {"exp", "cos"} <= names(first) and not {"exp", "cos"} & names(last)
  assert {"add", "log"} <= names(last) and not {"add", "log"} & names(first)


def test_gradients_of_all_layers_form_one_bucket_the_norms_one_each():
  def step(w, x):
    def loss(w):
      h = jnp.tanh(x @ w[0])
      h = h - jax.lax.pmean(jnp.mean(h, axis=0), "data")
      return jnp.sum(jnp.square(h @ w[1]))

    grads = jax.grad(loss)(w)
    return [jax.lax.psum(g, "data") for g in grads]

  program = flat(step, [jnp.ones((8, 8))] * 2, jnp.ones((4, 8)))
  buckets = schedule.buckets(program)
  assert len(buckets[-1]) == 2
  assert all(len(bucket) == 1 for bucket in buckets[:-1]) and len(buckets) >= 2


def gradient(w, x):
  return jax.grad(lambda w: jnp.sum(jnp.square(jnp.tanh(x @ w))))(w)


def all_gradients(w, x):
  """Forward and backward of all micro-batches, in one scan."""
  return jax.lax.scan(lambda total, x: (total + gradient(w, x), None), jnp.zeros_like(w), x)[0]


def summed(gradients):
  return lambda w, x: jax.lax.psum(gradients(w, x), "data")


@pytest.mark.parametrize("step, stage, expected", [
    # After a backward pass; inside a jit; after the last sum.
    (summed(lambda w, x: all_gradients(w + gradient(w, x[0]), x)), 0,
     ["compute", "forward", "backward", "compute"]),
    (summed(jax.jit(lambda w, x: gradient(all_gradients(w, x), x[0]))), 0,
     ["compute", "forward", "backward"]),
    (lambda w, x: all_gradients(summed(lambda w, x: gradient(w, x[0]))(w, x), x), 1, ["compute"]),
    (summed(all_gradients), 0, ["compute"]),
    # Without a scan: picking x[0] is preparation of the input.
    (summed(lambda w, x: gradient(w, x[0])), 0, ["compute", "forward", "backward"]),
])
def test_forward_and_backward_in_one_scan_are_compute_wherever_it_stands(step, stage, expected):
  program = flat(step, jnp.ones((8, 8)), jnp.ones((2, 4, 8)))
  stages = schedule.stages(program, most_segments=16)
  assert [segment.phase for segment in stages[stage].segments] == expected


# What is held back: enough that nothing significant starts before its timestamp, and nothing that
# would change a bit.

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
  segments = [segment.equations for stage in schedule.stages(program, most_segments=16)
              for segment in stage.segments]
  for segment in segments:
    chosen, complete = gates.cover(program, segment)
    assert all(gates.exact(program, value) for value in chosen)
    assert len(set(chosen)) == len(chosen)
    open_ones = (program.major.intersection(segment) - behind(program, segment, chosen)
                 - constant(program, segment))
    assert complete == (not open_ones)
  first, complete = gates.cover(program, segments[0])
  assert complete and first, "the step's inputs can always be held"


def covered(step, *arguments):
  """What is gated of the first segment of a step, as the places of the step's arguments; and
  whether that is enough."""
  program = flat(step, *arguments)
  segment = [i for i, e in enumerate(program.equations) if not e.collective]
  chosen, complete = gates.cover(program, segment)
  return [program.inputs.index(v) for v in chosen], complete


def product(w, x):
  return jax.lax.psum(jnp.sum(jnp.tanh(x @ w)), "data")


def fork(w, v, x):
  scaled = x * 2.0 + 1.0
  return jax.lax.psum(jnp.sum(scaled @ w) + jnp.sum(scaled @ v), "data")


def branches(w, v, x, y):
  return jax.lax.psum(jnp.sum(x @ w) + jnp.sum(y @ v), "data")


@pytest.mark.parametrize("step, shapes, held", [
    # The smallest value that does.
    (product, [(64, 64), (2, 64)], [1]), (product, [(64, 2), (64, 64)], [0]),
    # What is made of a gated value is held for all its readers: beside these products the scaling
    # weighs nothing.
    (fork, [(64, 4096), (64, 4096), (2, 64)], [2]),
    # Two branches need a gate each.
    (branches, [(64, 64), (64, 64), (2, 64), (2, 64)], [2, 3])])
def test_the_smallest_values_that_do_are_held(step, shapes, held):
  assert covered(step, *map(jnp.ones, shapes)) == (held, True)


def test_what_is_made_of_constants_alone_needs_no_gate():
  def step(x):
    return jax.lax.psum(jnp.sum(jnp.ones((64, 64)) @ jnp.ones((64, 64))) + x, "data")

  assert covered(step, jnp.float32(1))[1]


def made(step, *arguments):
  """A step's program, and the value it returns last."""
  program = flat(step, *arguments)
  return program, program.outputs[-1]


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
  program, value = made(step, argument)
  assert gates.exact(program, value) == exact
