"""Counts of an observed step: what ranks are busy with is read in the ring, and all change at one
step."""


import chex
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import jaxpace
from jaxpace.coordination import knobs
from jaxpace.live import gathered, speeds
from jaxpace.live.busy_times import BusyTimes
from jaxpace.live.control_file import ControlRequest
from jaxpace.live.speeds import Gathered
from jaxpace.observation.clocks import host_ring
from jaxpace.runs.reader import read_run
from jaxpace.runs.run import RunError
from jaxpace.simulation.shared_work import replay_balancer
from tests.instrumentation.running import mesh_of
from tests.live.observed_job import EVEN, SOURCE, TURNS, Job, by_speed, turning
from tests.live.test_shares import CAPACITY, EXAMPLES, RANKS, SIZE, TOTAL, loss_fn
from tests.patience import awaited


def ring_shows(monkeypatch, job, seconds):
  """Has the ring show how long ranks are busy with micro-batches of so many seconds, to the last
  digit."""
  def of(times, calls):
    busy = np.array([[seconds[r] * job.ran[call][r] if call is not None else np.nan
                      for call in calls] for r in range(RANKS)], np.float32)
    return np.stack([busy, np.broadcast_to(busy.max(axis=0), busy.shape)], axis=1)

  monkeypatch.setattr(BusyTimes, "of", of)


def test_each_example_once_an_epoch_across_changes_and_a_restart():
  job = Job()
  job.run(18)
  kept = jax.tree.map(np.copy, tuple(job.feed.state()))
  job.feed = job.fed()
  job.feed.restore(kept)
  job.run(18)
  # Steps 0 to 3 are gathered before step 8, the balancer is asked before step 12, and its counts
  # are taken before step 16. Steps with older counts say nothing, and what was on its way at the
  # restart is gone: there it begins with the first step after it.
  assert job.ran == [EVEN] * 16 + [TURNS[1]] * 18 + [TURNS[2]] * 2
  assert job.seen.tolist() == [12] * EXAMPLES, "36 steps of 16 are twelve epochs of 48"
  assert job.feed.drawn() == 36 * TOTAL * SIZE
  assert int(job.feed.state().step) == 36


def test_exchanges_grow_rare_while_counts_stay_and_tell_of_the_last_steps(monkeypatch):
  def update(observation, state):
    steps, last, left_out = state
    return jnp.array(EVEN, jnp.int32), (
        steps + jnp.all(observation.arrivals > 0), observation.step,
        left_out + (observation.step != last + 1))

  none = jnp.int32(0)
  job = Job(balancer=jaxpace.Balancer(lambda ranks: (none, none - 1, none), update, TOTAL))
  sent, send = [], Gathered.send

  def noted(gathered, rows):
    sent.append(int(job.feed.state().step) - 1)
    send(gathered, rows)

  monkeypatch.setattr(Gathered, "send", noted)
  monkeypatch.setattr(speeds, "_PATIENT", 3)
  monkeypatch.setattr(speeds, "_rarest", lambda step_time: 64)
  job.run(96)
  steps, last, left_out = job.feed.state().balancer  # its leaves, in order
  assert steps == last + 1 > 48 and left_out == 0, "none is left out up to every sixteenth step"
  job.run(304)
  apart = np.diff(sent).tolist()
  assert apart == [often for often in (4, 8, 16, 32, 64) for _ in range(apart.count(often))]
  assert sent[0] == 8 and min(map(apart.count, (4, 8, 16, 32))) > 1 and apart[-1] == 64
  steps, last, left_out = job.feed.state().balancer
  assert left_out == apart.count(32) + apart.count(64) and steps == (
      last + 1 - 16 * apart.count(32) - 48 * apart.count(64)), "then the last sixteen are seen"


def test_an_exchange_costs_the_same_part_of_short_and_long_steps():
  rarest = speeds._rarest
  assert rarest(0.035) == 256, "10 s / 0.035 s is 285"
  assert rarest(2.5) == rarest(70.0) == 4 and rarest(1e-5) == rarest(0.0) == 1024
  took = np.array([0.125, np.nan, 9.0, 0.125], np.float32)
  assert speeds._typical(took, 1.0) == 0.125, "one long step is no step time"
  assert speeds._typical(took[1:2], 1.0) == 1.0, "as before where no step is known"


