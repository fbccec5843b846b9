"""Feeds that are used otherwise than once before each step: ahead, from threads, several at once,
and wrongly."""

import contextlib
import queue
import threading

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpace
from jaxpace.live import shares, speeds
from jaxpace.live.control_file import ControlRequest
from tests.instrumentation.running import P, mesh_of
from tests.live.test_shares import EXAMPLES, RANKS, SIZE, TOTAL
from tests.live.test_speeds import EVEN, SOURCE, TURNS, Job, by_speed, others_differ, turning

RUN = [EVEN] * 16 + [TURNS[1]] * 16 + [TURNS[2]] * 4
"""Counts of the first steps, however far ahead they are asked for."""
STEERED = [EVEN] * 16 + [TURNS[1]] * 10 + [EVEN] * 8 + [TURNS[2]] * 2
"""The same, switched off before step 18 and on before step 26."""


def call(job, share):
  job.w, seen = job.step(job.w, share.batch(SOURCE), share.counts)
  job.ran.append(share.counts.tolist())
  job.seen += np.asarray(seen)


def ran(ahead, steers=False):
  """A job that asks for counts so many steps ahead, and the states that a checkpoint would hold."""
  job, taken, kept = Job(), [], []
  for number in range(len(RUN)):
    if steers and number in (18, 26):
      assert job.feed.steer(ControlRequest(enabled=number == 26), number) == number + 8
    taken += [job.feed.next(job.step) for _ in range(ahead if number == 0 else 1)]
    call(job, taken.pop(0))
    kept.append(job.feed.state())
    assert int(kept[-1].step) == number + 1, "what a checkpoint goes on with"
    assert job.feed.drawn() == (number + 1) * TOTAL * SIZE
  return job, kept


def test_counts_and_checkpoints_are_the_same_however_far_ahead_counts_are_asked_for():
  """In a thread that differs between processes, and each may keep its own."""
  (_, first), *others = found = [ran(ahead) for ahead in (1, 2, 4)]
  for job, _ in found:
    assert job.ran == RUN and job.seen.tolist() == [12] * EXAMPLES
  for _, kept in others:
    for one, other in zip(first, kept, strict=True):
      chex.assert_trees_all_equal(one, other)
  assert first[-1].balancer[0] > first[0].balancer[0]


@pytest.mark.parametrize("ahead", [1, 2, 4])
def test_control_applies_at_one_step_however_far_ahead_counts_are_asked_for(ahead):
  assert ran(ahead, steers=True)[0].ran == STEERED


def test_control_applies_at_one_step_whichever_thread_asks_for_counts():
  job, ready = Job(), queue.Queue(maxsize=6)

  def load():
    for _ in range(36):
      ready.put(job.feed.next(job.step))

  loader = threading.Thread(target=load)
  loader.start()
  for number in range(36):
    if number in (18, 26):
      job.feed.steer(ControlRequest(enabled=number == 26), number)
    call(job, ready.get())
  loader.join()
  assert job.ran == STEERED


def test_a_state_is_of_one_step_while_a_thread_asks_for_counts():
  job, ready = Job(), queue.Queue(maxsize=6)
  loader = threading.Thread(target=lambda: [ready.put(job.feed.next(job.step)) for _ in range(400)])
  loader.start()
  for number in range(400):
    state = job.feed.state()
    assert int(state.step) == number and state.ran.sum() == number * TOTAL
    call(job, ready.get())
  loader.join()


def test_a_step_that_does_not_come_is_no_silence(monkeypatch, caplog):
  monkeypatch.setattr(speeds, "_SAYS_SO", 0)
  job = Job()
  for _ in range(4):
    job.feed.next(job.step)
  with pytest.raises(ValueError, match="was called 5 times and the step 0 times: once a step"):
    job.feed.next(job.step)
  waits = threading.Thread(target=job.feed.next, args=(job.step,))
  waits.start()
  while "It waits for the next call, in another thread" not in caplog.text:
    waits.join(0.01)
  assert waits.is_alive()
  call(job, job.feed.share(0, EVEN))
  waits.join()


def test_long_steps_are_waited_for_in_silence(monkeypatch, caplog):
  class Waits(contextlib.nullcontext):
    """A step is called every two seconds."""
    seconds = 0

    def wait_for(self, over, timeout):
      self.seconds += timeout
      shared._called = self.seconds // 2
      return over()

  monkeypatch.setattr(speeds, "_SAYS_SO", 2)
  shared = Job().feed._shared
  shared._thread, shared._calls = 0, Waits()
  shared._until_called(10)
  assert shared._calls.seconds == 20 and not caplog.records


