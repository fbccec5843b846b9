"""Gradients summed in a loop where no timestamps can time them: it is said at tracing, with the
line that mends it."""

import logging

import chex
import jax
import jax.numpy as jnp
import pytest

from tests.instrumentation import models
from tests.instrumentation.running import P, instrumented, mesh_of

TURNS = 4


def accumulating(mended, checkpoint=False):
  """A step that adds up the gradients of TURNS micro-batches in a scan."""
  loss = jax.checkpoint(models.square_loss) if checkpoint else models.square_loss

  def step(params, batch):
    own = params
    if mended:
      params = jax.lax.pcast(params, "data", to="varying")
    micro = jax.tree.map(lambda a: a.reshape(TURNS, -1, a.shape[-1]), batch)

    def turn(total, part):
      return jax.tree.map(jnp.add, total, jax.grad(loss)(params, part)), None

    grads, _ = jax.lax.scan(turn, jax.tree.map(jnp.zeros_like, params), micro)
    if mended:
      grads = jax.lax.psum(grads, "data")
    grads = jax.tree.map(lambda g: g / jnp.float32(TURNS * jax.lax.axis_size("data")), grads)
    return models.sgd(own, grads), jax.lax.pmean(models.square_loss(params, batch), "data")

  return step


def train(step, check_vma=True, clock="callback"):
  paced, run, pace = instrumented(step, mesh_of(data=2), P(), P("data"), check_vma=check_vma,
                                  clock=clock)
  params = models.mlp_params()
  for batch in models.batches(2, each=2 * TURNS):
    pace, (params, _) = run(pace, params, batch)
  return params, paced.plan


def warnings(caplog):
  return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("checkpoint", [pytest.param(False, marks=pytest.mark.long), True])
def test_the_warning_comes_once_and_its_line_mends_it(caplog, checkpoint):
  found, plan = train(accumulating(mended=False, checkpoint=checkpoint))
  said = warnings(caplog)
  assert len(said) == 1 and said[0] in plan.notices and len(plan.unstamped) > 1
  assert str(plan).startswith(f"{len(plan.collectives)} collective") and said[0] in str(plan)
  assert "of 2 ranks, callback clock; arrivals are " in str(plan) and "Plan(" not in str(plan)
  assert "summed over 'data' inside jax.lax.scan" in said[0]
  assert '`params = jax.lax.pcast(params, \'data\', to="varying")`' in said[0]
  assert "`grads = jax.lax.psum(grads, 'data')`" in said[0]
  caplog.clear()
  mended, plan = train(accumulating(mended=True, checkpoint=checkpoint))
  assert not warnings(caplog) and not plan.unstamped
  sizes = sum(leaf.nbytes for leaf in jax.tree.leaves(mended))
  assert sum(c.bytes for c in plan.collectives) == sizes + 4, "every gradient, and the loss"
  chex.assert_trees_all_close(found, mended, rtol=1e-5, atol=1e-6)


def test_with_the_native_clock_each_turn_is_timed_and_nothing_is_said(caplog):
  _, plan = train(accumulating(mended=False), clock="native")
  assert not warnings(caplog) and not plan.unstamped
  assert [(one.loops[0].trips, one.phase) for one in plan.inside] == [(TURNS, "backward")]


def test_a_sum_written_into_the_loop(caplog):
  def step(params, batch):
    micro = jax.tree.map(lambda a: a.reshape(TURNS, -1, a.shape[-1]), batch)

    def turn(total, part):
      grads = jax.lax.pmean(jax.grad(models.square_loss)(params, part), "data")
      return jax.tree.map(jnp.add, total, grads), None

    grads, _ = jax.lax.scan(turn, jax.tree.map(jnp.zeros_like, params), micro)
    return models.sgd(params, grads), jnp.float32(0)

  train(step, check_vma=False)
  said = warnings(caplog)
  assert len(said) == 1 and "add up in the loop" in said[0] and "pcast" not in said[0]
