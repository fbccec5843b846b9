"""Pacers in a running step, on devices of one process. Loose bounds: no benchmark."""

import operator

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpace
from tests.instrumentation import models
from tests.instrumentation.running import P, column, instrumented, mesh_of, pair
from tests.patience import patiently

pytestmark = pytest.mark.optimized

RANKS, LATE, WINDOW = 4, 2, 16
LATENESS = 10e-3
MOST = 20e-3


def pacer():
  """A bucket that never is what limits, for a few seconds' run; and a threshold above what shared
  cores do."""
  return jaxpace.pace_early_ranks(window=WINDOW, threshold=0.2, max_delay=MOST, cost=1.0, noise=0.5)


def late_step(by_autodiff, base):
  """Every rank's forward pass begins after a while, rank LATE's as much later as the batch says."""

  def loss_of(params, x, y, seconds):
    mine = jax.lax.axis_index("data") == LATE
    x = jaxpace.delay(x, jnp.float32(base) + jnp.where(mine, seconds.reshape(()), jnp.float32(0)),
                      limit=1.0)
    return models.square_loss(params, (x, y))

  def step(params, batch):
    x, y, seconds = batch
    if by_autodiff:
      loss, grads = jax.value_and_grad(lambda p: jax.lax.pmean(loss_of(p, x, y, seconds), "data"))(
          params)
    else:
      loss, grads = jax.lax.pmean(jax.value_and_grad(loss_of)(params, x, y, seconds), "data")
    return models.sgd(params, grads), loss

  return step


def batch_of(seconds):
  x, y = models.batches(RANKS)[0]
  return x, y, jnp.full((RANKS,), seconds, jnp.float32)


def bitwise(step, data, ranks, pacer, steps, **settings):
  """Runs a step bare and with a pacer, whose parameters are the same; returns it, and its delays
  [ranks, steps]."""
  both = pair(step, mesh_of(data=ranks), models.mlp_params(), data[0], pacer=pacer, share=True,
              **settings)
  both.check_bits(models.mlp_params(), data, steps)
  asked = column(both.pace, both.paced.plan, "delay")
  assert (asked <= np.float32(2e-3)).all()
  return both, asked


def eager(**settings):
  return jaxpace.chain(jaxpace.pace_early_ranks(window=8, threshold=0.0, noise=0.0, cost=1.0,
                                                max_delay=2e-3, **settings))


def test_parameters_are_bitwise_those_of_the_bare_step_while_delays_come_last_and_go():
  data = [batch_of(s) for s in (1e-3, 2e-3, 1e-3)]
  _, asked = bitwise(late_step(True, 1e-3), data, RANKS, eager(), 40, check_vma=True)
  assert (asked > 0).any() and (asked[:, :8] == 0).all()


@pytest.mark.long
def test_under_the_guard_all_ranks_judge_alike_and_a_rows_arm_is_that_of_the_step_in_it():
  guarded = jaxpace.guard(eager(quantile=0.5), block=4)
  both, asked = bitwise(models.vma_step, models.batches(2), 2, guarded, 60, check_vma=True)
  names = both.paced.plan.decisions
  assert ({"guard_on", "guard_pair", "effect", "effect_low", "effect_high", "pairs", "slack",
           "tokens"} <= set(names))
  on = column(both.pace, both.paced.plan, "guard_on")
  np.testing.assert_array_equal(on[0], on[1])
  assert set(np.unique(on[:, 8:])) == {0.0, 1.0} and (asked[on == 0] == 0).all()
  guard = both.paced.pacer_state(both.pace)
  of_ranks(guard.trial)
  assert np.asarray(guard.shared).all() and guard.trial.usual[0] > 0 and guard.trial.pair[0] >= 4


def of_ranks(state):
  """Asserts that two ranks hold the same state, to the last bit."""
  chex.assert_trees_all_equal(*(jax.tree.map(operator.itemgetter(rank), state)
                                for rank in range(2)))


def in_buckets(params, batch):
  """Three all-reduces: two buckets of gradients and the loss."""
  loss, grads = jax.value_and_grad(models.square_loss)(params, batch)
  leaves, tree = jax.tree.flatten(grads)
  leaves = [*jax.lax.pmean(leaves[:2], "data"), *jax.lax.pmean(leaves[2:], "data")]
  return models.sgd(params, jax.tree.unflatten(tree, leaves)), jax.lax.pmean(loss, "data")


def test_interleaved_jobs_shift_all_ranks_alike():
  """The floor is set so low that every step looks contended."""
  pacer = jaxpace.interleave_jobs(2e-3, floor=1e-7, budget=1.0, dead_band=0.0)
  both, asked = bitwise(in_buckets, models.batches(2), 2, pacer, 60)
  assert (asked > 0).any()
  np.testing.assert_array_equal(asked[0], asked[1])
  state = both.paced.pacer_state(both.pace)
  assert len(jax.tree.leaves(state)) > 20
  of_ranks(state)


@patiently(LATENESS=10e-3, MOST=20e-3)
def test_early_ranks_are_paced_while_one_is_late_and_left_alone_after():
  paced, step, pace = instrumented(late_step(True, 10e-3), mesh_of(data=RANKS), P(), P("data"),
                                   check_vma=True, pacer=pacer(), share=True)
  state, shared = models.mlp_params(), []
  others = np.delete(np.arange(RANKS), LATE)

  def run(steps, seconds):
    nonlocal pace, state
    for _ in range(steps):
      pace, (state, _) = jax.block_until_ready(step(pace, state, batch_of(seconds)))
      shared.append(np.asarray(pace.arrivals)[0])
    return np.asarray(pace.delay)

  asked_next = run(3 * WINDOW, LATENESS)
  # a busy machine is noise
  while (asked_next[others] < 0.3 * LATENESS).any() and len(shared) < 30 * WINDOW:
    asked_next = run(1, LATENESS)
  late_steps = len(shared)
  run(2 * WINDOW, 0.0)

  assert paced.plan.share and paced.plan.decisions == ("active", "slack", "threshold", "tokens")
  arrivals = np.stack(shared)  # [steps, ranks]
  early = arrivals.max(axis=1, keepdims=True) - arrivals
  asked, applied = column(pace, paced.plan, "delay"), column(pace, paced.plan, "applied")
  assert (asked[:, :WINDOW] == 0).all(), "nothing is known yet"
  assert (asked_next[others] >= 0.3 * LATENESS).all()
  during = asked[others][:, WINDOW:late_steps]
  assert np.median(asked[LATE, WINDOW:late_steps]) == 0, "the late rank is not delayed"
  slack = np.median(early[WINDOW:late_steps][:, others], axis=0)
  assert (np.median(during, axis=1) <= slack).all(), "never more than the rank would have waited"
  assert (asked <= np.float32(MOST)).all()
  assert (applied[asked > 0] >= 0.99 * asked[asked > 0]).all() and (applied[asked == 0] == 0).all()
  # The decision after a step is in the row of the next.
  assert (asked[:, late_steps + WINDOW + 1:] == 0).all(), "back to exactly nothing within a window"
