"""Micro-batches by measured speed: what is recovered, how fast it follows, and that it leaves a
healthy job alone."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpace
from jaxpace.coordination import trial
from jaxpace.coordination.apportion import even
from jaxpace.core.types import Observation
from jaxpace.simulation.shared_work import play
from tests.coordination.jobs import best
from tests.quick import long

MILLI = 1e-3
STEPS = 1500
"""Of most jobs: each number of steps is compiled by itself."""


@functools.cache
def balancer(micro_batches=32, capacity=16, **settings):
  return jaxpace.share_by_speed(micro_batches, capacity, **settings)


@functools.cache
def guarded():
  return jaxpace.guard(balancer())


@functools.cache
def updating():
  """`balancer()`, and its update, compiled."""
  return balancer(), jax.jit(balancer().update)


def noise(steps, ranks, cv, seed=0):
  return np.exp(np.random.default_rng(seed).normal(0, cv, (steps, ranks)))


def recovered(played, slow, steps, rest=0.0):
  """Of what the best whole counts save of the slow ranks' step, the part that was saved in these
  steps."""
  lost = (np.asarray(slow) * even(32, len(slow))).max() * MILLI + rest - best(
      np.asarray(slow) * MILLI, 32, 16) - rest
  return (played.even[steps] - played.seconds[steps]).mean() / lost


@pytest.mark.parametrize("slow", [*long(1.2), 3.0])
def test_a_slow_rank_gets_fewer(slow):
  speeds = np.array([1, 1, slow, 1])
  played = play(balancer(), speeds * noise(STEPS, 4, 0.03) * MILLI, rest=0.5 * MILLI,
                transfer=MILLI)
  assert ((played.counts.sum(axis=1) == 32).all() and (played.counts >= 1).all()
          and (played.counts <= 16).all())
  assert recovered(played, speeds, slice(200, None), rest=0.5 * MILLI) >= 0.85
  assert played.changes <= 4
  assert (played.counts[:17] == even(32, 4)).all(), ("a full window comes first, and two steps "
                                                     "until it is in force")


def test_it_follows_a_rank_that_recovers_and_another_that_falls_behind():
  speeds = np.ones((STEPS, 4))
  speeds[:300, 1], speeds[300:, 3] = 2, 2
  played = play(balancer(), speeds * noise(STEPS, 4, 0.03) * MILLI)
  assert recovered(played, [1, 2, 1, 1], slice(200, 300)) >= 0.85
  assert recovered(played, [1, 1, 1, 2], slice(400, None)) >= 0.85
  assert played.changes <= 9


@pytest.mark.parametrize(("ranks", "cv"), [(4, 0.15), *long((64, 0.02))])
def test_a_healthy_job_is_left_alone(ranks, cv):
  played = play(balancer(8 * ranks), noise(STEPS, ranks, cv, seed=ranks) * MILLI, rest=0.5 * MILLI)
  assert played.seconds.sum() <= played.even.sum() * 1.005


def test_what_else_is_in_a_step_is_learnt():
  """Half of a step of a healthy rank is not micro-batches, and slow where the rank is: counts hold
  it in."""
  speeds = np.array([1, 1, 2.5, 1])
  work = speeds * noise(STEPS, 4, 0.02, seed=5) * MILLI
  played = play(balancer(), work, rest=8 * work)
  wanted = min(max((n + 8) * s for n, s in zip(counts, speeds, strict=True))
               for counts in ([10, 9, 9 - k, 4 + k] for k in range(3))
               for counts in [sorted(counts)]
               for counts in [[counts[3], counts[2], counts[0], counts[1]]])
  last = played.seconds[200:].mean() / MILLI
  assert last <= 1.1 * wanted, (last, wanted, played.counts[-1])


@pytest.mark.parametrize("known", [True, False])
def test_counts_whose_steps_took_longer_are_left_again(known):
  """A rank that is slow in its collectives, too, which its busy time does not show: steps take
  longer where it comes last."""
  (it, update), draws = updating(), noise(300, 4, 0.01, seed=2)
  speeds, before, after = np.array([1, 1, 1, 1.9]) * MILLI, [10, 9, 9, 4], [9, 9, 9, 5]
  state, ran = it.init(4)._replace(counts=jnp.array(before, jnp.int32)), []
  for step, draw in enumerate(draws):
    counts = np.asarray(state.counts)
    busy = speeds * counts * draw
    took = busy.max() + (11 if busy.argmax() == 3 else 8) * MILLI if known else np.nan
    _, state = update(Observation(
        jnp.int32(step), jnp.int32(0), jnp.float32(busy), jnp.zeros(4), jnp.zeros(1),
        jnp.float32(took), jnp.float32(took), jnp.zeros(1), counts=state.counts), state)
    ran.append(counts.tolist())
  assert after in ran, "which is less for the last rank to do, and so is tried"
  assert ran[-200:] == [before if known else after] * 200


def test_unknown_and_odd_observations_leave_the_counts():
  it, update = updating()
  state, equal = it.init(4), even(32, 4)
  slow = np.array([1, 1, 1, 3], np.float32) * np.float32(8e-3)

  def seen(arrivals, counts=equal):
    return Observation(jnp.int32(0), jnp.int32(0), arrivals, jnp.zeros(4), *[jnp.zeros(1)] * 4,
                       counts=counts)

  for rank, value in ((1, np.nan), (0, -1.0), (2, np.inf), (2, 0.0), (3, 1e6)):
    odd = seen(np.where(np.arange(4) == rank, np.float32(value), slow))
    for _ in range(40):
      counts, state = update(odd, state)
    assert np.asarray(counts).tolist() == equal.tolist() and int(state.seen) == 0
  unknown = seen(slow)._replace(counts=())
  assert np.asarray(update(unknown, state)[0]).tolist() == equal.tolist()
  for step in range(40):
    # One wild value in eight is no speed.
    counts, state = update(seen(slow * np.float32(50 if step % 8 == 0 else 1)), state)
  assert np.asarray(counts)[3] < 8 and np.asarray(counts).sum() == 32
  with pytest.raises(ValueError, match="The counts are of 3 ranks, and the balancer of 4"):
    it.update(unknown._replace(counts=jnp.zeros((3,), jnp.int32)), state)


def test_changes_are_bounded_and_rare():
  """Whatever is observed: never more than doubled or halved, a window apart."""
  rng = np.random.default_rng(3)
  work = np.exp(rng.normal(0, 1, (STEPS // 10, 4))).repeat(10, axis=0) * MILLI
  played = play(balancer(), work)
  counts = played.counts.astype(int)
  assert played.changes >= 3, "it is about changes"
  assert ((counts[1:] <= np.maximum(2 * counts[:-1], 1)).all()
          and (2 * counts[1:] >= counts[:-1]).all())
  at = np.flatnonzero((counts[1:] != counts[:-1]).any(axis=1))
  assert (np.diff(at) >= 16).all()


def test_settings():
  with pytest.raises(ValueError,
                     match="capacity=7 is too small: 4 ranks have room for 28 micro-batches"):
    jaxpace.share_by_speed(32, 7).init(4)
  with pytest.raises(ValueError, match="least=9 is too many"):
    jaxpace.share_by_speed(32, 16, least=9).init(4)
  with pytest.raises(ValueError, match="must be 8, 16 or 32 steps"):
    jaxpace.share_by_speed(32, 16, window=20)
  with pytest.raises(ValueError, match="is not a Pacer. .* forget to call the factory"):
    jaxpace.guard(jaxpace.share_by_speed)


# Answers that no balancer gives.

@pytest.mark.parametrize(("answer", "said"), [
    (lambda counts, state: (counts[:2], state), r"counts of all ranks, \[4\] int32; it .* \[2\]"),
    (lambda counts, state: (jnp.int32(3), state), r"counts of all ranks, \[4\] int32; it .* \[\]"),
    (lambda counts, state: None, "must return .counts, state.; it returned a NoneType"),
    (lambda counts, state: counts, "must return .counts, state.; it returned a ")])
def test_answers_that_no_balancer_gives_are_refused_in_words(answer, said):
  it = jaxpace.Balancer(lambda ranks: jnp.int32(0),
                        lambda seen, state: answer(seen.counts, state), 32)
  for wrapped in (it, jaxpace.guard(it)):
    with pytest.raises(ValueError, match=said):
      play(wrapped, np.ones((4, 4)))


@pytest.mark.parametrize("counts", [[19, 19, -3, -3], [1, 2, 3, 4], [np.nan] * 4, [29.0, 1, 1, 1]])
def test_counts_that_cannot_be_are_left_out(counts):
  it = jaxpace.Balancer(lambda ranks: (), lambda seen, state: (jnp.asarray(counts), state), 32)
  possible = sum(counts) == 32 and min(counts) >= 0
  assert play(it, np.ones((40, 4))).counts[-1].tolist() == (counts if possible else [8] * 4)


# Guarded.

def test_guarded_where_it_pays():
  speeds = np.array([1, 1, 2, 1])
  work = speeds * noise(STEPS, 4, 0.03) * MILLI
  played, unguarded = play(guarded(), work), play(balancer(), work)
  effect, low, high = map(float, trial.effect(played.state.trial))
  assert trial.is_on(played.state.trial) and abs(effect - (10 / 16 - 1)) < 0.03
  assert low < effect < high < 0
  lost = (played.seconds.sum() - unguarded.seconds.sum()) / played.even.mean()
  assert 0 < lost < 200, "steps that finding out has cost"


def test_guarded_where_it_does_not_pay():
  """Shares that are wrong: the guard switches them off, and they stay even."""
  wrong = jnp.array([16, 6, 5, 5], jnp.int32)
  contrary = jaxpace.Balancer(lambda ranks: (), lambda seen, state: (wrong, state), 32)
  played = play(jaxpace.guard(contrary), noise(STEPS, 4, 0.03) * MILLI)
  assert (played.counts[-300:] == even(32, 4)).all()
  assert float(trial.effect(played.state.trial)[1]) > 0
  assert played.seconds.mean() < 1.25 * played.even.mean()


def test_guarded_where_there_is_nothing_to_judge():
  work = noise(STEPS, 4, 0.15) * MILLI
  played, unguarded = play(guarded(), work), play(balancer(), work)
  np.testing.assert_array_equal(played.counts, unguarded.counts)
  assert int(played.state.trial.pair) == -1, "not one block"


@pytest.mark.long
def test_false_alarms_of_the_guard():
  """Uneven counts that change nothing: at most 5 % of runs find an effect, either way."""
  idle = jaxpace.Balancer(lambda ranks: (), lambda seen, state: (
      jnp.array([9, 8, 8, 7], jnp.int32), state), 32)
  found = [play(jaxpace.guard(idle, key=seed), noise(800, 4, 0.05, seed=seed) * 1e-6,
                rest=noise(800, 4, 0.05, seed=seed + 100) * MILLI).state.trial
           for seed in range(40)]
  excluded = [float(one.low) > 0 or float(one.high) < 0 for one in found]
  assert all(int(one.pairs) > 5 for one in found) and sum(excluded) <= 4


# Micro-batches by measured speed where steps hang together: on processors that a quota rations, a
# rank that has waited has a whole quota again, so busy times come in steps and a micro-batch more
# or less shows late.

PERIOD, QUOTA, MICRO_BATCH = 10e-3, 4e-3, 1.2e-3
ROUNDS, TOTAL = 140, 32


class Rationed:
  """A process that may use `quota` seconds of a processor in each period."""

  def __init__(self, quota: float, begins: float):
    self.quota, self.begins, self.period, self.left = quota, begins, -1, quota

  def run(self, start: float, work: float) -> float:
    """When `work` seconds of a processor, begun at `start`, are done."""
    while True:
      period = int(np.floor((start - self.begins) / PERIOD + 1e-9))
      if period != self.period:
        self.period, self.left = period, self.quota
      end = self.begins + (period + 1) * PERIOD
      used = min(work, self.left, end - start)
      work, self.left, start = work - used, self.left - used, start + used
      if work <= 1e-9:
        return start
      if self.left <= 1e-9:
        start = max(start, end)


def seen(busy, counts):
  none = jnp.zeros(1)
  return Observation(jnp.int32(0), jnp.int32(0), jnp.asarray(busy, jnp.float32), jnp.zeros(4),
                     none, none[0], none[0], none, counts=jnp.asarray(counts, jnp.int32))


def job(slower, seed, counts, shares):
  """Seconds of each step, and the counts; `shares`: decided by speed, in force eight steps later.

  The ranks' noise and quotas are the same for all counts.
  """
  rng = np.random.default_rng(seed)
  ranks = [Rationed(QUOTA / (slower if rank == 3 else 1), rng.uniform(0, PERIOD))
           for rank in range(4)]
  it, update = updating()
  state, decided, took, ran, now = it.init(4), collections.deque(), [], [], 0.0
  for step in range(ROUNDS):
    if decided and decided[0][0] <= step:
      counts = decided.popleft()[1]
    work = counts * MICRO_BATCH * np.exp(rng.normal(0, 0.2, 4)) + 0.3e-3
    busy = np.array([rank.run(now, own) for rank, own in zip(ranks, work, strict=True)]) - now
    for rank in ranks:
      rank.run(now + busy.max(), 0.3e-3)
    took.append(busy.max() + 2e-3)
    ran.append(counts)
    if shares:
      wanted, state = update(seen(busy, counts), state)
      if step % 4 == 0 and (wanted != (decided[-1][1] if decided else counts)).any():
        decided.append((step + 8, np.asarray(wanted)))
    now += took[-1] + rng.uniform(0, 1e-3)
  return np.mean(took[40:]), ran


@pytest.mark.parametrize(("slower", "by_hand"), [
    (1.5, (9, 9, 9, 5)), *long((2.0, (10, 9, 9, 4)), (3.0, (10, 10, 9, 3)))])
def test_counts_do_not_fall_back_to_even(slower, by_hand):
  """What they save of what the best counts by hand save, over eight jobs."""
  saved = possible = 0.0
  for seed in range(8):
    equal = even(TOTAL, 4)
    untouched, _ = job(slower, seed, equal, shares=False)
    shared, counts = job(slower, seed, equal, shares=True)
    saved += untouched - shared
    possible += untouched - job(slower, seed, np.array(by_hand), shares=False)[0]
    assert counts[-1][3] <= 6, "the slow rank has fewer to the end"
    first = next(step for step in range(ROUNDS) if counts[step][3] < 8)
    assert (np.array(counts)[first:, 3] < 8).all(), "no way back"
  assert saved >= 0.85 * possible


def test_a_healthy_job_keeps_even_counts():
  for seed in range(4):
    assert {tuple(counts) for counts in job(1.0, seed, even(TOTAL, 4), shares=True)[1]} == {
        (8, 8, 8, 8)}


def test_steps_that_hang_together_say_little():
  """Speeds of equal ranks that wander over some ten steps: counts cost less than they might."""
  costs = []
  for seed in range(12):
    rng = np.random.default_rng(seed)
    wandering = np.zeros((STEPS, 4))
    for step in range(1, STEPS):
      wandering[step] = 0.9 * wandering[step - 1] + 0.436 * rng.normal(size=4)
    played = play(balancer(), 1e-3 * np.exp(0.08 * wandering))
    costs.append(played.seconds.sum() / played.even.sum() - 1)
  assert np.mean(costs) <= 0.003