def test_work_is_shared_evenly_while_control_says_off(tmp_path):
  job = Job()

  def run(steps):
    for _ in range(steps):
      assert control(job.feed) is job.feed
      job.run(1)

  def until(said):
    assert awaited(lambda: run(1) or control.request == said), control.request
    return len(job.ran) - 1

  with jaxpace.Control(tmp_path, every_seconds=0.05) as control:
    run(20)
    (tmp_path / "control.json").write_text('{"enabled": false}')
    off = until(ControlRequest(enabled=False))
    run(3)
    (tmp_path / "control.json").unlink()
    on = until(ControlRequest())
    run(8)
  # Eight steps after the request was heard of, since counts may be asked for ahead.
  assert EVEN not in job.ran[16:off + 8] and job.ran[off + 8:on + 8] == [EVEN] * (on - off)
  assert job.ran[on + 8] != EVEN
  assert not (job.seen.max() - job.seen.min() > 1), "and no example is left out"


def test_the_threshold_of_control_is_the_least_gain():
  def update(observation, knobs):
    # Uneven counts, unless more is asked for than they promise.
    return jnp.where(knobs.threshold > 0.5, jnp.array(EVEN, jnp.int32),
                     jnp.array(TURNS[1], jnp.int32)), knobs

  job = Job(balancer=jaxpace.Balancer(lambda ranks: knobs.init(), update, TOTAL))
  job.feed.steer(ControlRequest(threshold=1.0), 0)
  job.run(17)
  job.feed.steer(ControlRequest(threshold=0.0), 17)
  job.run(24)
  assert job.ran == [EVEN] * 32 + [TURNS[1]] * 9


