"""Paces a rank that is early step after step, inside the time it would only have waited."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpace.coordination import knobs, windows
from jaxpace.coordination.knobs import Knobs
from jaxpace.core import durations
from jaxpace.core.types import Decision, Observation, Pacer

_ZERO, _NAN, _HALF = np.float32(0), np.float32(np.nan), np.float32(0.5)
_ROUNDING = np.float32(2.0**-21)
"""Share of the tokens withheld a step: more than all rounding of float32 in `tokens_after` can have
added (eight units in the last place), so the bound holds in the arithmetic that is really done."""


class EarlyRanks(NamedTuple):
  """State of `pace_early_ranks` on one rank."""

  low: windows.Quantile  # [] low quantile of own earliness
  spread: windows.Moments  # [] mean and deviation of own earliness
  step_time: windows.Quantile  # [] median of own step time
  means: windows.Mean  # [ranks] mean arrivals
  tokens: jax.Array  # [] float32 s, delay that may be asked for; the same on all ranks
  quiet: jax.Array  # [] int32, steps in a row without imbalance, at most half a window
  active: jax.Array  # [] bool
  knobs: Knobs  # [] threshold and max_delay, where they were changed while the job ran


def pace_early_ranks(window: int = 64, threshold: float = 0.05, max_delay: float = 20e-3,
                     quantile: float = 0.1, share_of_slack: float = 0.8, cost: float = 1e-3,
                     noise: float = 2.0) -> Pacer:
  """Delays a rank that is persistently early, by part of the time it would have waited for the
  others.

  The mechanism of the paper (5.3) with bounds of its own. Every rank decides by itself, from the
  arrivals A and applied delays d of all ranks in the last step; these must be shared
  (`jaxpace.instrument(..., share=True)`). While any rank's are unknown the delay is 0.

  *Persistent slack* is the smaller of two: the low quantile of own earliness over the window, and
  the latest rank's mean arrival less one's own. Where ranks are late in turn there is earliness,
  but no rank whose mean is late; they aren't paced.

  *Active* once the slack exceeds both `threshold` medians of the step and `noise` deviations of own
  earliness (the threshold rises with what is observed), for a rank that has seen a full window;
  passive again below half of that, or after half a window of steps in which own earliness itself
  was below half of `threshold`. Passive means a delay of exactly 0.

  *What it can cost* is held by a token bucket (`tokens_after`). Delays hold a step back by L =
  max(A + d) - max(A). In every step the bucket gains `cost` times max(A), the time to the last
  undelayed arrival, pays L, and holds at most `max_delay`. No delay is longer than what is in it.
  So, where delays are applied as asked, the sum of L is at most `cost` times the sum of max(A),
  whatever the arrivals:

    Let T[k] be the tokens after step k, T[0] = 0, the same on all ranks since A and d are. For step
    k + 1 each rank asks d <= T[k], so L[k+1] <= max d <= T[k], as A[r] + d[r] <= max(A) + max(d)
    for every rank r. Then T[k+1] <= T[k] + cost max(A[k+1]) - L[k+1], and T[k+1] >= 0 again. Add
    up: the sum of L is at most the sum of cost max(A), less T at the end. If A or d of a step are
    unknown, nothing is gained and all of T[k] is forfeited, which is at least L[k+1].

  max(A) is less than the step would have taken without pacing, so this is at most `cost` of the
  bare run. A delay operation that overshoots puts the bucket into debt: then nothing is asked until
  it is paid off.

  >>> pacer = pace_early_ranks(window=16)
  >>> update, state, late = jax.jit(pacer.update), pacer.init(2), jnp.array([5e-3, 20e-3])
  >>> delay = jnp.float32(0)
  >>> for step in range(2000):
  ...   seen = Observation(step=jnp.int32(step), rank=jnp.int32(0), arrivals=late,
  ...                      delays=jnp.array([delay, 0]), waits=jnp.array([16e-3 - delay]),
  ...                      step_time=jnp.float32(21e-3),
  ...                      job_step_time=jnp.float32(21e-3), job_transfers=jnp.array([1e-3]))
  ...   (delay, info), state = update(seen, state)
  >>> print(f"{delay:.3f} of a slack of {info['slack']:.3f} s")
  0.012 of a slack of 0.015 s

  Args:
    window: steps the estimates look back over, at least 8.
    threshold: persistent slack above which pacing begins, as a share of the median step, 0 to 1.
    max_delay: s, the longest delay, 0 to 10.
    quantile: which low quantile of own earliness counts as slack, strictly between 0 and 1; 0.1 is
      reached in nine steps of ten.
    share_of_slack: part of the slack that is filled with delay, 0 to 1.
    cost: most that pacing may lengthen the run, as a share of it, 0 to 1.
    noise: deviations of own earliness that the slack must exceed; 0 for none.

  Returns:
    A pacer. Its columns in the trace: `slack` and `threshold` in seconds (NaN until known),
    `tokens` in seconds, `active` 0 or 1.

  Raises:
    ValueError: an argument is out of range.
  """
  window = knobs.steps("window", window, 8)
  limit = knobs.number("threshold", threshold, 0, 1, "a share of the median step, 0.05 for 5 %")
  most = knobs.delay("max_delay", max_delay)
  fill = knobs.number("share_of_slack", share_of_slack, 0, 1,
                         "a share, 0.8 for four fifths of the slack")
  price = knobs.number("cost", cost, 0, 1, "a share of the run time, 1e-3 for 0.1 %")
  deviations = knobs.number("noise", noise, 0, 1000, "deviations of the rank's own earliness")
  knobs.number("quantile", quantile, 0, 1, "0.1 is the lowest tenth", open_ended=True)
  low, spread = windows.quantile(window, quantile), windows.deviation(window)
  means, typical = windows.mean(window), windows.quantile(window, 0.5)
  calm = np.int32(window // 2)

  def init(ranks: int) -> EarlyRanks:
    return EarlyRanks(
        low=low.init(), spread=spread.init(), step_time=typical.init(), means=means.init((ranks,)),
        tokens=jnp.zeros((), jnp.float32), quiet=jnp.zeros((), jnp.int32),
        active=jnp.zeros((), jnp.bool_), knobs=knobs.init())

  def update(observation: Observation, state: EarlyRanks) -> tuple[Decision, EarlyRanks]:
    seen, delays, rank = observation.arrivals, observation.delays, observation.rank
    share, longest = (knobs.chosen(state.knobs.threshold, limit),
                      knobs.chosen(state.knobs.max_delay, most))
    known = durations.all_known(seen, delays)
    early = jnp.where(known, durations.own(durations.earliness(seen), rank), _NAN)
    low_now, spread_now = low.update(early, state.low), spread.update(early, state.spread)
    means_now = means.update(jnp.where(known, seen, _NAN), state.means)
    typical_now = typical.update(jnp.where(known, observation.step_time, _NAN), state.step_time)

    mean_now = means.value(means_now)
    slack = jnp.minimum(low.value(low_now),
                        durations.greatest(mean_now) - durations.own(mean_now, rank))
    step_time = typical.value(typical_now)
    least = jnp.maximum(share * step_time, deviations * spread.value(spread_now))
    quiet = jnp.where(early > _HALF * share * step_time, np.int32(0),
                      jnp.minimum(state.quiet + np.int32(1), calm))
    quiet = jnp.where(known, quiet, state.quiet)
    # Comparisons with NaN are false: passive wherever something isn't known.
    enough = slack > jnp.where(state.active, _HALF * least, least)
    active = known & enough & (quiet < calm) & (low_now.seen >= np.int32(window))

    tokens = tokens_after(seen, delays, price, longest, state.tokens)
    delay = jnp.where(active, durations.bounded(jnp.minimum(fill * slack, tokens), longest), _ZERO)
    info = {"slack": slack, "threshold": least, "tokens": tokens,
            "active": active.astype(jnp.float32)}
    return Decision(delay, info), EarlyRanks(
        low=low_now, spread=spread_now, step_time=typical_now, means=means_now, tokens=tokens,
        quiet=quiet, active=active, knobs=state.knobs)

  return Pacer(init, update)


def tokens_after(seen: jax.Array, delays: jax.Array, cost: np.float32,
                 most: np.float32 | jax.Array, tokens: jax.Array) -> jax.Array:
  """Fills the token bucket by `cost` of the time to the last undelayed arrival, and pays for what
  the delays held back.

  Every rank keeps the same bucket, for it is filled and emptied by what all ranks know.

  Args:
    seen: [ranks] float32 s, undelayed arrivals of the step.
    delays: [ranks] float32 s, applied in the step, of any origin.
    cost: share of the time that may be spent.
    most: s the bucket holds at most.
    tokens: [] float32 s before the step.

  Returns:
    [] float32 s after it: negative while in debt, and no gain and no credit kept where a rank is
    missing, for the step may then have been held back by all that was in the bucket.
  """
  filled = tokens + cost * durations.latest(seen)
  paid = filled - jnp.abs(filled) * _ROUNDING - durations.lateness(seen, delays)
  return jnp.where(durations.all_known(seen, delays), jnp.minimum(paid, most),
                   jnp.minimum(tokens, _ZERO))