def test_processes_at_different_steps_are_refused(monkeypatch):
  job = Job()
  others_differ(monkeypatch, -1)
  with pytest.raises(ValueError, match="not at one step: process 0 at 10, the others at 9"):
    job.run(20)
  assert job.ran == [EVEN] * 12


def test_calls_without_counts_are_nobody_s_and_a_step_may_be_exchanged():
  job = Job()
  for number in range(len(RUN)):
    job.run(1)
    if number % 3 == 0:
      job.step(job.w, job.feed.share(0, EVEN).batch(SOURCE), np.array(EVEN))
  assert job.ran == RUN
  before, job.step = job.step, jaxpace.observe(job.step.jitted)
  job.run(20)
  assert before.coming == job.step.coming == type(before.coming)()
  assert job.ran[-1] != job.ran[len(RUN)], "the new one's ranks are measured, too"


def test_two_feeds_of_one_step_and_two_steps():
  one, other = Job(), Job(seed=5)
  for _ in RUN:
    one.run(1)
    other.run(1)
  assert one.ran == other.ran == RUN
  second = one.fed(seed=7)
  shares = []
  for _ in range(20):
    one.run(1)
    shares.append(second.next(one.step))
    one.step(one.w, shares[-1].batch(SOURCE), shares[-1].counts)
  assert [share.counts.tolist() for share in shares] == RUN[:20]


def test_a_balancer_whose_numbers_are_damaged_begins_evenly(caplog):
  """Not so those that are unknown in a new one as well."""
  job = Job(balancer=by_speed())
  job.run(1)
  kept = job.feed.state()
  names = by_speed().init(RANKS)._fields
  damaged = [np.array(leaf) for leaf in kept.balancer]
  damaged[names.index("slowness")][2] = np.nan
  for leaves, said in ((damaged, "hold NaN or infinity as the balancer's .slowness: counts begin "
                        "evenly, at step 1"), (kept.balancer, "")):
    feed = job.fed(balancer=by_speed())
    caplog.clear()
    feed.restore((1, [5, 1, 1, 1], EVEN, leaves))
    assert said in caplog.text and bool(caplog.records) == bool(said)
    assert feed.state().counts.tolist() == (EVEN if said else [5, 1, 1, 1])
    assert int(feed.state().step) == 1


def test_a_feed_that_has_begun_is_not_restored():
  job = Job()
  job.run(1)
  with pytest.raises(ValueError, match="feed.restore comes before the first feed.next"):
    job.feed.restore(None)


def test_a_feed_that_two_threads_ask_first_is_one(monkeypatch):
  made, both = [], threading.Barrier(2)

  class Slow(speeds.SharedCounts):
    def __init__(self, *args):
      made.append(self)
      with contextlib.suppress(threading.BrokenBarrierError):
        both.wait(0.2)  # for the other one, which must not come
      super().__init__(*args)

  monkeypatch.setattr(shares, "SharedCounts", Slow)
  job = Job()
  loader = threading.Thread(target=job.feed.next, args=(job.step,))
  loader.start()
  job.feed.state()
  loader.join()
  assert len(made) == 1


@pytest.mark.parametrize(("rows", "fetch", "said"), [
    (2 * TOTAL, True, "total_micro_batches=8, and micro_batches are 16 of all ranks together: "),
    (TOTAL, False, "room for 2 micro-batches of a rank, and jaxpace.shares gives up to 8: "),
    (RANKS * TOTAL, False, ""), (TOTAL, True, "")])
@pytest.mark.parametrize("whole", [True, False])
def test_micro_batches_that_counts_would_not_fit_are_refused_before_the_first_step(
    rows, fetch, said, whole):
  mesh = mesh_of(data=RANKS)

  def train(w, batch, counts):
    return jaxpace.accumulate(lambda w, x: (jnp.sum((x - w) ** 2), x.size), w, batch, counts,
                              mesh=mesh if whole else None, fetch=fetch)

  run = train if whole else jax.shard_map(train, mesh=mesh, in_specs=(P(), P("data"), P()),
                                          out_specs=P())
  step = jaxpace.observe(jax.jit(run))
  feed = jaxpace.shares(mesh, total_micro_batches=TOTAL, balancer=turning())
  counts, batch = feed.next(step).counts, np.ones((rows, SIZE), np.float32)
  if said:
    with pytest.raises(ValueError, match=said):
      step(jnp.float32(0), batch, counts)
  else:
    assert step(jnp.float32(0), batch, counts)[0] == 1