def test_a_batch_as_the_loader_lays_it_out_and_counts_alone():
  mesh = mesh_of(data=RANKS)
  whole = jax.tree.map(lambda leaf: leaf[:TOTAL * SIZE].reshape(TOTAL, SIZE), SOURCE)
  split = jax.sharding.NamedSharding(mesh, jax.P("data"))

  @jax.jit
  def train(w, batch, counts):
    (_, seen), grads = jaxpace.accumulate(loss_fn, w, batch, counts, has_aux=True, mesh=mesh,
                                          fetch=True)
    return w - grads, seen

  step, w = jaxpace.observe(train), jnp.float32(0)
  feed = jaxpace.shares(mesh, total_micro_batches=TOTAL, balancer=turning())
  ran, results = [], []
  for _ in range(17):
    share = feed.next(step)
    after, seen = step(w, jax.device_put(whole, split), share.counts)
    ran.append(share.counts.tolist())
    results.append(float(after))
    assert seen.tolist() == [1] * TOTAL * SIZE + [0] * (EXAMPLES - TOTAL * SIZE)
  assert ran == [EVEN] * 16 + [TURNS[1]]
  np.testing.assert_allclose(results, -SOURCE["x"][:TOTAL * SIZE].mean(), rtol=1e-6)
  with pytest.raises(ValueError, match="was given no examples to load"):
    share.take(SOURCE)
  too_many = jaxpace.shares(mesh, total_micro_batches=TOTAL, examples=EXAMPLES + 1, size=SIZE,
                            balancer=turning(), shuffle=False)
  last = too_many.share((EXAMPLES // (TOTAL * SIZE)), np.array(EVEN))
  with pytest.raises(IndexError, match=f"no example {EXAMPLES} in an array of {EXAMPLES}"):
    last.take(SOURCE)


@pytest.mark.parametrize(("counts", "knows", "other"), [
    ([7, 1], [np.int32(3)], "2 ranks, and this job has 4"),
    ([9, 1, 1, 1], [np.int32(3)], "another balancer or another global batch"),
    ([5, 1, 1, 1], [np.zeros(2, np.int32)], "another balancer or another global batch"),
    ([5, 1, 1, 1], [], "another balancer or another global batch")])
def test_shares_of_another_job_keep_the_step_and_begin_evenly(counts, knows, other, caplog):
  job = Job()
  job.feed.restore((np.asarray(7), np.array(counts), np.array(counts) * 7, knows))
  job.run(1)
  assert job.ran == [EVEN] and int(job.feed.state().step) == 8
  assert job.feed.state().balancer == (0,)
  assert f"of {other}: counts begin evenly, at step 7" in caplog.text
  job.feed = job.fed()
  job.feed.restore(None)
  assert "The checkpoint holds no shares: counts begin evenly, at step 0" in caplog.text
  assert int(job.feed.state().step) == 0


@pytest.mark.parametrize("typed", [False, True])
def test_a_checkpoint_of_orbax_gives_back_what_is_known(tmp_path, typed):
  """By the leaves' places, for without a target named tuples come back as dicts, by name."""
  job = Job(balancer=by_speed(window=8))
  job.run(18)
  kept = job.feed.state()
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(tmp_path / "18", {"feed": kept})
    checkpointer.wait_until_finished()
    found = checkpointer.restore(tmp_path / "18", *([{"feed": kept}] if typed else ()))["feed"]
  other = job.fed(balancer=by_speed(window=8))
  other.restore(found)
  chex.assert_trees_all_equal(other.state(), kept)
  assert np.any(kept.balancer[0] > 0) and type(found) is (type(kept) if typed else dict)


@pytest.mark.parametrize(("update", "said"), [
    (lambda seen, state: (jnp.array([9, -1, 0, 1], jnp.int32), state), "asks for counts of [9, "),
    (lambda seen, state: (seen.arrivals * jnp.nan, state), "asks for counts of [-1, -1, -1, -1]"),
    # A NaN is 0 as a whole number, and then these would add up.
    (lambda seen, state: (jnp.array([4, 2, 2, jnp.nan]), state), "(-1 is for NaN, or for no whole"),
    (lambda seen, state: (jnp.zeros(3, jnp.int32), state), "can't be asked, so work stays shared"),
    (lambda seen, state: (seen.counts, state + 0.5), "can't be asked, so work stays shared"),
    (lambda seen, state: [][0], "must return ([4] int32 counts, a state like the one")])
def test_counts_that_cannot_be_stay_as_they_were(update, said, caplog):
  job = Job(balancer=jaxpace.Balancer(lambda ranks: jnp.int32(0), update, TOTAL))
  job.run(18)
  assert job.ran == [EVEN] * 18 and job.feed.drawn() == 18 * TOTAL * SIZE
  (record,) = caplog.records
  assert said in record.message


def test_a_balancer_that_fails_in_the_middle_leaves_counts_even(caplog):
  asked = []

  def answer(arrivals):
    asked.append(arrivals)
    if len(asked) > 8:
      raise OSError("the table of speeds is gone")
    return np.array([5, 1, 1, 1], np.int32)

  def update(seen, state):
    return jax.pure_callback(answer, seen.counts, seen.arrivals), state

  job = Job(balancer=jaxpace.Balancer(lambda ranks: jnp.int32(0), update, TOTAL))
  job.run(40)
  # Failed in what is asked before step 20 and taken before 24; the exchange of that step says so.
  assert job.ran == [EVEN] * 16 + [[5, 1, 1, 1]] * 16 + [EVEN] * 8
  said = [record.message for record in caplog.records if record.name == "jaxpace"]
  assert len(said) == 1 and "The balancer failed at step 24, so work is shared evenly" in said[0]
  assert "the table of speeds is gone" in said[0]


def test_a_balancer_s_numbers_without_a_type_have_32_bits(caplog):
  balancer = jaxpace.Balancer(jnp.zeros, lambda seen, last: (seen.counts, seen.arrivals), TOTAL)
  job = Job(balancer=balancer)
  job.run(18)
  (last,) = job.feed.state().balancer
  assert last.dtype == np.float32 and np.all(last > 0) and not caplog.records


@pytest.mark.parametrize(("damaged", "said"), [
    (7, "takes what feed.state.. returned.*This is a int"),
    ((7, EVEN), "takes what feed.state.. returned.*of step, counts"),
    ({"params": 1}, "takes what feed.state.. returned.*of params"),
    ((-1, EVEN, EVEN, [np.int32(3)]), "no whole numbers from 0 as step but -1"),
    ((np.nan, EVEN, EVEN, [np.int32(3)]), "no whole numbers from 0 as step but nan"),
    ((7, [1.5, 2.5, 2, 2], EVEN, [np.int32(3)]), "no whole numbers from 0 as counts"),
    ((7, EVEN, None, [np.int32(3)]), "no whole numbers from 0 as ran but None"),
    ((7, EVEN, [1, 1], [np.int32(3)]), r"counts \[4\] and ran \[2\]: they are damaged")])
def test_a_checkpoint_that_is_something_else_is_refused_in_words(damaged, said):
  with pytest.raises(TypeError, match=said):
    Job().feed.restore(damaged)


def others_differ(monkeypatch, number):
  """Has the last device's process send another one of its numbers than it would."""
  received = Gathered.received

  def of_others(gathered):
    rows = received(gathered)
    if rows is not None:
      rows[-1, number] += 1
    return rows
  monkeypatch.setattr(Gathered, "received", of_others)


@pytest.mark.parametrize(("number", "said"), [
    (-2, "processes were given different balancers"),
    (-3, "processes ran different counts in steps up to 3: "),
    (-4, "processes decided on different counts before step 13: ")])
def test_processes_that_differ_share_evenly(number, said, monkeypatch, caplog):
  job = Job()
  others_differ(monkeypatch, number)
  job.run(40)
  assert job.ran == [EVEN] * 40
  (record,) = caplog.records
  assert said in record.message


def test_ten_thousand_changes_leave_no_more_names_than_counts(monkeypatch):
  """Those of barriers stay in process 0's memory; one that has failed is of no use any more."""
  met, fails = [], iter([False] * 10_000 + [True])

  def barrier(name, seconds, processes):
    met.append((name, seconds))
    if next(fails, False):
      raise TimeoutError

  monkeypatch.setattr(gathered.distributed, "barrier", barrier)
  each = Gathered(mesh_of(data=RANKS), 1)
  each._alone = False
  wanted = list(map(np.array, TURNS))
  assert all(each.agree(step, wanted[step % 4], 0.25) for step in range(10_000))
  assert len(set(met)) == 4 and {seconds for _, seconds in met} == {gathered._AGREES + 2.0}
  assert not each.agree(10_000, wanted[0], 0.25)
  assert each.agree(10_004, wanted[0], 0.25) and len(set(met)) == 5


def test_a_restart_on_hosts_of_other_speed_is_followed(monkeypatch):
  job = Job(balancer=by_speed())
  ring_shows(monkeypatch, job, [1e-3, 3e-3, 1e-3, 1e-3])
  job.run(60)
  assert job.ran[-1] == [3, 1, 2, 2]
  kept = job.feed.state()
  ring_shows(monkeypatch, job, [1e-3, 1e-3, 1e-3, 3e-3])
  job.feed = job.fed(balancer=by_speed())
  job.feed.restore(kept)
  job.run(90)
  assert job.ran[60] == [3, 1, 2, 2] and job.ran[-1][3] == 1 and job.ran[-1][1] > 1
  assert job.seen.max() - job.seen.min() == 0, "150 steps of 16 are fifty epochs of 48"


def test_a_step_that_runs_unmodified_keeps_even_counts(monkeypatch):
  monkeypatch.setattr(host_ring, "unavailable", lambda: "There is no clock.")
  job = Job()
  job.run(17)
  assert job.ran == [EVEN] * 17 and job.step.calls == 0


def test_a_step_one_of_whose_shapes_runs_unmodified_keeps_no_busy_times(monkeypatch):
  job = Job()
  job.run(2)
  with monkeypatch.context() as patched:
    patched.setattr(host_ring, "unavailable", lambda: "There is no clock.")
    wider = jnp.zeros((RANKS * CAPACITY, SIZE))
    job.step(job.w, {"x": wider[:, :1], "number": wider[:, :1].astype(jnp.int32)}, np.array(EVEN))
  job.run(40)
  assert job.step.calls == 2, "its calls are not counted any more"
  assert all(len(own) < 16 for own in job.feed._shared._busy._busy)


@pytest.mark.parametrize("named", [True, False])
def test_a_recording_has_the_counts_of_each_step(tmp_path, named):
  job = Job()
  with jaxpace.Recorder(tmp_path, job.step) if named else jaxpace.observed(tmp_path) as recorder:
    for _ in range(20):
      job.run(1)
      if named:
        recorder.record()
  steps = pa.concat_tables(map(pq.read_table, sorted(tmp_path.glob("steps/*.parquet"))))
  found = {(step, rank): count for step, rank, count in zip(
      *(steps[name].to_pylist() for name in ("step", "rank", "decision_micro_batches")),
      strict=True)}
  assert found == {(step, rank): job.ran[step][rank] for step in range(20) for rank in range(RANKS)}
  with pytest.raises(RunError, match="was shared by speed when it was recorded"):
    replay_balancer(read_run(tmp_path), by_speed(), np.arange(RANKS),
                    np.ones(20, bool))
  run = read_run(tmp_path, window=(None, 16))
  assert replay_balancer(run, by_speed(), np.arange(RANKS), run.inside)


def test_a_step_that_is_not_observed_is_refused():
  job = Job()
  with pytest.raises(ValueError, match="takes the observed step, whose ranks it sees at work"):
    job.feed.next(job.step.jitted)
  with pytest.raises(ValueError, match="must be a Balancer of total_micro_batches=8"):
    job.fed(balancer=jaxpace.share_by_speed(16, capacity=8))
