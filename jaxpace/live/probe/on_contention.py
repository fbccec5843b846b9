"""Probes the links by itself when the live step's transfers have become slow, if the user allows
it."""

from __future__ import annotations

import logging
import os
from typing import Any

import jax
import numpy as np

from jaxpace.core.plan import Plan
from jaxpace.core.recordable import Recordable
from jaxpace.live.probe import measure
from jaxpace.live.probe.links import ProbedLinks, probe_links
from jaxpace.trace import decode, ringcopy

_LOG = logging.getLogger("jaxpace")
_REST = 10  # periods without another probe after one
_FEWEST = 8  # steps from which a period's transfer is judged


class ProbeOnContention:
  """Watches the transfers of an instrumented step, and probes the links when they have become slow.

      prober = jaxpace.ProbeOnContention("runs/demo", paced, every=200)
      for batch in batches:
        pace, (state, metrics) = step(pace, state, batch)
        prober.step(pace)

  Every `every` steps the processes put together what the ring of stamps holds of the last steps: a
  collective's own time is the shortest wait of any rank. Where its median is more than `above`
  times the floor, `probe_links` runs there and then, between two steps, and process 0 logs what it
  says. All processes see the same numbers, so all probe, or none. A probe stops the training for a
  few seconds: hence only on request, and at most `most` times.
  """

  def __init__(self, directory: str | os.PathLike[str] | None, paced: Recordable, *,
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
    """Median over the ring's steps of the collectives' own time, seconds; the same on all
    processes."""
    plan = self._paced.plan
    rings, _ = ringcopy.start(pace, with_ranks=False).read()
    waits = np.full((rings.shape[1],), np.inf, np.float32)  # [steps], newest last
    if isinstance(plan, Plan) and plan.collectives:
      own = np.array([self._waits(ring, plan) for ring in rings])
      waits = own.min(axis=0)
    devices = measure.ends()
    if len(devices) > 1:
      waits = measure.gathered(devices, waits).min(axis=0)
    known = waits[np.isfinite(waits)]
    return float(np.median(known)) if known.size >= _FEWEST else None

  @staticmethod
  def _waits(ring: np.ndarray, plan: Any) -> np.ndarray:
    """[rows] float32 seconds, one rank's waits added up over a step's collectives; infinity where
    not known."""
    _, columns = decode.decode(ring, plan, 0, 0, 0)
    waits = np.ma.filled((columns["exit_ns"] - columns["enter_ns"]).astype(np.float64) * 1e-9,
                         np.inf)
    steps, place = np.unique(columns["step"], return_inverse=True)
    total = np.zeros(len(steps))
    np.add.at(total, place, waits)
    found = np.full((len(ring),), np.inf, np.float32)
    found[len(found) - len(total):] = total
    return found
