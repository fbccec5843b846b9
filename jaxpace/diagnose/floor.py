"""What a collective's transfer takes on a quiet fabric: as measured beforehand, else estimated from
the run itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from jaxpace.costs.fabric_file import MeasuredFabric, kind_in, quiet_seconds
from jaxpace.diagnose.selected_steps import ratio
from jaxpace.diagnose.totals import Totals
from jaxpace.runs.run import CollectiveTimes, Run

RUNNING_MINIMUM = "running minimum"
MEASURED = "measured fabric"
_SHORTEST, _LONGEST = 5, 33
_T = TypeVar("_T", float, np.ndarray)


class Floor(NamedTuple):
  """Floor of each collective, and the transfers split by it: transfer = quiet + contention in every
  step."""

  floor: np.ndarray  # [C] seconds, NaN where no transfer is known
  quiet: np.ndarray  # [C, K] min(transfer, floor), NaN where the transfer is not known
  contention: np.ndarray  # [C, K] max(transfer - floor, 0)
  source: str
  width: int  # steps of the running median; 0 where the floor is known from elsewhere
  by_group: tuple[np.ndarray, np.ndarray]
  """[T, K] quiet and contention of each group of ranks that meets; the others' are their means."""

  @property
  def known(self) -> bool:
    """Whether the floor was measured on a quiet fabric; otherwise contention is a lower bound."""
    return self.width == 0

  def inconclusive_in(self, steps: np.ndarray) -> Floor:
    """The same where in some steps, [K] bool, longer transfers can't be told from waiting: there is
    no contention."""

    def told(quiet: np.ndarray, contention: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
      return (np.where(steps, quiet + contention, quiet),
              np.where(steps, 0.0 * contention, contention))

    quiet, contention = told(self.quiet, self.contention)
    return self._replace(quiet=quiet, contention=contention,
                         by_group=told(*self.by_group))


def running_minimum(transfer: np.ndarray) -> Floor:
  """Takes as floor the lowest running median of the transfer over the run.

  A bare minimum hangs on one freak reading: two exits timestamped out of turn give a transfer of 0,
  and every other step would then count as contended. The median of 5 to 33 neighbouring steps, a
  twentieth of the run's, asks that the fabric be quiet for some steps before it is believed. A
  fabric that is never quiet in the run keeps its contention inside the floor: contention is a lower
  bound.

  Args:
    transfer: [C, K] seconds, NaN where not known.
  """
  known = int(np.isfinite(transfer).sum(axis=1).max(initial=0))
  width = int(np.clip(known // 20, _SHORTEST, _LONGEST)) | 1
  floor = np.array([_lowest_median(row[np.isfinite(row)], width) for row in transfer])
  return above(transfer, floor, RUNNING_MINIMUM, width)


def find_floor(run: Run, fabric: MeasuredFabric | None, totals: Totals) -> Floor:
  """The floor of every collective, of its groups in the mean over ranks: what the fabric says if
  that is known, else the run's own running minimum.

  A transfer that is quick for long in the run itself is believed before a fabric that says it can't
  be.
  """
  own = running_minimum(totals.group_transfer)
  if fabric is not None and run.collectives:
    most = joined_ranks(run) if totals.groups.all_meet else run.ranks
    own = _by_fabric(run, fabric, totals.group_transfer, own,
                     [(run.collectives[c], min(int((totals.group_of == group).sum()), most))
                      for group, c in enumerate(totals.collective_of)])
  quiet_slow, contended_slow = _slow(totals, own)
  slots, present = len(totals.groups.of), totals.known.sum(axis=0)
  there = totals.receivers.sum(axis=1)
  floor, quiet, contention = (np.full(slots, np.nan),
                              *(np.full((slots, len(present)), np.nan) for _ in range(2)))
  for c in range(slots):
    rows = totals.collective_of == c
    weight = totals.receivers[rows]
    for values, slow, mean in ((own.quiet, quiet_slow, quiet),
                               (own.contention, contended_slow, contention)):
      total = np.where(weight > 0, np.nan_to_num(values[rows]) * weight + slow[rows], 0.0
                       ).sum(axis=0)
      mean[c] = ratio(total, present)
    known = np.isfinite(own.floor[rows])
    if known.any():
      floor[c] = np.average(own.floor[rows][known], weights=np.maximum(there[rows][known], 1))
  return Floor(floor, quiet, contention, own.source, own.width, (own.quiet, own.contention))


def _by_fabric(run: Run, fabric: MeasuredFabric, transfer: np.ndarray, own: Floor,
               sizes: Sequence[tuple[CollectiveTimes, int]]) -> Floor:
  """The floors of transfers, by what the fabric says of the collective of each and its ranks; what
  the run itself has had, where that is quicker or the fabric says nothing."""
  told = [None if c.bytes is None else quiet_seconds(fabric, kind_in(run, c), c.bytes, ranks)
          for c, ranks in sizes]
  if not any(seconds is not None for seconds in told):
    return own
  floor = np.array([low if seconds is None or not seconds < low else seconds
                    for seconds, low in zip(told, own.floor, strict=True)])
  if None in told:
    return above(transfer, floor, f"{MEASURED} where it says, else {RUNNING_MINIMUM}", own.width)
  return above(transfer, floor, f"{MEASURED}: {fabric.source}", 0)


def _slow(totals: Totals, own: Floor) -> tuple[np.ndarray, np.ndarray]:
  """[T, K] what others wait elsewhere because of each group's slow transfers, divided as these are:
  by how much the group's floor is above the others' mean, and by how much it is above its floor."""
  above, known = np.zeros(len(own.floor)), np.isfinite(own.floor)
  for c in np.unique(totals.collective_of[known]):
    rows = known & (totals.collective_of == c)
    above[rows] = np.maximum(own.floor[rows] - own.floor[rows].mean(), 0.0)
  contention = np.nan_to_num(own.contention)
  contention[:, 1:] += contention[:, :-1]  # what is slow at a step's end is waited for in the next
  part = ratio(contention, contention + above[:, None], 0.0)
  return totals.slow * (1 - part), totals.slow * part


def joined_ranks(run: Run) -> int:
  """Ranks that one collective joins: on a data × model mesh those along the data axis, not all that
  recorded."""
  ranks = run.plan.get("ranks")
  return ranks if isinstance(ranks, int) and 0 < ranks <= run.ranks else run.ranks


def above(transfer: np.ndarray, floor: np.ndarray, source: str, width: int) -> Floor:
  """Splits transfers, [C, K] s, at their floors, [C] s."""
  quiet = np.minimum(transfer, floor[:, None])
  contention = transfer - quiet
  return Floor(floor, quiet, contention, source, width, (quiet, contention))


def _lowest_median(values: np.ndarray, width: int) -> float:
  if not values.size:
    return float("nan")
  if values.size < width:
    return float(np.median(values))
  windows = np.lib.stride_tricks.sliding_window_view(values, width)
  return min(float(np.partition(windows[i:i + 4096], width // 2, axis=1)[:, width // 2].min())
             for i in range(0, len(windows), 4096))


# Shares of the step, by rank, by host and of the job: one denominator each, every nanosecond in
# exactly one share.

SHARES = ("compute", "skew", "transfer", "contention", "runtime", "pacing")
MEANING = {
    "compute": "each rank's own work",
    "skew": "waiting for ranks that compute more",
    "transfer": "the collectives themselves",
    "contention": "collectives slower than their best",
    "runtime": "gaps between steps, waiting for them",
    "pacing": "delays, and waiting for them",
}
"""What the time of each share is spent on, in a few words."""


def seconds_of(parts: Mapping[str, _T], quiet: _T, contention: _T) -> dict[str, _T]:
  """Seconds by share, of parts by name in `jaxpace.diagnose.totals.PARTS`: one step's, or arrays of
  many; waiting for a rank that computes longer is skew, other is at its cause."""
  return {
      "compute": parts["compute"],
      "skew": parts["waiting_compute"],
      "transfer": quiet + parts["spread"],
      "contention": contention,
      "runtime": parts["runtime"] + parts["waiting_runtime"],
      "pacing": parts["pacing"] + parts["waiting_pacing"],
  }


def shares_of(parts: Mapping[str, float], quiet: float, contention: float) -> dict[str, float]:
  """Shares of a step, of one rank or a mean.

  All are 0 or more. `spread` averages out where ranks leave a collective apart from each other by
  turns; should it be so negative that it eats the whole transfer, what is missing is taken from the
  waiting, of which then more was counted than was waited.

  Args:
    parts: seconds by name in `jaxpace.diagnose.totals.PARTS`.
    quiet: seconds of the transfers up to their floor.
    contention: seconds beyond it.
  """
  seconds = seconds_of(parts, quiet, contention)
  lacking = -min(seconds["transfer"], 0.0)
  if lacking:
    waited = {"skew": parts["waiting_compute"], "runtime": parts["waiting_runtime"],
              "pacing": parts["waiting_pacing"], "contention": contention}
    total = sum(waited.values())
    for name, value in waited.items():
      seconds[name] -= lacking * value / total if total > 0 else 0.0
    seconds["transfer"] = 0.0
  if not parts["step"] > 0:
    return dict.fromkeys(SHARES, 0.0)
  return {name: seconds[name] / parts["step"] for name in SHARES}


def shares_in(totals: Totals, floor: Floor, steps: np.ndarray) -> dict[str, float]:
  """Shares of the mean of some steps, chosen by number or bool, of which there is one at least."""
  parts = {name: float(values[steps].mean()) for name, values in totals.per_step.items()}
  quiet, contention = (float(np.nan_to_num(values[:, steps]).sum(axis=0).mean())
                       for values in (floor.quiet, floor.contention))
  return shares_of(parts, quiet, contention)


def shares_of_ranks(totals: Totals, floor: Floor, each: Iterable[list[int]]
                    ) -> list[dict[str, float] | None]:
  """Shares over all steps of some ranks each, a host's or one rank; None where they have none."""
  quiet, contention = _split(totals, floor)
  return [shares_of({name: float(values[ranks].sum()) for name, values in totals.per_rank.items()},
                    float(quiet[ranks].sum()), float(contention[ranks].sum()))
          if totals.present[ranks].any() else None for ranks in each]


def _split(totals: Totals, floor: Floor) -> tuple[np.ndarray, np.ndarray]:
  """[R] seconds of transfer up to the floor and beyond it, summed over the steps in which each rank
  is known: of the groups that it is in, and of those whose slow transfers held it up."""
  known, held_up = totals.known, totals.held_up
  sums = np.zeros((2, len(known)))
  parts = [np.nan_to_num(values) for values in floor.by_group]
  for rows in totals.group_of:
    for rank in np.flatnonzero(rows < len(totals.collective_of)).tolist():
      for which, values in enumerate(parts):
        sums[which, rank] += float(values[rows[rank]] @ known[rank])
  whole = np.nan_to_num(floor.contention).sum(axis=0) @ known.sum(axis=0)
  contended = np.clip((whole - sums[1].sum()) / max(held_up.sum(), 1e-12), 0.0, 1.0)
  return sums[0] + (1 - contended) * held_up, sums[1] + contended * held_up
