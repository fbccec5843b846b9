"""Plays steps whose micro-batches are shared out by a balancer: the very `update` of the live step,
over given speeds.

    A[r,k] = rest[r,k] + n[r,k] s[r,k]        t[k] = max over ranks of A[r,k] + C[k]

n changes every fourth step only, to what the balancer answered 13 steps before, as live
(`jaxpace.live.speeds`); s is a rank's time for a micro-batch, rest what it does besides.

`replay_balancer` does so over the ranks' recorded speeds.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpace.coordination.apportion import even
from jaxpace.core.pacing import decide_counts
from jaxpace.core.types import Balancer, Observation
from jaxpace.runs.run import Run, RunError
from jaxpace.simulation.observed import observe, timestamped_alone

_NAN = np.float32(np.nan)
_EVERY, _LAG = 4, 13
"""Steps from one change of the counts to the next, and from the last step that the balancer has
seen to the first that runs its answer."""


class Played(NamedTuple):
  """K steps of R ranks."""

  counts: np.ndarray  # [K, R] int32, micro-batches run
  seconds: np.ndarray  # [K] float64 s, duration of each step; NaN where a speed is not known
  even: np.ndarray  # [K] float64 s, with even counts
  state: Any  # the balancer's, after the last step

  @property
  def speedup(self) -> float:
    """Mean step with even counts over mean step with these, of the steps known."""
    known = np.isfinite(self.seconds)
    return (float(self.even[known].sum() / self.seconds[known].sum()) if known.any()
            else float("nan"))

  @property
  def changes(self) -> int:
    """Steps whose counts are others than those of the step before."""
    return int((self.counts[1:] != self.counts[:-1]).any(axis=1).sum())


def play(balancer: Balancer, seconds: np.ndarray, rest: np.ndarray | float = 0.0,
         transfer: np.ndarray | float = 0.0) -> Played:
  """Plays a job whose counts a balancer says.

  Args:
    seconds: [K, R] s, time for one micro-batch of each rank in each step; NaN where not known.
    rest: [K, R] s or one for all, what a rank does in a step besides.
    transfer: [K] s or one for all, the collective.

  Returns:
    What happened, step by step.
  """
  steps, ranks = seconds.shape
  equal = even(balancer.micro_batches, ranks)
  work = np.asarray(seconds, np.float32)
  others = np.broadcast_to(np.asarray(rest, np.float32), work.shape)
  message = np.broadcast_to(np.asarray(transfer, np.float32), (steps,))
  rows = (np.arange(steps, dtype=np.int32), work, others, message)
  state, (counts, took) = _compiled(balancer)(
      balancer.init(ranks), np.tile(np.asarray(equal, np.int32), (_LAG, 1)), rows)
  with np.errstate(invalid="ignore"):
    alike = (others.astype(np.float64) + work.astype(np.float64) * equal).max(axis=1) + message
  return Played(np.asarray(counts), np.asarray(took, np.float64), alike,
                jax.tree.map(np.asarray, state))


@functools.lru_cache(maxsize=8)
def _compiled(balancer: Balancer) -> Any:
  """A program that plays all steps; the same for all runs of as many."""
  def step(carry: Any, row: Any) -> Any:
    # Answers after each of the last steps, [_LAG, R], oldest first; and the counts in force.
    state, answers, counts = carry
    number, each, besides, sent = row
    ran = jnp.where(number % np.int32(_EVERY) == 0, answers[0], counts)
    arrivals = besides + each * ran.astype(jnp.float32)
    took = jnp.max(arrivals) + sent
    # As live: steps that ran older counts say nothing of these.
    known = jnp.where(jnp.all(ran == answers[-1]), arrivals, _NAN)
    seen = Observation(
        step=number, rank=jnp.int32(0), arrivals=known, delays=jnp.zeros_like(arrivals),
        waits=(took - arrivals[0])[None], step_time=took, job_step_time=took,
        job_transfers=jnp.full((1,), _NAN), counts=ran)
    wanted, after = decide_counts(balancer, seen, state)
    # Counts that can't be are left out.
    possible = jnp.all(wanted >= 0) & (jnp.sum(wanted) == np.int32(balancer.micro_batches))
    answers = jnp.concatenate([answers[1:], jnp.where(possible, wanted, answers[-1])[None]])
    return (after, answers, ran), (ran, took)

  def run(state: Any, answers: jax.Array, rows: Any) -> Any:
    (after, _, _), out = jax.lax.scan(step, (state, answers, answers[0]), rows)
    return after, out

  return jax.jit(run)


CANNOT_KNOW = (
    "What part of a rank's busy time is micro-batches: all of it is taken to be, so what does not "
    "move (the optimizer, the input pipeline) makes the true gain smaller.",
    "What a rank would do otherwise with fewer micro-batches: its time for each is taken as "
    "recorded in that step.",
    "Transfers: they stay as recorded.",
)


def replay_balancer(run: Run, balancer: Balancer, ranks: np.ndarray, counted: np.ndarray
                    ) -> dict[str, Any] | None:
  """Plays the counted steps of a run with even counts, [K] bool, again, its work shared out by a
  balancer among the recorded ranks along one data axis, by their index along it. Returns figures of
  the document of `jaxpace replay --balancer --json`: seconds; None where no step counts. Raises
  RunError where counts were uneven in a step when it was recorded, or no collective was
  timestamped."""
  run = timestamped_alone(run)
  if not run.collectives:
    raise RunError(
        f"{run.path} holds no collective with timestamps: without entries and exits no rank's busy "
        "time is known.")
  uneven = run.guard.get("work_uneven", np.ones(1))
  if "micro_batches" in run.plan.get("decisions", ()) and (uneven > 0.5).any():
    raise RunError(f"The work of {run.path} was shared by speed when it was recorded: what it "
                   "would have gained shows in steps with even counts, --steps=A:B. Its own effect "
                   "is in the report where it was guarded.")
  seen = observe(run, ranks, 1, slice(0, len(run.steps)))
  share = balancer.micro_batches / len(ranks)
  arrivals = seen.arrivals.astype(np.float64)
  known = np.isfinite(arrivals).all(axis=1) & np.isfinite(seen.step_time).all(axis=1)
  rest = np.where(known, seen.step_time.mean(axis=1) - arrivals.max(axis=1), 0.0)
  # The ranks of a job whose micro-batches don't come out even differ by one: as if they did.
  played = play(balancer, arrivals / share, transfer=np.maximum(rest, 0.0))
  mask = known & counted & np.isfinite(played.seconds)
  if not mask.any():
    return None
  even = arrivals[mask].max(axis=1) + np.maximum(rest[mask], 0.0)
  recorded, shared = float(even.mean()), float(played.seconds[mask].mean())
  return {"ranks": len(ranks), "steps": int(mask.sum()),
          "step_time": {"recorded": recorded, "with": shared}, "speedup": recorded / shared,
          "changes": played.changes, "counts": played.counts[-1].tolist(),
          "cannot_know": list(CANNOT_KNOW)}
