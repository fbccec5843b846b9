"""Native meshes recorded live: who meets whom, in the plan and in the report."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.sharding import PartitionSpec as P

import jaxpace
from jaxpace.__main__ import main
from jaxpace.record.recorder import Recorder
from jaxpace.runs.reader import RunError, read_run
from tests.observation import observed_steps as steps

STEPS = 60


def record(path, mesh, step, axis, state, spec):
  """Records `step(state)` on a mesh."""
  paced = jaxpace.instrument(step, axis)
  pace_spec = jaxpace.spec(mesh)
  run = jax.jit(jax.shard_map(paced, mesh=mesh, in_specs=(pace_spec, spec),
                              out_specs=(pace_spec, spec)))
  pace = paced.init(mesh)
  with Recorder(path, paced) as recorder:
    for _ in range(STEPS):
      pace, state = run(pace, state)
      recorder.record()
      # Many steps in flight can deadlock XLA's in-process collectives on few cores.
      jax.block_until_ready(state)
  return paced.plan


def test_the_plan_of_a_pipeline_says_who_sends_to_whom(tmp_path):
  mesh = jax.make_mesh((2, 2), ("data", "stage"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

  def step(state):
    moved = jax.lax.ppermute(jnp.tanh(state), "stage", [(0, 1)])
    return jnp.tanh(state + moved + jax.lax.pmean(moved.sum(), "stage"))

  state = jax.device_put(jnp.ones((4, 8)), jax.sharding.NamedSharding(mesh, P(("data", "stage"))))
  plan = record(tmp_path / "run", mesh, step, "stage", state, P(("data", "stage")))
  assert plan.collectives[0].index_pairs == ((0, 1),) and plan.collectives[0].axes == ("stage",)
  assert not plan.collectives[1].index_pairs
  first, second = read_run(tmp_path / "run").collectives
  assert first.point_to_point and not second.point_to_point
  assert first.rank_groups.sources.tolist() == [[-1, 0, -1, 2]]
  assert second.rank_groups.sources is None and second.rank_groups.groups.tolist() == [0, 0, 1, 1]
  saved = json.loads((tmp_path / "run" / "run.json").read_text())["plan"]["collectives"][0]
  assert saved["may_begin_early"] == any("can start before" in notice for notice in plan.notices)
  assert np.asarray(saved["pairs"]).tolist() == [[0, 1]]


def test_all_of_an_instrumented_step_is_exposed_and_the_plan_says_what_runs_meanwhile(tmp_path):
  """Its timestamps come one after the other, so no collective is under way beside another."""
  mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

  def step(state):
    mean = jax.lax.pmean(jnp.tanh(state), "data")
    aside = jnp.sin(state @ jnp.ones((8, 8)))
    return jnp.tanh(aside + mean + jax.lax.pmean(mean * 0.5, "data"))

  state = jax.device_put(jnp.ones((4, 8)), jax.sharding.NamedSharding(mesh, P("data")))
  plan = record(tmp_path / "run", mesh, step, "data", state, P("data"))
  assert main(["report", str(tmp_path / "run"), "--json", str(tmp_path / "report.json")]) == 0
  document = json.loads((tmp_path / "report.json").read_text())
  assert sum(document["shares"].values()) == pytest.approx(1, abs=1e-6)
  rows, found = document["collectives"], document["overlap"]
  assert len(rows) == 2 and found["hidden"] == 0
  for row, planned in zip(rows, plan.collectives, strict=True):
    assert row["in_flight"] == row["exposed"] > 0 and row["hidden"] == row["behind_others"] == 0
    assert row["meanwhile"] == planned.meanwhile
  # The product may run beside either sum.
  assert all(row["meanwhile"] > 0.5 for row in rows)
  own = sum(row[name] * row["steps"] for row in document["per_rank"]
            for name in ("compute", "runtime", "pacing"))
  step_time = sum(row["step_time"] * row["steps"] for row in document["per_rank"])
  steps = sum(row["steps"] for row in document["per_rank"])
  assert (own / steps + found["exposed"]
          == pytest.approx(step_time / steps, rel=1e-6))


# Why nothing of a run could be read.

def test_of_a_step_that_ran_without_marks_the_reason_is_told(tmp_path):
  mesh = steps.mesh_of(data=2)
  x = steps.put(mesh, np.ones((4, 4), np.float32), P("data"))

  def ordered(x):
    shape = jax.ShapeDtypeStruct((), np.float32)
    return x - io_callback(lambda mean: np.float32(mean), shape, x.mean(), ordered=True)

  observed = jaxpace.observe(jax.jit(ordered))
  with jaxpace.Recorder(tmp_path, observed) as recorder:
    jax.block_until_ready(observed(x))
    recorder.record()
  with pytest.raises(RunError, match="ordered ran unmodified: .*ordered effect"):
    read_run(tmp_path)
