"""What was injected is what the timestamps say: which rank, how long, in which phase. Loose bounds:
no benchmark."""

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpace
from jaxpace.core.types import Decision, Pacer
from tests.instrumentation import models
from tests.instrumentation.running import (
  P,
  arrivals,
  at,
  column,
  instrumented,
  mesh_of,
  segments,
  times,
)
from tests.patience import patiently
from tests.quick import long

RANKS, STEPS, LATE = 4, 7, 2
INJECTED = 30e-3
# docs/measurements/truth.md has how true timestamps are.
SURELY = 0.8
"""Part of an injected delay that must come back in the median step."""


def sleeping(x):
  """x, on rank LATE after a while. A host callback that everything after depends on."""

  def host(x, rank):
    if rank == LATE:
      time.sleep(INJECTED)
    return x

  return jax.pure_callback(host, jax.ShapeDtypeStruct(x.shape, x.dtype), x,
                           jax.lax.axis_index("data"))


@jax.custom_vjp
def slow_forward(x):
  return sleeping(x)


slow_forward.defvjp(lambda x: (sleeping(x), None), lambda _, cotangent: (cotangent,))


@jax.custom_vjp
def slow_backward(x):
  return x


slow_backward.defvjp(lambda x: (x, None), lambda _, cotangent: (sleeping(cotangent),))


def late_step(slow):
  def step(params, batch):
    def loss(params):
      h = jnp.tanh(batch[0] @ params["layer0"]["w"])
      return jnp.mean(jnp.square(slow(h) @ params["layer1"]["w"] - batch[1]))

    value, grads = jax.value_and_grad(loss)(params)
    grads = jax.lax.pmean(grads, "data")
    return models.sgd(params, grads), jax.lax.pmean(value, "data")

  return step


def run(step, *, pmap=False, **settings):
  state, batch = models.mlp_params(width=64, layers=1), models.batches(RANKS, each=32)[0]
  if pmap:
    paced, devices = jaxpace.instrument(step, "data", **settings), jax.local_devices()[:RANKS]
    pace = paced.init(devices=devices)
    state = jax.tree.map(lambda leaf: jnp.stack([leaf] * RANKS), state)
    batch = jax.tree.map(lambda leaf: leaf.reshape(RANKS, -1, leaf.shape[-1]), batch)
    run_one = jax.pmap(paced, "data", devices=devices)
  else:
    paced, run_one, pace = instrumented(step, mesh_of(data=RANKS), P(), P("data"), **settings)
  for _ in range(STEPS):
    pace, (state, _) = run_one(pace, state, batch)
  return jax.block_until_ready(pace), paced.plan


def excess(values):
  """By how much rank LATE exceeds the median of the others, in the median step; values [ranks,
  steps]."""
  others = np.median(np.delete(values, LATE, axis=0), axis=0)
  return float(np.median((values[LATE] - others)[1:]))


@pytest.mark.parametrize("slow, settings", [
    (slow_forward, {"clock": "native", "share": True}),
    (slow_backward, {"clock": "callback", "share": None}),
    *long((slow_forward, {"clock": "auto", "pmap": True}))], ids=["native", "callback", "pmap"])
@patiently(INJECTED=30e-3)
def test_a_late_rank_s_arrival(slow, settings):
  pace, plan = run(late_step(slow), **settings)
  late = arrivals(pace, plan)
  assert SURELY * INJECTED <= excess(late) <= 3 * INJECTED
  # The others wait that long, and the late one does not: its wait is the transfer.
  timestamps = times(pace, plan)
  waits = (timestamps[:, :, at(plan, "exit", 0)] - timestamps[:, :, at(plan, "enter", 0)]) * 1e-9
  assert excess(waits) <= -SURELY * INJECTED
  phases = {name: excess(value * 1e-9) for name, value in segments(timestamps, plan).items()}
  if "forward" in phases and "backward" in phases:
    busy, idle = ("forward", "backward") if slow is slow_forward else ("backward", "forward")
    assert phases[busy] >= SURELY * INJECTED and phases[idle] < INJECTED / 2
  else:
    assert phases["compute"] >= SURELY * INJECTED
  assert phases["update"] < INJECTED / 2


@functools.cache
def shared(share):
  """A run in which arrivals are shared or not."""
  return run(late_step(slow_forward), share=share)


