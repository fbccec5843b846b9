"""The explicit pieces: names reach the plan, and a delay holds back without changing anything."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpace
from jaxpace.observation.clocks import resolve_clock
from tests.instrumentation import models
from tests.instrumentation.running import P, bits, mesh_of, pair

pytestmark = pytest.mark.optimized

ASKED = 30e-3


@pytest.fixture(params=["native", "callback"])
def clock(request):
  if request.param == "native" and resolve_clock().notice:
    pytest.skip(resolve_clock().notice)
  return request.param


def named_step(params, batch):
  loss, grads = jax.value_and_grad(models.square_loss)(params, batch)
  grads = jaxpace.psum(grads, "data", name="gradients")
  loss = jaxpace.pmean(loss, "data", name="loss")
  return models.sgd(params, grads), jnp.exp(jaxpace.pmean(jnp.log(loss), "data", name="geometric"))


def test_names_reach_the_plan():
  params, data = models.mlp_params(), models.batches(2)
  both = pair(named_step, mesh_of(data=2), params, data[0])
  both.check_bits(params, data, 2)
  # The loss is summed with what its mean feeds: alone, before the group of the gradients and the
  # geometric mean.
  names = [collective.name for collective in both.paced.plan.collectives]
  assert names == ["loss", "gradients"]


@pytest.mark.parametrize("ours, theirs",
                         [(jaxpace.psum, jax.lax.psum), (jaxpace.pmean, jax.lax.pmean)])
def test_sums_and_means_are_those_of_jax(ours, theirs):
  value = {"a": models.normal(0, 4, 3), "b": models.normal(1, 8).astype(jnp.bfloat16)}
  mesh = mesh_of(data=4)

  def run(function):
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=P("data"), out_specs=P()))

  assert (bits(run(lambda v: ours(v, "data", name="x"))(value))
          == bits(run(lambda v: theirs(v, "data"))(value)))


@pytest.mark.parametrize("piece", [jaxpace.psum, jaxpace.pmean])
def test_a_name_that_is_none_is_refused(piece):
  with pytest.raises(ValueError, match="letters, digits and underscores"):
    piece(jnp.ones(2), "data", name="two words")


def seconds_of(function, *arguments):
  """The second call's time: the first compiles."""
  jax.block_until_ready(function(*arguments))
  start = time.monotonic()
  jax.block_until_ready(function(*arguments))
  return time.monotonic() - start


VALUES = {
    "float": models.normal(0, 7), "half": models.normal(1, 3, 5).astype(jnp.bfloat16),
    "nan": jnp.array([np.nan, -0.0]), "integer": jnp.arange(300), "flag": jnp.array([True, False]),
    "none": None, "void": jnp.zeros((0, 2)), "key": jax.random.key_data(jax.random.key(7)),
    "nested": (jnp.float32(1.5), [jnp.uint8(3)])}


def test_a_delayed_value_is_the_same_bit_for_bit(clock):
  late = jax.jit(lambda value: jaxpace.delay(value, 1e-3, clock=clock))(VALUES)
  assert jax.tree.structure(late) == jax.tree.structure(VALUES)
  assert bits(late) == bits(VALUES)
  key = jax.random.key(3)
  assert bits(jax.jit(lambda k: jaxpace.delay(k, 1e-3, clock=clock))(key)) == bits(key)


@pytest.mark.parametrize("kept", range(3))
def test_every_leaf_is_held_back_at_least_as_long_as_asked(clock, kept):
  value = (jnp.ones(3), jnp.arange(200), jnp.ones((50, 50)))
  late = jax.jit(lambda value, seconds: jaxpace.delay(value, seconds, clock=clock)[kept])
  assert seconds_of(late, value, jnp.float32(ASKED)) >= ASKED


def test_the_delay_begins_when_all_are_ready(clock):
  @jax.jit
  def late(a, b):
    return jaxpace.delay((a, jaxpace.delay(b, ASKED, clock=clock)), ASKED, clock=clock)[0]

  assert seconds_of(late, jnp.ones(3), jnp.ones(4)) >= 2 * ASKED


def test_a_delay_is_cut_to_its_limit(clock):
  late = jax.jit(lambda x, s: jaxpace.delay(x, s, limit=ASKED, clock=clock))
  assert ASKED <= seconds_of(late, jnp.ones(3), jnp.float32(600)) < 300


def test_a_delay_is_differentiable(clock):
  def loss(x, delayed):
    x = jaxpace.delay(x, 1e-3, clock=clock) if delayed else x
    return jnp.sum(jnp.sin(x["w"]) * x["v"])

  point = {"w": models.normal(0, 9), "v": models.normal(1, 9)}
  plain, late = (jax.jit(jax.value_and_grad(lambda x, on=on: loss(x, on)))(point)
                 for on in (False, True))
  assert bits(late) == bits(plain)
  tangent = jax.tree.map(jnp.ones_like, point)
  assert bits(jax.jvp(lambda x: loss(x, True), (point,), (tangent,))) == bits(
      jax.jvp(lambda x: loss(x, False), (point,), (tangent,)))


def test_each_rank_delays_by_its_own_amount(clock):
  def step(x):
    rank = jax.lax.axis_index("data")
    return jaxpace.delay(x, jnp.where(rank == 1, jnp.float32(ASKED), jnp.float32(0)), clock=clock)

  for check_vma in (True, False):
    run = jax.jit(jax.shard_map(step, mesh=mesh_of(data=2), in_specs=P("data"), out_specs=P("data"),
                                check_vma=check_vma))
    x = models.normal(0, 4, 3)
    assert seconds_of(run, x) >= ASKED
    assert bits(run(x)) == bits(x)
