"""Judges whether something that can be switched on and off makes steps shorter: by pairs of blocks,
on the running job.

A state machine on scalars, one `update` a step, that `jaxpace.guard` runs inside the compiled step.
It knows nothing of pacing.

    warm-up (off) -> pairs of blocks -> on, while it pays      -> pairs again
                                     -> off, where it doesn't  -> pairs again

**Pairs.** A pair is two blocks of `block` steps, one on, one off; a hash of (key, pair) says which
comes first. The first `settle` steps of each block aren't counted, they still feel the other one.
The difference of the two mean step times is one value of the sequence that
`jaxpace.coordination.coins` judges. What is left out, and for how long a block lasts, is
decided by rules that don't look at which block was on (or by what was known before the pair): if on
and off did the same, the sign of each difference would be the coin's, and the interval holds
whatever the step times do.

**Cut.** A block is cut short once its steps have together taken `harm` block lengths more than
usual; if it was the pair's second one, the rest of the pair is spent off. So a pair costs little
more than `harm` blocks at worst. A cut decides nothing by itself: a pause or a slow spell cuts
blocks of either kind.

**Clip.** Differences are cut to half a usual step, or one checkpoint of a hundred steps' length
would drown a day.

**Decision.** After each pair:

- on, if the interval lies below zero, for `HOLD` times as many steps as the pairs took that showed
  it; then pairs again, from no evidence. To stay on, odds of 4 to 1 for a gain are enough, and it
  stays twice as long each time.
- off, if the interval lies above zero; or sooner, since not to act takes no proof: at odds of 10 to
  1 for a harm, or after `patience` pairs. For `retry` steps, twice as long each time; then pairs
  again, from no evidence.

**Lean.** A small effect takes long to show, and half of it is lost meanwhile. So, from the 24th
pair on, steps are put between pairs on the side that looks better: 2 z^2 pair lengths, z being the
sum of differences over its standard error, at most `lean`. They are counted in no pair and chosen
before the next one's coin is tossed, so the interval holds; what is to be shown takes that much
longer, which costs little while the better side is on. With `trust` all `lean` of them are on, from
the first pair on, until the differences speak against it by one standard error.

The interval of the first return to pairs is at 3/4 of `level`, that of the k-th at `level` / (4 k
(k - 1)). These add up to `level`: the chance that an interval ever excludes zero where there is no
effect.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpace.coordination import coins, knobs
from jaxpace.core.durations import valid
from jaxpace.core.types import pick

BLOCK = 16
"""Steps of a block, by default. Short blocks make little of drifts and of
autocorrelation, and a gross harm is seen after a dozen pairs whatever their length."""

HOLD = 8
"""Times the steps spent on showing a gain for which it is then enjoyed before it is shown again."""

ON, COUNTED, SECOND, ODD = 1, 2, 4, 8
"""Bits of a tag: what a step was."""

REST, LEANS_ON, LEANS_OFF = 2, 3, 4
"""Parts of a pair after its two blocks: its rest, which is off; and steps until the next pair, if
`lean`."""

PAIRS, KEPT, DROPPED = 0, 1, 2
"""Modes: trying it, block by block; on, since it pays; off."""

_RENEWS, _GIVES_UP = math.log(4.0), math.log(10.0)  # log odds
_SHORTEST = 1e-9  # s
_FOREVER = 2.0**30  # steps
_CLIP = 0.5  # usual steps
_MEMORY = 64.0  # steps over which the usual step time is followed
_LEANS_FROM = 24  # pairs
_LEANS_BY = 2.0  # pair lengths for each unit of squared evidence
_DOUBTS = 1.0  # squared evidence against it from which it is no longer trusted
_SLOW = 8.0  # steps in a row of twice the usual time that are the new usual


class Trial(NamedTuple):
  """State of a trial; all []. What belongs to the step about to run is marked *."""

  # int32, * bits `ON`, `COUNTED`, `SECOND`, `ODD`; hand it back with that step's time
  tag: jax.Array
  mode: jax.Array  # int32, * 0 pairs, 1 on, 2 off
  # int32, * 0 first block, 1 second block, 2 the rest of the pair, 3 leaning to on, 4 to off
  part: jax.Array
  into: jax.Array  # int32, * steps of this part or mode before it
  left: jax.Array  # int32, * steps of this part or mode, itself included
  pair: jax.Array  # int32, * number of the pair, from 0
  count_1: jax.Array  # float32, steps counted in the first block
  count_2: jax.Array  # float32, in the second
  total_1: jax.Array  # float32 s, their times added up
  total_2: jax.Array  # float32 s
  used: jax.Array  # bool, the thing switched on was seen to do anything since the last pair
  # bool, it was in the block switched on before this pair; else the pair is void
  useful: jax.Array
  usual: jax.Array  # float32 s, typical step time while off
  spread: jax.Array  # float32 s^2, variance of single steps about it
  followed: jax.Array  # float32, steps these two come from, at most 64
  slow: jax.Array  # float32, steps in a row, while off, that took twice as long or longer
  base: jax.Array  # float32 s, `usual` as it was when the pair began
  fresh: jax.Array  # bool, the next pair is the first one of this return to pairs
  pairs: jax.Array  # int32, pairs counted
  mean: jax.Array  # float32 s, of their differences on - off
  squares: jax.Array  # float32 s^2, sum of squares about it
  off: jax.Array  # float32 s, mean step time of their blocks off
  rho: jax.Array  # float32 s^2, see `coins.prior`
  # float32 s, the interval for the difference; -inf and inf until there are enough pairs
  low: jax.Array
  high: jax.Array  # float32 s
  tries: jax.Array  # float32, returns to pairs, this one included
  hold: jax.Array  # float32, steps of the last stretch on; 0 where the last decision was for off
  wait: jax.Array  # float32, steps of the next stretch off


Trials = tuple[Callable[[], Trial],
               Callable[[jax.Array, jax.Array, jax.Array, Trial], Trial]]
"""A kind of trial, two pure functions: `init()`, and `update(seconds, tag, used, state)`."""


def is_on(state: Trial) -> jax.Array:
  """Says whether the step about to run is to be switched on: [] bool."""
  return (state.tag & ON) != 0


def effect(state: Trial) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns (on - off) / off of the mean step time and its interval: three [] float32; NaN where
  not known yet.

  Below zero is faster with it on. Of the pairs since the last return to pairs, until the next one's
  first.
  """
  nothing = jnp.float32(math.nan)
  known = state.pairs > 0
  off = jnp.where(known, state.off, 1.0)
  bounded = known & (state.high < math.inf)
  return (jnp.where(known, state.mean / off, nothing), jnp.where(bounded, state.low / off, nothing),
          jnp.where(bounded, state.high / off, nothing))


