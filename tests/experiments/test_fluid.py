"""The fluid model against what is known of it, and its pacer's acceptance in small."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpace
from experiments.labs.fabric import attraction
from experiments.measure import fluid, two_jobs_simulated
from jaxpace.simulation.job import Job, Shape
from jaxpace.simulation.jobs import LinkShares, several

NOTHING = fluid.nothing()


def bare(jobs, weight=fluid.fair):
  return jax.tree.map(np.asarray, jax.jit(fluid.simulator(NOTHING.update, weight))(jobs, ()))


def test_two_identical_jobs_at_an_offset():
  """T' = max(2a, 1 + max(0, a - offset)), the offset the shorter way round."""
  run = jax.jit(fluid.simulator(NOTHING.update))
  for share in (0.3, 0.4, 0.6):
    for offset in (0.0, 0.05, 0.2, 0.5, 0.8):
      jobs = fluid.scene(0, [1, 1], [share, share], steps=20, buckets=4, together=True)
      found = np.asarray(run(jobs._replace(start=jnp.asarray([0, offset], jnp.float32)),
                             ()).step_time)
      expected = max(2 * share, 1 + max(0, share - min(offset, 1 - offset)))
      np.testing.assert_allclose(found[:, 6:], expected, rtol=1e-5,
                                 err_msg=f"a = {share}, offset {offset}")


@pytest.mark.parametrize("paced", [False, pytest.param(True, marks=pytest.mark.long)])
def test_where_both_models_apply_they_agree(paced):
  """Jobs of one rank, without noise, at equal shares of one link: `jaxpace.simulation.jobs`, and
  delays with it.

  For a while: where a pacer feeds back, what rounding makes of the two grows from step to step.
  """
  periods, shares, starts, steps, buckets = ([1.0, 1.0, 1.3], [0.3, 0.4, 0.2], [0.0, 0.13, 0.41],
                                             20, 4)
  pacer = jaxpace.interleave_jobs(floor=0.075) if paced else NOTHING
  scene = fluid.scene(0, periods, shares, steps=steps, buckets=buckets, together=True)
  scene = scene._replace(start=jnp.asarray(starts, jnp.float32))
  states = fluid.stack([pacer.init(1)] * 3)
  ours = jax.jit(fluid.simulator(pacer.update))(scene, states)
  plan = several([Shape(1, overlap=False)] * 3, [pacer] * 3, buckets=[buckets] * 3, steps=steps)
  zero = np.float32(0)
  jobs = [Job(forward=np.float32((1 - share) * period), backward=zero, update=zero, gap=zero,
              transfers=np.full(buckets, share * period / buckets, np.float32))
          for period, share in zip(periods, shares, strict=True)]
  theirs = jax.jit(plan.run)(jax.random.key(0), jobs,
                             LinkShares(np.ones((3, 1), np.float32), np.ones(3, np.float32)),
                             np.asarray(starts, np.float32), np.full(3, 2**30, np.int32))
  step_time = np.stack([history.step_time for history in theirs])
  delay = np.stack([history.delay for history in theirs])
  assert (delay > 0).any() == paced
  np.testing.assert_allclose(delay, ours.delay, atol=1e-4)
  np.testing.assert_allclose(step_time - delay, ours.step_time - ours.delay, atol=1e-4)


@pytest.mark.parametrize("weight", [fluid.fair, fluid.mltcp, fluid.drawn])
def test_the_link_works_at_its_rate_whenever_anyone_sends(weight):
  """The union of the intervals in which jobs send is as long as the work they send."""
  jobs = fluid.scene(3, [1, 1, 1.3], [0.3, 0.4, 0.2], steps=40, buckets=4, jitter=0.05)
  jobs = jobs._replace(steps=jnp.full((3,), 40, jnp.int32))
  found = bare(jobs, weight)
  exit = np.cumsum(found.step_time.astype(np.float64), axis=1) + np.asarray(jobs.start)[:, None]
  enter = exit - found.comm
  spans = sorted(zip(enter.ravel(), exit.ravel(), strict=True))
  covered, until = 0.0, 0.0
  for begin, end in spans:
    covered += max(0.0, end - max(begin, until))
    until = max(until, end)
  assert covered == pytest.approx(float(np.asarray(jobs.work, np.float64).sum()), rel=1e-5)
  assert (found.comm > np.asarray(jobs.work).sum(axis=2) * (1 - 1e-5)).all()


