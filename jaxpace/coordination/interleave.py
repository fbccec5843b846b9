"""Shifts the phase of a whole job, so that jobs on one link send in turn instead of at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpace.coordination import knobs, shift_trial, windows
from jaxpace.coordination.coins import checked, uniform
from jaxpace.core.durations import LONGEST, bounded, valid
from jaxpace.core.pacing import by_slot
from jaxpace.core.types import Decision, Observation, Pacer

_ZERO, _ONE, _NAN = np.float32(0), np.float32(1), np.float32(np.nan)
_EDGE = np.float32(1.1)
"""A bucket that took less than this times its floor had the link to itself, but for noise."""
_RISE = np.float32(0.15)
"""Rise of n from the first bucket to the last that shows who was first, where both were shared."""
_SMALL = np.float32(0.1)
"""Buckets below this share of the largest are left out: a scalar's time is latency, not
bandwidth."""


class LinkOrder(NamedTuple):
  """What one step's bucket times say. All NaN or False where nothing is known."""

  # [] float32, time beyond the floors, as a share of the floors, of the buckets that are known
  contention: jax.Array
  # [] float32 s, W: others' work that was on the link when this job began, and had to be shared
  # with
  ahead: jax.Array
  clears: jax.Array  # [] bool, whether that work was done before this job's last bucket
  # [] bool, not so, and its last bucket was held up more than its first: it was there first
  leads: jax.Array
  # [] bool, not so, and its first bucket was held up more than its last: it came later
  trails: jax.Array
  total: jax.Array  # [] float32 s, sum of the floors


def look(times: jax.Array, floors: jax.Array) -> LinkOrder:
  """Reads the order of the jobs from bucket times.

  n = times / floors is the number of jobs on the link, averaged over the bucket. Under fair
  sharing, while one bucket of floor f is sent with n jobs on the link, the others together send (n
  - 1) f. Those that were there when this job began are there until they finish, so as long as n has
  not fallen; after that, a rise is somebody who came later. Hence W = sum of floors * (running
  minimum of n - 1).

  Where all buckets were shared the running minimum never clears, and jobs that began within a
  bucket of each other look alike, but for their ends: who began first finds its first bucket shared
  for less of its time than its last.

  >>> found = look(jnp.array([20e-3, 15e-3, 10e-3, 20e-3]), jnp.full((4,), 10e-3))
  >>> print(f"{found.ahead:.3f} s ahead, contention {found.contention:.3f}, clears: {found.clears}")
  0.015 s ahead, contention 0.625, clears: True

  Args:
    times: [B] float32 s, in the order in which the buckets are sent; NaN where it isn't known: n is
      then taken to be no more than before.
    floors: [B] float32 s, on a quiet link; NaN where there is no bucket.
  """
  sent = valid(floors) & (floors > _ZERO)
  sent &= floors >= _SMALL * jnp.max(jnp.where(sent, floors, _ZERO))
  ok = sent & valid(times)
  n = jnp.where(ok, jnp.minimum(times / jnp.where(ok, floors, _ONE), np.float32(1e6)),
                np.float32(np.inf))
  least = jax.lax.cummin(n)
  total, looked_at = (jnp.sum(jnp.where(these, floors, _ZERO)) for these in (sent, ok))

  def beyond(number: jax.Array, these: jax.Array) -> jax.Array:
    return jnp.sum(jnp.where(these, floors * jnp.maximum(number - _ONE, _ZERO), _ZERO))

  known = jnp.any(ok)
  at = jnp.arange(n.shape[0], dtype=jnp.int32)
  ends = [jnp.sum(jnp.where(at == place, jnp.where(ok, n, _ZERO), _ZERO))
          for place in (jnp.min(jnp.where(ok, at, np.int32(n.shape[0]))),
                        jnp.max(jnp.where(ok, at, np.int32(-1))))]
  contention = jnp.where(known, beyond(n, ok) / jnp.where(known, looked_at, _ONE), _NAN)
  clears = known & (least[-1] < _EDGE)
  unclear = known & ~clears
  ahead = jnp.where(known, beyond(least, sent & jnp.isfinite(least)), _NAN)
  return LinkOrder(contention, ahead, clears, unclear & (ends[1] > ends[0] + _RISE),
                   unclear & (ends[0] > ends[1] + _RISE),
              total)