def either(chosen: jax.Array, one: Callable[[], Any], other: Callable[[], Any]) -> Any:
  """Runs the chosen one on a CPU, which saves a microsecond or three; elsewhere both, and keeps
  what is chosen.

  An accelerator must not branch: the host would have to read what is chosen in the middle of the
  step.
  """
  def both(chosen: jax.Array) -> Any:
    return pick(chosen, one(), other())

  return jax.lax.platform_dependent(chosen, cpu=lambda chosen: jax.lax.cond(chosen, one, other),
                                    default=both)


def trials(block: int = BLOCK, key: int = 0, harm: float = 0.25, level: float = 0.05,
           settle: int = 1, patience: int = 512, retry: int = 10_000, lag: int = 0, lean: int = 0,
           trust: bool = False) -> Trials:
  """Makes a kind of trial.

  >>> init, update = trials()
  >>> def step(_, state):
  ...   on = is_on(state)                        # switch it on or off, run the step, and then
  ...   seconds = jnp.where(on, 0.9e-3, 1e-3)
  ...   return update(seconds, state.tag, on, state)
  >>> state = jax.lax.fori_loop(0, 2000, step, init())
  >>> print(is_on(state), f"{effect(state)[0]:+.0%}")
  True -10%

  Args:
    block: steps of a block, at least settle + 1; at least two periods of any pauses that are what
      it is about.
    key: of the hash that orders each pair.
    harm: block lengths of extra time at which a block is cut short.
    level: chance of ever deciding falsely.
    settle: first steps of a block that aren't counted.
    patience: pairs after which what has shown neither gain nor harm is switched off.
    retry: steps for which it is then off, the first time.
    lag: steps that begin between the end of a step and the `update` which is given its time.
    lean: most pair lengths between two pairs that are spent on the side that looks better; 0 for
      none.
    trust: between two pairs it is on, for `lean` pair lengths, until the pairs speak against it.

  Returns:
    `init() -> state`, before the first step; `update(seconds, tag, used, state) -> state`, once a
    step. `seconds` is the newest step time, `tag` the tag which the state had when that step was
    about to run; NaN, or anything that is no duration, is left out. `used` says whether the thing
    was seen to do anything in that step. State and decision depend on these arguments alone.

  Raises:
    ValueError: an argument is out of range.
  """
  settle = knobs.steps("settle", settle, 0)
  block = knobs.steps("block", block, settle + 1)
  excess = float(knobs.number("harm", harm, 0.01, 100,
                                 "block lengths, 0.25 for a quarter of a block"))
  knobs.number("level", level, 0, 0.5, "the chance of a false alarm, 0.05 for 5 %",
                  open_ended=True)
  patience, retry = knobs.steps("patience", patience, 1), knobs.steps("retry", retry, 1)
  lag, lean = knobs.steps("lag", lag, 0), knobs.steps("lean", lean, 0)
  key = int(coins.checked(key))
  measured = block - settle
  real, whole, where = jnp.float32, jnp.int32, jnp.where

  def init() -> Trial:
    zero, none = real(0.0), whole(0)
    return Trial(
        tag=none, mode=whole(DROPPED), part=none, into=none, left=whole(block), pair=whole(-1),
        count_1=zero, count_2=zero, total_1=zero, total_2=zero, used=jnp.bool_(False),
        useful=jnp.bool_(False), usual=zero, spread=zero, followed=zero, slow=zero, base=zero,
        fresh=jnp.bool_(True), pairs=none, mean=zero, squares=zero, off=zero, rho=real(1.0),
        low=real(-math.inf), high=real(math.inf), tries=real(1.0), hold=zero, wait=real(retry))

  def update(seconds: jax.Array, tag: jax.Array, used: jax.Array, state: Trial) -> Trial:
    return _advance(_measure(seconds, tag, used, state))

  def _measure(seconds: jax.Array, tag: jax.Array, used: jax.Array, state: Trial) -> Trial:
    """Enters one step's time: into its block, and into what is usual while off."""
    known = valid(seconds) & (seconds >= _SHORTEST)
    seconds = where(known, seconds, real(0.0))
    on, second = (tag & ON) != 0, (tag & SECOND) != 0
    same = ((tag & ODD) != 0) == ((state.pair & 1) != 0)
    counted = known & same & ((tag & COUNTED) != 0) & (state.mode == PAIRS)
    one, two = counted & jnp.logical_not(second), counted & second

    off = known & jnp.logical_not(on)
    # Nothing takes less than half the usual time but after what was not usual, such as compilation.
    slow = where(seconds >= 2.0 * state.usual, state.slow + 1.0, real(0.0))
    restart = off & ((state.followed == 0) | (seconds < 0.5 * state.usual) | (slow >= _SLOW))
    weight = where(restart, real(1.0), jnp.minimum(state.followed + 1.0, _MEMORY))
    usual = where(restart, seconds, state.usual)
    away = jnp.maximum(jnp.minimum(seconds - usual, usual), -usual)
    spread = where(restart, real(0.0), state.spread + (away * away - state.spread) / weight)
    return state._replace(
        count_1=state.count_1 + real(one), total_1=state.total_1 + where(one, seconds, real(0.0)),
        count_2=state.count_2 + real(two), total_2=state.total_2 + where(two, seconds, real(0.0)),
        used=state.used | (used & on), usual=where(off, usual + away / weight, state.usual),
        spread=where(off, spread, state.spread), followed=where(off, weight, state.followed),
        slow=where(off, where(restart, real(0.0), slow), state.slow))

  def _advance(state: Trial) -> Trial:
    """Moves on to the next step; at the end of a pair, judges."""
    in_pair = state.mode == PAIRS
    count = where(state.part == 0, state.count_1, state.count_2)
    total = where(state.part == 0, state.total_1, state.total_2)
    left, into = state.left - 1, state.into + 1
    blocks = in_pair & (state.part < 2)
    cut = blocks & (state.base > 0) & (total - count * state.base > excess * measured * state.base)
    rest = lag + where(cut, left, whole(0))  # after the second block
    over = (left <= 0) | cut
    first_over, second_over = over & in_pair & (state.part == 0), over & in_pair & (state.part == 1)
    resting = second_over & (rest > 0)
    closed = in_pair & ((second_over & (rest <= 0)) | (over & (state.part == REST)))
    # A pair, unless what follows decides otherwise.
    begins = closed | (over & (jnp.logical_not(in_pair) | (state.part >= LEANS_ON)))

    # false, and varying over ranks as all that comes of the state is
    no = closed & jnp.logical_not(closed)
    judged, helps, fails = either(closed, lambda: _judge(state), lambda: (state, no, no))
    longer, better = _lean(judged) if lean else (whole(0), whole(LEANS_OFF))
    leans = closed & jnp.logical_not(helps | fails) & (longer > 0)
    begins = begins & jnp.logical_not(helps | fails | leans)
    first = HOLD * (2.0 * block) * real(judged.pairs)
    stay = jnp.minimum(where(state.hold > 0, 2.0 * state.hold, first), _FOREVER)
    mode = where(helps, whole(KEPT),
                 where(fails, whole(DROPPED), where(begins, whole(PAIRS), state.mode)))
    left = where(helps, jnp.int32(stay), where(fails, jnp.int32(state.wait), where(
        begins | first_over, whole(block), where(leans, longer, where(resting, rest, left)))))
    part = where(first_over, whole(1), where(resting, whole(REST), where(leans, better, where(
        closed | begins, whole(0), state.part))))
    into = where(over | closed, whole(0), into)
    pair = where(begins, state.pair + 1, state.pair)
    seen = closed | (over & (state.mode == KEPT))
    zero = real(0.0)
    after = judged._replace(
        mode=mode, part=part, into=into, left=left, pair=pair,
        count_1=where(begins, zero, state.count_1), count_2=where(begins, zero, state.count_2),
        total_1=where(begins, zero, state.total_1), total_2=where(begins, zero, state.total_2),
        base=where(begins, state.usual, state.base),
        # What it was seen to do in the pair or the stretch on that ends here.
        useful=where(seen, state.used, state.useful), used=state.used & jnp.logical_not(seen),
        hold=where(helps, stay, where(fails, zero, state.hold)),
        wait=where(fails, jnp.minimum(2.0 * state.wait, _FOREVER), state.wait),
        tries=where(helps | fails, state.tries + 1.0, state.tries),
        fresh=judged.fresh | helps | fails)
    return after._replace(tag=_tag(after))

  def _lean(state: Trial) -> tuple[jax.Array, jax.Array]:
    """Steps until the next pair, 0 for none, and the side on which they are: two int32."""
    total = real(state.pairs) * state.mean
    evidence = total * total / (state.squares + total * state.mean + state.rho)
    pairs = jnp.minimum(jnp.int32(_LEANS_BY * evidence), whole(lean))
    pairs = where(state.fresh | (state.pairs < _LEANS_FROM), whole(0), pairs)
    side = where(state.mean < 0, whole(LEANS_ON), whole(LEANS_OFF))
    if trust:
      trusted = state.fresh | (state.mean < 0) | (evidence < _DOUBTS)
      pairs, side = where(trusted, whole(lean), pairs), where(trusted, whole(LEANS_ON), side)
    return pairs * whole(2 * block), side

  def _judge(state: Trial) -> tuple[Trial, jax.Array, jax.Array]:
    """Enters the pair that has just ended, unless it is void.

    Returns:
      The state, whether this has decided for on, and whether for off.
    """
    known = (state.count_1 > 0) & (state.count_2 > 0) & (state.base > 0)
    counts = known & state.useful
    first, second = (total / jnp.maximum(count, 1.0)
                     for total, count in ((state.total_1, state.count_1),
                                          (state.total_2, state.count_2)))
    on_first = coins.coin(key, state.pair)
    difference = where(on_first, first - second, second - first)
    most = _CLIP * state.base
    difference = jnp.maximum(jnp.minimum(difference, most), -most)

    zero = real(0.0)
    pairs = where(state.fresh, whole(0), state.pairs) + 1
    mean, squares, off = (where(state.fresh, zero, value)
                          for value in (state.mean, state.squares, state.off))
    n = real(pairs)
    mean, squares = coins.entered(difference, n, mean, squares)
    off = off + (where(on_first, second, first) - off) / n
    # A hundredth of a percent of the usual step at least: clocks tick.
    variance = jnp.maximum(state.spread, 1e-6 * state.base * state.base) * (2.0 / measured)
    rho = where(state.fresh, jnp.maximum(coins.prior(variance), 1e-30), state.rho)
    first_try = state.tries < 2.0
    shares = where(first_try, real(4.0 / 3.0),
                   4.0 * state.tries * jnp.maximum(state.tries - 1.0, 1.0))
    strict = jnp.log(shares) - math.log(level)
    half = coins.half_width(pairs, squares, rho, strict)
    low, high = mean - half, mean + half
    odds = coins.log_odds(pairs, mean, squares, rho)
    gain, renews = mean < 0, state.hold > 0
    helps = counts & ((high < 0) | (renews & gain & (odds >= _RENEWS)))
    gives_up = (jnp.logical_not(gain) & (odds >= _GIVES_UP)) | (pairs >= patience)
    fails = counts & jnp.logical_not(helps) & ((low > 0) | gives_up)
    entered = state._replace(pairs=pairs, mean=mean, squares=squares, off=off, rho=rho, low=low,
                             high=high, fresh=jnp.bool_(False))
    judged = Trial(*(where(counts, new, old) for new, old in zip(entered, state, strict=True)))
    return judged, helps, fails

  def _tag(state: Trial) -> jax.Array:
    in_pair, first = state.mode == PAIRS, state.part == 0
    on_first = coins.coin(key, state.pair)
    block_on = ((where(first, on_first, jnp.logical_not(on_first)) & (state.part < REST))
                | (state.part == LEANS_ON))
    on = where(in_pair, block_on, state.mode == KEPT)
    counted = in_pair & (state.part < 2) & (state.into >= settle)
    none = whole(0)
    bits: Any = where(on, whole(ON), none) | where(counted, whole(COUNTED), none)
    bits = bits | where(in_pair & (state.part == 1), whole(SECOND), none)
    return bits | where((state.pair & 1) != 0, whole(ODD), none)

  return init, update
