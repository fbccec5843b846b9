"""What the injected faults really cost, from what the injectors measured: never from what the
recorder timestamped. Pure.

A rank's busy time before the collective is what it slept, computed and paused, each read off the
monotonic clock where it was done. The accounting of docs/accounting.md, applied to these times,
gives the shares a report should find; the steps replayed without one fault give what that fault
costs.
"""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any, NamedTuple

import numpy as np

from experiments.labs.faults.schedule import schedule
from experiments.labs.faults.spec import NETWORK, OUTSIDE, PAUSES, Fault, Spec, layout

GROUPS = ("chronic", "wandering", "runtime", "contention")
"""Shares that can be told apart by injection: of ranks late for good (whatever the reason), of
ranks intermittently late, of pauses between steps, of transfers that take longer."""


class Measured(NamedTuple):
  """What the processes of a run measured. R ranks, K steps; seconds."""

  work: np.ndarray  # [R, K] slept and computed as part of a healthy step
  extra: np.ndarray  # [R, K] slept on top
  over: np.ndarray  # [R, K] of both, what it took longer than was asked for
  pause: dict[str, np.ndarray]  # [R, K] by cause, the same on all ranks of a process
  # [K] time from one step's end to the next one's, mean over processes; NaN for the first
  step: np.ndarray


def read(directory: pathlib.Path, spec: Spec) -> Measured:
  """Reads `injected/<process>.npz` of a run.

  Raises:
    OSError: a file is missing or can't be read.
  """
  shape = layout(spec.layout)
  arrays = {name: np.zeros((shape.ranks, spec.steps)) for name in ("work", "extra", "over")}
  pause: dict[str, np.ndarray] = {}
  steps = []
  for process in range(shape.processes):
    with np.load(directory / "injected" / f"{process}.npz") as file:
      own = file["ranks"]
      arrays["work"][own] = file["work"] + file["spin"]
      arrays["extra"][own] = file["extra"]
      # A spinning rank computes so many turns, not seconds: what it took longer shows against its
      # twin only.
      arrays["over"][own] = (file["work"] - file["work_asked"] + file["extra"] - file["extra_asked"]
                             + file["spin"])
      for name in file.files:
        if name.startswith("pause_"):
          pause.setdefault(name.removeprefix("pause_"),
                           np.zeros((shape.ranks, spec.steps)))[own] = file[name]
      steps.append(np.diff(file["ends_ns"], prepend=file["ends_ns"][0]) * 1e-9)
  step = np.mean(steps, axis=0)
  step[0] = np.nan
  return Measured(arrays["work"], arrays["extra"], arrays["over"], pause, step)


def lost(found: Measured, first: int, last: int) -> float:
  """Share of the step that steps `first` to `last` took longer than is usual in the run, whatever
  the reason.

  By the loops' own clocks: what a step takes beyond the longest work and pauses that were asked
  for, less the run's median of it.
  """
  asked = (found.work + found.extra - found.over
           + sum(found.pause.values(), np.zeros_like(found.work))).max(axis=0)
  rest = found.step - asked
  return float((np.nanmean(rest[first:last + 1]) - np.nanmedian(rest)) / np.nanmedian(found.step))


def disturbed(found: Measured, cost: float, steps: int) -> float:
  """Share of all stretches of so many steps in which that share, `lost`, is `cost` at least."""
  begins = range(1, len(found.step) - steps + 1)
  return (float(np.mean([lost(found, begin, begin + steps - 1) >= cost for begin in begins]))
          if begins else 0.0)


@dataclasses.dataclass(frozen=True)
class FaultTruth:
  """What one fault did.

  Attributes:
    kind, mode, ranks, hosts, onset, until: as labelled; no ranks and hosts: nobody is to blame.
    seconds: mean a step over the whole run: injected on the rank it struck most, or added to the
      transfer.
    cost: share of the run's step time that would be saved without it; without an imbalance all
      ranks have the mean.
    cost_active: the same of the steps from `onset` to `until`.
    began: first step from `onset` on in which it did anything: a rare pause begins when it strikes
      first.
  """

  kind: str
  mode: str
  ranks: tuple[int, ...]
  hosts: tuple[str, ...]
  onset: int
  until: int
  seconds: float
  cost: float
  cost_active: float
  began: int


