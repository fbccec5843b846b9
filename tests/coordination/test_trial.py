"""Trials on synthetic step times: what they decide, when, at what cost, and from what."""

import functools
import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpace.coordination import coins, shift_trial, trial
from tests.quick import examples, long

BLOCK = trial.BLOCK
CHUNK = 500
"""Steps of a run in one call, so that runs of any number of them are compiled once."""


@functools.cache
def judge_of(**settings):
  """A trial, and a jitted run: ((state, late), (times [CHUNK, 2], used [CHUNK])) -> as scan."""
  init, update = trial.trials(**settings)

  def step(carry, given):
    state, waiting = carry
    seconds, used = given
    on = trial.is_on(state)
    waiting = [*waiting, (jnp.where(on, seconds[1], seconds[0]), state.tag, used)]
    state = update(*waiting[0], state)
    return (state, waiting[1:]), (on, waiting[-1][1], state)

  return init, jax.jit(functools.partial(jax.lax.scan, step))


def play(times, used=True, lag=0, state=None, **settings):
  """Runs a trial. `times` [steps, 2] are the seconds of each step, off and on.

  Returns:
    Whether each step was on [steps], tags [steps], the state after each step.
  """
  init, run = judge_of(**settings, **({"lag": lag} if lag else {}))
  late = [(np.float32(np.nan), np.int32(0), np.bool_(False))] * lag
  carry, found = (jax.tree.map(jnp.asarray, init() if state is None else state), late), []
  steps = len(times)
  padding = -steps % CHUNK
  times = np.pad(np.float32(times), [(0, padding), (0, 0)], mode="edge")
  used = np.pad(np.broadcast_to(used, steps), (0, padding))
  for at in range(0, steps, CHUNK):
    carry, rows = run(carry, (times[at:at + CHUNK], used[at:at + CHUNK]))
    found.append(rows)
  on, tags, states = jax.tree.map(lambda *parts: np.concatenate(parts)[:steps], *found)
  return on, tags, [trial.Trial(*leaves) for leaves in zip(*states, strict=True)]


def noisy(steps, effect=0.0, cv=0.05, seed=0, rho=0.0):
  """Step times of mean 1 (off) and 1 + effect (on), autocorrelated normal noise of the given
  variation: [steps, 2]."""
  rng = np.random.default_rng(seed)
  noise = np.empty(steps)
  level = rng.normal()
  for k in range(steps):
    noise[k], level = level, rho * level + np.sqrt(1 - rho * rho) * rng.normal()
  return np.maximum(0.2, 1 + cv * noise)[:, None] * np.array([1, 1 + effect])


def tossed(key, pairs):
  """Which of pairs begin on, by the coin."""
  return [bool(coins.coin(key, jnp.int32(n))) for n in range(pairs)]


def half_width(*numbers):
  """In float64."""
  return coins.half_width(*map(np.float64, numbers), np)


def runs_of(on):
  """Lengths of the stretches of one kind: [(on, steps), ...]."""
  return [(kind, len(list(group))) for kind, group in itertools.groupby(on.tolist())]


def test_pairs_are_a_block_on_and_a_block_off_in_the_order_of_the_coin():
  on, tags, _ = play(noisy(BLOCK * 41), key=5)
  assert not on[:BLOCK].any(), "a warm-up first"
  pairs = on[BLOCK:].reshape(20, 2, BLOCK)
  assert (pairs.all(axis=2) | ~pairs.any(axis=2)).all() and (pairs[:, 0] != pairs[:, 1]).all()
  assert pairs[:, 0, 0].tolist() == tossed(5, 20)
  counted = (tags[BLOCK:].reshape(20, 2, BLOCK) & trial.COUNTED) != 0
  assert (not counted[:, :, 0].any()
          and counted[:, :, 1:].all()), "the first step of a block is not counted"


