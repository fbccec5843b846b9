"""Runs a pacer over a recorded run: the very `Pacer.update` and `Pacer.hold` of the live step, over
the max-plus model of a step.

    t[k+1] = max over ranks of (t[k] + A[r] + d[r]) + H + C

A (undelayed arrivals) and C (the rest of the step) are as recorded, d is what the pacer asks, and H
by how much its holds lengthen the step (`jaxpace.simulation.observed`). In this model nothing a
rank does makes another one faster: delays can only cost, by L = max(A + d) - max(A) a step, and holds
by H.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpace.core import pacing
from jaxpace.core.durations import bounded, latest, valid
from jaxpace.core.types import Pacer
from jaxpace.runs.run import MISSING, Run, RunError
from jaxpace.simulation import observed
from jaxpace.simulation.observed import ObservedSteps, observe, timestamped_alone

_CHUNK_CELLS = 1 << 18
_NAN = np.float32(np.nan)

Progress = Callable[[int, int], None]


class Replayed(NamedTuple):
  """A pacer's decisions over a recorded run, and what they would have done. K steps, R ranks."""

  steps: np.ndarray  # [K] int64, step numbers
  # [K, R] float32 s, asked for that step: decided after the step before; never above max_delay
  delays: np.ndarray
  # [K] bool: the arrival of every rank that was ever recorded is known: the step can be played
  # again
  known: np.ndarray
  # [K] float64 s, mean over ranks of the recorded step; NaN where none is known
  recorded: np.ndarray
  # [K] float64 s, the same without the delays and holds of when it was recorded; NaN unless known
  bare: np.ndarray
  cost: np.ndarray  # [K] float64 s, L of the replayed delays; NaN unless known
  hold_cost: np.ndarray  # [K] float64 s, H of the replayed holds; NaN unless known
  agrees: np.ndarray  # [K, R] bool: the delay is the one recorded as asked for
  # [K, R] float32, the pacer's own, made after that step with the next one's delay
  columns: dict[str, np.ndarray]
  # [K, S], the first rank's, which are all ranks': what `hold` asked for, and how often it listened
  holds: observed.Answers
  # [K, S] bool: these are as recorded; False where it wasn't asked here or there
  holds_agree: np.ndarray
  # [K, S] bool: the record says that it was asked, and its answer followed
  holds_recorded: np.ndarray
  # [K] int64: readings on record
  readings: np.ndarray


_Carry = tuple[Any, Any, Any, Any]
"""The pacer's states, every leaf [R, ...]; [R] float32 s, asked for the step to come; [R] float32
s, own step time, and [R, S] float32 s, own estimates of transfers, of the step before."""