def test_a_job_alone_takes_what_it_computes_and_sends():
  jobs = fluid.scene(1, [1.0], [0.4], steps=30, jitter=0.05)
  found = bare(jobs)
  np.testing.assert_allclose(found.step_time, np.asarray(jobs.compute + jobs.work.sum(axis=2)),
                             rtol=1e-5)


def test_a_delay_moves_the_phase_for_good():
  """A pacer that delays one step by the overlap parts the jobs."""
  def update(seen, state):
    delay = jnp.where((state == 0) & (seen.step == 4), np.float32(0.3), np.float32(0))
    return jaxpace.Decision(delay, {}), state

  jobs = fluid.scene(0, [1, 1], [0.4, 0.4], steps=20, together=True)
  jobs = jobs._replace(start=jnp.asarray([0.1, 0], jnp.float32))
  found = jax.jit(fluid.simulator(update))(jobs, jnp.arange(2, dtype=jnp.int32))
  time = np.asarray(found.step_time)
  np.testing.assert_allclose(time[:, 1:4], 1.3, rtol=1e-5)
  np.testing.assert_allclose(time[:, 8:], 1.0, rtol=1e-5)
  assert (np.flatnonzero(np.asarray(found.delay)[0]).tolist()
          == [5]), "asked after one step, applied in the next"


def test_what_a_pacer_sees_of_the_job_is_one_step_old_but_for_the_buckets_that_were_over():
  def update(seen, state):
    now = seen.job_transfers_now
    info = {"took": seen.job_step_time, "sent": jnp.sum(seen.job_transfers),
            "own": jnp.sum(seen.waits[:-1]),
            "now": jnp.where(jnp.isnan(now[-1]), jnp.sum(now[:-1]), jnp.nan)}
    return jaxpace.Decision(jnp.float32(0), info), state

  jobs = fluid.scene(5, [1, 1], [0.4, 0.4], steps=12, jitter=0.05)
  found = jax.tree.map(np.asarray, jax.jit(fluid.simulator(update))(jobs, ()))
  assert np.isnan(found.info["took"][:, :2]).all(), "a first step's time isn't known"
  np.testing.assert_array_equal(found.info["took"][:, 2:], found.step_time[:, 1:-1])
  np.testing.assert_array_equal(found.info["sent"][:, 1:], found.comm[:, :-1])
  np.testing.assert_array_equal(found.info["now"], found.info["own"])


def test_as_over_tcp_a_leader_loses_its_lead_and_only_the_follower_moves_it():
  """The lead of a pair that overlaps: it falls by what the model of the lab's own fit says."""
  lead = 0.1
  jobs = fluid.scene(0, [1, 1], [0.4, 0.4], steps=30, buckets=4, together=True)
  found = bare(jobs._replace(start=jnp.asarray([0, lead], jnp.float32)), fluid.drawn)
  comm = found.comm.astype(np.float64)
  first, second = attraction.shared(np.asarray([lead]), 0.4, 0.75)
  np.testing.assert_allclose(comm[:, 0], [first[0], second[0]], rtol=2e-3)
  assert comm[0, 0] > comm[1, 0] + 0.02
  np.testing.assert_allclose(comm[:, -1], 0.8, rtol=1e-2, err_msg="in the end they are in step")


@pytest.mark.parametrize("control",
                         [pytest.param("interleave", marks=pytest.mark.long), "drawn_interleave"])
def test_jobs_that_collide_part_and_stay_parted(control):
  """Without control their period would be 1.4 for ever."""
  scene = two_jobs_simulated.SCENES["two_together_31"]
  found = two_jobs_simulated.history(scene, two_jobs_simulated.CONTROLS[control], 6)
  assert two_jobs_simulated.figure(scene, found)["mean"] < 1.05
