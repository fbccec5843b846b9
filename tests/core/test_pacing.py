"""One builder of observations: a live run, its replay and a simulated job show a pacer the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import jaxpace
from jaxpace.core import pacing
from jaxpace.core.types import Decision, Pacer
from jaxpace.runs.reader import read_run
from jaxpace.simulation import scenario, settings
from jaxpace.simulation.record import RunWriter
from jaxpace.simulation.replay import replay
from tests.instrumentation.running import P, instrumented, mesh_of

RANKS, STEPS = 4, 12


def telltale(slots):
  """A pacer that delays by rank; its columns are what it saw, slot by slot where there are
  slots."""

  def columns(seen):
    out = {"rank": seen.rank.astype(jnp.float32), "step": seen.step.astype(jnp.float32),
           "arrival_2": seen.arrivals[2], "delay_2": seen.delays[2], "step_time": seen.step_time,
           "job_step_time": seen.job_step_time}
    for slot in range(slots):
      out |= {f"wait_{slot}": seen.waits[slot], f"job_{slot}": seen.job_transfers[slot],
              f"now_{slot}": seen.job_transfers_now[slot]}
    return out

  def update(seen, state):
    delay = jnp.where(seen.rank == 2, np.float32(0), np.float32(1e-3))
    return Decision(delay, columns(seen)), state

  return Pacer(lambda ranks: (), update)


def close(one, other):
  np.testing.assert_allclose(one, other, rtol=2e-6, atol=2e-9, equal_nan=True)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
  """A live run with two timestamped collectives, the first of which carries what is shared."""
  path = tmp_path_factory.mktemp("runs") / "live"
  def step(params, batch):
    grads = jax.lax.psum(jnp.outer(batch.sum(0), batch.sum(0)), "data")
    params = params - np.float32(1e-3) * grads
    norm = jax.lax.psum((params * params).sum(), "data")
    return params, norm

  paced, run, pace = instrumented(step, mesh_of(data=RANKS), P(), P("data"), pacer=telltale(2),
                                  share=True)
  params, batch = jnp.zeros((8, 8)), jnp.ones((RANKS * 2, 8))
  with jaxpace.Recorder(path, paced) as recorder:
    for _ in range(STEPS):
      pace, (params, _) = run(pace, params, batch)
      recorder.record()
  return path, paced.plan


def test_a_replay_shows_what_the_live_step_showed(recorded):
  path, plan = recorded
  run = read_run(path)
  assert len(plan.collectives) == 2 and plan.share
  again = replay(run, telltale(2), as_recorded=True)
  rows = pa.concat_tables([pq.read_table(part) for part in sorted(path.rglob("*.parquet"))
                           if "decision_rank" in pq.read_schema(part).names]).sort_by(
                               [("step", "ascending"),
                                ("rank", "ascending")])
  assert len(rows) == STEPS * RANKS and len(again.columns) == 12
  for name in sorted(again.columns):
    live = rows.column(f"decision_{name}").to_numpy(zero_copy_only=False).astype(
        np.float32).reshape(STEPS, RANKS)
    # Columns recorded with a step were decided after the step before.
    close(live[3:], again.columns[name][2:-1])


def test_which_transfers_are_known_now_follows_the_carrier(recorded):
  path, plan = recorded
  again = replay(read_run(path), telltale(2), as_recorded=True)
  known = [bool(np.isfinite(again.columns[f"now_{slot}"][3:]).all()) for slot in range(2)]
  assert known == pacing.over_before(plan.carrier, 2).tolist()


@pytest.mark.parametrize("buckets", [pytest.param(1, marks=pytest.mark.long), 3])
def test_a_simulated_job_shows_what_a_replay_of_its_record_shows(tmp_path, buckets):
  config = {"steps": 20, "fabric": {"nodes": 2, "per_node": RANKS // 2}, "jobs": {"twin": {
      "forward": 4e-3, "backward": 8e-3, "buckets": buckets, "gradient_bytes": 1e6,
      "noise": {"normal": {"deviation": 0.05}}, "pacer": "telltale"}}}
  made = settings.read(config, lambda _: telltale(buckets))
  [(_, steps)] = scenario.run(made)
  writer = RunWriter(tmp_path / "run", made.jobs[0], made, config)
  writer.write(steps)
  writer.close()
  again = replay(read_run(tmp_path / "run"), telltale(buckets), slots=buckets, as_recorded=True)
  assert sorted(again.columns) == sorted(steps.info)
  for name, values in again.columns.items():
    # Recorded in whole nanoseconds.
    np.testing.assert_allclose(values[2:], steps.info[name][2:], rtol=1e-5, atol=1e-8,
                               equal_nan=True, err_msg=name)


def test_what_is_over_before_the_message_leaves():
  assert pacing.over_before(None, 3).tolist() == [False] * 3
  assert pacing.over_before(0, 3).tolist() == [False] * 3
  assert pacing.over_before(2, 3).tolist() == [True, True, False]


def test_the_jobs_step_time_is_the_one_that_was_shared():
  shared = pacing.nothing_shared(1)._replace(step_time=jnp.float32(7))
  seen, _ = pacing.observe(jnp.int32(0), jnp.int32(0), jnp.zeros(2), jnp.zeros(2), jnp.zeros(1),
                           jnp.float32(3), shared)
  assert (float(seen.step_time), float(seen.job_step_time)) == (3, 7)


def test_an_answer_becomes_plain_scalars_sorted_by_name():
  pacer = Pacer(lambda ranks: (),
                lambda seen, state: (Decision(np.float64(2), {"b": 1, "a": jnp.int32(3)}), state))
  seen = pacing.observe(jnp.int32(0), jnp.int32(0), jnp.zeros(2), jnp.zeros(2), jnp.zeros(1),
                        jnp.float32(0), pacing.nothing_shared(1))[0]
  decision, _ = pacing.decide(pacer, seen, ())
  assert (list(decision.info) == ["a", "b"] and decision.delay.dtype == jnp.float32
          and decision.delay.shape == ())
  assert [float(value) for value in decision.info.values()] == [3, 1]
