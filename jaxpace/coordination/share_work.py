"""Puts a balancer where a pacer is: the counts are threaded, recorded, restored and switched like a
pacer's state."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpace.coordination import trial
from jaxpace.coordination.apportion import even
from jaxpace.coordination.knobs import Switch
from jaxpace.core.pacing import decide_counts
from jaxpace.core.types import Balancer, Decision, Observation, Pacer

_NAN = np.float32(np.nan)
_LAG = 2
"""Steps that begin between the end of a step and the update that is given its time: `job_step_time`
is of the step before the one observed, and counts act in the one after next."""

_LEAN = 4


class SharedWork(NamedTuple):
  """State of `share_work`, the same on all ranks where arrivals are shared. R ranks."""

  # [2, R] int32, micro-batches of each rank in the next step, and in the one after it
  counts: jax.Array
  ran: jax.Array  # [R] int32, micro-batches that each rank has run since the start, modulo 2^32
  switch: Switch  # [] whether work is shared by speed; else evenly
  inner: Any  # the balancer's
  trial: trial.Trial | tuple[()]  # [] where guarded
  tags: jax.Array  # [3] int32, the trial's, of the step before, of the next and of the one after it
  uneven: jax.Array  # [] bool, whether the counts were uneven in the last step


def share_work(balancer: Balancer, guarded: bool = False, block: int = trial.BLOCK,
               settle: int = 1) -> Pacer:
  """Lets a balancer say how many micro-batches each rank runs. To be given to `jaxpace.instrument`
  as its pacer.

  It delays nothing (`jaxpace.chain` joins it with a pacer that does). The balancer sees every step
  with the counts that were run in it. What it answers after step k is in force in step k + 2: while
  step k + 1 runs, the hosts load what step k + 2 will need. Until then, and wherever it is switched
  off, the counts are as they were, or even.

  The counts of the next two steps are in the pace state, so they survive a restart;
  `jaxpace.shares` reads them there, and gives each process its part of the data. The step itself
  gets them with its batch, for `jaxpace.accumulate`.

  *Guarded*, it is judged on the running job, as a pacer is by `jaxpace.guard`: pairs of blocks with
  even and with uneven counts in an order that a hash gives, an interval that holds under peeking,
  off where it does not pay. While it is being judged half of the gain is lost; so this is for where
  one doubts it.

  Args:
    balancer: what decides, such as `jaxpace.share_by_speed(total_micro_batches=32, capacity=16)`.
    guarded: whether to judge it on the running job.
    block: steps of a block.
    settle: first steps of a block that aren't counted.

  Returns:
    A pacer. Its columns: `micro_batches` this rank's count in the step it is recorded with;
    `work_gain` the part of a step's time that the balancer's last look promised; `work_uneven` 0 or
    1; and where it is guarded `work_on`, `work_effect`, `work_effect_low`, `work_effect_high` and
    `work_pairs`.

  Raises:
    ValueError: an argument is out of range.
  """
  if not isinstance(balancer, Balancer):
    raise ValueError(f"{balancer!r} is not a Balancer. Pass what a factory returns, such as "
                     "jaxpace.share_by_speed(total_micro_batches=32, capacity=16), or "
                     "jaxpace.Balancer(init, update, 32).")
  judge = trial.trials(block, settle=settle, lag=_LAG, lean=_LEAN)

  def init(ranks: int) -> SharedWork:
    inner, counts = balancer.init(ranks), even(balancer.micro_batches, ranks)
    return SharedWork(
        counts=jnp.stack([counts, counts]), ran=jnp.zeros((ranks,), jnp.int32),
        switch=Switch(jnp.ones((), jnp.bool_)), inner=inner, trial=judge.init() if guarded else (),
        tags=jnp.zeros((3,), jnp.int32), uneven=jnp.zeros((), jnp.bool_))

  def update(observation: Observation, state: SharedWork) -> tuple[Decision, SharedWork]:
    ran, following = state.counts
    equal = jnp.asarray(even(balancer.micro_batches, ran.shape[0]))
    wanted, inner = decide_counts(balancer, observation._replace(counts=ran), state.inner)
    # Counts that can't be are left out: a step can't run them, and the job would end.
    possible = jnp.all(wanted >= 0) & (jnp.sum(wanted) == np.int32(balancer.micro_batches))
    wanted = jnp.where(possible, wanted, following)
    on, judged, tags, columns = state.switch.on, state.trial, state.tags, {}
    if isinstance(judged, trial.Trial):
      judged = judge.update(observation.job_step_time, tags[0], state.uneven, judged)
      on = on & trial.is_on(judged)
      tags = jnp.concatenate([tags[1:], judged.tag[None]])
      effect, low, high = trial.effect(judged)
      columns = {"work_on": on.astype(jnp.float32), "work_effect": effect, "work_effect_low": low,
                 "work_effect_high": high, "work_pairs": judged.pairs.astype(jnp.float32)}
    counts = jnp.where(on, wanted, equal)
    own = jax.lax.dynamic_index_in_dim(following, jnp.clip(observation.rank, 0, ran.shape[0] - 1),
                                       keepdims=False)
    info = {"micro_batches": own.astype(jnp.float32), "work_gain": getattr(inner, "gain", _NAN),
            "work_uneven": jnp.any(following != equal).astype(jnp.float32), **columns}
    return Decision(jnp.zeros((), jnp.float32), info), SharedWork(
        counts=jnp.stack([following, counts]), ran=state.ran + ran, switch=state.switch,
        inner=inner, trial=judged, tags=tags, uneven=jnp.any(ran != equal))

  return Pacer(init, update)


def found(state: Any) -> SharedWork:
  """Finds the state of `share_work` in a pacer's state, chained or steered perhaps.

  Raises:
    ValueError: there is none, or more than one.
  """
  every = _every(state)
  if len(every) != 1:
    raise ValueError(f"The step shares out no work: {len(every) or 'none'} of its pacers is "
                     "jaxpace.share_work(...). Give jaxpace.instrument "
                     "pacer=jaxpace.share_work(jaxpace.share_by_speed(...)).")
  return every[0]


def shares_work(state: Any) -> bool:
  """Says whether a pacer's state is, or holds, one of `share_work`."""
  return bool(_every(state))


def _every(state: Any) -> list[SharedWork]:
  nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, SharedWork))
  return [node for node in nodes if isinstance(node, SharedWork)]
