"""The order of re-evaluation is a valid one, and puts what no collective feeds before it."""

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpace.instrumentation import schedule
from tests.instrumentation.traced import flat, layered
from tests.quick import examples


def in_order(stages):
  for stage in stages:
    yield from (i for segment in stage.segments for i in segment.equations)
    yield from stage.bucket.equations if stage.bucket else ()


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
  buckets = [bucket.equations for bucket in schedule.buckets(program)]
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
  buckets = [bucket.equations for bucket in schedule.buckets(program)]
  assert len(buckets[-1]) == 2
  assert all(len(bucket) == 1 for bucket in buckets[:-1]) and len(buckets) >= 2


@pytest.mark.parametrize("scan", [True, False])
def test_forward_and_backward_in_one_scan_are_compute(scan):
  def step(w, x):
    gradient = jax.grad(lambda w, x: jnp.sum(jnp.square(jnp.tanh(x @ w))))
    if scan:
      grads, _ = jax.lax.scan(lambda total, x: (total + gradient(w, x), None), jnp.zeros_like(w), x)
    else:
      grads = gradient(w, x[0])
    return jax.lax.psum(grads, "data")

  program = flat(step, jnp.ones((8, 8)), jnp.ones((2, 4, 8)))
  phases = [segment.phase for segment in schedule.stages(program, most_segments=16)[0].segments]
  # Picking x[0] is preparation of the input.
  assert phases == (["compute"] if scan else ["compute", "forward", "backward"])


def gradient(w, x):
  return jax.grad(lambda w: jnp.sum(jnp.square(jnp.tanh(x @ w))))(w)


def all_gradients(w, x):
  """Forward and backward of all micro-batches, in one scan."""
  return jax.lax.scan(lambda total, x: (total + gradient(w, x), None), jnp.zeros_like(w), x)[0]


def after_a_backward_pass(w, x):
  return jax.lax.psum(all_gradients(w + gradient(w, x[0]), x), "data")


def inside_a_jit(w, x):
  return jax.lax.psum(jax.jit(lambda w, x: gradient(all_gradients(w, x), x[0]))(w, x), "data")


def after_the_last_sum(w, x):
  return all_gradients(jax.lax.psum(gradient(w, x[0]), "data"), x)


@pytest.mark.parametrize("step, stage, expected", [
    (after_a_backward_pass, 0, ["compute", "forward", "backward", "compute"]),
    (inside_a_jit, 0, ["compute", "forward", "backward"]),
    (after_the_last_sum, 1, ["compute"]),
])
def test_a_mixed_scan_is_compute_wherever_it_stands(step, stage, expected):
  program = flat(step, jnp.ones((8, 8)), jnp.ones((2, 4, 8)))
  stages = schedule.stages(program, most_segments=16)
  assert [segment.phase for segment in stages[stage].segments] == expected
