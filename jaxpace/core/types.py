"""The words every layer shares: what a pacer sees, what it asks for, what a pacer is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

PacerState = Any
"""Any pytree of arrays with fixed shapes; carried by the user inside the pace state."""


def pick(chosen: jax.Array, new: Any, old: Any) -> Any:
  """Returns `new` where it is chosen, else `old`, leaf by leaf of two trees alike."""
  return jax.tree.map(lambda a, b: b if a is b else jnp.where(chosen, a, b), new, old)


_NOTHING: Any = np.full((0,), np.nan, np.float32)


class Observation(NamedTuple):
  """What one rank knows about the last completed step. Durations are float32 seconds.

  `R` is the number of ranks along the data axis, `S` the number of collective slots.
  A value that is not known is NaN, never 0: a missing arrival is not an early one.

  What all ranks must decide alike, they decide from what is the same on all of them: `arrivals` and
  `delays` where every one is known, `step`, and whatever is called `job_...`. A rank's waits and
  step time are its own.
  """

  step: jax.Array  # [] int32, index of the completed step
  rank: jax.Array  # [] int32, this rank's index along the data axis
  # [R] undelayed arrival at the step's first collective; others' are NaN unless shared
  arrivals: jax.Array
  # [R] delay each rank really applied in this step; others' are NaN unless shared
  delays: jax.Array
  waits: jax.Array  # [S] own exit - enter of every collective; NaN in unused slots
  step_time: jax.Array  # [] own time from the previous step's last exit to this one's
  # Of the step before that one, the same on all ranks to the last bit; NaN unless shared:
  job_step_time: jax.Array  # [] rank 0's step_time
  job_transfers: jax.Array  # [S] mean over ranks of what each found a collective's own time to be
  # Of the step just done, the same on all ranks: what the message they share it with was not too
  # early for.
  # [S] as above; NaN from the collective on that carries it; [0] for none
  job_transfers_now: jax.Array = _NOTHING
  # [R] int32 micro-batches that each rank ran in this step, where work is shared by speed; else ()
  counts: jax.Array | tuple[()] = ()
  # [S] what was held before each collective, the same on all ranks: the sum of what `Pacer.hold`
  # asked for and of what listening took; () where nothing can be held
  holds: jax.Array | tuple[()] = ()


class Decision(NamedTuple):
  """What a pacer asks of its own rank in the next step."""

  delay: jax.Array  # [] float32 s, 0 <= delay; 0 when passive
  info: dict[str, jax.Array]  # named float32 scalars for the trace; diagnosed, never carried


class Moment(NamedTuple):
  """What a job knows before one of its collectives. The same on all ranks, or they would not
  meet."""

  step: jax.Array  # [] int32, index of the step under way
  slot: jax.Array  # [] int32, place of the collective among the step's
  # [] float32 s, what listening took just now: the shortest wait of any rank in a tiny collective;
  # NaN before the first time
  heard: jax.Array
  listened: jax.Array  # [] int32, times it was listened before this collective
  held: jax.Array  # [] float32 s, asked for and listened before this collective so far
  step_held: jax.Array  # [] float32 s, the same before all of this step's so far, this one included


class Hold(NamedTuple):
  """What a pacer asks for before a collective."""

  # [] float32 s, 0 <= seconds: so long after the job's last collective, or listening, was over does
  # the next one begin, at the earliest; 0 for at once
  seconds: jax.Array
  listen: jax.Array  # [] bool: then listen, and ask again; else the collective itself begins


class Pacer(NamedTuple):
  """Two pure functions or three, after the manner of an optax transformation.

  `init(ranks)` makes the state of one rank in a job of that many ranks. `update(observation,
  state)` must be jittable, use no clock and no collective, and depend on nothing but its arguments:
  the same function runs in the live step, in the simulator and in the replay of a recorded run.

  `hold(moment, state)` is asked before each timestamped collective: how long to hold it back, and
  whether to listen first; after listening it is asked again. All ranks must answer alike, so it
  decides from what is the same on all of them: the moment, and what `update` has put into the state
  of such values. It is as pure as `update`. None, as most pacers have it: nothing is held.
  """

  init: Callable[[int], PacerState]
  update: Callable[[Observation, PacerState], tuple[Decision, PacerState]]
  hold: Callable[[Moment, PacerState], tuple[Hold, PacerState]] | None = None


class Balancer(NamedTuple):
  """How many micro-batches each rank runs: a pair of pure functions, after the manner of a pacer.

  `init(ranks)` makes the state. `update(observation, state)` returns the counts wanted from now on,
  [R] int32 that add up to `micro_batches`, and the state after. It must be the same on all ranks:
  from what they share (`arrivals`, `delays`, `counts`), with no clock and no collective. A number
  of the state that is finite in `init`'s stays so: where a checkpoint's is not, it is damaged.
  """

  init: Callable[[int], Any]
  update: Callable[[Observation, Any], tuple[jax.Array, Any]]
  micro_batches: int
  """Of all ranks of the job together, in a step: the `total_micro_batches` of `jaxpace.shares`."""