@pytest.mark.parametrize("effect", [-0.03, 0.3, *long(-0.1, 0.03)])
def test_an_effect_is_found_and_acted_upon(effect):
  on, _, states = play(noisy(4000, effect))
  decided = next(k for k, state in enumerate(states) if state.mode != 0 and k > BLOCK)
  found, low, high = trial.effect(states[decided])
  names = trial.Trial._fields
  assert not low > effect and not high < effect and found == pytest.approx(effect, abs=0.02)
  assert high < 0 if effect < 0 else coins.log_odds(
      *(states[decided][names.index(name)]
        for name in ("pairs", "mean", "squares", "rho"))) > np.log(10)
  assert decided < 40 * 2 * BLOCK
  assert on[decided + 1:decided + 1 + 4 * (decided // 2)].mean() == (1 if effect < 0 else 0)


def test_the_interval_is_that_of_the_block_means():
  """Recomputed from the steps in float64."""
  times = noisy(BLOCK * 61, 0.01, seed=3)
  on, tags, states = play(times, level=0.02)
  steps = np.where(on, times[:, 1], times[:, 0])
  state, took = states[-1], steps[BLOCK:].reshape(30, 2, BLOCK)
  means = took[:, :, 1:].mean(axis=2)
  first_on = on[BLOCK:].reshape(30, 2, BLOCK)[:, 0, 0]
  # the first tells nothing
  differences = np.where(first_on, means[:, 0] - means[:, 1], means[:, 1] - means[:, 0])[1:]
  off = np.where(first_on, means[:, 1], means[:, 0])[1:]
  squares = ((differences - differences.mean())**2).sum()
  half = half_width(29, squares, state.rho, np.log(4 / 3 / 0.02))
  expected = differences.mean() + np.array([0, -half, half])
  assert state.pairs == 29
  np.testing.assert_allclose(trial.effect(state), expected / off.mean(), rtol=1e-4)


def test_all_returns_to_pairs_together_spend_the_level():
  """3/4 of it on the first, 1 / (4 k (k - 1)) on the k-th: 3/4 + 1/8 + 1/24 + ... = 1."""
  level, parts = 0.05, [0, 3 / 4, *(1 / (4 * k * (k - 1)) for k in range(2, 100_000))]
  assert parts[2:4] == [1 / 8, 1 / 24] and sum(parts) == pytest.approx(1, abs=1e-5)
  _, _, states = play(noisy(5500), level=level, patience=30, retry=50)
  seen = set()
  for state in states:
    if state.mode == trial.PAIRS and not state.fresh and np.isfinite(state.high):
      half = half_width(state.pairs, state.squares, state.rho,
                        -np.log(level * parts[int(state.tries)]))
      np.testing.assert_allclose((state.low, state.high), (state.mean - half, state.mean + half),
                                 rtol=1e-3, atol=1e-6)
      seen.add(int(state.tries))
  assert {1, 2, 3, 4} <= seen


@pytest.mark.long
def test_a_gain_is_held_ever_longer_and_a_harm_retried_ever_more_rarely():
  on, _, _ = play(noisy(16_000, -0.2))
  held = [steps for kind, steps in runs_of(on) if kind and steps > 3 * BLOCK]
  assert len(held) >= 3 and all(b >= 1.9 * a for a, b in itertools.pairwise(held[:-1]))
  on, _, _ = play(noisy(18_000, 0.2), retry=1000)
  idle = [steps for kind, steps in runs_of(on) if not kind and steps > 3 * BLOCK]
  assert len(idle) > 3 and all(1.9 * a <= b <= 2.2 * a for a, b in itertools.pairwise(idle[:-1]))


def test_what_shows_nothing_is_off_after_a_while():
  on, _, states = play(noisy(3000), patience=40, retry=500)
  decided = BLOCK + 41 * 2 * BLOCK  # the warm-up, a pair that tells nothing, and 40 that do
  assert states[decided - 1].mode == 2 and states[decided - 2].mode == 0
  assert not on[decided:decided + 500].any() and on[decided + 500:decided + 500 + 2 * BLOCK].any()


@pytest.mark.parametrize("effect, most", [(1.0, 100), *long((0.3, 80), (3.0, 120))])
def test_gross_harm_costs_no_more_than_a_hundred_steps_or_so(effect, most):
  on, _, _ = play(noisy(9000, effect))
  assert effect * on.sum() < most
  if effect > 0.5:
    longest = max(steps for kind, steps in runs_of(on) if kind)
    assert longest <= max(3, 0.25 * BLOCK / effect + 3), "cut within the block"


def test_one_huge_pause_does_not_drown_the_rest():
  times = noisy(4000, -0.1)
  times[8 * BLOCK + 3] = 100.0
  on, _, states = play(times)
  assert any(state.mode == 1 for state in states)


def test_nothing_done_is_no_evidence():
  """Pairs count from the second after the thing was seen to do something, whatever the step
  times."""
  _, _, states = play(noisy(3000, 0.1), used=False)
  assert states[-1].pairs == 0 and all(state.mode == 0 for state in states[BLOCK:])
  assert np.isnan(trial.effect(states[-1])).all()
  begin = BLOCK * 21
  _, _, states = play(noisy(BLOCK * 31), used=np.arange(BLOCK * 31) >= begin)
  assert states[begin + 2 * BLOCK - 1].pairs == 0 and states[-1].pairs == 4


def test_times_may_come_late(lag=3):
  """The same pairs, with a few steps of rest after each; an effect is measured as exactly as
  without."""
  on, _, states = play(noisy(4000, -0.1, cv=0.0), lag=lag)
  state = next(state for state in states if state.mode == 1)
  assert trial.effect(state)[0] == pytest.approx(-0.1, abs=1e-6), (
      "no step is counted to the other arm")
  first = on[BLOCK:BLOCK + 4 * (2 * BLOCK + lag)].reshape(4, -1)
  assert (first[:, :2 * BLOCK].sum(axis=1) == BLOCK).all() and not first[:, 2 * BLOCK:].any()


@pytest.mark.parametrize("effect", [-0.04, *long(0.04)])
def test_it_leans_to_the_side_that_looks_better_between_pairs_that_it_leaves_as_they_are(effect):
  # no block is cut
  on, tags, states = play(noisy(9000, effect, cv=0.2, rho=0.5, seed=4), key=9, harm=100, lean=3,
                          lag=1)
  decided = next((k for k, state in enumerate(states) if state.mode != 0 and k > BLOCK),
                 len(states))
  parts = np.array([0, *(state.part for state in states[:decided - 1])])  # of the step itself
  side = trial.LEANS_ON if effect < 0 else trial.LEANS_OFF
  leaning = parts >= trial.LEANS_ON
  assert 0.3 < leaning.mean() < 0.8 and (parts == side).sum() > 0.8 * leaning.sum()
  np.testing.assert_array_equal(on[:decided][leaning], parts[leaning] == trial.LEANS_ON)
  assert not (tags[:decided][leaning] & trial.COUNTED).any(), "they are counted in no pair"
  stretches = [len(list(group)) for here, group in itertools.groupby(leaning) if here]
  assert len(stretches) > 4 and set(stretches[:-1]) <= {2 * BLOCK * k for k in (1, 2, 3)}
  assert next(state.pairs for state in states[:decided] if state.part >= trial.LEANS_ON) >= 24
  # Each pair is as it was: two blocks and its rest, in the order of the coin, and a step of rest
  # for the lag.
  rest = on[BLOCK:decided][~leaning[BLOCK:]]
  pairs = rest[:len(rest) // (2 * BLOCK + 1) * (2 * BLOCK + 1)].reshape(-1, 2 * BLOCK + 1)
  assert pairs[:, 0].tolist() == tossed(9, len(pairs))
  assert (pairs[:, :BLOCK].all(1) != pairs[:, BLOCK:-1].all(1)).all() and not pairs[:, -1].any()
  better = on[:decided] if effect < 0 else ~on[:decided]
  assert better.mean() > 0.6, "without, it would be half"


def test_with_trust_it_is_on_between_pairs_until_these_speak_against_it():
  """No effect, a gain, a harm: on nine tenths of the steps, and off once the harm has shown."""
  for effect in (0.0, -0.1):
    on, tags, states = play(noisy(1500, effect, cv=0.2, seed=4), key=9, harm=100, lean=4,
                            trust=True)
    parts = np.array([0, *(state.part for state in states[:-1])])
    assert on[BLOCK:].mean() > 0.75
    leaning = parts >= trial.LEANS_ON
    assert not (tags[leaning] & trial.COUNTED).any(), "they are counted in no pair"
    if effect < 0:
      assert on[leaning].all()
  on, _, states = play(noisy(4000, 0.2, cv=0.2, seed=4), key=9, harm=100, lean=4, trust=True)
  assert states[-1].mode == trial.DROPPED and not on[-1000:].any()


@functools.cache
def compiled():
  return jax.jit(trial.trials()[1])


ANY = st.one_of(st.floats(width=32),
                st.sampled_from([np.nan, np.inf, -np.inf, -1.0, 0.0, 1e30, 86400.0, 1e-38]))


@hypothesis.given(st.lists(st.tuples(ANY, st.integers(0, 15), st.booleans()), max_size=30),
                  st.integers(0, 200))
@hypothesis.settings(max_examples=examples(40))
def test_whatever_it_is_given_it_still_judges_afterwards(junk, begin):
  update = compiled()
  _, _, states = play(noisy(201, cv=0.02))
  state = states[begin]
  for seconds, tag, used in junk:
    state = update(jnp.float32(seconds), jnp.int32(tag), jnp.asarray(used), state)
    assert not any(np.isnan(np.float64(leaf)) for leaf in state)
    assert state.left >= 0 and state.usual < np.inf
  _, _, after = play(noisy(1000, 0.3, cv=0.02), state=state)
  assert any(s.mode == 2 and s.mean > 0 for s in after)


@pytest.mark.parametrize("settings, name", [
    ({"block": 1}, "block"), ({"harm": 0.0}, "harm"), ({"level": 1.0}, "level"),
    ({"key": -1}, "key"), ({"key": 0.5}, "key"), ({"patience": 0}, "patience"),
    ({"retry": 0}, "retry"), ({"lag": -1}, "lag"), ({"lean": -1}, "lean"),
    ({"settle": 16}, "block")])
def test_slips_are_named(settings, name):
  with pytest.raises(ValueError, match=f"{name}="):
    trial.trials(**settings)


# The coin that judges shifts: its lag and its arms, what it estimates, and how rarely it is wrong.

LEVEL, PATIENCE, RETRY = 0.05, 48, 100
JOBS, STEPS = 200, 1500


@functools.cache
def run():
  """Scans over [STEPS] draws and noise: step time 1 + noise, + effect in the 8 steps that follow an
  act.

  A shift is wanted again once the last one has long ceased to matter.
  """

  def turn(carry, now):
    state, since, last, before = carry
    draw, noise, effect = now
    state = shift_trial.advance(before, jnp.float32(1), state, PATIENCE, RETRY, LEVEL)
    judged = state
    wanted = (since > 12) & (state.age == 0)
    act, tested, state = shift_trial.trigger(wanted, jnp.asarray(False), jnp.float32(1), draw,
                                             state)
    since = jnp.where(act, 0, since + 1)
    # This decision is about the step that comes now; its time is seen by the decision after the
    # next one.
    took = jnp.float32(1) + noise + jnp.where(since < shift_trial.STEPS, effect, jnp.float32(0))
    return (state, since, took, last), (judged, act, tested, wanted)

  def scan(draws, noise, effect):
    start = (shift_trial.init(RETRY), jnp.int32(99), jnp.float32(1), jnp.float32(1))
    effects = jnp.broadcast_to(jnp.float32(effect), draws.shape)
    return jax.lax.scan(turn, start, (draws, noise, effects))[1]

  return jax.jit(jax.vmap(scan, in_axes=(0, 0, None)))


def jobs(sigma, seed=0):
  rng = np.random.default_rng(seed)
  return jnp.asarray(rng.random((JOBS, STEPS)), jnp.float32), jnp.asarray(
      sigma * rng.normal(size=(JOBS, STEPS)), jnp.float32)


@jax.jit
@jax.vmap
@jax.vmap
def effects(state):
  """Estimates of [JOBS, STEPS] states, and their intervals."""
  return shift_trial.effect(state, LEVEL)


@pytest.mark.parametrize("effect", [*long(-0.05), 0.1])
def test_it_estimates_the_effect_and_shows_its_sign(effect):
  states, _, _, _ = run()(*jobs(0.02), effect)
  estimate, low, high = effects(states)
  enough = np.asarray(states.tests) == 8
  assert np.asarray(estimate)[enough].mean() == pytest.approx(effect, rel=0.25)
  inside = (np.asarray(low) <= effect) & (np.asarray(high) >= effect)
  told = np.isfinite(np.asarray(low)) & (np.asarray(states.tests) > 0)
  assert inside[told].mean() > 0.9
  shown, off = np.asarray(states.shown).any(axis=1), np.asarray(states.off > 0).any(axis=1)
  assert ((shown.all(), off.any()) == (True, False) if effect < 0
          else (shown.any(), off.all()) == (False, True))


def test_where_shifts_do_nothing_it_rarely_says_otherwise_and_gives_up():
  states, _, _, _ = run()(*jobs(0.02, seed=1), 0.0)
  _, low, high = effects(states)
  false = ((np.asarray(low) > 0) | (np.asarray(high) < 0)).any(axis=1)
  assert false.mean() <= 0.05 + 0.03
  assert (np.asarray(states.off) > 0).any(axis=1).mean() > 0.9


def test_half_of_the_triggers_are_tests_and_nothing_happens_in_tails():
  states, act, tested, wanted = run()(*jobs(0.02), 0.0)
  act, tested = np.asarray(act), np.asarray(tested)
  triggers = np.asarray(wanted) & (np.asarray(states.off) == 0)
  assert tested[triggers].mean() == pytest.approx(0.5, abs=0.05)
  assert act[triggers].mean() == pytest.approx(0.75, abs=0.05)
  assert act[tested].mean() == pytest.approx(0.5, abs=0.05)
  runs = np.asarray(states.age)
  assert runs.max() == shift_trial.STEPS + shift_trial.LAG and not act[~triggers].any()


@pytest.mark.parametrize("draw, sign", [(0.1, 1), (0.3, -1)])
def test_exactly_the_eight_steps_after_the_trigger_are_compared(draw, sign):
  """Decided after step 0; a decision sees the step before the one just done."""
  state = shift_trial.init(RETRY)
  act, tested, state = shift_trial.trigger(
      jnp.asarray(True), jnp.asarray(False), jnp.float32(1), jnp.float32(draw), state)
  assert bool(tested) and bool(act) == (sign > 0)
  for decision in range(1, 11):
    step = decision - 1
    took = 1.2 if 1 <= step <= 8 else 50.0
    state = shift_trial.advance(jnp.float32(took), jnp.float32(1), state, PATIENCE, RETRY, LEVEL)
    assert int(state.tests) == (step >= 8)
  assert float(state.mean) == pytest.approx(sign * 2 * 0.2, rel=1e-4)