def replay(run: Run, pacer: Pacer, *, ranks: Sequence[int] | np.ndarray | None = None,
           max_delay: float = 0.25, slots: int = 16, shared: bool = True, as_recorded: bool = False,
           progress: Progress | None = None, max_hold: float = 0.25
           ) -> Replayed:
  """Runs a pacer over a recorded run.

  Every rank's pacer starts with the run, in the state that `init` makes. What was applied and held
  when the run was recorded is taken out of it: the pacer sees undelayed arrivals, its own delays
  and holds, and waits and step times as these would make them.

  A pacer with a `hold` is asked before each collective that could be held back, in each step in
  which it was allowed to, and hears the readings on record before that collective, as long as there
  are any; what it wants to hear beyond is NaN.

  Args:
    run: the recorded run.
    pacer: what to run.
    ranks: the recorded ranks along one data axis, by their index along it; all by default.
    max_delay: s, the limit of `jaxpace.instrument`: longer delays are cut.
    slots: slots of the waits a pacer sees.
    shared: whether every rank sees all ranks' arrivals and delays, or only its own.
    as_recorded: show the pacer what was really observed, the recorded delays and holds included,
      instead of what its own would have made of it. The same pacer then decides as it did live.
      Where the record does not say before which collectives it was asked, it is not asked.
    progress: called with the steps played and their number.
    max_hold: s per step, the limit of `jaxpace.instrument`.

  Returns:
    What it would have done, step by step.

  Raises:
    RunError: no collective was timestamped, so there are no arrivals.
    ValueError: the pacer doesn't return what a pacer must.
  """
  run = timestamped_alone(run)
  if not run.collectives:
    raise RunError(f"{run.path} holds no collective with timestamps: without entries and exits "
                   "there are no arrivals to show a pacer. The report's notes say why none has "
                   "timestamps.")
  ranks = np.arange(run.ranks) if ranks is None else np.asarray(ranks)
  count, total = len(ranks), len(run.steps)
  timestamped = np.zeros(slots, bool)
  timestamped[[c.slot for c in run.collectives if c.slot < slots]] = True
  # Where nothing is shared nothing is held, live as here.
  asks = pacer.hold is not None and shared and (observed.was_asked(run) or not as_recorded)
  may = [c.slot for c in run.collectives if c.slot < slots and not c.may_begin_early]
  ask = observed.asker(pacer, sorted(may), slots, max_hold) if asks else None
  states = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (count, *jnp.shape(leaf))),
                        pacer.init(count))
  carry = (states, jnp.zeros(count, jnp.float32), jnp.full(count, _NAN),
           jnp.full((count, slots), _NAN))
  over = timestamped & pacing.over_before(_carrier(run), slots)
  play = jax.jit(_player(pacer, count, timestamped, over, np.float32(max_delay), shared,
                         as_recorded, ask, run.collectives[0].slot))
  there: np.ndarray = np.any(run.attempt[ranks] >= 0, axis=1)
  parts, width = [], max(64, _CHUNK_CELLS // count)
  places = observed.most_readings(run)
  for begin in range(0, total, width):
    part = slice(begin, min(begin + width, total))
    seen = observe(run, ranks, slots, part)
    held = observed.on_record(run, ranks, slots, part, places)
    carry, found = play(carry, seen._replace(record=held))
    asked, delays, columns, answers = jax.tree.map(np.asarray, found)
    parts.append(_judge(seen, there, asked, delays, columns, answers, held))
    if progress:
      progress(min(begin + width, total), total)
  return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)


def _carrier(run: Run) -> int | None:
  """Slot of the collective in which the ranks' numbers ride; of a run that did not share them, the
  last one."""
  if not run.plan.get("share", False):
    return max(c.slot for c in run.collectives)
  # None in older runs: none of a step's own transfers went along yet when they were recorded.
  return run.plan.get("carrier")


