"""The pacer in a running step: four devices of one process, one of them late. Loose bounds: no
benchmark."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpace
from tests.instrumentation import models
from tests.instrumentation.running import P, column, mesh_of, pair

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
                      limit=0.1)
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


def test_parameters_are_bitwise_those_of_the_bare_step():
  """While delays come, last and go."""
  state, data = models.mlp_params(), [batch_of(s) for s in (1e-3, 2e-3, 1e-3)]
  eager = jaxpace.chain(jaxpace.pace_early_ranks(window=8, threshold=0.0, noise=0.0, cost=1.0,
                                                 max_delay=2e-3))
  both = pair(late_step(True, 1e-3), mesh_of(data=RANKS), state, data[0], check_vma=True,
              pacer=eager, share=True)
  both.check_bits(state, data, 40)
  asked = column(both.pace, both.paced.plan, "delay")
  assert (asked > 0).any() and (asked[:, :8] == 0).all()
  assert (asked[:, :] <= np.float32(2e-3)).all()


def test_early_ranks_are_paced_while_one_is_late_and_left_alone_after():
  paced = jaxpace.instrument(late_step(True, 10e-3), "data", pacer(), share=True)
  mesh = mesh_of(data=RANKS)
  spec = jaxpace.spec(mesh)
  step = jax.jit(jax.shard_map(paced, mesh=mesh, in_specs=(spec, P(), P("data")),
                               out_specs=(spec, P()), check_vma=True))
  pace, state, shared = paced.init(mesh), models.mlp_params(), []
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
