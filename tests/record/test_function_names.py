"""By which names functions go: under `pmap`, of one name, and one that trains and evaluates."""

import jax
import jax.numpy as jnp
import pytest

import jaxpace
from jaxpace.runs.reader import read_run
from tests.record.unnamed_step import arrays


def test_functions_under_pmap_are_told_apart_by_their_lines(tmp_path):
  devices = jax.devices()[:4]
  double = jax.pmap(lambda x: jax.lax.psum(x, "data") * 2, axis_name="data", devices=devices)
  halve = jax.pmap(lambda x: jax.lax.psum(x, "data") / 8, axis_name="data", devices=devices)
  x = jnp.ones((4, 4))
  with jaxpace.observed(tmp_path / "run") as inside:
    for step in range(8):
      x = double(x)
      if step % 5 == 0:  # twice: what ran three times might be the step, if it took long
        halve(x).block_until_ready()
    x.block_until_ready()
  [name] = inside.step.programs
  assert "test_function_names.py:" in name and len(read_run(tmp_path / "run").steps) == 8


def test_functions_under_pmap_whose_sums_are_in_a_helper_go_by_their_own_names(tmp_path):
  def mean(x):
    return jax.lax.pmean(x, "data")

  def train_step(w, x):
    return w - 0.1 * mean(jax.grad(lambda w: ((x @ w) ** 2).mean())(w))

  def evaluate(w, x):
    return mean(((x @ w) ** 2).mean())

  train, judge, unnamed = (jax.pmap(each, axis_name="data", devices=jax.devices()[:4])
                           for each in (train_step, evaluate, lambda w, x: 2 * evaluate(w, x)))
  w, x = jnp.ones((4, 8, 1)), jnp.ones((4, 2, 8))
  with jaxpace.observed(tmp_path / "run") as inside:
    for _ in range(6):
      w = train(w, x)
      judge(w, x).block_until_ready()
      unnamed(w, x).block_until_ready()
  assert inside.step.programs == ("train_step",)
  assert len(read_run(tmp_path / "run").steps) == 6


def descend(w, x):
  return w - jnp.float32(1e-4) * jax.grad(lambda w: ((x @ w) ** 2).mean())(w)


class Critic:
  def step(self, w, x):
    return descend(w, x)


class Actor:
  def step(self, w, x):
    return descend(w, -x)


@pytest.mark.parametrize("name, functions", [
    ("step", (Critic().step, Actor().step)),
    ("descend", (lambda w, x: descend(w, x),
                 lambda w, x: descend(w, -x)))])
def test_two_functions_of_one_name_are_two_programs_whatever_they_are_given(
    tmp_path, name, functions):
  (w, x), (one, other) = arrays(), map(jax.jit, functions)
  with jaxpace.observed(tmp_path) as inside:
    for rows in (x, jnp.concatenate([x, x])):
      for _ in range(6):
        w = jax.block_until_ready(other(one(w, rows), rows))
  assert inside.step.programs[0].partition(" (")[0] == name
  assert len(inside.step.programs) == 2 and len(read_run(tmp_path).steps) == 12
  assert any("test_function_names.py:" in each for each in inside.step.programs)


class Evaluator:
  """One method for training and for evaluation, by the name of another's."""

  def step(self, w, x, train=False):
    def loss(w):
      return (jnp.tanh(x @ w) ** 2).mean()
    return w - jax.grad(loss)(w) if train else loss(w)


@pytest.mark.parametrize("first", [True, False])
def test_an_evaluation_that_goes_by_the_name_of_the_step_is_none(tmp_path, first):
  (w, x), step, evaluate = arrays(), jax.jit(Critic().step), jax.jit(Evaluator().step)
  with jaxpace.observed(tmp_path) as inside:
    for number in range(24):
      if number % 8 == (0 if first else 7):
        for _ in range(3):
          evaluate(w, x).block_until_ready()
      w = step(w, x).block_until_ready()
  assert len(read_run(tmp_path).steps) == 24
  line = Critic.step.__code__.co_firstlineno
  assert inside.step.programs == (f"step (tests/record/test_function_names.py:{line})",)


def test_one_function_that_computes_gradients_where_it_trains_is_two_programs(tmp_path):
  (w, x), step = arrays(), jax.jit(Evaluator().step, static_argnames="train")
  with jaxpace.observed(tmp_path) as inside:
    for number in range(24):
      if number % 8 == 0:
        step(w, x).block_until_ready()
      w = step(w, x, train=True).block_until_ready()
  assert len(read_run(tmp_path).steps) == 24
  [name] = inside.step.programs
  assert name.startswith("step (") and not name.endswith("without gradients)")
