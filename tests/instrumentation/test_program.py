"""The flat program: calls opened where needed, evaluated to the same values, collectives found or
noted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpace.instrumentation import program
from tests.instrumentation.traced import flat


def evaluate(flat_program, *arguments):
  env = dict(flat_program.constants) | dict(zip(flat_program.inputs, arguments, strict=True))
  look = lambda ref: ref.value if isinstance(ref, program.Literal) else env[ref]  # noqa: E731
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