def given_floor(floor: Sequence[float] | float | None, count: int) -> np.ndarray | None:
  """Checks floors that are known beforehand: [count] float32 s, NaN for collectives it does not
  name; None for None. Raises ValueError where they are no positive times."""
  if floor is None:
    return None
  try:
    values = ([float(floor)] * count if isinstance(floor, (int, float))
              else [float(value) for value in floor])
  except (TypeError, ValueError):
    values = []
  if not values or not all(math.isfinite(value) and 0 < value <= LONGEST for value in values):
    raise ValueError(f"floor={floor!r} must be seconds above 0: one number, or one for each "
                     "collective in the order of the step, such as [4e-3, 4e-3, 1e-3].")
  return np.asarray([*values, *[np.nan] * count][:count], np.float32)


_CALM = np.int32(32)
"""Decisions without a shift wanted after which it counts as disengaged."""
_SURE = np.int32(3)
"""Steps in a row in which contention must be seen before the first shift."""
_ONCE = np.int32(1)
"""So many may be a pause of a rank's, even while jobs are kept apart."""
_AWAKE = np.int32(256)
"""Decisions after a shift during which the next one needs less evidence."""
_ALERT = np.int32(40)
"""Decisions after a shift during which the next one needs least."""
_JUMP = np.float32(0.25)
"""Of the collective; what W grows by more than that is somebody's shift, not drift."""
_GAIN = np.float32(0.125)
"""Weight of the newest growth."""
_SOON = np.int32(32)
"""Decisions after a shift within which the next touch says whether it went far enough."""
_WIDER, _NARROWER, _CLOSEST = np.float32(1.4), np.float32(0.5), np.float32(0.1)
"""Factors on the clearance: touched in front again, touched behind; and its least, as a share of
its most."""
_ENOUGH = np.float32(0.6)
"""Share of the collective that must be known of the step just done, or the step before it is looked
at."""
_FINE = np.float32(0.4)
"""Of the dead band, what is enough then."""


class Interleave(NamedTuple):
  """State of `interleave_jobs`; the same on all ranks of a job. `B` is the number of slots it looks
  at."""

  key: jax.Array  # [] uint32, differs from job to job
  floor: jax.Array  # [B] lowest recent bucket times
  period: windows.Mean  # [] mean step time less own delays
  bank: jax.Array  # [] float32 periods, delay that may be asked for
  asked: jax.Array  # [] float32 s, asked after the last step
  asked_before: jax.Array  # [] float32 s, after the one before
  hold: jax.Array  # [] int32, decisions to sit out until a shift is seen
  test: shift_trial.ShiftTest  # []
  quiet: jax.Array  # [] int32, decisions since a shift was wanted, at most `_CALM`
  # [] int32, decisions since a shift was asked for on more than one sight, at most `_AWAKE`
  since: jax.Array
  # [] int32, steps in a row in which contention was beyond the dead band, at most `_SURE`
  seen: jax.Array
  ahead: jax.Array  # [] float32 s, W in the step seen before; NaN unless this job followed in it
  growth: jax.Array  # [] float32 s, by which W grows from one step to the next while nobody moves
  clear: jax.Array  # [] float32, share of the floors that it moves beyond the work ahead


