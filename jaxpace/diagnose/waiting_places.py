"""Where in an observed step the waits are: which collective, which iteration of its loop, which
line of the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxpace.core.words import Sentence
from jaxpace.diagnose.episodes import Episode
from jaxpace.diagnose.floor import Floor
from jaxpace.diagnose.lateness import beyond_typical
from jaxpace.diagnose.limits import LISTED, MOST, TWICE
from jaxpace.diagnose.modes.inputs import EvidenceInputs
from jaxpace.diagnose.selected_steps import SelectedSteps
from jaxpace.diagnose.totals import Totals
from jaxpace.diagnose.words.evidence import Evidence
from jaxpace.diagnose.words.names import milliseconds, percent
from jaxpace.record.ring.plan import iterations_in_words
from jaxpace.runs.run import Run


class OccurrencePlan(NamedTuple):
  """What the plan says of one occurrence of a collective; only of an observed step it says where
  that is."""

  of: int
  name: str
  """Of all its iterations: "all-gather.11"."""
  kind: str
  axis: str
  phase: str
  source: str | None
  operation: str | None
  loops: tuple[tuple[str, int, int | None], ...]
  """Name, turn (from 0 on) and iterations of each loop it is in, outermost first."""
  meanwhile: float | None
  """Share of the step's operations that may run while it is under way; None where the plan doesn't
  tell."""

  @property
  def iteration(self) -> str:
    """Its iterations in words; empty where it is in no loop.

    >>> loops = (("while.1", 2, 4), ("while.2", 17, 32))
    >>> OccurrencePlan(0, "psum", "", "", "", None, None, loops, None).iteration
    'iteration 2 of 4, in it iteration 17 of 32'
    """
    return iterations_in_words(self.loops)

  @property
  def origin(self) -> str:
    """Line and phase, in brackets; empty where neither is known."""
    known = [self.source or "", self.phase if self.phase not in ("", "compute") else ""]
    return f" ({', '.join(filter(None, known))})" if any(known) else ""

  @property
  def title(self) -> str:
    """Of all its iterations, with line and phase."""
    return self.name + self.origin

  def __str__(self) -> str:
    return self.name + (f", {self.iteration}" if self.loops else "") + self.origin


def places(run: Run) -> list[OccurrencePlan]:
  """The place of each of the run's collectives, in their order."""
  entries = {entry.get("slot"): entry for entry in run.plan.get("collectives") or ()
             if isinstance(entry, dict)}
  found = []
  for collective in run.collectives:
    planned: dict[str, Any] = entries.get(collective.slot, {})
    entry = planned if run.observed else {}
    of, meanwhile = entry.get("of"), planned.get("meanwhile")
    found.append(OccurrencePlan(
        of=of if isinstance(of, int) else -1 - collective.slot,
        name=collective.name.split("@")[0] if run.observed else collective.name,
        kind=str(entry.get("kind") or ""), axis=str(entry.get("axis") or ""),
        phase=str(entry.get("phase") or ""), source=entry.get("source") or None,
        operation=entry.get("operation") or None,
        loops=tuple((str(name), iteration, trips) for name, iteration,
                    trips in entry.get("loops") or ()),
        meanwhile=meanwhile if isinstance(meanwhile, int | float) else None))
  return found


class CollectiveShare(NamedTuple):
  """What a step spends at one collective, all its iterations together. Seconds per step, means over
  ranks."""

  place: OccurrencePlan  # of the iteration in which most is waited
  iterations: int
  waiting: float
  transfer: float
  contention: float
  worst: float  # of `waiting`, in the iteration in which most is waited
  rank: int | None  # that most of the waiting is for; None where it is unknown
  held: float  # part of `waiting` that is for that rank
  exposed: float  # under way and waited for, at most
  hidden: float  # under way while the rank computes, at least
  behind_others: float  # under way while others are waited for

  @property
  def stands_out(self) -> bool:
    """Whether much more is waited in one iteration than in the others."""
    return self.iterations > 1 and self.worst > TWICE * self.waiting / self.iterations

  @property
  def in_flight(self) -> float:
    """From entry to exit."""
    return self.exposed + self.hidden + self.behind_others

  def to_json(self, step: float) -> dict[str, Any]:
    """Where it waits, as plain values; `step` is the mean step in seconds."""
    place = self.place
    return {
        "collective": place.name, "kind": place.kind, "axis": place.axis, "phase": place.phase,
        "source": place.source, "operation": place.operation, "turns": self.iterations,
        "waiting": self.waiting, "share": self.waiting / step if step > 0 else 0.0,
        "transfer": self.transfer, "contention": self.contention, "rank": self.rank,
        "rank_share": self.held if self.rank is not None else None,
        "worst_turn": {"loops": [list(loop) for loop in place.loops], "waiting": self.worst}
        if place.loops else None}

  def overlap_to_json(self) -> dict[str, Any]:
    """What of it is waited for and what computing hides, as plain values."""
    return {"collective": self.place.title, "times": self.iterations, "in_flight": self.in_flight,
            "exposed": self.exposed, "hidden": self.hidden, "behind_others": self.behind_others,
            "meanwhile": self.place.meanwhile}


