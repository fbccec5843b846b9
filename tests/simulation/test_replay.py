"""Replay against runs whose truth is known, and against what a live pacer decided."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpace
from jaxpace.diagnose.selected_steps import count_steps
from jaxpace.runs.groups import groups
from jaxpace.runs.reader import read_run
from jaxpace.simulation.observed import observe
from jaxpace.simulation.replay import replay, summarise
from tests.coordination.test_live import late_step
from tests.instrumentation import models
from tests.instrumentation.running import P, instrumented, mesh_of
from tests.quick import QUICK, long
from tests.synthetic import synthetic_runs
from tests.synthetic.synthetic_runs import SyntheticJob

# Decisions of a compiled step and of its replay are compared bit by bit.
pytestmark = pytest.mark.optimized
LATE = SyntheticJob(ranks=4, steps=1500, noise=0.02, late={3: 20e-3})
@pytest.fixture
def written(tmp_path):
  def write(job, name="run"):
    truth = synthetic_runs.write(tmp_path / name, job)
    return read_run(tmp_path / name), truth
  return write


def always(delays):
  """Asks for the same delays in every step, and records what it sees."""
  asked = np.asarray(delays, np.float32)

  def update(seen, state):
    info = {"arrival": seen.arrivals[seen.rank], "others": jnp.isfinite(seen.arrivals).sum(),
            "wait": seen.waits[0], "last_wait": seen.waits[1], "delay": seen.delays[seen.rank],
            "step_time": seen.step_time, "job": seen.job_step_time,
            "transfer": seen.job_transfers[0], "unused": seen.waits[-1], "step": seen.step}
    return jaxpace.Decision(jnp.asarray(asked)[seen.rank], info), state

  return jaxpace.Pacer(lambda ranks: (), update)


def summary_of(run, pacer, **options):
  summary = summarise(replay(run, pacer, **options), count_steps(run).mask)
  assert summary is not None
  return summary


def test_pacing_early_ranks_beside_a_straggler_costs_at_most_a_thousandth(written):
  run, _ = written(LATE)
  summary = summary_of(run, jaxpace.pace_early_ranks(window=16))
  delays = [own["mean"] for own in summary["delay"]["by_rank"].values()]
  assert summary["active_share"] > 0.9 and min(delays[:3]) > 5e-3 and delays[3] == 0
  took = summary["step_time"]
  assert took["without"] == took["recorded"] <= took["with"] <= took["recorded"] * 1.001
  assert summary["change"] == pytest.approx(took["with"] / took["without"] - 1)


@pytest.mark.parametrize("collectives", [1, 2])
def test_a_delay_on_the_last_rank_costs_exactly_that(written, collectives):
  run, truth = written(dataclasses.replace(LATE, noise=0.0, steps=200, collectives=collectives))
  replayed = replay(run, always([0, 0, 0, 3e-3]))
  known = replayed.known
  assert not known[0] and known[1:].all(), "the first step has no exit to start from"
  np.testing.assert_allclose(replayed.cost[known], 3e-3, atol=5e-9)
  step = np.diff(truth.exit[-1, 0])[0] * 1e-9
  np.testing.assert_allclose(replayed.bare[known], step, rtol=1e-6)
  summary = summary_of(run, always([0, 0, 0, 3e-3]))
  assert summary["step_time"]["with"] == pytest.approx(step + 3e-3, abs=1e-8)
  assert summary["active_share"] == 1
  assert summary["cost"]["total"] == pytest.approx(3e-3 * summary["steps"], rel=1e-5)


def test_no_delay_is_longer_than_the_step_was_instrumented_for(written):
  run, _ = written(dataclasses.replace(LATE, steps=50))
  summary = summary_of(run, always([np.nan, -1, 9, 0]), max_delay=4e-3)
  assert summary["delay"]["longest"] == np.float32(4e-3)
  assert ([own["mean"] > 0 for own in summary["delay"]["by_rank"].values()]
          == [False, False, True, False])


@pytest.mark.parametrize("collectives", [*long(1), 2])
def test_what_the_pacer_sees_is_what_a_run_with_its_delays_would_have_shown(written, collectives):
  """The same job is recorded without and with the delays; the first is replayed with them."""
  job = dataclasses.replace(LATE, steps=120, collectives=collectives, late={3: 4e-3}, noise=0.1)
  delays = {0: 6e-3, 2: 1e-3}
  bare, _ = written(job, "bare")
  paced, _ = written(dataclasses.replace(job, delays=delays), "paced")
  pacer = always([6e-3, 0, 1e-3, 0])
  replayed = replay(bare, pacer)
  live = replay(paced, pacer, as_recorded=True)
  assert (replayed.cost[1:] > 0).any()
  for name in ("arrival", "delay", "wait", "last_wait", "step_time", "job", "transfer", "unused",
               "others", "step"):
    # from step 1 on delays differ from the job's
    got, expected = replayed.columns[name][3:], live.columns[name][3:]
    np.testing.assert_allclose(got, expected, atol=2e-8, rtol=1e-6, err_msg=name)
  np.testing.assert_allclose((replayed.bare + replayed.cost)[2:], live.recorded[2:], rtol=1e-6)
  recorded = replay(bare, always([0, 0, 0, 0])).recorded
  np.testing.assert_allclose(live.bare[2:], recorded[2:], rtol=1e-6,
                             err_msg="applied delays are taken out")
  assert (np.isnan(live.columns["last_wait"]).all() == (collectives == 1)
          and np.isnan(live.columns["unused"]).all())


def test_the_job_values_are_those_of_the_step_before(written):
  run, _ = written(dataclasses.replace(LATE, steps=40))
  columns = replay(run, always([0] * 4)).columns
  np.testing.assert_array_equal(columns["job"][1:],
                                np.broadcast_to(columns["step_time"][:-1, :1], (39, 4)))
  assert np.isnan(columns["transfer"][:2]).all()
  np.testing.assert_allclose(columns["transfer"][2:], LATE.transfer, rtol=1e-4)


def test_without_sharing_a_rank_sees_itself_only(written):
  run, _ = written(dataclasses.replace(LATE, steps=40))
  alone, together = (replay(run, always([0] * 4), shared=shared).columns
                     for shared in (False, True))
  assert (alone["others"][1:] == 1).all() and (together["others"][1:] == 4).all()
  np.testing.assert_array_equal(alone["arrival"], together["arrival"])
  assert np.isnan(alone["job"]).all()


def test_missing_ranks_and_steps_are_unknown_and_dont_count(written):
  run, _ = written(dataclasses.replace(LATE, steps=60))
  gone = slice(20, 30)
  run.attempt[2, gone] = -1
  run.collectives[0].attempt[2, gone] = -1
  replayed = replay(run, always([0] * 4))
  assert (not replayed.known[20:31].any() and replayed.known[1:20].all()
          and replayed.known[31:].all())
  arrival, others = replayed.columns["arrival"], replayed.columns["others"]
  assert np.isnan(arrival[20:31, 2]).all() and np.isfinite(np.delete(arrival, 2, 1)[1:]).all()
  assert (others[20:31] == 3).all() and np.isnan(replayed.columns["delay"][20:30, 2]).all()
  assert np.isnan(replayed.cost[20:31]).all() and np.isfinite(replayed.recorded[20:31]).all()
  summary = summary_of(run, always([0] * 4))
  assert summary["steps"] == 48 and summary["steps_left_out"] == 11


def test_a_rank_that_was_never_recorded_is_left_out_and_the_rest_played(written):
  run, _ = written(dataclasses.replace(LATE, noise=0.0, steps=60, late={2: 20e-3}))
  run.attempt[3] = -1
  run.collectives[0].attempt[3] = -1
  replayed = replay(run, always([0, 0, 2e-3, 9e-3]))
  assert replayed.known[1:].all() and (replayed.columns["others"][1:] == 3).all()
  np.testing.assert_allclose(replayed.cost[1:], 2e-3, atol=5e-9)
  assert summary_of(run, jaxpace.pace_early_ranks(window=8))["active_share"] == 0


def test_chunks_make_no_difference(written, monkeypatch):
  run, _ = written(dataclasses.replace(LATE, steps=300))
  whole = replay(run, jaxpace.pace_early_ranks(window=16, cost=0.1))
  monkeypatch.setattr("jaxpace.simulation.replay._CHUNK_CELLS", 1)
  parts = replay(run, jaxpace.pace_early_ranks(window=16, cost=0.1))
  np.testing.assert_array_equal(whole.delays, parts.delays)
  np.testing.assert_array_equal(whole.cost, parts.cost)
  assert (whole.delays > 0).any()


def test_groups_along_the_data_axis():
  def info(mesh, axis):
    return {"settings": {"mesh": mesh, "axis": axis}, "plan": {"ranks": 2}}
  assert groups(info({"data": 2, "model": 3}, ["data"]), 6).tolist() == [[0, 3], [1, 4], [2, 5]]
  assert groups(info({"model": 3, "data": 2}, ["data"]), 6).tolist() == [[0, 1], [2, 3], [4, 5]]
  assert groups(info({"a": 2, "model": 2, "b": 2},
                     ["b", "a"]), 8).tolist() == [[0, 4, 1, 5], [2, 6, 3, 7]]
  assert groups({}, 3).tolist() == [[0, 1, 2]]
  assert groups(info({"data": 4, "model": 2}, ["data"]), 2).tolist() == [[0, 1]]
  assert groups(info({"data": 2}, ["data"]), 6) is None


@pytest.mark.parametrize(("mesh", "share"),
                         [({"data": 2, "model": 2}, True),
                          pytest.param({"data": 2}, False, marks=pytest.mark.long)])
def test_the_pacer_that_ran_live_decides_the_same_over_its_record(tmp_path, mesh, share):
  """Bit for bit, compiled as a user's: the observations are rebuilt to the last bit, and it is the
  same `update`."""
  def pacer():
    return jaxpace.chain(jaxpace.pace_early_ranks(window=8, threshold=0.02, noise=0.0, cost=0.5,
                                                  max_delay=5e-3),
                         by_half())

  mesh = mesh_of(**mesh)
  paced, step, pace = instrumented(late_step(False, 1e-3), mesh, P(), P("data"), pacer=pacer(),
                                   share=share)
  state = models.mlp_params()
  count = mesh.shape["data"]
  batch = (*models.batches(count)[0], jnp.full((count,), 3e-3, jnp.float32))
  arrivals, delays, step_times, asked = [], [], [], []
  with jaxpace.Recorder(tmp_path / "run", paced) as recorder:
    for _ in range(60):
      asked.append(np.asarray(pace.delay))
      pace, (state, _) = jax.block_until_ready(step(pace, state, batch))
      recorder.record()
      arrivals.append(np.asarray(pace.arrivals))
      delays.append(np.asarray(pace.delays))
      step_times.append(np.asarray(pace.step_time))
  run = read_run(tmp_path / "run")
  for group in groups(run.info, run.ranks):
    seen = observe(run, group, 16, slice(0, 60))
    own = np.arange(len(group))
    np.testing.assert_array_equal(seen.arrivals, np.stack(arrivals)[:, group, own])
    # A delay above 4 ms takes more digits than whole nanoseconds keep: one unit in the last place.
    np.testing.assert_array_max_ulp(np.nan_to_num(seen.delays),
                                    np.nan_to_num(np.stack(delays)[:, group, own]), 1)
    np.testing.assert_array_equal(seen.step_time, np.stack(step_times)[:, group])
    replayed = replay(run, pacer(), ranks=group, shared=share, as_recorded=True)
    if QUICK:  # compiled another way than a user's, the two programs may round differently
      np.testing.assert_allclose(replayed.delays, np.stack(asked)[:, group], rtol=1e-5)
    else:
      np.testing.assert_array_equal(replayed.delays, np.stack(asked)[:, group])
      assert replayed.agrees.all()
    assert (replayed.delays > 0).any()
    other = replay(run, jaxpace.limit(pacer(), 1e-5), ranks=group, shared=share, as_recorded=True)
    assert not other.agrees.all()


def by_half():
  """A pacer without memory whose delays need no sharing."""
  def update(seen, state):
    wait = seen.waits[0]
    delay = jnp.where(jnp.isfinite(wait), jnp.minimum(wait, np.float32(2e-3)) * np.float32(0.37),
                      np.float32(0))
    return jaxpace.Decision(delay, {"step_time": seen.step_time}), state
  return jaxpace.Pacer(lambda ranks: (), update)
