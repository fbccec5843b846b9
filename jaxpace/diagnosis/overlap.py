"""Computing while sending: what of a job's collectives is waited for, and what computing hides."""

from __future__ import annotations

from typing import Any, NamedTuple

from jaxpace.diagnosis.in_flight import OverlapSums
from jaxpace.diagnosis.waiting_places import MOST, places
from jaxpace.trace.run import Run


class CollectiveOverlap(NamedTuple):
  """A collective, all turns of its loop together. Seconds a step, means over ranks."""

  name: str
  times: int
  exposed: float
  hidden: float
  behind_others: float
  # share of the step's operations that may run meanwhile, by the plan; None where it doesn't tell
  meanwhile: float | None

  @property
  def in_flight(self) -> float:
    """From entry to exit."""
    return self.exposed + self.hidden + self.behind_others

  def to_json(self) -> dict[str, Any]:
    """Plain values."""
    return {"collective": self.name, "times": self.times, "in_flight": self.in_flight,
            "exposed": self.exposed, "hidden": self.hidden, "behind_others": self.behind_others,
            "meanwhile": self.meanwhile}


class Overlap(NamedTuple):
  """Computing while sending, of a job. Seconds a step, means over ranks."""

  collectives: tuple[CollectiveOverlap, ...]  # those with most exposed time first
  each: tuple[CollectiveOverlap, ...]  # every turn by itself, in the run's order
  computing: float  # while any collective is under way, at least

  @property
  def exposed(self) -> float:
    """What is waited for collectives, at most."""
    return sum(one.exposed for one in self.collectives)

  @property
  def tells(self) -> bool:
    """Whether there is more to say than that all is waited for, as far as stamps tell."""
    return self.computing > 0 or any(one.meanwhile is not None for one in self.collectives)

  def to_json(self, step: float) -> dict[str, Any]:
    """Plain values; `step` is the mean step in seconds."""
    return {"exposed": self.exposed, "exposed_share": self.exposed / step if step > 0 else 0.0,
            "hidden": self.computing, "under_way": self.exposed + self.computing,
            "in_flight": sum(one.in_flight for one in self.collectives),
            "collectives": [one.to_json() for one in self.collectives[:MOST]]}


def overlap(run: Run, sums: OverlapSums, steps: int) -> Overlap | None:
  """What a run's collectives hide; None without collectives or counted steps.

  Args:
    run: the run.
    sums: over its counted steps.
    steps: how many these are.
  """
  if not run.collectives or not steps:
    return None
  planned = {entry.get("slot"): entry for entry in run.plan.get("collectives") or ()
             if isinstance(entry, dict)}
  at = places(run)
  each: list[CollectiveOverlap] = []
  groups: dict[tuple[str, int], list[int]] = {}
  for c, collective in enumerate(run.collectives):
    share = planned.get(collective.slot, {}).get("meanwhile")
    each.append(CollectiveOverlap(
        collective.name, 1, float(sums.exposed[c]) / steps, float(sums.hidden[c]) / steps,
        float(sums.behind[c]) / steps, share if isinstance(share, int | float) else None))
    groups.setdefault(("of", at[c].of) if at else ("slot", c), []).append(c)
  found = []
  for own in groups.values():
    one = each[own[0]]
    found.append(CollectiveOverlap(
        at[own[0]].name + at[own[0]].origin if at else one.name, len(own),
        sum(each[c].exposed for c in own), sum(each[c].hidden for c in own),
        sum(each[c].behind_others for c in own), one.meanwhile))
  return Overlap(tuple(sorted(found, key=lambda one: -one.exposed)), tuple(each),
                 sums.computing / steps)


__all__ = ["CollectiveOverlap", "Overlap", "overlap"]