def shares_by_collective(run: Run, selected: SelectedSteps, totals: Totals, floor: Floor
                         ) -> list[CollectiveShare]:
  """What a step spends at each of its collectives, in the run's order; none without counted
  steps."""
  if not selected.size:
    return []
  waiting, transfer, contention = (_means(values[:, selected.mask]) for values in (
      totals.earliness, totals.transfer, floor.contention))
  for_whom = totals.charged.sum(axis=2) / selected.size  # [C, R]
  at, found = places(run), []
  of = np.array([place.of for place in at])
  for index in dict.fromkeys(of.tolist()):
    own = np.flatnonzero(of == index)
    worst = int(own[waiting[own].argmax()])
    whole = float(waiting[own].sum())
    rank, held = None, 0.0
    if whole > 0:
      by_rank = for_whom[own].sum(axis=0)
      rank = int(by_rank.argmax())
      held = min(float(by_rank[rank]) / whole, 1.0)
    under_way = [float(values.sum()) for values in totals.overlap[:, own] / selected.size]
    found.append(CollectiveShare(at[worst], len(own), whole, float(transfer[own].sum()),
                                 float(contention[own].sum()), float(waiting[worst]), rank, held,
                                 *under_way))
  return found


def where_waits_are(run: Run, found: Sequence[CollectiveShare]) -> tuple[CollectiveShare, ...]:
  """The collectives of an observed step, those with most waiting first; nothing of another run."""
  return tuple(sorted(found, key=lambda one: -one.waiting)) if run.observed else ()


def _means(values: np.ndarray) -> np.ndarray:
  """[C] means over the steps in which a collective ran, times the part of the steps in which it
  did."""
  return np.asarray(np.nan_to_num(values).mean(axis=1))


def late_at(case: EvidenceInputs, episode: Episode) -> Sentence | None:
  """Says before which collective a late rank is busy for longer; None of a run that is not of an
  observed step."""
  if not case.run.observed or not episode.lateness > 0:
    return None
  at = places(case.run)
  by_slot = beyond_typical(case.totals, case.lateness.blocks, episode, case.totals.lateness)
  whole = float(np.maximum(by_slot, 0.0).sum())
  if not whole > 0:
    return None
  top = int(by_slot.argmax())
  if by_slot[top] >= MOST * whole:
    return Evidence.AT.say("one", late=milliseconds(float(by_slot[top])), place=at[top])
  best, own = _most([place.of for place in at], by_slot)
  place = at[int(own[0])]
  if best >= MOST * whole and len(own) > 1:
    return Evidence.AT.say("iterations", late=milliseconds(best), name=place.name,
        origin=place.origin, iterations=len(own), least=milliseconds(float(by_slot[own].min())),
        most=milliseconds(float(by_slot[own].max())))
  return Evidence.AT.say("spread", whole=milliseconds(whole), part=percent(best / whole),
      name=place.name, origin=place.origin)


def _most(keys: Sequence[Any], seconds: np.ndarray) -> tuple[float, np.ndarray]:
  """How many of [C] seconds are of the key that most are of, and at which collectives."""
  of = np.array(keys)
  sums = {key: float(seconds[of == key].sum()) for key in dict.fromkeys(keys)}
  top = max(sums, key=lambda key: sums[key])
  return sums[top], np.flatnonzero(of == top)


def most_waited(case: EvidenceInputs) -> Sentence | None:
  """Says at which collective most of the waiting is; None of a run that is not of an observed
  step."""
  found = where_waits_are(case.run, shares_by_collective(case.run, case.selected, case.totals,
                                                         case.floor))
  whole = sum(w.waiting for w in found)
  if not whole > 0:
    return None
  top = found[0]
  iteration = (f", {percent(top.worst / top.waiting)} of that in {top.place.iteration}"
               if top.stands_out else "")
  return Evidence.MOST_WAITED.say(part=percent(top.waiting / whole), name=top.place.name,
      origin=top.place.origin, iteration=iteration)


def most_contended(case: EvidenceInputs) -> Sentence | None:
  """Says along which axis of the mesh transfers are slow; None where that does not tell
  anything."""
  if not case.run.observed:
    return None
  at = places(case.run)
  seconds = _means(case.floor.contention[:, case.selected.mask])
  whole = float(seconds.sum())
  axes = [place.axis for place in at]
  if not whole > 0 or len(set(axes)) < 2:
    return None
  along, own = _most(axes, seconds)
  top = at[int(own[seconds[own].argmax()])]
  return Evidence.MOST_CONTENDED.say(part=percent(along / whole),
      axis=top.axis.replace(",", " and ") or "no axis of the mesh", name=top.name,
      origin=top.origin)


# Computing while sending: what of a job's collectives is waited for, and what computing hides.

class Overlap(NamedTuple):
  """Computing while sending, of a job. Seconds per step, means over ranks."""

  collectives: tuple[CollectiveShare, ...]  # those with most exposed time first
  computing: float  # while any collective is under way, at least

  @property
  def exposed(self) -> float:
    """What is waited for collectives, at most."""
    return sum(one.exposed for one in self.collectives)

  @property
  def tells(self) -> bool:
    """Whether there is more to say than that all is waited for, as far as timestamps tell."""
    return self.computing > 0 or any(one.place.meanwhile is not None for one in self.collectives)

  def to_json(self, step: float) -> dict[str, Any]:
    """Plain values; `step` is the mean step in seconds."""
    return {"exposed": self.exposed, "exposed_share": self.exposed / step if step > 0 else 0.0,
            "hidden": self.computing, "under_way": self.exposed + self.computing,
            "in_flight": sum(one.in_flight for one in self.collectives),
            "collectives": [one.overlap_to_json() for one in self.collectives[:LISTED]]}


def overlap(found: Sequence[CollectiveShare], computing: float) -> Overlap | None:
  """What a run's collectives hide; None without collectives."""
  return Overlap(tuple(sorted(found, key=lambda one: -one.exposed)), computing) if found else None
