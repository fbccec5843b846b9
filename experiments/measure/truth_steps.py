"""Known delays in one process with several devices, judged step by step."""

from __future__ import annotations

import random
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType

from experiments.lib import lateness_found, measured
from experiments.lib.injection import PLACES, LateJob, fault
from jaxpace.trace.decode import concatenate, decode

_LATE = 1
_WARM_UP = 10


def one_process(place: str, ranks: int, clock: str, delays: list[float],
                repeats: int) -> dict[str, Any]:
  """Injects every delay `repeats` times, in random order among as many steps without, and judges
  every step.

  Returns:
    `lateness_found.per_step`, and in which columns of the trace the time showed.
  """
  mesh = jax.make_mesh((ranks,), ("data",), axis_types=(AxisType.Auto,),
                       devices=jax.devices()[:ranks])
  schedule = [delay for delay in delays for _ in range(repeats)]
  schedule += [0.0] * max(len(schedule) // 2, repeats)
  random.Random(ranks).shuffle(schedule)
  schedule = [0.0] * _WARM_UP + schedule + [0.0]
  job = LateJob(mesh, clock=clock, rows=len(schedule), share=True)
  say = measured.progress(f"{place}, {ranks} ranks, {clock} clock", len(schedule))
  slept = []
  for done, delay in enumerate(schedule):
    slept.append(job.run(fault(place, _LATE, delay * 1e-3)))
    if done % 10 == 9:
      # many steps ahead, the devices of one process starve each other
      jax.block_until_ready(slept[-1])
      say(done + 1)
  injected = np.stack([np.asarray(value) for value in slept])[:, _LATE, PLACES.index(place)] * 1e3
  asked = np.asarray(schedule)
  steps, arrivals = _decoded(job)
  use = slice(_WARM_UP, None)
  # The update comes after the exit: what it takes is part of the next step's arrival.
  later = place == "update"
  judged_asked, judged_slept = (np.concatenate([[0.0], v[:-1]]) if later else v
                                for v in (asked, injected))
  plan = job.paced.plan
  assert plan is not None
  return {"place": place, "ranks": ranks, "clock": plan.clock,
          "counted_in": "the next step" if later else "the step",
          **lateness_found.per_step(arrivals[:, use], _LATE, judged_asked[use], judged_slept[use]),
          "shows_in": lateness_found.where_it_shows(
              {name: values[:, use] for name, values in steps.items()}, _LATE,
              asked[use], injected[use])}


def _decoded(job: LateJob) -> tuple[dict[str, np.ndarray], np.ndarray]:
  """Columns of the steps [R, K] ms, and arrivals [R, K] ms, NaN where unknown."""
  assert job.paced.plan is not None
  rows = np.asarray(job.pace.ring)
  decoded = [decode(rows[rank], job.paced.plan, rank, 0, 0) for rank in range(job.ranks)]
  steps, collectives = (concatenate([part[i] for part in decoded]) for i in (0, 1))

  def dense(values: np.ndarray) -> np.ndarray:
    return (np.ma.filled(np.ma.asarray(values).astype(np.float64), np.nan).reshape(job.ranks, -1)
            * 1e-6)

  names = [f"{name}_ns" for name in ("gap", "forward", "backward", "compute", "sync", "update")]
  enter, leave = dense(collectives["enter_ns"]), dense(collectives["exit_ns"])
  arrivals = np.full(enter.shape, np.nan)
  arrivals[:, 1:] = enter[:, 1:] - leave[:, :-1]
  return {name.removesuffix("_ns"): dense(steps[name]) for name in names if name in steps}, arrivals
