"""Timestamps around collectives in loops, branches and jax.checkpoint: where they go in, and what
they are of."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxpace.instrumentation import nested, program
from tests.instrumentation.running import mesh_of

AXIS = ("data",)


def tracing_mark(values, *waited, tag):
  """In place of a timestamp: hands the values on, and leaves its tag in the jaxpr as a scale of
  nothing."""
  del waited
  return [jax.lax.optimization_barrier((value, jnp.int32(tag)))[0] for value in values]


def both(step, *arguments, check_vma=False):
  """What the program's equations give without timestamps and with them, on two devices; and the
  marked program."""
  found = []

  def run(*arguments):
    closed = jax.make_jaxpr(step)(*arguments)
    flat = program.flatten(closed, AXIS)
    made, inside = nested.timestamped(flat, AXIS, tracing_mark, 10)
    found.append((flat, made, [one for _, one in inside]))
    results = []
    for each in (flat, made):
      env = dict(zip(each.inputs, arguments, strict=True)) | dict(each.constants)
      for equation in each.equations:
        read = [env[ref] if isinstance(ref, int) else ref.value for ref in equation.inputs]
        env.update(zip(equation.outputs, program.evaluate(equation, read), strict=True))
      results.append(jax.lax.pmean(env[each.outputs[0]], AXIS))
    return tuple(results)

  given = jax.jit(jax.shard_map(run, mesh=mesh_of(data=2), in_specs=P("data"), out_specs=P(),
                                check_vma=check_vma))(*arguments)
  np.testing.assert_array_equal(*given)
  assert np.isfinite(given[0]).all()
  return found[0]


def summed(x):
  return x - jax.lax.psum(x, "data") / 4


X = np.linspace(0, 1, 12, dtype=np.float32).reshape(4, 3)


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("step, loops, conditional, hidden_in", [
    (lambda x: jax.checkpoint(summed)(x), [], False, "checkpoint"),
    (lambda x: jax.lax.scan(lambda c, _: (summed(c), None), x, None, length=3)[0], [3], False,
     "scan"),
    (lambda x: jax.lax.fori_loop(0, 2, lambda _, c: summed(c), x), [2], False, "scan"),
    (lambda x: jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, summed(c[1])),
                                  (0, x))[1], [None], False, "while"),
    (lambda x: jax.lax.cond(jax.lax.pmax(x, "data").sum() > 0, summed,
                            lambda x: x - 1 + 0 * summed(x), x), [], True, "cond"),
    (lambda x: jax.lax.scan(lambda c, _: (jax.lax.scan(
        lambda d, _: (jax.jit(jax.checkpoint(summed))(d), None), c, None, length=4)[0],
                                          None), x, None, length=3)[0],
     [3, 4], False, "scan"),
], ids=["checkpoint", "scan", "fori", "while", "cond", "nested"])
def test_each_body_gets_its_marks_and_computes_the_same(step, loops, conditional, hidden_in,
                                                        check_vma):
  flat, made, inside = both(step, X, check_vma=check_vma)
  assert flat.hidden and not made.hidden
  assert all(one.primitive.startswith("psum") and one.bytes == 24 and hidden_in in one.reason
             for one in flat.hidden)
  assert len(inside) == len(flat.hidden)
  for one in inside:
    assert [loop.trips for loop in one.loops] == loops and one.conditional == conditional
    assert one.bytes == 24 and one.axes == ("data",) and one.dtypes == ("float32",)
    assert (one.source is not None
            and one.source.startswith("tests/instrumentation/test_nested_traced.py:"))
  tags = [tag for one in inside for tag in (*one.enter_tags, *one.exit_tags)]
  assert sorted(tags) == list(range(10, 10 + 2 * len(flat.hidden))), "each tag once"
  assert len({loop.name for one in inside for loop in one.loops}) == len(loops)


def test_sums_that_xla_combines_are_one_and_others_are_not():
  def body(c, _):
    a, b = jax.lax.psum(c, "data"), jax.lax.psum(2 * c, "data")
    largest = jax.lax.pmax(c, "data")
    return c + 0.1 * jax.lax.psum(a * b, "data") - largest, None

  flat, made, inside = both(lambda x: jax.lax.scan(body, x, None, length=2)[0], X)
  assert len(flat.hidden) == 4
  assert sorted(len(one.enter_tags) for one in inside) == [1, 1, 2]
  [two] = [one for one in inside if len(one.enter_tags) == 2]
  assert two.bytes == 48 and two.operands == 2 and len(two.exit_tags) == 2


def test_sums_of_half_precision_are_left_alone_and_said():
  def body(c, _):
    half = c.astype(jnp.bfloat16)
    gathered = jax.lax.all_gather(half, "data").astype(jnp.float32).sum(0)
    return c + jax.lax.psum(half, "data").astype(jnp.float32) + gathered, None

  _, made, inside = both(lambda x: jax.lax.scan(body, x, None, length=2)[0], X)
  assert [one.primitives for one in inside] == [("all_gather",)]
  [left] = made.hidden
  assert left.primitive == "psum" and "half precision" in left.reason and "a loop" in left.reason


def test_constants_and_nested_shard_maps_are_left_alone_and_said():
  def body(c, _):
    return c / jax.lax.psum(jnp.ones(3), "data"), None

  _, made, inside = both(lambda x: jax.lax.scan(body, x, None, length=2)[0], X)
  assert not inside
  assert [("constants" in left.reason, left.bytes) for left in made.hidden] == [(True, 12)]


def test_a_program_without_loops_is_handed_back():
  flat, made, inside = both(lambda x: jax.lax.psum(x, "data"), X)
  assert made is flat and not inside