@dataclasses.dataclass(frozen=True)
class Truth:
  """What a run's faults did together.

  Attributes:
    step_time: mean step, seconds, measured by the loops.
    shares: of the step time, by `GROUPS`, of all injected time: a healthy run's jitter has shares,
      too.
    faults: one for each fault of the spec.
    untouched: what the difference from the twin that is called contention is in a run in whose
      network, and to whose processes, nothing was done from outside: the error of that truth, as a
      share of the step; None in other runs.
  """

  step_time: float
  shares: dict[str, float]
  faults: tuple[FaultTruth, ...]
  untouched: float | None = None

  def to_json(self) -> dict[str, Any]:
    return dataclasses.asdict(self)


def truth(spec: Spec, found: Measured, twin: Measured | None) -> Truth:
  """Works out what the faults of a run did.

  Args:
    spec: the run.
    found: what was measured in it.
    twin: what was measured in its healthy twin; None for a healthy run.
  """
  counts = np.isfinite(found.step)
  mean = float(found.step[counts].mean())
  inside = found.work + found.extra
  pauses = sum(found.pause.values(), np.zeros_like(inside))
  slowed = _slowed(spec, found, twin, inside + pauses)
  faults = []
  for fault in spec.faults:
    in_step, pause, network = _parts(spec, fault, found, twin, slowed)
    now = np.zeros(spec.steps, bool)
    now[fault.onset:fault.until] = True
    saved = (inside + pauses).max(axis=0) - (inside - in_step + pauses - pause).max(axis=0)
    saved = np.where(now, saved + network, 0.0)
    ranks, hosts = blamed(spec, fault)
    seconds = float((in_step + pause)[:, counts].mean(axis=1).max()) + network * float(now.mean())
    faults.append(FaultTruth(
        fault.kind, fault.mode, ranks, hosts, fault.onset, fault.until, seconds,
        float(saved[counts].mean()) / mean,
        float(saved[counts & now].mean()) / float(found.step[counts & now].mean()),
        _began(fault, (in_step + pause).max(axis=0))))
  shares = accounting(inside[:, counts], pauses[:, counts])
  active = max((float((fault.until - fault.onset) / spec.steps)
                for fault in spec.faults if fault.kind in NETWORK),
               default=0.0)
  shares["contention"] = slowed * active
  untouched = None
  if (twin is not None and layout(spec.layout).processes > 1
      and not any(f.kind in OUTSIDE for f in spec.faults)):
    untouched = _beyond_twin(found, twin, inside + pauses, slice(1, None)) / mean
  return Truth(mean, {name: value / mean for name, value in shares.items()}, tuple(faults),
               untouched)


def _began(fault: Fault, seconds: np.ndarray) -> int:
  """First step from the onset on in which a pause was injected, of [K] seconds; of every other
  fault, the onset."""
  struck = (np.flatnonzero(seconds[fault.onset:] > 0) if fault.kind in PAUSES
            else np.zeros(1, np.int64))
  return fault.onset + int(struck[0]) if struck.size else fault.onset


def accounting(inside: np.ndarray, pauses: np.ndarray) -> dict[str, float]:
  """Seconds per step by `GROUPS`, from busy times alone.

  Earliness (max over ranks of the busy time - own) is split by the positive differences (last rank
  - own) between work and pauses; what pauses take and make others wait is `runtime`. The waiting
  for work is `chronic` as far as the same ranks are behind in the mean, and `wandering` beyond
  that.

  Args:
    inside: [R, K] seconds of work in the step.
    pauses: [R, K] seconds between steps.
  """
  busy = inside + pauses
  last = busy.argmax(axis=0)[None]
  early = busy.max(axis=0) - busy
  more = [np.maximum(np.take_along_axis(part, last, axis=0) - part, 0.0)
          for part in (inside, pauses)]
  total = more[0] + more[1]
  scale = np.divide(early, total, out=np.zeros_like(early), where=total > 0)
  waiting, paused = (float((part * scale).mean()) for part in more)
  chronic = min(float(inside.mean(axis=1).max() - inside.mean()), waiting)
  return {"chronic": chronic, "wandering": waiting - chronic,
          "runtime": float(pauses.mean()) + paused}


