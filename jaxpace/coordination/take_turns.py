"""Takes turns with other jobs at a shared link: listens before each collective, waits while the
link is in use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpace.coordination import interleave, knobs, windows
from jaxpace.coordination.coins import checked, uniform
from jaxpace.core.durations import valid
from jaxpace.core.pacing import by_slot
from jaxpace.core.types import Decision, Hold, Moment, Observation, Pacer, pick

_ZERO, _ONE, _NAN = np.float32(0), np.float32(1), np.float32(np.nan)
SILENT, MEASURES, TRIES, TURNS, RESTS = (np.int32(mode) for mode in range(5))
"""Modes: nobody else is there; how much others take is measured; turns are tried; taken; not taken
for a while."""
_LEAK = np.float32(1 / 256)
"""Weight of a reading that is neither the least nor the most so far in the memory of these."""
_APART = np.float32(2.5)
"""A link in use sounds at least so many times as long as a quiet one, or nobody hears it."""
_LOUD = np.float32(4)
"""By message a reading so many times as long as the shortest means a link in use."""
_RESTED = np.float32(5)
"""A step's first reading of a quiet link takes at most so many times as long as the shortest."""
_NOTICED = 16
"""Steps over which contention is averaged before it is noticed, or gone."""
_NO_WORSE, _NO_WORSE_WHOLE = np.float32(1.05), np.float32(1.1)
"""Times what sharing cost: turns that cost more are not taken; by message, where of two jobs the
one of the shorter period waits, and the other one gains."""
_BANK = np.float32(6)
"""What turns may cost beyond sharing, in collectives on a quiet link, before they are broken
off."""
_RARE = np.float32(0.15)
"""Share of steps: a job that is heard in fewer is not worth a gap."""
_LONG_ENOUGH = 32
"""Steps of a trial after which it is ended if others were heard in so few."""
_YIELD = np.float32(0.25)
"""The gap is no longer than this share of the bucket after which it is left."""
_SHORTER = np.float32(0.25)
"""Of the patience, what is tried next where the whole does not pay."""
_CALM, _LESS_CALM = np.int32(32), np.int32(8)
"""Steps in a row in which nobody was heard and nothing was late, until it is silent again; by
message one that was late by itself counts for so many less, and where jobs have been out of each
other's way listening begins again as soon as a step is late."""
_SELDOM = np.float32(0.25)
"""Share of steps: who meets another job in fewer steps than that moves away from it, by message."""
_ASIDE, _ASIDE_STEPS = np.float32(0.02), np.int32(8)
"""By so much later it begins, as a share of its collectives, in so many steps after it has waited:
little by little, so that no step is much longer than others."""
_LONGEST_REST = np.int32(1 << 20)


class TakeTurns(NamedTuple):
  """State of `take_turns`; the same on all ranks of a job. B is the number of slots it looks at."""

  key: jax.Array  # [] uint32, differs from job to job
  floor: jax.Array  # [B] lowest recent bucket times
  quiet: jax.Array  # [] float32 s, what listening takes on a quiet link; NaN before the first time
  loud: jax.Array  # [] float32 s, while others send
  # [] float32 s, by message: what a step's first time takes on a quiet link, which has rested; NaN
  rested: jax.Array
  # [] int32, free readings that are still wanted since one meant a link in use
  doubts: jax.Array
  heard: jax.Array  # [] bool, whether any reading of this step did
  mode: jax.Array  # [] int32
  since: jax.Array  # [] int32, steps in this mode
  patience: jax.Array  # [] float32, most that is waited before a bucket, as a multiple of its floor
  rest: jax.Array  # [] int32, steps of this rest, or half of the next one's
  recent: windows.Mean  # [] contention, over some steps
  shared: windows.Mean  # [] what others cost while turns aren't taken, as a share of the floors
  taken: windows.Mean  # [] what others, waiting and listening cost while they are
  # [] float32, by how much more turns have cost than sharing, in collectives; never below 0
  spent: jax.Array
  others: windows.Mean  # [] share of steps in which others were heard
  before: jax.Array  # [B] float32 s, held in the step of which the bucket times come next
  # [] int32, steps in a row in which nobody was heard, and buckets took no longer than alone
  calm: jax.Array
  # [] bool, by message: turns have paid, and are taken again at once when buckets are late again
  proven: jax.Array
  # [] int32, steps in which it still begins a little later, away from the job it has waited for
  aside: jax.Array


