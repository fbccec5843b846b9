"""The fault of the demo: late by what it says, on the rank it says, and without a change to any
value."""

from __future__ import annotations

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from experiments.examples import late
from experiments.examples.start import UserError
from experiments.measure import observed_truth


def step_of(check_vma: bool, seconds: float, rank: int = 1, dtype=jnp.float32):
  """A compiled step on two devices: mean of the batch, and each device's time through it."""
  mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])

  def train_step(state, batch):
    return state + jax.lax.pmean(batch["x"].astype(jnp.float32).sum(), "data"), batch["x"]

  wrapped = late.make_late(train_step, "data", rank, seconds)
  step = jax.jit(jax.shard_map(wrapped, mesh=mesh, in_specs=(P(), P("data")),
                               out_specs=(P(), P("data")), check_vma=check_vma))
  sharded, replicated = jax.NamedSharding(mesh, P("data")), jax.NamedSharding(mesh, P())
  batch = {"x": jax.device_put(np.arange(8).astype(dtype), sharded)}
  return step, jax.device_put(jnp.zeros(()), replicated), batch


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int32, jnp.uint8, jnp.bfloat16])
def test_values_do_not_change(check_vma: bool, dtype) -> None:
  (plain, state, batch), (slow, _, _) = (step_of(check_vma, 0, dtype=dtype),
                                         step_of(check_vma, 1e-3, dtype=dtype))
  for expected, got in zip(plain(state, batch), slow(state, batch), strict=True):
    np.testing.assert_array_equal(np.asarray(expected), np.asarray(got))


def test_only_the_chosen_rank_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
  slept: list[float] = []
  monkeypatch.setattr(late, "time", types.SimpleNamespace(sleep=slept.append))
  step, state, batch = step_of(True, 12e-3, rank=0)
  for _ in range(3):
    jax.block_until_ready(step(state, batch))
  assert slept == [12e-3] * 3


def test_a_rank_that_is_not_there_is_refused() -> None:
  step, state, batch = step_of(True, 1e-3, rank=2)
  with pytest.raises(UserError, match="Rank 2 cannot be made late: there are 2"):
    step(state, batch)


@pytest.mark.long
def test_a_device_late_in_a_layer_is_told_with_its_layer():
  job = observed_truth.launch(1, [30.0], 3)
  assert job["lost"] == 0 and job["collectives"] == 3 * observed_truth.LAYERS + 1
  assert [(fault["within"], fault["layer_right"]) for fault in job["faults"]] == [(True, True)] * 3
  assert all(30 <= fault["slept_ms"] < 60 for fault in job["faults"])
  assert [row["within"] for row in observed_truth.summary(job)] == [3, 3]


def test_faults_are_the_same_in_every_process_and_of_every_size():
  asked = observed_truth.faults([1.0, 2.0], 50, 4)
  assert asked == observed_truth.faults([1.0, 2.0], 50, 4)
  assert sorted(fault.delay_ms for fault in asked) == [1.0] * 50 + [2.0] * 50
  assert {fault.layer for fault in asked} == set(range(observed_truth.LAYERS))
  assert (np.diff([fault.step for fault in asked]) == observed_truth.EVERY).all()
