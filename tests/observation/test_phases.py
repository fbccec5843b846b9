"""Phases told from name stacks, against stacks that JAX really writes."""

import os
import sysconfig

import jax
import jax.numpy as jnp
import pytest

import jaxpace
from jaxpace.observation import phases, source_lines


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


# Which line of the calls that led to an operation a report names, and how.

JAX = ("/opt/base/lib/python3.12/site-packages/jax/_src/lax/parallel.py", 7)
FLAX = ("/usr/lib/python3/dist-packages/flax/linen/linear.py", 287)
TRAINER = ("/venv/lib/python3.12/site-packages/brax/training/gradients.py", 58)
STANDARD = (os.path.join(sysconfig.get_paths()["stdlib"], "contextlib.py"), 81)


@pytest.mark.parametrize(("frames", "shown"), [
    ([JAX, FLAX, ("/home/me/job/models/layer.py", 12), ("/home/me/job/train.py", 3)],
     "models/layer.py:12"),
    ([JAX, FLAX, STANDARD, TRAINER], "flax/linen/linear.py:287"),
    ([JAX, TRAINER], "brax/training/gradients.py:58"), ([JAX], "jax/_src/lax/parallel.py:7"),
    ([JAX, STANDARD], "contextlib.py:81"), ([("/elsewhere/train.py", 9)], "train.py:9"),
    ([("/home/me/job/jaxpace/step/instrument.py", 4), ("/home/me/job/train.py", 3)], "train.py:3"),
    ([], None)])
def test_the_line_named_is_the_innermost_of_the_user_and_its_path_that_of_its_import(
    monkeypatch, frames, shown):
  monkeypatch.setattr("sys.path", ["/home/me", "/home/me/job",
                                   "/venv/lib/python3.12/site-packages"])
  assert source_lines.innermost(frames) == shown