def _player(pacer: Pacer, count: int, timestamped: np.ndarray, over: np.ndarray, most: np.float32,
            shared: bool, as_recorded: bool, ask: Any, first: int
            ) -> Callable[[_Carry, ObservedSteps], tuple[_Carry, Any]]:
  numbers = np.arange(count, dtype=np.int32)
  weight = np.float32(1 / count)

  def of_one(step: Any, rank: Any, arrivals: Any, delays: Any, waits: Any, step_time: Any,
             along: pacing.Shared, state: Any, holds: Any) -> Any:
    """One rank's decision; what is of all ranks is [R]."""
    if not shared:
      arrivals, delays = (jnp.where(numbers == rank, values, _NAN) for values in (arrivals, delays))
      along = pacing.nothing_shared(len(timestamped))
    seen, transfers = pacing.observe(step, rank, arrivals, delays, waits, step_time, along,
                                     holds)
    return (*pacing.decide(pacer, seen, state), transfers)

  def step(carry: _Carry, row: Any) -> tuple[_Carry, Any]:
    states, asked, step_before, found = carry
    used = bounded(asked, most)
    delays, waits, step_time = row.delays, row.waits, row.step_time
    if not as_recorded:
      delays = jnp.where(row.present, used, _NAN)
      moved = _latest(row.arrivals, delays) - _latest(row.arrivals, row.delays)
      moved = jnp.where(jnp.isnan(moved), np.float32(0), moved)
      own = jnp.where(row.present, delays - jnp.nan_to_num(row.delays), np.float32(0))
      waits = waits.at[:, 0].set(jnp.maximum(waits[:, 0] + moved - own, np.float32(0)))
      moved -= row.record.longer
    holds: Any = ()
    answers = observed.nothing_asked(len(timestamped))
    if ask is not None:
      latest = _latest(row.arrivals, delays)
      each = jax.vmap(ask, in_axes=(None, None, None, 0), axis_size=count)
      states, every = each(
          row.steps, row.record, row.record.reached.at[first].set(latest), states)
      answers = jax.tree.map(lambda values: values[0], every)
      holds = jnp.nan_to_num(answers.held)
      if not as_recorded:
        moved += answers.longer.sum()
    if not as_recorded:
      step_time = jnp.maximum(step_time + moved, np.float32(0))
    # As jaxpace.instrumentation.piggyback carries them: rank 0's step time, the mean of the
    # transfers if all are known. An attempt's first step brings nothing of the step before along.
    fresh = jnp.isnan(row.step_time[0])
    along = pacing.Shared(
        step_time=jnp.where(fresh, _NAN, step_before[0]),
        transfers=jnp.where(timestamped & ~fresh, (found * weight).sum(axis=0), _NAN),
        waits=jnp.where(over, (waits * weight).sum(axis=0), _NAN))
    decision, states, transfers = jax.vmap(
        of_one, in_axes=(None, 0, None, None, 0, 0, None, 0, None))(
            row.steps, numbers, row.arrivals, delays, waits, step_time, along, states, holds)
    return ((states, decision.delay, step_time, transfers),
            (asked, used, decision.info, answers))

  return lambda carry, rows: jax.lax.scan(step, carry, rows)


def _latest(seen: jax.Array, delays: jax.Array) -> jax.Array:
  return latest(jnp.where(valid(seen), seen + jnp.nan_to_num(delays), _NAN))


def _judge(seen: ObservedSteps, there: np.ndarray, asked: np.ndarray, delays: np.ndarray,
           columns: dict[str, np.ndarray], answers: observed.Answers,
           held: observed.OnRecord) -> Replayed:
  """Plays the steps again in float64, without the ranks that were never recorded (`there` is
  False)."""
  arrivals, applied = (seen.arrivals.astype(np.float64),
                       np.nan_to_num(seen.delays).astype(np.float64))
  known = (np.isfinite(arrivals) & np.isfinite(seen.step_time))[:, there].all(axis=1) & there.any()
  arrivals = np.where(there & known[:, None], arrivals, -1.0)
  delays = np.where(there, delays, np.float32(0))

  def held_back(by: np.ndarray) -> np.ndarray:
    return np.where(known, (arrivals + by).max(axis=1) - arrivals.max(axis=1), np.nan)

  times = np.isfinite(seen.step_time)
  total = np.where(times, seen.step_time, 0).sum(axis=1, dtype=np.float64)
  recorded = np.divide(total, times.sum(axis=1), out=np.full(len(times), np.nan),
                       where=times.any(axis=1))
  # as the table holds it
  rounded = (np.rint(asked.astype(np.float64) * 1e9) * 1e-9).astype(np.float32)
  agrees = (rounded == seen.asked) | (~np.isfinite(asked) & ~np.isfinite(seen.asked))
  holding = np.where(known, answers.longer.sum(axis=1, dtype=np.float64), np.nan)
  return Replayed(seen.steps.astype(np.int64), delays, known, recorded,
                  recorded - held_back(applied) - held.longer,
                  held_back(delays.astype(np.float64)), holding, agrees, columns, answers,
                  observed.agree(answers, held), held.asked_ns != MISSING,
                  held.there.sum(axis=1, dtype=np.int64))


