"""A fluid model of training jobs that share one link: compute, then all-reduce, over and over.

Each job computes, then sends its buckets one after the other over the link, whose capacity the jobs
that are sending share at every instant: equally (what per-flow fair queueing and TCP tend to), or
in proportion to a weight that grows with what a job has sent of its collective (after "MLTCP:
Congestion Control for DNN Training", 2024: 0.25 + 1.75 times the share sent), or falls with it, as
was measured over TCP, which draws jobs together. One link, one number a job: no packets, no round
trips, no losses. A step's delay is what the job's pacer asked after the step before, from the
library's own `Pacer.update`, fed as in a live step: it sees the bucket times of the step just done
but for the last one's, which carries them, and those of the step before.

`jaxpace.simulation.jobs` is the model to use for whole jobs: ranks with noise of their own, several
links, a fabric, runs that are recorded. Its jobs compete by weights that stay as they are; what is
here and not there is a weight that changes while a collective is sent, factors on what pacers see,
and what of the step just done they are shown. Where both apply, equal shares of one link, they
agree: a test holds one against the other.

Event-driven inside one compiled loop: from one end of a phase to the next. Times are float32
seconds since the phase began, never since the run began.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpace.core.types import Decision, Observation, Pacer

_ZERO, _ONE, _NAN = np.float32(0), np.float32(1), np.float32(np.nan)
_EDGE = np.float32(1e-6)
"""Work below this is done: what rounding leaves of a phase of the order of a second."""

LIVE, LATE, AT_ONCE = "live", "late", "at once"
"""What pacers are shown of the step just done: all buckets but the last, none, all."""


class Jobs(NamedTuple):
  """What runs: `J` jobs, `N` steps of which figures are kept, `S` buckets a collective."""

  # [J, N] float32 s, from exit to enter, its jitter included; the last one goes on
  compute: jax.Array
  work: jax.Array  # [J, N, S] float32 s, each bucket on a quiet link
  noise: jax.Array  # [J, N, S] float32, factor on bucket times as the pacer sees them
  start: jax.Array  # [J] float32 s, idle before the first step
  steps: jax.Array  # [J] int32, steps after which a job leaves
  paced: jax.Array  # [J] bool, whether the pacer's delays are applied


class History(NamedTuple):
  """What happened: NaN where a job did not get that far."""

  # [J, N] float32 s, exit to exit, delay included; the first one without `start`
  step_time: jax.Array
  delay: jax.Array  # [J, N] float32 s, applied at the start of the step
  comm: jax.Array  # [J, N] float32 s, all buckets
  info: dict[str, jax.Array]  # [J, N] float32, the pacer's columns, decided after the step


class _State(NamedTuple):
  phase: jax.Array  # [J] int32, 0 computing, s + 1 sending bucket s
  left: jax.Array  # [J] float32 s of work on a quiet link
  busy: jax.Array  # [J] float32 s in the phase so far
  taken: jax.Array  # [J] float32 s in the step so far
  step: jax.Array  # [J] int32, steps done
  delay: jax.Array  # [J] float32 s, of the present step
  now: jax.Array  # [J, S] float32 s, bucket times of the present step
  before: jax.Array  # [J, S] float32 s, of the step before, as seen
  time_before: jax.Array  # [J] float32 s, of the step before; NaN unknown
  pacer: Any
  history: History
  events: jax.Array  # [] int32


def fair(sent: jax.Array) -> jax.Array:
  """Equal shares: [J] share of the collective sent -> [J] weight."""
  return jnp.ones_like(sent)


def mltcp(sent: jax.Array) -> jax.Array:
  """The weight grows with the bytes sent: 0.25 + 1.75 times the share; the slope and intercept of
  MLTCP-Reno."""
  return np.float32(0.25) + np.float32(1.75) * sent


def drawn(sent: jax.Array) -> jax.Array:
  """The weight falls with the bytes sent: 1 + 0.75 times the share that is left.

  As `experiments.labs.fabric.attraction` fits it to real TCP: 0.65 to 0.8 with cubic, bbr and reno.
  """
  return _ONE + np.float32(0.75) * (_ONE - sent)


def nothing() -> Pacer:
  """A pacer that never asks for a delay."""
  return Pacer(lambda ranks: (), lambda seen, state: (Decision(jnp.float32(0), {}), state))


def stack(pacers: list[Any]) -> Any:
  """Pacer states of several jobs, one leading axis: what `simulator` carries."""
  return jax.tree.map(lambda *leaves: jnp.stack([jnp.asarray(leaf) for leaf in leaves]), *pacers)


def simulator(update: Callable[..., Any], weight: Callable[[jax.Array], jax.Array] = fair,
              shown: str = LIVE
              ) -> Callable[[Jobs, Any], History]:
  """Makes the simulation of one scene, for `jax.jit` and `jax.vmap`.

  Args:
    update: of a `Pacer`; the same for all jobs, each with its own state.
    weight: share of the collective sent [J] -> weight on the link [J].
    shown: which bucket times of the step just done pacers see, beside those of the step before:
      `LIVE`, `LATE` or `AT_ONCE`, which no message of a live step can show them.

  Returns:
    A function (jobs, pacer states with a leading axis [J]) -> history.
  """

  def run(jobs: Jobs, pacer: Any) -> History:
    count, most, buckets = jobs.work.shape
    each = jnp.arange(count, dtype=jnp.int32)
    slots = jnp.arange(buckets, dtype=jnp.int32)
    over = np.asarray({LIVE: np.arange(buckets) < buckets - 1, LATE: np.zeros(buckets, bool),
                       AT_ONCE: np.ones(buckets, bool)}[shown])

    def observe(state: _State, step_time: jax.Array, first: jax.Array) -> Observation:
      place = jnp.clip(state.step, 0, most - 1)
      return Observation(
          step=state.step, rank=jnp.zeros_like(state.step),
          arrivals=jnp.where(first, _NAN, jobs.compute[each, place])[:, None],
          delays=state.delay[:, None], waits=state.now, step_time=jnp.where(first, _NAN, step_time),
          job_step_time=state.time_before, job_transfers=state.before,
          job_transfers_now=jnp.where(over, state.now * jobs.noise[each, place], _NAN))

    def turn(state: _State) -> _State:
      place = jnp.clip(state.step, 0, most - 1)
      sending = state.phase > np.int32(0)
      sizes = jobs.work[each, place]  # [J, S]
      begun = slots[None] < (state.phase - np.int32(1))[:, None]
      done = jnp.sum(jnp.where(begun, sizes, _ZERO), axis=1)
      total = jnp.sum(sizes, axis=1)
      own = sizes[each, jnp.maximum(state.phase - np.int32(1), np.int32(0))]
      weights = jnp.where(sending, weight((done + own - state.left) / total), _ZERO)
      rate = jnp.where(sending, weights / jnp.maximum(jnp.sum(weights), _EDGE), _ONE)
      wait = jnp.min(state.left / rate)
      left = state.left - wait * rate
      finished = (left <= _EDGE) & (state.step < jobs.steps)
      busy, taken = state.busy + wait, state.taken + wait

      last = finished & (state.phase == np.int32(buckets))
      ended = (slots[None] == (state.phase - np.int32(1))[:, None]) & finished[:, None]
      now = jnp.where(ended, busy[:, None], state.now)
      state = state._replace(now=now, taken=taken)
      seen = observe(state, taken, state.step == np.int32(0))
      decision, after = jax.vmap(update)(seen, state.pacer)
      delay = jnp.where(jobs.paced, decision.delay, _ZERO)

      def keep(old: jax.Array, new: jax.Array) -> jax.Array:
        return old.at[each, jnp.where(last, state.step, np.int32(most))].set(new, mode="drop")

      history = History(
          keep(state.history.step_time, taken), keep(state.history.delay, state.delay),
          keep(state.history.comm, jnp.sum(now, axis=1)),
          {name: keep(old, decision.info[name]) for name, old in state.history.info.items()})
      step = jnp.where(last, state.step + np.int32(1), state.step)
      delay = jnp.where(last, delay, state.delay)
      phase = jnp.where(last, np.int32(0), state.phase + finished.astype(jnp.int32))
      place = jnp.clip(step, 0, most - 1)
      bucket = jobs.work[each, place, jnp.clip(phase - np.int32(1), 0, buckets - 1)]
      following = jnp.where(phase == np.int32(0), delay + jobs.compute[each, place], bucket)
      following = jnp.where(step >= jobs.steps, np.float32(np.inf), following)
      return _State(
          phase=phase, left=jnp.where(finished, following, left),
          busy=jnp.where(finished, _ZERO, busy), taken=jnp.where(last, _ZERO, taken), step=step,
          delay=delay, now=jnp.where(last[:, None], _NAN, now),
          before=jnp.where(last[:, None], now * jobs.noise[each, jnp.clip(state.step, 0, most - 1)],
                           state.before),
          time_before=jnp.where(last, jnp.where(state.step == np.int32(0), _NAN, taken),
                                state.time_before),
          pacer=jax.tree.map(lambda new, old: jnp.where(last.reshape(-1, *[1] * (new.ndim - 1)),
                                                        new, old), after,
                             state.pacer),
          history=history, events=state.events + np.int32(1))

    def unfinished(state: _State) -> jax.Array:
      wanted = jnp.minimum(jobs.steps, np.int32(most))
      return (jnp.any(state.step < wanted)
              & (state.events < np.int32(8 * count * most * (1 + buckets))))

    blank = jnp.full((count, most), _NAN)
    unknown = jnp.full((count, buckets), _NAN)
    zeros = jnp.zeros((count,), jnp.float32)
    state = _State(
        phase=jnp.zeros((count,), jnp.int32), left=jobs.start + jobs.compute[:, 0], busy=zeros,
        taken=-jobs.start, step=jnp.zeros((count,), jnp.int32), delay=zeros, now=unknown,
        before=unknown, time_before=jnp.full((count,), _NAN), pacer=pacer,
        history=History(blank, blank, blank, {}), events=jnp.int32(0))
    info = jax.eval_shape(jax.vmap(update), observe(state, zeros, zeros > _ZERO), pacer)[0].info
    state = state._replace(history=History(blank, blank, blank, dict.fromkeys(info, blank)))
    return jax.lax.while_loop(unfinished, turn, state).history

  return run


def scene(seed: int, periods: list[float], fractions: list[float], *, steps: int, buckets: int = 8,
          jitter: float = 0.0, noise: float = 0.0, together: bool = False,
          leaves: dict[int, int] | None = None, unpaced: tuple[int, ...] = ()) -> Jobs:
  """Draws a scene.

  Args:
    seed: of starts, jitter and noise; the same seed gives the same to every control.
    periods: s, of each job alone.
    fractions: of that, communication.
    steps: kept for each job.
    buckets: of equal size.
    jitter: standard deviation of the compute time, as a share of the period; never below a tenth of
      the compute time.
    noise: standard deviation of the logarithm of bucket times as the pacer sees them.
    together: all start at once; else each at a uniform instant of its period.
    leaves: job -> steps after which it leaves.
    unpaced: jobs whose delays are not applied.
  """
  rng = np.random.default_rng([seed, len(periods)])
  count = len(periods)
  period, share = np.asarray(periods)[:, None], np.asarray(fractions)[:, None]
  start = np.zeros(count) if together else rng.random(count) * period[:, 0]
  compute = (1 - share) * period + jitter * period * rng.normal(size=(count, steps))
  work = np.broadcast_to((share * period / buckets)[..., None], (count, steps, buckets))
  seen = np.exp(noise * rng.normal(size=(count, steps, buckets)))
  until = np.asarray([(leaves or {}).get(job, 2**30) for job in range(count)], np.int32)
  return Jobs(
      jnp.asarray(np.maximum(compute, 0.1 * (1 - share) * period), jnp.float32),
      jnp.asarray(work, jnp.float32), jnp.asarray(seen, jnp.float32),
      jnp.asarray(start, jnp.float32), jnp.asarray(until),
      jnp.asarray([job not in unpaced for job in range(count)]))