def test_stamps_are_in_order_on_every_rank():
  pace, plan = shared(True)
  timestamps = times(pace, plan)
  assert (timestamps > 0).all()
  assert (np.diff(timestamps, axis=2) >= 0).all()
  assert (timestamps[:, 1:, 0] >= timestamps[:, :-1,
                                     -1]).all(), "a step starts before the one before it ends"
  enter, leave = timestamps[:, :, at(plan, "enter", 0)], timestamps[:, :, at(plan, "exit", 0)]
  assert (leave.min(axis=0) >= enter.max(axis=0)).all(), ("a rank left the collective before the "
                                                          "last had entered")


@pytest.mark.parametrize("share", [True, None])
def test_shared_arrivals_are_every_rank_s_own_and_others_the_rank_knows_alone(share):
  pace, plan = shared(share)
  known = np.asarray(pace.arrivals)  # [ranks, ranks]
  assert bool(plan.share) == bool(share)
  np.testing.assert_array_equal(np.isfinite(known), np.eye(RANKS, dtype=bool) | bool(share))
  if share:
    np.testing.assert_array_equal(known, np.broadcast_to(known[0], known.shape))
  np.testing.assert_allclose(np.diagonal(known), arrivals(pace, plan)[:, -1], rtol=1e-5, atol=1e-6)


DELAYING = Pacer(lambda ranks: (), lambda seen, state: (Decision(
    jnp.where(seen.rank == LATE, jnp.float32(INJECTED), jnp.float32(0)), {}), state))


@pytest.mark.parametrize("clock", ["native", *long("callback")])
@patiently(INJECTED=30e-3)
def test_a_delay_is_applied_recorded_and_taken_out_of_the_arrival(clock):
  pace, plan = run(late_step(lambda x: x), clock=clock, share=True, pacer=DELAYING)
  applied, asked = column(pace, plan, "applied"), column(pace, plan, "delay")
  np.testing.assert_array_equal(asked[:, 0], 0)
  np.testing.assert_array_equal(asked[LATE, 1:], np.float32(INJECTED))
  assert (applied[LATE, 1:] >= np.float32(0.999 * INJECTED)).all()
  np.testing.assert_array_equal(np.delete(applied, LATE, axis=0), 0)
  assert abs(excess(arrivals(pace, plan))) < INJECTED / 2
  np.testing.assert_array_equal(np.asarray(pace.delays)[0], applied[:, -1])
  timestamps = times(pace, plan)
  entered = (timestamps[:, 1:, at(plan, "enter", 0)]
             - timestamps[:, :-1, at(plan, "exit", 0)]) * 1e-9
  assert excess(entered) >= SURELY * INJECTED, "the delay did not delay"


@pytest.mark.parametrize("clock", ["native", *long("callback")])
def test_nothing_of_a_step_starts_before_its_delay_is_over(clock):
  """What is timestamped later would look delayed even if the work had been done meanwhile."""
  begun = {rank: [] for rank in range(RANKS)}

  def note(x, rank):
    begun[int(rank)].append(time.monotonic_ns())
    return x

  @jax.custom_vjp
  def noted(x):
    return jax.pure_callback(note, jax.ShapeDtypeStruct(x.shape, x.dtype), x,
                             jax.lax.axis_index("data"))

  noted.defvjp(lambda x: (noted(x), None), lambda _, cotangent: (cotangent,))

  pace, plan = run(late_step(noted), clock=clock, share=True, pacer=DELAYING)
  over = times(pace, plan)[:, :, at(plan, "delay")]
  for rank in range(RANKS):
    assert len(begun[rank]) == STEPS
    assert (np.array(begun[rank]) >= over[rank]).all()


def test_no_delay_exceeds_max_delay_whatever_a_pacer_asks():
  asked = np.array([np.nan, -1.0, np.inf, 5.0, -np.inf, 2.0, 0.0], np.float32)
  pacer = Pacer(lambda ranks: (), lambda o, s: (Decision(jnp.asarray(asked)[o.step], {}), s))
  pace, plan = run(late_step(lambda x: x), pacer=pacer, max_delay=1e-3)
  applied = column(pace, plan, "applied")[:, 1:]
  assert np.isfinite(applied).all() and (applied >= 0).all()
  np.testing.assert_array_equal((applied >= np.float32(0.99e-3)).all(axis=0), asked[:-1] > 0)
  assert (applied[:, ~(asked[:-1] > 0)] == 0).all()
