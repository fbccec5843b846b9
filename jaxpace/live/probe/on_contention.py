"""Probes the links by itself when the live step's transfers have become slow, if the user allows
it."""

from __future__ import annotations

import logging
import os
from typing import Any

import jax
import numpy as np

from jaxpace.core.plan import Plan
from jaxpace.core.recordable import Stamped
from jaxpace.live.probe import measure
from jaxpace.live.probe.links import ProbedLinks, probe_links
from jaxpace.trace.decode import StampedSteps
from jaxpace.trace.marks.stamped import held_in_ring

_LOG = logging.getLogger("jaxpace")
_REST = 10  # periods without another probe after one
_FEWEST = 8  # steps from which a period's transfer is judged
_MOST_STEPS = 128  # of which it is judged


class ProbeOnContention:
  """Watches the transfers of an instrumented step, and probes the links when they have become slow.

      prober = jaxpace.ProbeOnContention("runs/demo", paced, every=200)
      for batch in batches:
        pace, (state, metrics) = step(pace, state, batch)
        prober.step(pace)

  Every `every` steps the processes put together what the ring holds of the last steps: a
  collective's own time is the shortest wait of any rank. Where its median is more than `above`
  times the floor, `probe_links` runs there and then, between two steps, and process 0 logs what it
  says. All processes see the same numbers, so all probe, or none. A probe stops the training for a
  few seconds: hence only on request, and at most `most` times.
  """

  def __init__(self, directory: str | os.PathLike[str] | None, paced: Stamped, *,
               every: int = 200, above: float = 1.5, floor: float | None = None, most: int = 3,
               **options: Any):
    """Prepares.

    Args:
      directory: run directory for `links.json`; None: nowhere.
      paced: what `jaxpace.instrument` returned.
      every: steps from one look to the next; a look waits for the devices.
      above: how many times the floor is too slow.
      floor: seconds of all of a step's transfers on the quiet fabric; None: the least median seen
        so far.
      most: probes at most.
      **options: of `jaxpace.probe_links`.

    Raises:
      ValueError: an argument is out of range.
    """
    if every < 1 or not above > 1 or most < 1 or (floor is not None and not floor > 0):
      raise ValueError(f"every={every} and most={most} must be at least 1, above={above} more than "
                       f"1, and floor={floor} None or positive seconds.")
    self._directory, self._paced = directory, paced
    self._every, self._above, self._floor, self._most, self._options = (
        every, above, floor, most, options)
    self._least = float("inf")
    self._calls = self._resting = 0
    self.probes: list[ProbedLinks] = []

  def step(self, pace: Any) -> ProbedLinks | None:
    """Counts a step; looks, and probes, when it is time. Call it after every step, on every
    process.

    Args:
      pace: the pace state that the step returned.

    Returns:
      What a probe found, where one ran.
    """
    self._calls += 1
    if self._calls % self._every or len(self.probes) >= self._most:
      return None
    transfer = self._transfer(pace)
    if transfer is None:
      return None
    self._least = min(self._least, transfer)
    floor = self._least if self._floor is None else self._floor
    if self._resting > 0:
      self._resting -= 1
      return None
    if transfer <= self._above * floor:
      return None
    self._resting = _REST
    links = probe_links(self._directory, **self._options)
    self.probes.append(links)
    if jax.process_index() == 0:
      _LOG.warning(
          "Transfers take %.2f ms per step, %.1f times their floor; the links were probed (%.1f "
          "s): %s",
          transfer * 1e3, transfer / floor, links.taken, links.text())
    return links

  def _transfer(self, pace: Any) -> float | None:
    """Median over the last steps of the collectives' own time, seconds; the same on all
    processes."""
    jax.block_until_ready(pace.step)
    waits = np.full((_MOST_STEPS,), np.inf, np.float32)  # newest last
    plan = self._paced.plan
    if plan is not None and plan.program is not None and plan.collectives:
      for own in held_in_ring(plan):
        waits = np.minimum(waits, _waits(own, plan, len(waits)))
    devices = measure.ends()
    if len(devices) > 1:
      waits = measure.gathered(devices, waits).min(axis=0)
    known = waits[np.isfinite(waits)]
    return float(np.median(known)) if known.size >= _FEWEST else None


def _waits(steps: StampedSteps, plan: Plan, count: int) -> np.ndarray:
  """[count] float32 s, one rank's waits added up over a step's collectives, of the last steps;
  infinity where not known."""
  of_kind = {kind: [place for place, mark in enumerate(plan.marks) if mark.kind == kind]
             for kind in ("enter", "exit")}
  enter, leave = steps.times[:, of_kind["enter"]], steps.times[:, of_kind["exit"]]
  total = np.where((enter == 0) | (leave == 0), np.inf, (leave - enter) * 1e-9).sum(axis=1)
  found = np.full(count, np.inf, np.float32)
  # Of a loop that went back, the last.
  place = count - 1 - (int(steps.step[-1]) - steps.step)
  kept = (place >= 0) & (place < count)
  found[place[kept]] = total[kept]
  return found