def blamed(spec: Spec, fault: Fault) -> tuple[tuple[int, ...], tuple[str, ...]]:
  """Ranks and hosts that a fault is to be blamed on; none where nobody is to blame."""
  shape = layout(spec.layout)
  if fault.kind in ("rotating", "imbalance", "trunk"):
    return (), ()
  if fault.kind == "link" and shape.processes == 2:
    return (), ()  # one link of two hosts that is slow both ways looks the same from either
  if fault.kind in ("straggler", "misplaced"):
    ranks = fault.targets
  else:
    ranks = tuple(rank for process in fault.targets for rank in shape.ranks_of(process))
  if len(ranks) == shape.ranks:
    return (), ()  # everybody
  processes = sorted({shape.process_of(rank) for rank in ranks})
  return ranks, tuple(f"h{process}" for process in processes) if shape.processes > 1 else ()


def _slowed(spec: Spec, found: Measured, twin: Measured | None, busy: np.ndarray) -> float:
  """Seconds by which the steps under a fault from outside exceed the twin's, beyond the last rank's
  busy time.

  What the network does to a transfer, or a process that stands still in one, is not under the
  injectors' control: it is the one truth that is measured against the twin.
  """
  struck = [fault for fault in spec.faults if fault.kind in OUTSIDE]
  if twin is None or not struck:
    return 0.0
  return max(_beyond_twin(found, twin, busy, slice(max(1, struck[0].onset), struck[0].until)), 0.0)


def _beyond_twin(found: Measured, twin: Measured, busy: np.ndarray, now: slice) -> float:
  """Seconds by which some steps exceed the twin's, beyond the last rank's [R, K] busy time."""
  rest = found.step - busy.max(axis=0)
  usual = twin.step - (twin.work + twin.extra).max(axis=0)
  return float(np.nanmean(rest[now]) - np.nanmean(usual[now]))


def _parts(spec: Spec, fault: Fault, found: Measured, twin: Measured | None, slowed: float
           ) -> tuple[np.ndarray, np.ndarray, float]:
  """[R, K] seconds of a fault in the step, [R, K] between steps, and seconds it adds to each
  transfer."""
  nothing = np.zeros_like(found.work)
  if fault.kind in PAUSES:
    return nothing, found.pause[PAUSES[fault.kind]], 0.0
  if fault.kind in NETWORK:
    return nothing, nothing, slowed
  if fault.kind in ("stopped", "hog"):
    ranks, _ = blamed(spec, fault)
    usual = (np.median(twin.over, axis=1, keepdims=True) if twin
             else np.median(found.over, axis=1, keepdims=True))
    own = np.isin(np.arange(len(nothing)), ranks)[:, None]
    return np.where(own, np.maximum(found.over - usual, 0.0), 0.0), nothing, slowed
  # Two faults may lengthen the same rank's step: what it slept on top is split as it was asked for.
  alone = dataclasses.replace(spec,
                              faults=tuple(f if f is fault else dataclasses.replace(f, seconds=0.0)
                                           for f in spec.faults))
  asked, whole = schedule(alone).extra, schedule(spec).extra
  part = np.divide(asked, whole, out=np.zeros_like(nothing), where=whole > 0) * found.extra
  if fault.kind == "imbalance":
    # The fault is that the work is uneven: without it all ranks have as much of it as they have in
    # the mean.
    part = part - part.mean(axis=0)
  return part, nothing, 0.0
