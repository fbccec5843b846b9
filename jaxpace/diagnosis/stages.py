"""Whether a run's groups are stages that wait for each other beside the collectives, as those of a
pipeline do."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxpace.diagnosis.codes import Note, Sentence
from jaxpace.diagnosis.totals import Summed, Totals
from jaxpace.diagnosis.wording import milliseconds
from jaxpace.trace.problems import list_ranks, plural

# Chosen by hand; no measurement of them is published.
_SAME, _OTHER = 0.002, 0.02
"""Groups that take the same step within the first share of it, and are busy for times that differ
by more than the second, wait for each other somewhere."""


class Stages(NamedTuple):
  """Signs of stages. Seconds a step."""

  point_to_point: int  # collectives that are transfers from one rank to another
  transfer: float  # what these take, mean over ranks
  # groups that no stamped collective joins, and that keep step all the same
  apart: tuple[tuple[int, ...], ...]


def stages(summed: Summed) -> Stages | None:
  """Returns the signs of stages; None where there are none."""
  run, selected, totals = summed.run, summed.selected, summed.totals
  alone = np.array([c.point_to_point for c in run.collectives], bool)
  took = totals.transfer[alone][:, selected.mask] if alone.any() else np.empty((0, 0))
  transfer = float(np.nan_to_num(took).sum(axis=0).mean()) if took.size else 0.0
  apart = _keep_step(totals)
  staged = totals.groups is not None and totals.groups.found.staged
  return Stages(int(alone.sum()), transfer, apart) if alone.any() or apart or staged else None


def _keep_step(totals: Totals) -> tuple[tuple[int, ...], ...]:
  if totals.groups is None or not totals.groups.found.apart:
    return ()
  joined = totals.groups.found.joined
  some = totals.present > 0
  number = np.maximum(totals.present, 1)
  step = totals.per_rank["step"] / number
  busy = (totals.per_rank["compute"] + totals.per_rank["runtime"]) / number
  parts = [np.flatnonzero((joined == part) & some) for part in range(int(joined.max()) + 1)]
  parts = [own for own in parts if own.size]
  if len(parts) < 2:
    return ()
  steps, longest = (np.array([how(values[own]) for own in parts])
                    for how, values in ((np.mean, step), (np.max, busy)))
  if np.ptp(steps) > _SAME * steps.mean() or np.ptp(longest) <= _OTHER * steps.mean():
    return ()
  return tuple(tuple(own.tolist()) for own in parts)


def sentences(found: Stages, collectives: int) -> list[Sentence]:
  """Says what the report's figures mean then."""
  said = []
  if found.point_to_point:
    are = ("are point-to-point transfers" if found.point_to_point > 1
           else "is a point-to-point transfer")
    said.append(Sentence(Note.POINT_TO_POINT,
        f"{found.point_to_point} of {plural(collectives, 'collective')} {are}, as "
        "between the stages of a pipeline: a rank waits there for its source alone. They hold "
        f"{milliseconds(found.transfer)} of the transfer."))
  if found.apart:
    shown = "; ".join(list_ranks(ranks, 4) for ranks in found.apart[:4])
    more = f"; and {len(found.apart) - 4} more groups" if len(found.apart) > 4 else ""
    said.append(Sentence(Note.STAGES,
        f"Ranks {shown}{more} never meet in a collective with timestamps, and yet take the same "
        "step, though they are busy for different times: something else joins them, as the stages "
        "of a pipeline are."))
  return [*said, Sentence(Note.BUBBLES,
      "What stages wait for each other without being late (a pipeline that fills and drains: "
      "bubbles) counts as transfer; 'no skew' leaves it as it is.")]
