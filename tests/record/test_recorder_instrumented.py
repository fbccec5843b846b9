"""The recorder on really instrumented steps: what comes out is what the step's plan says went
in."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxpace
from jaxpace.record.recorder import Recorder
from jaxpace.runs.rundir import read_json
from tests.instrumentation.running import PAUSE, column, instrumented, mesh_of, restless
from tests.quick import long
from tests.record.recording import table

FEATURES = 64


def loss(params, batch):
  return jnp.mean(jnp.tanh(batch @ params) ** 2)


def train_step(params, batch):
  value, grads = jax.value_and_grad(loss)(params, batch)
  grads = jax.lax.pmean(grads, "data")
  return params - jnp.float32(0.1) * grads, value


def check(directory, plan, ranks, steps):
  rows = sorted(table(directory, "steps"), key=lambda r: (r["rank"], r["step"]))
  assert ([(r["rank"], r["step"]) for r in rows]
          == [(r, s) for r in range(ranks) for s in range(steps)])
  now = time.monotonic_ns()
  for r in rows:
    phases = [r[f"{name}_ns"] for name in ("forward", "backward", "compute", "sync", "update")]
    known = [phase for phase in phases if phase is not None]
    assert min(known) >= 0
    assert sum(known) <= r["end_ns"] - r["start_ns"]
    assert 0 < r["start_ns"] < r["end_ns"] < now
    assert (r["gap_ns"] is None) == (r["step"] == 0)
    assert r["cpu_ns"] >= 0
  segments = {mark.segment for mark in plan.marks}
  for name in ("forward", "backward", "sync", "update"):
    assert (rows[0][f"{name}_ns"] is not None) == (name in segments)
  waits = table(directory, "collectives")
  assert len(waits) == ranks * steps * len(plan.collectives)
  assert all(r["exit_ns"] >= r["enter_ns"] > 0 for r in waits)
  by_step = {(r["rank"], r["step"]): r for r in rows}
  for r in waits:
    step = by_step[r["rank"], r["step"]]
    assert step["start_ns"] <= r["enter_ns"] <= r["exit_ns"] <= step["end_ns"]


def recorded(directory, mesh, steps, **settings):
  """The instrumented step after so many recorded steps under `jax.shard_map`, and what was lost."""
  paced, step, pace = instrumented(lambda params, batch: train_step(params, batch)[0], mesh, P(),
                                   P("data"), **settings)
  params = jnp.ones((FEATURES,), jnp.float32)
  batch = np.ones((8 * mesh.shape["data"], FEATURES), np.float32)
  with Recorder(directory, paced) as recorder:
    for _ in range(steps):
      pace, params = step(pace, params, batch)
      recorder.record()
      # Many steps in flight can deadlock XLA's in-process collectives on few cores.
      jax.block_until_ready(params)
  return paced, recorder.lost


@pytest.mark.parametrize("axes, settings", [
    ({"data": 8}, {"donate": (0, 1)}),
    ({"data": 4, "model": 2}, {"check_vma": True, "share": True}), *long(
        ({"data": 8}, {}), ({"data": 4, "model": 2}, {"check_vma": True, "share": None}))])
def test_every_part_of_every_step_is_recorded(tmp_path, axes, settings):
  paced, lost = recorded(tmp_path, mesh_of(**axes), 30, **settings)
  assert lost == {"lost_rows": 0, "holes": 0, "stopped": None}
  check(tmp_path, paced.plan, 8, 30)


@pytest.mark.parametrize("named", [True, False])
def test_an_observed_step_has_what_its_pacer_decided(tmp_path, named):
  """Of each step, though it is compiled for two shapes; and a delay is no computing."""
  mesh = mesh_of(data=2)
  paced, run, pace = instrumented(train_step, mesh, P(), P("data"), pacer=restless())
  params, steps = jnp.ones((FEATURES,), jnp.float32), 12
  step = jaxpace.observe(run) if named else run
  with jaxpace.Recorder(tmp_path, step) if named else jaxpace.observed(tmp_path) as recorder:
    for size in [8] * steps + [16] * steps:
      pace, (params, _) = step(pace, params, np.ones((size, FEATURES), np.float32))
      if named:
        recorder.record()
    jax.block_until_ready(params)
  rows = sorted(table(tmp_path, "steps"), key=lambda r: (r["rank"], r["step"]))
  for name, wanted, scale in (("delay_ns", "delay", 1e9), ("delay_applied_ns", "applied", 1e9),
                              ("decision_turn", "turn", 1)):
    np.testing.assert_allclose([row[name] for row in rows],
                               scale * column(pace, paced.plan, wanted).ravel(), rtol=1e-6)
  assert rows[1]["delay_applied_ns"] >= 1e9 * PAUSE and rows[0]["delay_applied_ns"] == 0
  for row in rows:
    assert row["end_ns"] - row["start_ns"] == sum(row[f"{name}_ns"] or 0 for name in (
        "delay_applied", "forward", "backward", "compute", "sync", "update"))
  assert read_json(tmp_path / "run.json")["plan"]["decisions"] == ["turn"]
