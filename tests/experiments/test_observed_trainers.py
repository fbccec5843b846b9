"""Trainers of many kinds: with timestamps every array is the same, bit for bit, and no warning
  comes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from experiments.measure import observed_trainers
from experiments.measure import observed_trainers_more as more
from experiments.measure.observed_trainers_steps import Trainer

pytestmark = pytest.mark.optimized(always=True)


@pytest.fixture(autouse=True)
def _promoting():
  # optax promotes.
  with jax.numpy_dtype_promotion("standard"):
    yield


@pytest.mark.parametrize("make", [
    # Read back, partitioned, and compiled again, 12 of its 25 arrays differed after a step.
    pytest.param(lambda: more.cookbook("float32", width=32, layers=1), marks=pytest.mark.long),
    pytest.param(lambda: more.fsdp_scan(jnp.bfloat16), marks=pytest.mark.long),
    more.manual_experts,
    pytest.param(more.experts, marks=pytest.mark.long),
    pytest.param(more.convolutions, marks=pytest.mark.long),
    pytest.param(more.tensor_dropout, marks=pytest.mark.long),
    pytest.param(more.pmap, marks=pytest.mark.long),
], ids=["cookbook", "fsdp", "experts by hand", "experts", "convolutions", "dropout", "pmap"])
def test_trainers_have_the_same_bits_and_no_warning(make) -> None:
  row = observed_trainers.run(make(), 3)
  assert row["different"] == {} and row["warnings"] == [] and row["bare_reasons"] == []
  assert row["executions"] == 3 and row["collectives"] and not row["untimed"]


def test_a_bit_that_differs_is_counted() -> None:
  made = more.data_parallel(more.optax.sgd(0.1))
  calls = []

  def call(step, state, batch):
    state, value = made.call(step, state, batch)
    calls.append(step)
    return state, value + jnp.float32(1e-6) if len(calls) == 4 else value
  row = observed_trainers.run(Trainer(made.jitted, made.start, made.batch, call), 2)
  assert list(row["different"].values()) == [1] and row["after_one"] == 0


def test_twenty_trainers_and_more_are_there() -> None:
  assert len(observed_trainers.ALL) >= 20
