"""Phases told from name stacks, against stacks that JAX really writes."""


import jax
import jax.numpy as jnp
import pytest

import jaxpace
from jaxpace.observation import phases


@pytest.mark.parametrize("stack, expected", [
    ("", phases.OTHER),
    ("update", phases.OTHER),
    ("jvp(layer)", "forward"),
    ("jvp()/layer", "forward"),
    ("transpose(jvp(layer))", "backward"),
    ("transpose(jvp())/layer", "backward"),
    ("step/transpose(jvp(loss))/dense", "backward"),
    ("jit(step)/jvp(loss)/jit(relu)", "forward"),
    ("vmap(jvp(loss))", "forward"),
    ("vmap(transpose(jvp(loss)))", "backward"),
    ("transpose_weights/multiply", phases.OTHER),
    ("jvp_like/multiply", phases.OTHER),
    ("jaxpace.phase.augment", "augment"),
    ("outer/jaxpace.phase.augment/inner", "augment"),
    ("jvp(loss)/jaxpace.phase.attention", "attention"),
    ("jaxpace.phase.outer/jaxpace.phase.inner", "inner"),
    ("transpose(jvp(jaxpace.phase.attention))", "backward"),
    ("jaxpace.phase.mine/transpose(jvp(loss))", "mine"),
])
def test_classify(stack, expected):
  assert phases.classify(stack) == expected


def _stacks(jaxpr, outer=""):
  for eqn in jaxpr.eqns:
    stack = phases.join(outer, str(eqn.source_info.name_stack))
    yield eqn.primitive.name, stack
    for value in eqn.params.values():
      inner = getattr(value, "jaxpr", value)
      if hasattr(inner, "eqns"):
        yield from _stacks(inner, stack)


def _phases(function, *arguments):
  found = {}
  for name, stack in _stacks(jax.make_jaxpr(function)(*arguments).jaxpr):
    found.setdefault(name, set()).add(phases.classify(stack))
  return found


def test_the_stacks_of_a_gradient():
  def step(w):
    w = w / 3.0  # input preparation
    grads = jax.grad(lambda w: jnp.sum(jax.jit(jnp.sin)(w)))(w)
    return jnp.exp(grads)  # update

  found = _phases(step, jnp.ones(3))
  assert found["sin"] == {"forward"}
  assert found["div"] == {phases.OTHER} == found["exp"]
  assert "backward" in found["mul"]


@pytest.mark.parametrize("name", ["", "two words", "1st", "x" * 33, "a/b", None, 3])
def test_names_that_can_t_be_columns(name):
  with pytest.raises(ValueError, match="letters, digits and underscores"), jaxpace.phase(name):
    pass


@pytest.mark.parametrize("name", ["sync", "gap", "delay"])
def test_names_that_are_measured_anyway(name):
  with pytest.raises(ValueError, match="choose another name"), jaxpace.phase(name):
    pass


@pytest.mark.parametrize("outer, inner, expected", [
    ("", "", ""), ("a", "", "a"), ("", "b", "b"), ("a", "b/c", "a/b/c")])
def test_join(outer, inner, expected):
  assert phases.join(outer, inner) == expected
