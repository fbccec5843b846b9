"""Jobs that share one link and hold their collectives back for each other: `Pacer.hold`, as it runs
live.

What each job computes is drawn beforehand (`Drawn`), for turns change only when it sends. Each
bucket is asked about when the one before it is over, waits until it is ready and as long as it is
held, listens if so asked, is asked about again, and is sent:

    begins[b] = max(ready[b], over + seconds)        over: the job's last collective, or listening, was over

Jobs that send at once slow each other down: by `speeds`, one number for each number of senders.
Listening takes a small time of its own that slows nobody; it takes longer while somebody sends, and
sometimes it is mistaken.

As all ranks of a job hold alike, a job is one; its `ready` is its last rank's. Scenes (W of them)
run side by side in one loop of events; times are float32 seconds since the job's last exit, never
since the run began.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpace.core import pacing
from jaxpace.core.types import Decision, Hold, Moment, Observation, Pacer

_ZERO, _ONE, _NAN = np.float32(0), np.float32(1), np.float32(np.nan)
_EDGE = np.float32(1e-7)
"""s: what rounding leaves of a phase."""
_WAITS, _LISTENS, _SENDS = np.int32(0), np.int32(1), np.int32(2)


class Drawn(NamedTuple):
  """What the jobs of one scene do, each by itself. J jobs, K steps (after which they begin again),
  B buckets."""

  ready: Any  # [J, K, B] float32 s after the last exit: when each bucket could be sent
  work: Any  # [J, K, B] float32 s, each bucket's own time on a quiet link
  start: Any  # [J] float32 s, idle before the first step
  speeds: Any  # [J] float32, speed of each sender, as a share of its own, while 1, 2, ... J send
  tiny: Any  # [J] float32 s, what listening takes on a quiet link
  obeys: Any  # [J] bool, whether what the pacer asks is done
  # [J, K, B] float32 s that a bucket takes longer if it begins while another job sends: messages
  # dropped where buffers are full, and sent again. () for none
  crowded: Any = ()


class Ear(NamedTuple):
  """What a job hears of the link: float32 numbers, the same for all jobs."""

  busy: Any = 4.0  # how many times as long listening takes while another job sends
  scatter: Any = 0.2  # deviation of its logarithm
  wrong: Any = 0.02  # chance that it tells of the other state of the link


class Turns(NamedTuple):
  """What happened: [W, J, K] float32; NaN where a job did not get that far. K steps asked for."""

  step_time: Any  # s, exit to exit, delay included; the first one without `start`
  sent: Any  # s, from each bucket's beginning to its end, all buckets
  held: Any  # s, asked for and listened, all buckets
  listened: Any  # times
  info: dict[str, Any]  # the pacer's columns, decided after the step


class _State(NamedTuple):
  """One scene. [J] but where said."""

  phase: jax.Array  # int32
  left: jax.Array  # float32 s of waiting or listening, or of sending at full speed
  clock: jax.Array  # float32 s since the last exit
  step: jax.Array  # int32
  bucket: jax.Array  # int32
  begun: jax.Array  # float32 s, when the bucket under way began
  listen: jax.Array  # bool, whether it listens when the wait is over
  asked: jax.Array  # float32 s, of the wait
  moment: Moment
  delay: jax.Array  # float32 s, of this step
  times: jax.Array  # [J, B] float32 s, of this step's buckets
  holds: jax.Array  # [J, B] float32 s
  before: jax.Array  # [J, B] float32 s, bucket times of the step before
  time_before: jax.Array  # float32 s
  pacer: Any


def simulator(pacer: Pacer, steps: int, *, max_hold: float = 10.0, max_delay: float = 10.0
              ) -> Callable[[jax.Array, Drawn, Ear, Any], Turns]:
  """Makes the simulation of W scenes.

  Args:
    pacer: of all jobs; each has a state of its own, so they may differ in keys.
    steps: to be kept; a scene is over when its first job has done them.
    max_hold: s, in a step, as in `jaxpace.instrument`.
    max_delay: s, likewise.

  Returns:
    A function (key, drawn [W, ...], ear, states [J, ...] of the pacer) -> what happened, for
    `jax.jit`. The same key gives every scene the same luck in listening.
  """

  def hold(moment: Moment, state: Any) -> tuple[Hold, Any]:
    if pacer.hold is None:
      return Hold(jnp.float32(0), jnp.zeros((), jnp.bool_)), state
    return pacing.hold_back(pacer, moment, state, max_hold)

  def begin(drawn: Drawn, states: Any) -> _State:
    jobs, _, buckets = drawn.work.shape
    zero, none = jnp.zeros((jobs,), jnp.float32), jnp.zeros((jobs,), jnp.int32)
    unknown = jnp.full((jobs, buckets), _NAN)
    state = _State(
        phase=none, left=zero, clock=-drawn.start, step=none, bucket=none, begun=zero,
        listen=jnp.zeros((jobs,), bool), asked=zero,
        moment=jax.vmap(pacing.before_collective)(none, none, zero), delay=zero, times=unknown,
        holds=jnp.zeros((jobs, buckets), jnp.float32), before=unknown,
        time_before=jnp.full((jobs,), _NAN), pacer=states)
    every = jnp.ones((jobs,), bool)
    state = _ask(drawn, state, every)
    # Nothing is held before the first step, which has no exit to count from.
    return state._replace(left=drawn.ready[:, 0, 0] + drawn.start)

  def _ask(drawn: Drawn, state: _State, who: jax.Array) -> _State:
    """Asks the pacers of some jobs about their bucket, and begins to wait for it."""
    asked, after = jax.vmap(hold)(state.moment, state.pacer)
    obeys = drawn.obeys
    seconds, listen = jnp.where(obeys, asked.seconds, _ZERO), obeys & asked.listen
    each = jnp.arange(state.step.shape[0])
    ready = (drawn.ready[each, state.step % np.int32(drawn.work.shape[1]), state.bucket]
             + state.delay)
    # A bucket's first wait is counted from the last exit, which was just now, as is all listening's
    # end.
    left = jnp.maximum(jnp.maximum(ready - state.clock, seconds), _ZERO)
    again = state.moment.listened > np.int32(0)
    left = jnp.where(again, seconds, left)
    def choose(new: jax.Array, old: jax.Array) -> jax.Array:
      return jnp.where(who.reshape(-1, *[1] * (new.ndim - 1)), new, old)

    return state._replace(
        phase=choose(jnp.full_like(state.phase, _WAITS), state.phase),
        left=choose(left, state.left), listen=choose(listen, state.listen),
        asked=choose(seconds, state.asked), pacer=jax.tree.map(choose, after, state.pacer))

  def turn(key: jax.Array, drawn: Drawn, ear: Ear, state: _State) -> tuple[_State, Any]:
    jobs, most, buckets = drawn.work.shape
    each, slots = jnp.arange(jobs), jnp.arange(buckets, dtype=jnp.int32)
    sending = state.phase == _SENDS
    senders = jnp.sum(sending)
    speed = jnp.where(sending, drawn.speeds[jnp.maximum(senders - 1, 0)], _ONE)
    wait = jnp.min(state.left / speed)
    clock, left = state.clock + wait, state.left - wait * speed
    ended = left <= _EDGE
    work = drawn.work[each, state.step % np.int32(most)]
    own = work[each, state.bucket]
    others = senders - sending.astype(jnp.int32) > 0
    if not isinstance(drawn.crowded, tuple):
      extra = drawn.crowded[each, state.step % np.int32(most), state.bucket]
      own = own + jnp.where(others, extra, _ZERO)

    # A wait is over: listen, or send.
    waited = ended & (state.phase == _WAITS)
    hears, sends = waited & state.listen, waited & ~state.listen
    luck = jax.random.normal(key, (jobs,)), jax.random.uniform(jax.random.fold_in(key, 1), (jobs,))
    loud = others ^ (luck[1] < ear.wrong)
    heard = drawn.tiny * jnp.where(loud, ear.busy, _ONE) * jnp.exp(ear.scatter * luck[0])
    moment = state.moment
    moment = jax.tree.map(lambda new, old: jnp.where(hears, new, old),
                          jax.vmap(pacing.listened)(moment, Hold(state.asked, state.listen), heard),
                          moment)
    final = jnp.where(sends, state.asked, _ZERO)
    moment = moment._replace(held=moment.held + final, step_held=moment.step_held + final)
    begun = jnp.where(sends, clock, state.begun)
    here = slots[None] == state.bucket[:, None]
    holds = jnp.where(here & sends[:, None], moment.held[:, None], state.holds)

    # Listening is over: ask again. A bucket is over: the next one, or the next step.
    heard_it = ended & (state.phase == _LISTENS)
    sent = ended & sending
    times = jnp.where(here & sent[:, None], (clock - state.begun)[:, None], state.times)
    over = sent & (state.bucket == np.int32(buckets - 1))
    seen = Observation(
        step=state.step, rank=jnp.zeros_like(state.step),
        arrivals=(drawn.ready[each, state.step % np.int32(most), 0])[:, None],
        delays=state.delay[:, None], waits=times, step_time=clock, job_step_time=state.time_before,
        job_transfers=state.before, job_transfers_now=jnp.where(slots < buckets - 1, times, _NAN),
        holds=holds)
    decision, after = jax.vmap(lambda seen, pacer_state: pacing.decide(pacer, seen, pacer_state))(
        seen, state.pacer)
    delay = jnp.where(drawn.obeys, jnp.clip(decision.delay, _ZERO, np.float32(max_delay)), _ZERO)
    row = (over, state.step, clock, jnp.sum(times, axis=1), jnp.sum(holds, axis=1), decision.info)

    def at_end(new: jax.Array, old: jax.Array) -> jax.Array:
      return jnp.where(over.reshape(-1, *[1] * (new.ndim - 1)), new, old)

    first = state.step == np.int32(0)
    step = state.step + over.astype(jnp.int32)
    bucket = jnp.where(over, np.int32(0), state.bucket + sent.astype(jnp.int32))
    spent = jnp.where(over, _ZERO, moment.step_held)
    fresh = jax.vmap(pacing.before_collective)(step, bucket, spent)
    state = state._replace(
        phase=jnp.where(hears, _LISTENS, jnp.where(sends, _SENDS, state.phase)),
        left=jnp.where(hears, heard, jnp.where(sends, own, left)),
        clock=jnp.where(over, _ZERO, clock), step=step, bucket=bucket, begun=begun,
        moment=jax.tree.map(lambda new, old: jnp.where(sent, new, old), fresh, moment),
        delay=at_end(delay, state.delay), times=at_end(jnp.full_like(times, _NAN), times),
        holds=at_end(jnp.zeros_like(holds), holds), before=at_end(times, state.before),
        time_before=at_end(jnp.where(first, _NAN, clock), state.time_before),
        pacer=jax.tree.map(at_end, after, state.pacer))
    return _ask(drawn, state, heard_it | sent), row

  def run(key: jax.Array, drawn: Drawn, ear: Ear, states: Any) -> Turns:
    scenes, jobs = drawn.start.shape
    state = jax.vmap(begin, in_axes=(0, None))(drawn, states)
    step = jax.vmap(turn, in_axes=(None, 0, None, 0))
    blank = jnp.full((scenes, jobs, steps), _NAN)
    names = jax.eval_shape(step, key, drawn, ear, state)[1][-1]
    scene, job = jnp.arange(scenes)[:, None], jnp.arange(jobs)[None]

    def body(carry: Any) -> Any:
      count, state, kept, listened = carry
      listened = listened + (state.phase == _LISTENS).astype(jnp.float32)
      state, (over, number, took, sent, held, info) = step(jax.random.fold_in(key, count), drawn,
                                                           ear, state)
      place = jnp.where(over, number, np.int32(steps))

      def keep(old: jax.Array, new: jax.Array) -> jax.Array:
        return old.at[scene, job, place].set(new, mode="drop")

      values = Turns(took, sent, held, listened, info)
      return count + 1, state, jax.tree.map(keep, kept, values), jnp.where(over, _ZERO, listened)

    kept = Turns(blank, blank, blank, blank, dict.fromkeys(names, blank))
    carry = (jnp.int32(0), state, kept, jnp.zeros((scenes, jobs), jnp.float32))
    return jax.lax.while_loop(lambda c: jnp.any(c[1].step[:, 0] < np.int32(steps)), body, carry)[2]

  return run


def nothing() -> Pacer:
  """Returns a pacer that never asks for anything: every bucket is sent as soon as it is ready."""
  return Pacer(lambda ranks: (), lambda seen, state: (Decision(jnp.float32(0), {}), state))