def take_turns(key: int = 0, *, by: str = "bucket",
               floor: Sequence[float] | float | None = None, patience: float | None = None,
               dead_band: float = 0.1, learn: int = 48, trial: int = 64, retry: int = 1024,
               window: int = 1024, slots: int = 16) -> Pacer:
  """Waits before each collective while another job is sending, for a bounded time, and then sends
  without yielding.

  Two senders that share a link at half speed each finish late; if the second waits for the first,
  one finishes early and the other no later, and where sharing loses capacity both gain. That holds
  for jobs of any period, and there is no phase to keep.

  *Listening.* Before a collective a tiny one is timed: the shortest wait of any rank in it is the
  network's time, and the same on all ranks. It means a link in use where it is nearer, in ratio,
  to the longest readings than to the shortest, and these are 2.5-fold apart at least. While it
  does, the job listens again after 0.75 to 1.25 times the quiet reading, for up to `patience` times
  the bucket's own time; then it sends. After a link in use one free reading is not believed, but
  checked by a second one, after a random time of up to twice the quiet reading: readings err, and
  of several jobs that wait only one should begin.

  *By what.* Two jobs that send bucket by bucket in turns both finish as late as if they shared the
  link: that gains only where sharing itself loses capacity. Where it loses none, as over TCP, who
  came first must send all of its buckets before the other begins. So by message a job listens
  before the first collective of its step alone (the first that can be held back), waits for up to `patience` times all of its own,
  and sends them one after the other.

  *The gap*, by bucket. After its own bucket a job leaves the link free for three quiet readings and one in
  use, so that one who waits gets in: turns by bucket, not by message. No more than a quarter of the
  bucket.

  *When.* Silent, without listening, while contention (what buckets took beyond their floors, as a
  share of these) is within `dead_band`. Beyond it, it is measured for `learn` steps what sharing
  costs; then turns are tried for `trial` steps. They are taken on where what was waited and
  listened and what buckets took beyond their floors is less, in all, than sharing cost; a trial
  that has cost six times all collectives of a step more than sharing is broken off. Where it
  doesn't pay, a quarter of the patience is tried in the same way (a small bucket that meets a
  large one does better to share); and where that does not either (others don't obey, or what is
  heard is no job), it rests for `retry` steps, twice as many each time. A trial in which nobody
  was heard ends after 32 steps, and there is no second one. Turns that come to cost more than
  sharing did are given up likewise, and tried again after a quarter of `retry`. When nobody was
  heard for 32 steps and no bucket was late, it is silent again.

  By message three free readings in a row are wanted after one of a link in use. A step's first one
  is compared with other first ones, since processors and links that have rested answer later; where
  it is four times the shortest of all, two more decide. A tenth more than sharing costs is put up
  with, and nobody need be heard: jobs of one period that took turns are out of each other's way. Who
  has waited, and waits in less than a quarter of the steps, begins later by 2 % of its collectives
  in each of the next eight, so that the next step's jitter does not make them meet again. Turns
  that have paid end after 32 steps in which nobody was heard and nothing was late, each late one
  less eight, and begin again without a trial as soon as a step is late.

  *Its test.* That comparison is of before and after, which drifts can deceive:
  `jaxpace.guard(take_turns(...), block=64, trust=True)` compares at random, and ends what does not
  pay.

  All ranks decide alike, from bucket times that are shared (`jaxpace.instrument(..., share=True)`)
  and from readings that are a collective's result. Where nothing is shared it is silent.

  >>> pacer = take_turns(key=7, floor=10e-3)
  >>> state = pacer.init(2)._replace(mode=TURNS, quiet=jnp.float32(2e-4), loud=jnp.float32(9e-4))
  >>> moment = Moment(jnp.int32(5), jnp.int32(0), jnp.float32(8e-4), jnp.int32(1), jnp.float32(8e-4), jnp.float32(8e-4))
  >>> asked, state = jax.jit(pacer.hold)(moment, state)
  >>> print(f"wait {1e3 * asked.seconds:.2f} ms, listen again: {asked.listen}")
  wait 0.20 ms, listen again: True

  Args:
    key: of random waits, 0 to 2**32 - 1. It must differ between jobs that share a link and be the
      same on all ranks of a job, such as `zlib.crc32(job_name.encode())`.
    by: "bucket", or "message", all collectives of a step; the same in all jobs that share a link.
    floor: s, each collective's time on a quiet link, in the order of the step's collectives, or one
      for all. None for the lowest that was seen.
    patience: most that is waited, as a multiple of the bucket's floor, or of all of them by
      message, 0 to 100; None for 2, or 1 by message.
    dead_band: contention within which nothing is done, as a share of the floors, 0 to 1.
    learn: steps over which the cost of sharing is measured before turns are tried.
    trial: steps of a trial.
    retry: steps of the first rest.
    window: steps over which a floor that was seen is forgotten.
    slots: collectives it looks at, in order; those after are sent as they come.

  Returns:
    A pacer with a `hold`, whose delay is always 0. Its columns in the trace: `contention`, as a
    share of the floors; `turns`, 1 while they are tried or taken; `sharing_cost` and `turns_cost`,
    what the two were found to cost, as shares of the floors; NaN where not known.

  Raises:
    ValueError: an argument is out of range.
  """  # noqa: E501
  start = checked(key)
  if by not in ("bucket", "message"):
    raise ValueError(f'by={by!r} must be "bucket" or "message": what is sent in one turn.')
  whole = by == "message"
  no_worse = _NO_WORSE_WHOLE if whole else _NO_WORSE
  if patience is None:
    patience = 1.0 if whole else 2.0
  most = knobs.number("patience", patience, 0, 100,
                         "a multiple of a bucket's own time, 2 for twice that")
  band = knobs.number("dead_band", dead_band, 0, 1, "a share of the floors, 0.1 for 10 %")
  still, uncalm = (band, _LESS_CALM) if whole else (np.float32(0.5) * band, _CALM)
  learn, trial = knobs.steps("learn", learn, 4), knobs.steps("trial", trial, 4)
  retry, slots = knobs.steps("retry", retry, 1), knobs.slots(slots)
  sooner, half = max(1, retry // 8), max(1, retry // 2)
  given = interleave.given_floor(floor, slots)
  lowest, noticed = windows.floor(window), windows.mean(_NOTICED)
  sharing, turning = windows.mean(2 * learn), windows.mean(2 * trial)

  def init(ranks: int) -> TakeTurns:
    none, no = jnp.int32(0), jnp.zeros((), jnp.bool_)
    return TakeTurns(
        key=jnp.asarray(start), floor=lowest.init((slots,)), quiet=jnp.float32(_NAN),
        loud=jnp.float32(_NAN), rested=jnp.float32(_NAN), doubts=none, heard=no,
        mode=jnp.asarray(SILENT), since=none,
        patience=jnp.asarray(most), rest=jnp.int32(half), spent=jnp.float32(0),
        others=noticed.init(), recent=noticed.init(), shared=sharing.init(), taken=turning.init(),
        before=jnp.zeros((slots,), jnp.float32), calm=none, proven=no, aside=none)

  def floors_of(state: TakeTurns) -> jax.Array:
    return lowest.value(state.floor) if given is None else jnp.asarray(given)

  def hold(moment: Moment, state: TakeTurns) -> tuple[Hold, TakeTurns]:
    at = jnp.clip(moment.slot, np.int32(0), np.int32(slots - 1))
    # Picked by comparison: a gather is a kernel of its own.
    places = np.arange(slots, dtype=np.int32)
    floors = floors_of(state)
    own = jnp.sum(jnp.where(places == at, floors, _ZERO))
    last = jnp.sum(jnp.where(places == at - np.int32(1), floors, _ZERO))
    acts = (((state.mode == TRIES) | (state.mode == TURNS)) & (own > _ZERO)
            & (moment.slot < np.int32(slots)))
    if whole:
      # Before the first collective that can be held back: not every step's first one can.
      acts &= moment.step_held <= moment.held
      own = jnp.sum(jnp.where(valid(floors), floors, _ZERO))
    first = moment.listened == np.int32(0)
    known = ~first & valid(moment.heard)
    quiet, loud = (jnp.where(known, _towards(moment.heard, old, least), old)
                   for old, least in ((state.quiet, True), (state.loud, False)))
    once = known & (moment.listened == np.int32(1)) if whole else jnp.zeros((), jnp.bool_)
    rested = jnp.where(once, _towards(moment.heard, state.rested, True), state.rested)
    # Processors and links that have rested answer later: a first reading is compared with others.
    least = jnp.where(once, jnp.minimum(rested, _RESTED * quiet), quiet)
    busy = known & (loud > _APART * least)
    halfway = moment.heard * moment.heard > least * loud
    unsure = jnp.zeros((), jnp.bool_)
    if whole:
      # Alone on the link the other's buckets queue for less time than where both sent at once.
      loudish = busy & (moment.heard > _LOUD * quiet)
      unsure = loudish & once & ~halfway
      busy &= halfway | (loudish & ~once)
    else:
      busy &= halfway

    gap = jnp.minimum(np.float32(4) * quiet + loud, _YIELD * last)
    there = ~(noticed.value(state.others) < _RARE) & (not whole)
    gap = jnp.where((at > np.int32(0)) & there & valid(gap), gap, _ZERO)
    draw = uniform(state.key, (moment.step * np.int32(1024) + at * np.int32(32)) ^ moment.listened,
                   1)
    waits = busy & (moment.held < state.patience * own)
    checks = known & (unsure | (state.doubts > np.int32(0))) & ~busy
    doubts = jnp.where(busy, np.int32(2 if whole else 1), jnp.where(
        unsure, np.int32(1), state.doubts - checks.astype(jnp.int32)))
    doubts = jnp.where(first, np.int32(0), doubts)
    again = (jnp.where(waits, np.float32(0.75) + np.float32(0.5) * draw, np.float32(0.5) * draw)
             * quiet)
    listen = acts & (first | waits | checks)
    away = jnp.where(state.aside > np.int32(0), _ASIDE * own, _ZERO) if whole else _ZERO
    seconds = jnp.where(first, gap, jnp.where(waits | checks, again, away))
    return Hold(jnp.where(acts, seconds, _ZERO), listen), state._replace(
        quiet=quiet, loud=loud, rested=rested, doubts=doubts,
        heard=state.heard | (busy & ~once))

  def update(observation: Observation, state: TakeTurns) -> tuple[Decision, TakeTurns]:
    times = by_slot(observation.job_transfers, slots)
    state = state._replace(floor=lowest.update(times, state.floor))
    floors = floors_of(state)
    sent = valid(times) & valid(floors)
    total = jnp.sum(jnp.where(sent, floors, _ZERO))
    known = total > _ZERO
    beyond = jnp.sum(jnp.where(sent, jnp.maximum(times - floors, _ZERO), _ZERO))
    held = jnp.sum(state.before)
    acted = held > _ZERO
    total = jnp.where(known, total, _ONE)
    contention = jnp.where(known, beyond / total, _NAN)
    recent = noticed.update(contention, state.recent)
    shared = sharing.update(jnp.where(acted | state.proven, _NAN, contention), state.shared)
    taken = turning.update(jnp.where(acted, contention + held / total, _NAN), state.taken)
    without, with_turns = sharing.value(shared), turning.value(taken)

    mode = state.mode
    # A trial lasts so many steps of turns: those in which a guard keeps it from them say nothing.
    since = state.since + jnp.where(mode == TRIES, acted, known).astype(jnp.int32)
    contended = noticed.value(recent) > band
    silent = mode == SILENT
    # What is known of the step just done comes sooner; of its last buckets nothing is.
    now = by_slot(observation.job_transfers_now, slots)
    late_now = jnp.where(valid(now) & valid(floors), jnp.maximum(now - floors, _ZERO), _ZERO)
    late = (contention > band) | (jnp.sum(late_now) > band * total)
    resumes = silent & state.proven & late
    notices = contended & ((silent & ~state.proven) | ((mode == RESTS) & (since >= state.rest)))
    measured = (mode == MEASURES) & (since >= np.int32(learn))
    tries = measured & (without > band)
    tried = (mode == TRIES) & (since >= np.int32(trial))
    more = contention + held / total - (no_worse * without if whole else without)
    spent = jnp.where(acted & valid(without) & known, jnp.maximum(state.spent + more, _ZERO),
                      state.spent)
    others = noticed.update(jnp.where(acted, state.heard.astype(jnp.float32), _NAN), state.others)
    # By message, jobs that were put out of each other's way hear nothing of each other.
    heard_others = (noticed.value(others) >= _RARE) | jnp.asarray(whole)
    fails = ((mode == TRIES) | (mode == TURNS)) & (spent > _BANK)
    unheard = (mode == TRIES) & (since >= np.int32(min(trial, _LONG_ENOUGH))) & ~heard_others
    fails |= (tried & ~(with_turns < no_worse * without)) | unheard
    # Nothing is gained by waiting shorter for who isn't there.
    shorter = fails & (state.patience >= most) & ~unheard
    rests = fails & ~shorter
    quiet_step = (contention < still) & ~state.heard
    less = jnp.maximum(state.calm - jnp.where(state.heard, _CALM, uncalm), np.int32(0))
    calm = jnp.where(quiet_step, jnp.minimum(state.calm + np.int32(1), _CALM), less)
    seldom = state.heard & acted & (noticed.value(others) < _SELDOM)
    aside = jnp.where(seldom, _ASIDE_STEPS, jnp.maximum(state.aside - np.int32(1), np.int32(0)))
    # By message a trial in which jobs are out of each other's way is one that pays.
    gone = ((mode == TURNS) | ((mode == TRIES) & (not whole))) & (calm >= _CALM)
    leaves = (measured & ~tries) | (gone & ~rests)

    after = jnp.where(notices, MEASURES, jnp.where(tries | shorter, TRIES, jnp.where(
        rests, RESTS, jnp.where(leaves, SILENT, jnp.where(tried | resumes, TURNS, mode)))))
    changed = (after != mode) | shorter
    rest = jnp.where(rests, jnp.minimum(state.rest * np.int32(2), _LONGEST_REST), state.rest)
    # What has paid is tried again sooner: another job's guard keeps it from turns now and then.
    rest = jnp.where(leaves, np.int32(half), jnp.where(after == TURNS, np.int32(sooner), rest))
    begins = rests | (leaves & ~state.proven) | notices
    proven = whole & (state.proven | (tried & ~fails)) & ~fails & ~notices
    own_patience = jnp.where(shorter, _SHORTER * most, jnp.where(begins, most, state.patience))
    none = jnp.zeros((slots,), jnp.float32)
    holds = (none if isinstance(observation.holds, tuple)
             else by_slot(observation.holds, slots))
    turns = (after == TRIES) | (after == TURNS)
    info = {"contention": contention, "turns": turns.astype(jnp.float32), "sharing_cost": without,
            "turns_cost": with_turns}
    return Decision(jnp.float32(0), info), state._replace(
        heard=jnp.zeros_like(state.heard), mode=after, since=jnp.where(changed, np.int32(0), since),
        patience=own_patience, rest=rest, recent=recent,
        shared=pick(notices, sharing.init(), shared),
        taken=pick(tries | shorter, turning.init(), taken),
        spent=jnp.where(shorter, np.float32(0.5) * _BANK, jnp.where(tries | resumes, _ZERO, spent)),
        others=pick(tries, noticed.init(), others), before=jnp.where(valid(holds), holds, _ZERO),
        calm=jnp.where(changed, np.int32(0), calm), proven=proven,
        aside=aside if whole else state.aside)

  return Pacer(init, update, hold)


def _towards(reading: jax.Array, old: jax.Array, least: bool) -> jax.Array:
  """The least of readings, or the most, which is slowly forgotten: [] float32 s."""
  moved = old + _LEAK * (reading - old)
  return jnp.where(jnp.isnan(old), reading,
                   jnp.minimum(reading, moved) if least else jnp.maximum(reading, moved))
