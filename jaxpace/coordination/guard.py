"""Lets a pacer act, or a balancer, only while measurement on the running job shows that it pays."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxpace.coordination import knobs, trial
from jaxpace.coordination.apportion import even
from jaxpace.core import fields
from jaxpace.core.durations import valid
from jaxpace.core.pacing import decide_counts
from jaxpace.core.types import (
    Balancer,
    Decision,
    Hold,
    Moment,
    Observation,
    Pacer,
    PacerState,
    pick,
)

_ZERO, _NAN = np.float32(0), np.float32(np.nan)
_LAG = 1
"""`job_step_time` is of the step before the one observed, and a decision acts in the one after: one
lies in between."""

_LEAN = 4
"""Pair lengths. With more, gains of 3 % in much noise cost little less while they aren't shown, and
are shown later."""

_SETTLES = 12
"""Steps from the last one that a balancer has seen to the first that runs its answer: so many of a
block of counts say nothing of it."""
Guarded = TypeVar("Guarded", Pacer, Balancer)


class Guard(NamedTuple):
  """State of `guard` on one rank. Around a balancer it is the same on all, and has no more than the
  first two."""

  inner: PacerState
  trial: trial.Trial  # [] the same on all ranks where step times are shared
  before: Any = ()  # [] int32, tag of the step before the one being run
  asked: Any = ()  # [] bool, whether any rank was delayed, or a collective held back, in that step
  shared: Any = ()  # [] bool, a `job_step_time` was seen


def guard(pacer: Guarded, block: int | None = None, key: int = 0, harm: float = 0.25,
          level: float = 0.05, settle: int = 1, patience: int = 512, retry: int = 10_000,
          trust: bool = False) -> Guarded:
  """Wraps a pacer, measures on the running job whether its delays make steps shorter, and lets them
  through only then.

  So with what it holds back before collectives (`take_turns`): in blocks without, nothing is held
  and nobody listens.

  Pairs of blocks, with the delays and without, in an order that a hash of (key, pair) gives: the
  same on all ranks and in every run, without a message. Where delays are held back they are exactly
  0; the pacer goes on observing. The effect is (on - off) / off of the mean step time, below zero
  where steps are shorter with pacing; its interval holds under peeking at every step
  (`jaxpace.coordination.coins`). What follows from it, and what bounds the cost of finding
  out, is `jaxpace.coordination.trial`'s.

  A pair counts only if a delay was seen in the block with pacing before it. So a pacer that asks
  for nothing is never judged; nor does it cost anything, for off is then the same as on.

  All ranks decide alike from `job_step_time` and the shared delays. Where these are not shared
  (`share=None`) each rank judges by its own step time whether its own delays pay. Ranks begin in
  step, but may part: one may then be on while another is off, each being noise to the other, so an
  effect that needs several ranks at once shows only in part. Once a `job_step_time` was seen, own
  step times are never used.

  With `trust` what stands between two pairs is four pair lengths on, from the first pair on, until
  the pairs speak against it (by one standard error). That is for a pacer
  that bounds its own harm and needs another job to do the same (`take_turns`): where each job's
  guard is off for half of the steps, at its own times, each spoils what the other measures.

  A *balancer* is judged alike, in blocks of even and of uneven counts. As its answer is in force 13
  to 16 steps after what it has seen, the first 12 steps of its blocks aren't counted, and blocks
  are 32 steps long. Nothing is judged, and every step is as without a guard, as long as it wants
  even counts.

  The effect of something that lasts after it is switched off, such as a shifted phase
  (`interleave_jobs`), can't be judged by blocks.

  >>> asks = Pacer(lambda ranks: (), lambda seen, state: (Decision(jnp.float32(2e-3), {}), state))
  >>> pacer = guard(asks)
  >>> update, state, delay = jax.jit(pacer.update), pacer.init(1), jnp.float32(0)
  >>> for step in range(1000):
  ...   # This delay only makes the step longer.
  ...   took = jnp.float32(10e-3) + delay
  ...   seen = Observation(jnp.int32(step), jnp.int32(0), jnp.array([9e-3]), delay[None],
  ...                      jnp.array([1e-3]), took, jnp.float32(jnp.nan), jnp.array([1e-3]))
  ...   (delay, info), state = update(seen, state)
  >>> print(f"{delay:.4f} s, for the effect was {info['effect']:+.0%}")
  0.0000 s, for the effect was +20%

  Args:
    pacer: whose delays to let through or hold back; or a balancer.
    block: steps of a block; by default 16, of a balancer 32.
    key: orders the blocks of each pair, 0 to 2**32 - 1; the same on all ranks.
    harm: a block is cut short once it has taken this many block lengths more than usual, 0.25 for a
      harm of 25 %.
    level: chance of ever deciding falsely, over the whole run.
    settle: first steps of a block that aren't counted, being under the influence of the one before;
      of a balancer, beyond the 12.
    patience: pairs after which what has shown neither gain nor harm is switched off.
    retry: steps for which a pacer that doesn't pay is off before it is tried again; twice as long
      each time.
    trust: it is on between the pairs, unless they speak against it.

  Returns:
    A balancer for a balancer; else a pacer. Its columns, beside the pacer's own: `guard_on` 0 or 1;
    `guard_pair` the number of the pair that the step counts in, NaN if in none; `effect`,
    `effect_low` and `effect_high`, NaN until known, and `pairs`, of the last return to pairs. The
    interval is at the level left to that one, wider than one at `level`. A recorder of the step has
    a balancer's as `work_on`, `work_effect` and so on.

  Raises:
    ValueError: an argument is out of range.
  """
  trust = fields.truth("trust", trust)
  if isinstance(pacer, Balancer):
    settle = knobs.steps("settle", settle, 0) + _SETTLES - 1
    block = knobs.steps("block", 2 * trial.BLOCK if block is None else block, settle + 4)
    return _guarded(pacer, trial.trials(block, key, harm, level, settle, patience, retry,
                                        lean=_LEAN, trust=trust))
  knobs.pacers(pacer)
  begin, judge = trial.trials(trial.BLOCK if block is None else block, key, harm, level, settle,
                              patience, retry, lag=_LAG, lean=_LEAN, trust=trust)

  def init(ranks: int) -> Guard:
    no = jnp.zeros((), jnp.bool_)
    return Guard(pacer.init(ranks), trial=begin(), before=jnp.zeros((), jnp.int32), asked=no,
                 shared=no)

  def update(observation: Observation, state: Guard) -> tuple[Decision, Guard]:
    decision, inner = pacer.update(observation, state.inner)
    now = state.trial.tag  # of the step observed
    asked = jnp.any(valid(observation.delays) & (observation.delays > _ZERO))
    if not isinstance(observation.holds, tuple):
      asked |= jnp.any(valid(observation.holds) & (observation.holds > _ZERO))
    shared = state.shared | valid(observation.job_step_time)
    # What ranks judged by themselves until the first step time arrived is forgotten: from here on
    # they are alike.
    begins = shared & jnp.logical_not(state.shared)
    none = jnp.zeros((), jnp.int32)
    seconds = jnp.where(shared, observation.job_step_time, observation.step_time)
    tag = jnp.where(begins, none, jnp.where(shared, state.before, now))
    used = jnp.where(shared, state.asked, asked)
    after = judge(seconds, tag, used, pick(begins, begin(), state.trial))

    on = trial.is_on(after)
    effect, low, high = trial.effect(after)
    counts = (after.tag & np.int32(trial.COUNTED)) != np.int32(0)
    columns = {"guard_on": on.astype(jnp.float32),
               "guard_pair": jnp.where(counts & after.useful, after.pair.astype(jnp.float32), _NAN),
               "effect": effect, "effect_low": low, "effect_high": high,
               "pairs": after.pairs.astype(jnp.float32)}
    info = decision.info | {(name if name not in decision.info else f"{name}_guard"): value
                            for name, value in columns.items()}
    delay = jnp.where(on, decision.delay, _ZERO)
    return Decision(delay, info), Guard(
        inner, trial=after, before=jnp.where(begins, none, now), asked=asked, shared=shared)

  inner_hold = pacer.hold
  if inner_hold is None:
    return Pacer(init, update)

  def hold(moment: Moment, state: Guard) -> tuple[Hold, Guard]:
    asked, after = inner_hold(moment, state.inner)
    on = trial.is_on(state.trial)
    return (Hold(jnp.where(on, asked.seconds, _ZERO), asked.listen & on),
            state._replace(inner=pick(on, after, state.inner)))

  return Pacer(init, update, hold)


def judged(state: Any) -> dict[str, jax.Array]:
  """What measurement has shown of the counts of a guarded balancer, [] float32 each, by the name of
  its column, and the `mode` of its trial; nothing of another balancer's state."""
  if not isinstance(state, Guard):
    return {}
  effect, low, high = trial.effect(state.trial)
  found = {"work_on": trial.is_on(state.trial), "work_effect": effect, "work_effect_low": low,
           "work_effect_high": high, "work_pairs": state.trial.pairs, "mode": state.trial.mode}
  return {name: value.astype(jnp.float32) for name, value in found.items()}


def _guarded(balancer: Balancer, trials: trial.Trials) -> Balancer:
  """A balancer whose counts are in force while measurement shows that they pay; else even ones."""
  begin, judge = trials

  def init(ranks: int) -> Guard:
    return Guard(balancer.init(ranks), begin())

  def update(observation: Observation, state: Guard) -> tuple[jax.Array, Guard]:
    ran = jnp.asarray(observation.counts)
    equal = jnp.asarray(even(balancer.micro_batches, ran.shape[0]))
    wanted, inner = decide_counts(balancer, observation, state.inner)
    uneven = jnp.any(ran != equal)
    # A step says something of the block under way if it ran what is in force there.
    seconds = jnp.where(uneven == trial.is_on(state.trial), observation.job_step_time, _NAN)
    judges = uneven | jnp.any(wanted != equal)
    after = pick(judges, judge(seconds, state.trial.tag, uneven, state.trial), state.trial)
    return jnp.where(trial.is_on(after), wanted, equal), Guard(inner, after)

  return Balancer(init, update, balancer.micro_batches)