CANNOT_KNOW = (
    "Whether pacing helps. In this model no rank's delay makes another rank faster, so pacing "
    "cannot gain: the figure is what it would cost.",
    "Whether ranks that wait and poll slow the late ones down (CPU, SMs, power). That is where "
    "pacing early ranks can gain, and only a live run with pacing on and off shows it.",
    "Contention with other jobs: moving this job's phase changes what its collectives take, here "
    "they stay as recorded.",
    "Pauses (garbage collection, checkpoints) moved to other steps: they stay where they were.",
    "What a delay costs on a GPU or a busy machine: delays are taken as applied exactly as asked, "
    "at no cost of their own.",
)
NOT_OF_HOLDS = (
    "Whether holding collectives back helps: they take as long as recorded, whoever else is held "
    "back, and what is heard is what was heard then, whatever is done about it.",
)
"""Of a pacer with a `hold`, besides."""


def summarise(replayed: Replayed, counted: np.ndarray, as_recorded: bool = False
              ) -> dict[str, Any] | None:
  """Adds a replay up over the steps whose every rank is known and that are counted, [K] bool,
  without the warm-up; where the pacer was shown what was observed, its answers are compared with
  those recorded. Returns figures of the document of `jaxpace replay --json`: seconds, and shares of
  one; None where no step counts."""
  mask = counted & replayed.known
  steps = int(mask.sum())
  if not steps:
    return None
  delays = replayed.delays[mask].astype(np.float64)
  bare, cost = float(replayed.bare[mask].mean()), float(replayed.cost[mask].sum())
  paced = bare + (cost + float(replayed.hold_cost[mask].sum())) / steps
  columns = {}
  for name, values in replayed.columns.items():
    known = values[mask][np.isfinite(values[mask])]
    if known.size:
      columns[name] = float(known.mean(dtype=np.float64))
  held = _held(replayed, mask, bare * steps, as_recorded)
  return {
      "ranks": delays.shape[1], "steps": steps,
      "steps_left_out": int(np.isfinite(replayed.recorded).sum()) - steps,
      "step_time": {"recorded": float(replayed.recorded[mask].mean()), "without": bare,
                    "with": paced},
      "change": paced / bare - 1 if bare > 0 else 0.0,
      "cost": {"total": cost, "share": cost / (bare * steps)},
      "active_share": float((delays > 0).any(axis=1).mean()),
      "delay": {"mean": float(delays.mean(axis=0).mean()), "longest": float(delays.max()),
                "by_rank": {str(rank): {"mean": mean, "active_share": share}
                            for rank, (mean, share) in enumerate(zip(
                                delays.mean(axis=0).tolist(), (delays > 0).mean(axis=0).tolist(),
                                strict=True))}},
      "held": held, "columns": columns,
      "agreement": float(replayed.agrees[mask].mean()) if as_recorded else None,
      "cannot_know": [*CANNOT_KNOW, *(NOT_OF_HOLDS if held else ())]}


def _held(replayed: Replayed, mask: np.ndarray, elapsed: float, as_recorded: bool
          ) -> dict[str, Any] | None:
  """What a pacer's `hold` asked for in the steps that count, of `elapsed` s without pacing; None
  where it wasn't asked."""
  holds = replayed.holds
  seconds = holds.held[mask].astype(np.float64)
  asked = int(np.isfinite(seconds).sum())
  if not asked:
    return None
  by_step = np.nan_to_num(seconds).sum(axis=1)
  listened, recorded = holds.listened[mask], replayed.holds_recorded[mask]
  cost = float(replayed.hold_cost[mask].sum())
  return {"mean": float(by_step.mean()), "longest": float(by_step.max()),
          "active_share": float(((by_step > 0) | (listened > 0).any(axis=1)).mean()),
          "cost": {"total": cost, "share": cost / elapsed}, "asked": asked,
          "listened": int(listened.sum()), "unanswered": int(holds.unanswered[mask].sum()),
          "on_record": int(replayed.readings[mask].sum()),
          "agreement": float(replayed.holds_agree[mask][recorded].mean())
          if as_recorded and recorded.any() else None}
