"""Where the timestamps go, and what they wait for."""

import jax
import jax.numpy as jnp
import pytest

from jaxpace.instrumentation import piggyback, script
from tests.instrumentation.traced import flat

ARGUMENTS = ({"a_unused": jnp.ones(7), "w": jnp.ones((8, 8)), "x_unused": jnp.ones(3)},
             jnp.ones((4, 8)))


def one_layer(params, x):
  return jax.lax.psum(jax.grad(lambda params: jnp.sum(jnp.square(x @ params["w"])))(params), "data")


def with_a_norm(params, x):
  def loss(params):
    h = jnp.tanh(x @ params["w"])
    h = h - jax.lax.pmean(jnp.mean(h, axis=0), "data")
    return jnp.sum(jnp.square(h @ params["w"]))

  return jax.lax.psum(jax.value_and_grad(loss)(params), "data")


def written(step, slots=16, delayed=True, overlap=False):
  program = flat(step, *ARGUMENTS)
  return script.write_script(program, ("data",), slots=slots, delayed=delayed, overlap=overlap)


@pytest.mark.parametrize("step", [one_layer, with_a_norm])
def test_no_stamp_waits_for_the_gradients_of_unused_parameters(step):
  """They are zeros that XLA sums ahead: a timestamp that waits for them, or for their sums, waits
  for nothing."""
  result = written(step)
  constant = result.program.constant
  last = result.stages[-2].bucket
  # Two of the operands and two of the results are such.
  operands = {v for i in last for v in result.program.equations[i].reads()}
  results = {v for i in last for v in result.program.equations[i].outputs}
  assert len(operands & constant) == len(results & constant) == 2
  for stage in result.stages:
    if stage.bucket:
      timestamps = stage.timestamps
      assert timestamps.operands and not constant.intersection(timestamps.operands)
      assert timestamps.latest_result not in constant and timestamps.gate not in constant
    for segment in stage.segments:
      assert not constant.intersection(segment.boundary or ())


def test_the_largest_collectives_get_the_slots_and_the_last_sum_carries():
  result = written(with_a_norm, slots=1)
  assert result.overflow == len(result.unstamped) >= 1
  (kept,) = result.collectives
  gradients = 4 * (7 + 64 + 3 + 1)
  assert kept.bytes == gradients and kept.index == 0
  every = written(with_a_norm)
  assert every.carrier.slot == len(every.collectives) - 1
  assert every.overflow == 0 and not every.unstamped


def test_where_none_can_the_largest_is_named():
  def step(params, x):
    first = jax.lax.psum(jnp.full((9,), len(x), jnp.int32), "data")
    return params, jax.lax.psum(first[:2], "data")

  assert written(step).carrier == piggyback.Carrier(0, "int32", ("data",))


def test_a_boundary_names_the_phase_that_ends_there():
  def step(params, x):
    loss = jax.checkpoint(
        lambda params: jnp.sum(jnp.square(jnp.tanh(jnp.tanh(x @ params["w"]) @ params["w"]))))
    return jax.lax.psum(jax.value_and_grad(loss)(params), "data")

  result = written(step)
  assert [(mark.kind, mark.segment) for mark in result.marks] == [
      ("start", "gap"), ("delay", "delay"), ("phase", "forward"), ("enter", "backward"),
      ("exit", "sync"), ("end", "update")]


def timestamps_of(result):
  """The timestamps of a script's buckets, in order of time."""
  return [stage.timestamps for stage in result.stages if stage.timestamps is not None]


def kind(program, value):
  """Dtype and shape of a value."""
  aval = program.avals[value]
  return str(aval.dtype), aval.shape