def interleave_jobs(max_delay: float = 0.25, *, key: int = 0,
                    floor: Sequence[float] | float | None = None, window: int = 1024,
                    dead_band: float = 0.1, clearance: float = 0.2, budget: float = 0.01,
                    patience: int = 256, retry: int = 1024, level: float = 0.05,
                    slots: int = 16) -> Pacer:
  """Delays all ranks of a job by the same, once, where another job on the link is still sending
  when it begins.

  Fair sharing never separates jobs that collide: both take longer by the same, and collide again in
  the next step; TCP even draws them together. A delay moves the job's phase for good, so one shift
  parts them, and a small one now and then keeps them apart.

  Every rank decides by itself, from what is the same on all ranks to the last bit: each bucket's
  own time in the step just done (`Observation.job_transfers_now`, all but that of the last bucket,
  which carries them), or, where these are less than 0.6 of the collective, in the step before
  (`job_transfers`), and its time (`job_step_time`). They must be shared (`jaxpace.instrument(...,
  share=True)`); where they are not the delay is exactly 0, and no rank may be left out
  (`only_ranks`) or the others would only wait for it.

  *The rule.* n is a bucket's time over its floor, the number of jobs that shared the link
  meanwhile. The running minimum of n - 1 over the buckets in order, times the floors, is W: the
  work that was ahead of this job when it began to send (`look`). Where it
  clears before the last bucket, or was more at the first bucket than at the last, this job is the
  follower, and moves by W + g + the clearance times the floors: g is by how much W was seen to grow
  from one step to the next while this job did not move, once for each step between the one that is
  seen and the one that begins with the shift. The clearance begins with a tenth of its most. It
  becomes 1.4 times as much if the next touch, within 32 steps, is with the one ahead again, and 0.5
  times as much for each step in which one behind is met. The leader does nothing. Where neither is
  so the order cannot be seen (they began together, or there is one bucket only): then it moves by U
  W, U uniform from 1.1 to 1.5, with probability one half. After a shift it waits for a decision
  (two, where it sees the step before), up to 3 more where the order could not be seen: others move
  too. All draws are hashes of (key, step).

  *When.* For the first shift contention must be beyond the dead band in three steps in a row, for
  the next 256 steps in two. For the first 40 of these a follower moves as soon as W is 4 % of the
  floors (0.4 dead bands), by W alone, and by the rest if it follows in the next step too; so a
  phase that wanders off is set right before jobs collide, and a pause of one rank, which looks
  alike, moves it little and doesn't count as a shift.

  *Its test* is the coin of `jaxpace.coordination.shift_trial`: of the shifts that are wanted some
  are not made, and the steps that follow are compared. It switches itself off where shifts make
  steps longer, or show nothing for long.

  *Bounds.* Nothing is asked while contention, the sum of what buckets took beyond their floors, is
  at most `dead_band` of the floors, 0.4 times that when awake; nothing beyond `max_delay`; and no
  shift that is longer than what is in a bank that begins with one period, earns `budget` periods a
  step and holds one at most. So delays lengthen a run by at most `budget` of it plus one period.

  >>> pacer = interleave_jobs(floor=10e-3, key=7)
  >>> times = jnp.full((16,), jnp.nan).at[:4].set(jnp.array([20e-3, 20e-3, 15e-3, 10e-3]))
  >>> nan = jnp.full((2,), jnp.nan)
  >>> took = jnp.float32(0.1)
  >>> seen = Observation(step=jnp.int32(9), rank=jnp.int32(0), arrivals=nan, delays=nan,
  ...                    waits=times, step_time=took, job_step_time=took, job_transfers=times)
  >>> state = pacer.init(2)
  >>> for _ in range(3):
  ...   decision, state = jax.jit(pacer.update)(seen, state)
  >>> print(f"{decision.delay:.3f} s, contention {decision.info['contention']:.3f} of the floor")
  0.026 s, contention 0.625 of the floor

  Args:
    max_delay: s, the longest delay, 0 to 10. `jaxpace.instrument` has a limit of its own.
    key: of the coin, 0 to 2**32 - 1. It must differ between jobs that share a link and be the same
      on all ranks of a job, such as `zlib.crc32(job_name.encode())`: jobs with the same key toss
      the same coin and may never part.
    floor: s, each collective's time on a quiet link, in the order of the step's collectives, or one
      for all. None for the lowest that was seen: then a job that never had a bucket to itself does
      not see that it is contended.
    window: steps over which a floor that was seen is forgotten.
    dead_band: contention below which nothing is done, as a share of the floors, 0 to 1.
    clearance: the most a follower moves beyond the work ahead of it, as a share of the floors, 0 to
      1: half of the gap that is to be between two jobs. What it does move it learns. Too little,
      and jobs that are drawn together touch again at once; too much, and it runs into the next one
      where many share the link.
    budget: most that delays may add to the run, as a share of it, 0 to 1, after the first period.
    patience: tests after which it is switched off if they have shown no gain.
    retry: steps for which it is then off, the first time; twice as many each time after.
    level: chance of ever switching off, or of trusting itself, falsely.
    slots: collectives it looks at, in order; those after are ignored.

  Returns:
    A pacer. Its columns in the trace: `contention`, as a share of the floors; `ahead`, W in
    seconds; `engaged`, 1 while a shift was wanted lately and it isn't switched off; `shift_effect`,
    the effect of a shift on the 8 steps after it as a share of the period, below 0 for a gain, with
    the ends `shift_low` and `shift_high` of its interval. NaN where not known.

  Raises:
    ValueError: an argument is out of range.
  """
  most = knobs.delay("max_delay", max_delay)
  band = knobs.number("dead_band", dead_band, 0, 1, "a share of the floors, 0.1 for 10 %")
  clear = knobs.number("clearance", clearance, 0, 1, "a share of the floors, 0.2 for 20 %")
  earned = knobs.number("budget", budget, 0, 1, "a share of the run time, 0.01 for 1 %")
  patience, retry = knobs.steps("patience", patience, 1), knobs.steps("retry", retry, 1)
  knobs.number("level", level, 0, 0.5, "the chance of a false decision, 0.05 for 5 %",
                  open_ended=True)
  slots, start = knobs.slots(slots), checked(key)
  given = given_floor(floor, slots)
  lowest, typical = windows.floor(window), windows.mean(64)

  def init(ranks: int) -> Interleave:
    zero, none = jnp.float32(0), jnp.int32(0)
    return Interleave(
        key=jnp.asarray(start), floor=lowest.init((slots,)), period=typical.init(),
        bank=jnp.float32(1), asked=zero, asked_before=zero, hold=none, test=shift_trial.init(retry),
        quiet=jnp.asarray(_CALM), since=jnp.asarray(_AWAKE), seen=none, ahead=jnp.float32(np.nan),
        growth=zero, clear=jnp.asarray(_CLOSEST * clear))

  def update(observation: Observation, state: Interleave) -> tuple[Decision, Interleave]:
    key = state.key
    before, now = (by_slot(times, slots)
                   for times in (observation.job_transfers, observation.job_transfers_now))
    floors_now = lowest.update(before, state.floor)
    floors = lowest.value(floors_now) if given is None else jnp.asarray(given)
    floors = jnp.where(valid(before) | valid(now), floors, _NAN)
    there = jnp.where(valid(floors), floors, _ZERO)
    fresh = (jnp.sum(jnp.where(valid(now), there, _ZERO))
             / jnp.maximum(jnp.sum(there), np.float32(1e-30))) >= _ENOUGH
    seen = look(jnp.where(fresh, now, before), floors)
    # The step before began with what was asked two decisions ago.
    took = jnp.where(valid(observation.job_step_time), observation.job_step_time, _NAN)
    own_time = jnp.maximum(took - state.asked_before, _ZERO)
    # Asked in the step that is seen; on its way since then; and steps from it to the one that
    # begins with a shift.
    in_seen = jnp.where(fresh, state.asked, state.asked_before)
    on_its_way = jnp.where(fresh, _ZERO, state.asked)
    late = jnp.where(fresh, np.int32(1), np.int32(2))
    period_now = typical.update(own_time, state.period)
    period = typical.value(period_now)
    known = valid(seen.ahead) & valid(took) & (period > _ZERO)
    bank = jnp.where(known, jnp.minimum(state.bank + earned, _ONE), state.bank)
    test = shift_trial.advance(took, period, state.test, patience, retry, level)

    # A follower whose W grows by itself is drawn in: what it loses until its shift takes hold is
    # added.
    certain = seen.clears | seen.trails
    follows = known & certain & (seen.ahead > _FINE * band * seen.total)
    grown = seen.ahead - state.ahead
    drifts = follows & (in_seen == _ZERO) & (jnp.abs(grown) < _JUMP * seen.total)
    growth = jnp.where(drifts, state.growth + _GAIN * (grown - state.growth), state.growth)
    ahead = jnp.where(follows, seen.ahead, _NAN)
    lost = late.astype(jnp.float32) * jnp.maximum(growth, _ZERO)
    drawn = (np.float32(1.1) + np.float32(0.4) * uniform(key, observation.step, 1)) * seen.ahead
    sudden = follows & jnp.isnan(state.ahead)
    whole = jnp.maximum(seen.ahead + lost + state.clear * seen.total - on_its_way, _ZERO)
    want = bounded(jnp.where(certain, jnp.where(sudden, seen.ahead, whole), drawn), most)
    awake = state.since < _AWAKE
    beyond = known & (seen.contention > band)
    times_seen = jnp.where(beyond, jnp.minimum(state.seen + np.int32(1), _SURE), np.int32(0))
    alert = state.since < _ALERT
    again = (follows & (alert | (beyond & ~sudden))) | (beyond & (times_seen > _ONCE))
    contended = jnp.where(awake, again, beyond & (times_seen == _SURE))
    wanted = (contended & (state.hold == np.int32(0)) & (follows | ~(certain | seen.leads))
              & (want > _ZERO))
    wanted &= want <= bank * period
    act, tested, test = shift_trial.trigger(wanted, awake, own_time,
                                            uniform(key, observation.step, 2), test)
    # Where the order can't be seen and no test's coin says whether to move, one of its own does.
    act &= certain | tested | (uniform(key, observation.step, 3) < np.float32(0.5))

    delay = jnp.where(act, want, _ZERO)
    bank = jnp.where(act, jnp.maximum(bank - delay / period, _ZERO), bank)
    more = (np.float32(4) * uniform(key, observation.step, 4)).astype(jnp.int32)
    wait = late + jnp.where(certain, np.int32(0), more)
    wait = jnp.where(sudden, np.int32(0), wait)
    hold = jnp.where(act, wait, jnp.maximum(state.hold - np.int32(1), np.int32(0)))
    since = jnp.where(act & ~sudden, np.int32(0), jnp.minimum(state.since + np.int32(1), _AWAKE))
    quiet = jnp.where(wanted, np.int32(0), jnp.minimum(state.quiet + np.int32(1), _CALM))
    # Half of the gap is wanted, whose size nobody knows: wider when one ahead is met again, less
    # when one behind is.
    held_up_behind = (known & ~follows
                      & (seen.contention * seen.total - seen.ahead > _FINE * band * seen.total))
    soon = state.since < _SOON
    factor = jnp.where(soon & held_up_behind, _NARROWER,
                       jnp.where(soon & act & certain & ~sudden, _WIDER, _ONE))
    clear_now = jnp.clip(state.clear * factor, _CLOSEST * clear, clear)
    estimate, low, high = shift_trial.effect(test, level)
    engaged = (quiet < _CALM) & (test.off == np.int32(0))
    info = {"contention": seen.contention, "ahead": seen.ahead,
            "engaged": engaged.astype(jnp.float32), "shift_effect": estimate, "shift_low": low,
            "shift_high": high}
    return Decision(delay, info), Interleave(
        key=key, floor=floors_now, period=period_now, bank=bank, asked=delay,
        asked_before=state.asked, hold=hold, test=test, quiet=quiet, since=since, seen=times_seen,
        ahead=ahead, growth=growth, clear=clear_now)

  return Pacer(init, update)
