"""Shares of the step, by rank, by host and of the job: one denominator each, every nanosecond in
exactly one share."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from jaxpace.diagnosis.floor import Floor
from jaxpace.diagnosis.totals import ByGroup, Totals
from jaxpace.trace.run import Run

SHARES = ("compute", "skew", "transfer", "contention", "runtime", "pacing")
MEANING = {
    "compute": "forward, backward, update",
    "skew": "waiting for ranks that compute more",
    "transfer": "the collectives themselves",
    "contention": "collectives slower than their best",
    "runtime": "gaps between steps, waiting for them",
    "pacing": "delays, and waiting for them",
}
"""What the time of each share is spent on, in a few words."""
_AT_A_TIME = 1 << 22


def shares_of(parts: Mapping[str, float], quiet: float, contention: float) -> dict[str, float]:
  """Shares of a step, of one rank or a mean; waiting for a rank that computes longer is skew, other
  is at its cause.

  All are 0 or more. `spread` averages out where ranks leave a collective apart from each other by
  turns; should it be so negative that it eats the whole transfer, what is missing is taken from the
  waiting, of which then more was counted than was waited.

  Args:
    parts: seconds by name in `jaxpace.diagnosis.totals.PARTS`.
    quiet: seconds of the transfers up to their floor.
    contention: seconds beyond it.
  """
  seconds = {
      "compute": parts["compute"],
      "skew": parts["waiting_compute"],
      "transfer": quiet + parts["spread"],
      "contention": contention,
      "runtime": parts["runtime"] + parts["waiting_runtime"],
      "pacing": parts["pacing"] + parts["waiting_pacing"],
  }
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


def by_rank(totals: Totals, floor: Floor) -> list[dict[str, float] | None]:
  """Shares of every rank's own steps; None for a rank without one."""
  quiet, contention = _split(totals, floor)
  return [_mean_shares(totals, quiet, contention, [rank]) for rank in range(len(totals.present))]


def by_host(run: Run, totals: Totals, floor: Floor) -> dict[str, dict[str, float]]:
  """Shares of every host, over all steps of its ranks."""
  quiet, contention = _split(totals, floor)
  ranks: dict[str, list[int]] = {}
  for rank in range(run.ranks):
    host = run.host_of_rank(rank)
    if host:
      ranks.setdefault(host, []).append(rank)
  shares = {host: _mean_shares(totals, quiet, contention, own)
            for host, own in sorted(ranks.items())}
  return {host: own for host, own in shares.items() if own is not None}


def _mean_shares(totals: Totals, quiet: np.ndarray, contention: np.ndarray,
                 ranks: list[int]) -> dict[str, float] | None:
  if not totals.present[ranks].sum():
    return None
  parts = {name: float(values[ranks].sum()) for name, values in totals.per_rank.items()}
  return shares_of(parts, float(quiet[ranks].sum()), float(contention[ranks].sum()))


def _split(totals: Totals, floor: Floor) -> tuple[np.ndarray, np.ndarray]:
  """[R] seconds of transfer up to the floor and beyond it, summed over the steps in which each rank
  is known."""
  if totals.groups is not None and floor.by_group is not None:
    return _split_by_group(totals.groups, totals.known, floor)
  quiet, contention = (np.nan_to_num(values.sum(axis=0))
                       for values in (floor.quiet, floor.contention))
  ranks, size = totals.known.shape
  sums = np.zeros((2, ranks))
  width = max(1, _AT_A_TIME // max(1, ranks))
  for begin in range(0, size, width):
    part = slice(begin, begin + width)
    known = totals.known[:, part]
    if known.all():
      sums += np.array([[quiet[part].sum()], [contention[part].sum()]])
    else:
      sums += (known.astype(np.float64) @ np.stack([quiet[part], contention[part]], axis=1)).T
  return sums[0], sums[1]


def _split_by_group(groups: ByGroup, known: np.ndarray, floor: Floor
                    ) -> tuple[np.ndarray, np.ndarray]:
  """The same, of the groups that each rank is in, and of those whose slow transfers held it up."""
  assert floor.by_group is not None
  sums = np.zeros((2, len(known)))
  parts = [np.nan_to_num(values) for values in floor.by_group]
  for rows in groups.row:
    for rank in np.flatnonzero(rows < len(groups.collective)).tolist():
      for which, values in enumerate(parts):
        sums[which, rank] += float(values[rows[rank]] @ known[rank])
  whole, held_up = np.nan_to_num(floor.contention).sum(axis=0) @ groups.present, groups.held_up
  contended = np.clip((whole - sums[1].sum()) / max(held_up.sum(), 1e-12), 0.0, 1.0)
  return sums[0] + (1 - contended) * held_up, sums[1] + contended * held_up
