"""Batches that the trainer's own loader lays out evenly: what ranks fetch of them, and when."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpace
from jaxpace.observation.clocks import host_ring
from tests import quick
from tests.instrumentation.running import mesh_of
from tests.instrumentation.test_accumulate import (
    EVEN,
    KEY,
    RANKS,
    TOTAL,
    close,
    examples,
    expected,
    loss_fn,
    mapped,
    of,
    params,
)


def test_counts_are_added_up_in_their_own_type():
  mesh = mesh_of(data=RANKS)
  with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
    run = jax.jit(lambda params, micro_batches, counts: jaxpace.accumulate(
        loss_fn, params, micro_batches, counts, mesh=mesh, fetch=True))
    close(run(params(), examples(), of(6, 1, 0, 5)), expected())


@pytest.mark.parametrize("whole", [*quick.long(False), True])
def test_ranks_fetch_what_they_run_of_a_batch_that_is_laid_out_evenly(whole):
  mesh = mesh_of(data=RANKS)

  def step(params, micro_batches, counts):
    return jaxpace.accumulate(loss_fn, params, micro_batches, counts, key=jax.random.key(KEY),
                              mesh=mesh if whole else None, fetch=True)

  run = jax.jit(step) if whole else mapped(step)
  for counts in (EVEN, (6, 1, 0, 5), (0, TOTAL, 0, 0)):
    close(run(params(), examples(), of(*counts)), expected(True))
  loss, _ = run(params(), examples(), of(3, 3, 3, 4))
  assert np.isnan(loss), "counts of another global batch"


def test_nothing_is_fetched_where_counts_are_even():
  mesh = mesh_of(data=RANKS)
  step = jaxpace.observe(jax.jit(lambda params, micro_batches, counts: jaxpace.accumulate(
      loss_fn, params, micro_batches, counts, mesh=mesh, fetch=True)))
  jax.block_until_ready(step(params(), examples(), of(*EVEN)))

  def events(*counts):
    before = np.array(host_ring.current().heads()[:RANKS])
    jax.block_until_ready(step(params(), examples(), of(*counts)))
    return (host_ring.current().heads()[:RANKS] - before).tolist()

  even, uneven = events(*EVEN), events(6, 1, 0, 5)
  assert len({*even}) == len({*uneven}) == 1, "all of them gather or none"
  assert uneven[0] >= even[0] + 2, "an enter and an exit timestamp at least"
  assert events(*EVEN) == even


def test_random_keys_are_fetched_too():
  mesh = mesh_of(data=RANKS)
  step = jax.jit(lambda keys, counts: jaxpace.accumulate(
      lambda w, key: (w * jax.random.normal(key), 1.0), jnp.float32(1), keys, counts, mesh=mesh,
      fetch=True)[0])
  keys = jax.random.split(jax.random.key(0), TOTAL)
  mean = np.mean([jax.random.normal(key) for key in keys])
  for counts in (EVEN, (6, 1, 0, 5)):
    assert step(keys, of(*counts)) == pytest.approx(mean, rel=1e-5)