@pytest.mark.parametrize(("overlap", "gated"), [(False, ()), (True, (4,))])
def test_the_smallest_float32_operand_is_gated_and_no_matrix_or_half(overlap, gated):
  """On a GPU that with all products behind it: the loss would hold up the gradients before the
  last."""
  def step(params, x):
    h = jnp.tanh(x @ params["w"])
    g = h @ (h.T @ h)
    sums = {"loss": jnp.sum(h * h), "vector": g.sum(0), "half": g.sum().astype(jnp.bfloat16),
            "matrix": h @ h.T, "integer": jnp.int32(g.sum()), "smaller": g.sum(1)}
    return jax.lax.psum(sums, "data")

  result = written(step, overlap=overlap)
  (timestamps,) = timestamps_of(result)
  assert kind(result.program, timestamps.gate) == ("float32", gated)

  def without(params, x):
    return jax.lax.psum((x @ params["w"], x.sum().astype(jnp.bfloat16)), "data")

  (timestamps,) = timestamps_of(written(without))
  assert timestamps.gate is None and not timestamps.may_begin_early, (
      "an operand of our own holds it back")


def test_what_joins_is_of_the_dtype_of_most_bytes_and_of_a_sum_over_all_ranks():
  def mixed(params, x):
    return jax.lax.psum((jnp.sum(x), (x @ params["w"]).astype(jnp.bfloat16)), "data")

  def in_groups(params, x):
    return jax.lax.psum(x @ params["w"], "data", axis_index_groups=[[0], [1]])

  assert timestamps_of(written(mixed))[0].joinable == piggyback.Carrier(0, "bfloat16", ("data",))
  result = written(in_groups)
  assert timestamps_of(result)[0].joinable is None and result.carrier is None
  assert timestamps_of(result)[0].may_begin_early
  assert [notice for notice in result.notices if notice.startswith("Collective 0 can start before")]


def test_an_exit_waits_for_what_comes_after_the_most_collectives_and_holds_back_scalars_alone():
  def step(params, x):
    def loss(w):
      h = x @ w["first"]
      h = h - jax.lax.pmean(jnp.mean(h, axis=0), "data")
      return jnp.sum(jnp.square(jnp.tanh(h) @ w["w"] + w["bias"]))

    grads = jax.grad(loss)({"first": params["w"], "w": params["w"], "bias": params["x_unused"][:1]})
    # The bias's gradient is ready before the norm's own sum in the backward pass, the first layer's
    # is not.
    summed = jax.lax.psum({"bias": grads["bias"], "first": grads["first"].sum(0)}, "data")
    rate = params["count"].astype(jnp.float32)
    return (params["w"] - rate * summed["first"], params["a_unused"][:1] - summed["bias"],
            params["count"] + 1)

  arguments = {**ARGUMENTS[0], "count": jnp.int32(1)}, ARGUMENTS[1]
  result = script.write_script(flat(step, *arguments), ("data",), slots=16, delayed=True)
  last = timestamps_of(result)[-1]
  assert last.last and kind(result.program, last.latest_result) == ("float32", (8,))
  assert [kind(result.program, value) for value in last.held_after] == [("int32", ())]


def test_what_may_run_meanwhile_is_what_depends_on_neither_side():
  """Two equal products: one is summed, the other one is nothing to that sum."""
  def step(params, x):
    summed = jax.lax.psum(x @ params["w"], "data")
    return summed, x @ (params["w"] * 0.5)

  def in_a_row(params, x):
    return jax.lax.psum(x @ params["w"], "data") @ params["w"]

  def beside_a_loop(params, x):
    aside, _ = jax.lax.scan(lambda y, _: (jnp.tanh(y @ params["w"]), None), x, length=3)
    return jax.lax.psum(x @ params["w"], "data"), aside

  product, scaling = 2 * 4 * 8 * 8, 2 * 8 * 8
  (found,) = written(step).collectives
  assert found.meanwhile == pytest.approx((product + scaling) / (2 * product + scaling))
  assert [one.meanwhile for one in written(in_a_row).collectives] == [0.0]
  assert [one.meanwhile for one in written(beside_a_loop).collectives] == [None]
