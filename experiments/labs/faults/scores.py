"""How often a diagnosis was right: confusion, F1 by mode, blame, share and what-if errors,
detection delay. Pure."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from experiments.labs.faults.spec import (
  AMPLIFICATION,
  CONTENTION,
  HEALTHY,
  LOCALITY,
  MODES,
  OUTSIDE,
  RUNTIME,
  STRAGGLER,
)

COSTLY = 0.05
"""Faults that cost this share of a run's time count; what becomes of cheaper ones is told apart."""
STRETCH = 24
"""Steps over which it is asked how often healthy runs are disturbed: what the stream looks back
on."""
WRONG = 8.0
"""Percent by which a prediction is off that is asked for its cause."""
BINS = (0.0, 0.02, 0.035, 0.05, 0.1, 0.2, 1.0)
"""Edges of the classes of cost."""
GROUP_OF = {STRAGGLER: "chronic", LOCALITY: "chronic", AMPLIFICATION: "wandering",
            RUNTIME: "runtime", CONTENTION: "contention"}
"""Which share of the injected truth a mode's share is compared with; a slow link's is contention,
whatever its name."""


@dataclasses.dataclass(frozen=True)
class Found:
  """A finding of the report."""

  mode: str
  share: float
  confidence: float
  ranks: tuple[int, ...]
  hosts: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Injected:
  """A fault as it was labelled; see `truth.FaultTruth`."""

  kind: str
  mode: str
  ranks: tuple[int, ...]
  hosts: tuple[str, ...]
  onset: int
  cost: float
  cost_active: float
  began: int = 0


@dataclasses.dataclass(frozen=True)
class Judged:
  """One run, what was injected and what was found.

  Attributes:
    name: of the run.
    layout: of its processes.
    ranks: of the job.
    control: whether it is a healthy control.
    injected: the faults.
    found: the findings, the costliest first.
    shares: injected truth by group.
    what_if: seconds of a step without the fault: as predicted, as measured in the twin, and as the
      injectors' own times say of this very run; None where not asked or answered.
    detected: steps from when it first did anything until streaming named the mode, by the place of
      each fault that begins mid-run; None where it never did.
    noticed: the same until it told of anything at all.
    false_alarms: of the stream, before anything was injected.
    of_disturbances: those of them in whose steps, from the onset told to the alarm, the job lost
      `COSTLY` of its time or more to something that nobody injected, by the loops' own clocks.
    disturbed: in a healthy control, share of its stretches of `STRETCH` steps in which it lost as
      much; else None.
    steps: of the run.
    untouched: error of the truth that contention is compared with, as a share of the step, where it
      shows.
    trouble: what kept the run from being diagnosed; empty if nothing did.
  """

  name: str
  layout: str
  ranks: int
  control: bool
  injected: tuple[Injected, ...]
  found: tuple[Found, ...]
  shares: Mapping[str, float]
  what_if: tuple[float, float, float] | None = None
  detected: Mapping[int, int | None] | None = None
  noticed: Mapping[int, int | None] | None = None
  false_alarms: int = 0
  of_disturbances: int = 0
  disturbed: float | None = None
  steps: int = 0
  untouched: float | None = None
  trouble: str = ""

  @property
  def family(self) -> str:
    return "+".join(fault.kind for fault in self.injected) or HEALTHY


def by_mode(runs: Iterable[Judged], cost: Callable[[Injected], float] = lambda fault: fault.cost
            ) -> dict[str, dict[str, float]]:
  """Precision, recall and F1 of each mode, over healthy controls and runs all of whose faults cost
  `COSTLY`.

  A run may have several modes; each is counted by itself.

  Args:
    runs: all of them.
    cost: which cost of a fault decides.

  Returns:
    By mode: `right`, `missed`, `false` (counts), `precision`, `recall`, `f1`; NaN where there is
    nothing to count.
  """
  counts = {mode: Counter({"right": 0, "missed": 0, "false": 0}) for mode in MODES}
  for run in runs:
    if any(cost(fault) < COSTLY for fault in run.injected) or not (run.injected or run.control):
      continue
    true, told = {fault.mode for fault in run.injected}, {finding.mode for finding in run.found}
    for mode in MODES:
      counts[mode]["right"] += mode in true and mode in told
      counts[mode]["missed"] += mode in true and mode not in told
      counts[mode]["false"] += mode not in true and mode in told
  return {mode: {**count, **_rates(count)} for mode, count in counts.items()}


def _rates(count: Mapping[str, int]) -> dict[str, float]:
  right, missed, false = count["right"], count["missed"], count["false"]
  whole = 2 * right + missed + false
  return {"precision": right / (right + false) if right + false else float("nan"),
          "recall": right / (right + missed) if right + missed else float("nan"),
          "f1": 2 * right / whole if whole else float("nan")}


def macro_f1(modes: Mapping[str, Mapping[str, float]]) -> float:
  """Mean F1 of the modes that occur."""
  values = [entry["f1"] for entry in modes.values() if np.isfinite(entry["f1"])]
  return float(np.mean(values)) if values else float("nan")


def confusion(runs: Iterable[Judged]) -> dict[str, dict[str, int]]:
  """Counts by injected mode (rows) and found mode (columns), of the same runs as `by_mode`.

  A fault whose mode was found goes on the diagonal; else it goes to the costliest finding that no
  fault of the run accounts for, or to healthy. A healthy control goes to its costliest finding, or
  to healthy.
  """
  names = (*MODES, HEALTHY)
  table = {row: dict.fromkeys(names, 0) for row in names}
  for run in runs:
    if any(fault.cost < COSTLY for fault in run.injected):
      continue
    true = {fault.mode for fault in run.injected}
    told = [finding.mode for finding in run.found]
    other = next((mode for mode in told if mode not in true), HEALTHY)
    for mode in true:
      table[mode][mode if mode in told else other] += 1
    if run.control:
      table[HEALTHY][other] += 1
  return table


def fading(runs: Iterable[Judged]) -> list[dict[str, Any]]:
  """How often the mode of a single fault is found, and its blame right, by cost."""
  singles = [(run, run.injected[0]) for run in runs if len(run.injected) == 1]
  rows = []
  for low, high in zip(BINS, BINS[1:], strict=False):
    here = [(run, fault) for run, fault in singles if low <= fault.cost < high]
    named = [value for run, fault in here if (value := blame(run, fault)) is not None]
    rows.append({"from": low, "to": high, "runs": len(here),
                 "found": sum(any(f.mode == fault.mode for f in run.found) for run, fault in here),
                 "blamed": sum(named), "to_blame": len(named)})
  return rows


def blame(run: Judged, fault: Injected) -> bool | None:
  """Whether a fault was blamed on the right ranks or host.

  Right is: exactly its ranks; or its host by name and no rank of another host. Nobody innocent may
  be named.

  Returns:
    None where there is nobody to blame, or the mode was not found.
  """
  finding = next((finding for finding in run.found if finding.mode == fault.mode), None)
  if finding is None or not (fault.ranks or fault.hosts):
    return None
  same = [other for other in run.injected if other.mode == fault.mode]
  ranks = {rank for other in same for rank in other.ranks}
  hosts = {host for other in same for host in other.hosts}
  if not set(finding.ranks) <= ranks:
    return False
  return bool(ranks) and set(finding.ranks) == ranks or bool(hosts) and set(finding.hosts) == hosts


def blame_accuracy(runs: Iterable[Judged]) -> tuple[int, int]:
  """How many of how many costly faults with somebody to blame were found and rightly blamed; missed
  ones count."""
  right = whole = 0
  for run in runs:
    for fault in run.injected:
      if fault.cost >= COSTLY and (fault.ranks or fault.hosts):
        whole += 1
        right += blame(run, fault) is True
  return right, whole


def wrongly_blamed(run: Judged) -> bool:
  """Whether ranks or hosts are named in a run in which nobody is to blame. A host that all ranks
  are on is none."""
  if any(fault.ranks or fault.hosts for fault in run.injected):
    return False
  return any(0 < len(finding.ranks) < run.ranks
             or (finding.hosts and run.layout.partition("x")[0] != "" and
                 0 < len(finding.hosts) < _hosts(run.layout))
             for finding in run.found)


def _hosts(layout: str) -> int:
  first, several, _ = layout.partition("x")
  return int(first) if several else 1


def share_errors(runs: Iterable[Judged]) -> dict[str, np.ndarray]:
  """Errors of the findings' shares in points, by group, of costly faults that were found.

  Several findings of one group, stragglers beside misplaced ranks, are added up first.
  """
  errors: dict[str, list[float]] = {group: [] for group in dict.fromkeys(GROUP_OF.values())}
  for run in runs:
    told = {finding.mode for finding in run.found}
    links = any(fault.kind == "misplaced_link" for fault in run.injected)
    group_of = {**GROUP_OF, LOCALITY: GROUP_OF[CONTENTION]} if links else GROUP_OF
    for group in errors:
      true = {fault.mode for fault in run.injected if group_of[fault.mode] == group
              and fault.cost >= COSTLY}
      if true and true <= told:
        share = sum(finding.share for finding in run.found if group_of.get(finding.mode) == group)
        errors[group].append(100 * (share - run.shares[group]))
  return {group: np.array(values) for group, values in errors.items()}


def what_if_errors(runs: Iterable[Judged]) -> tuple[np.ndarray, np.ndarray]:
  """Predicted over true step time without the fault, less 1, in %: against the twin, and against
  the same run."""
  found = [run.what_if for run in runs if run.what_if]
  return (np.array([100 * (predicted / twin - 1) for predicted, twin, _ in found]),
          np.array([100 * (predicted / own - 1) for predicted, _, own in found]))


def twins_differ(runs: Iterable[Judged]) -> np.ndarray:
  """Step of a run without its fault over its twin's, less 1, in %: what no prediction can know. Of
  faults whose cost is not itself measured against the twin."""
  return np.array([100 * (run.what_if[2] / run.what_if[1] - 1) for run in runs
                   if run.what_if and run.injected[0].kind not in OUTSIDE])


def what_if_causes(runs: Iterable[Judged]) -> dict[str, int]:
  """Of predictions that are `WRONG` % or more off the twin, how many are so since that differs from
  the run itself, since the fault is not found, or else by kind of fault."""
  causes: Counter[str] = Counter()
  for run in runs:
    if run.what_if and abs(run.what_if[0] / run.what_if[1] - 1) >= WRONG / 100:
      predicted, twin, own = run.what_if
      fault = run.injected[0]
      causes["the twin" if abs(own / twin - 1) > abs(predicted / own - 1)
             else fault.kind if any(f.mode == fault.mode for f in run.found) else "not found"] += 1
  return dict(causes.most_common())


def delays(runs: Iterable[Judged],
           of: Callable[[Judged], Mapping[int, int | None] | None] = lambda run: run.detected
           ) -> list[int | None]:
  """Steps from onset to detection of each costly fault; None where it was never detected.

  Args:
    runs: all of them.
    of: what counts as detection, `detected` or `noticed`.
  """
  return [steps for run in runs for place, steps in sorted((of(run) or {}).items())
          if run.injected[place].cost_active >= COSTLY]


def summary(runs: Sequence[Judged]) -> dict[str, Any]:
  """All figures of one way of judging, as plain data."""
  modes, active = by_mode(runs), by_mode(runs, lambda fault: fault.cost_active)
  right, whole = blame_accuracy(runs)
  controls = [run for run in runs if run.control]
  nobody = [run for run in runs if run.injected
            and not any(f.ranks or f.hosts for f in run.injected)]
  errors = share_errors(runs)
  (against_twin, against_own), waited = what_if_errors(runs), delays(runs)
  found = sorted(steps for steps in waited if steps is not None)
  return {
      "runs": len(runs), "with_faults": sum(bool(run.injected) for run in runs),
      "controls": len(controls),
      "counted": sum(bool(run.injected) and all(f.cost >= COSTLY for f in run.injected)
                     for run in runs), "macro_f1": macro_f1(modes),
      "macro_f1_active": macro_f1(active), "modes": modes, "confusion": confusion(runs),
      "blame": {"right": right, "of": whole, "accuracy": right / whole if whole else float("nan")},
      "controls_with_findings": sorted(run.name for run in controls if run.found),
      "controls_falsely_blamed": sorted(run.name for run in controls if wrongly_blamed(run)),
      "nobody_to_blame": {"runs": len(nobody),
                          "named": sorted(run.name for run in nobody if wrongly_blamed(run))},
      "share_error_points": {group: _spread(values) for group, values in errors.items()},
      "contention_truth_error_points": _spread(
          np.array([100 * run.untouched for run in runs if run.untouched is not None])),
      "what_if_error_percent": {"twin": _spread(against_twin), "same_run": _spread(against_own),
                                "twins": _spread(twins_differ(runs))},
      "what_if_causes": what_if_causes(runs),
      "what_if_error_by_kind": _what_if_by_kind(runs),
      "fading": fading(runs),
      "detection": {"faults": len(waited), "detected": len(found),
                    "within_30": sum(steps <= 30 for steps in found),
                    "noticed_within_30": sum(steps is not None and steps <= 30
                                             for steps in delays(runs, lambda run: run.noticed)),
                    "false_alarms_in_controls": sum(run.false_alarms for run in controls),
                    "of_disturbances": sum(run.of_disturbances for run in controls),
                    "steps_of_controls": sum(run.steps for run in controls),
                    "disturbed_stretches":
                    float(np.mean([run.disturbed or 0.0 for run in controls] or [0.0])),
                    "by_kind": _by_kind(runs),
                    "median": float(np.median(found)) if found else None,
                    "p95": float(np.percentile(found, 95)) if found else None},
      "undiagnosed": {run.name: run.trouble for run in runs if run.trouble}}


def _what_if_by_kind(runs: Iterable[Judged]) -> dict[str, dict[str, Any]]:
  """`what_if_errors` by kind of fault: the one fault that is taken out."""
  found: dict[str, list[Judged]] = {}
  for run in runs:
    if run.what_if:
      found.setdefault(run.injected[0].kind, []).append(run)
  return {kind: dict(zip(("twin", "same_run"), map(_spread, what_if_errors(own)), strict=True))
          for kind, own in sorted(found.items())}


def _by_kind(runs: Iterable[Judged]) -> dict[str, list[int | None]]:
  """`delays` by kind of fault, sorted, those never detected last."""
  found: dict[str, list[int | None]] = {}
  for run in runs:
    for place, steps in (run.detected or {}).items():
      if run.injected[place].cost_active >= COSTLY:
        found.setdefault(run.injected[place].kind, []).append(steps)
  return {kind: sorted(steps, key=lambda s: float("inf") if s is None else s)
          for kind, steps in sorted(found.items())}


def _spread(values: np.ndarray) -> dict[str, float | int | None]:
  """Median and high percentiles of |values|, how many, and how many within 2."""
  if not values.size:
    return {"number": 0, "median_abs": None, "p95_abs": None, "max_abs": None, "bias": None,
            "within_2": None}
  size = np.abs(values)
  return {"number": int(values.size), "median_abs": float(np.median(size)),
          "p95_abs": float(np.percentile(size, 95)), "max_abs": float(size.max()),
          "bias": float(np.median(values)), "within_2": float((size <= 2).mean())}


def misjudged(runs: Iterable[Judged]) -> list[str]:
  """A line for each run that was judged wrongly: what was injected, what was found."""
  lines = []
  for run in runs:
    costly = {fault.mode for fault in run.injected if fault.cost >= COSTLY}
    true, told = {fault.mode for fault in run.injected}, {finding.mode for finding in run.found}
    wrong = []
    if costly - told:
      wrong.append("missed " + ", ".join(sorted(costly - told)))
    if (run.control or run.injected) and told - true:
      wrong.append("false " + ", ".join(sorted(told - true)))
    wrong += [f"blamed wrongly for {fault.mode}" for fault in run.injected
              if fault.cost >= COSTLY and blame(run, fault) is False]
    if wrongly_blamed(run) and (run.control or run.injected):
      wrong.append("somebody named, nobody to blame")
    if run.trouble:
      wrong.append(run.trouble)
    if wrong:
      injected = "; ".join(
          f"{f.mode} by {f.kind}, ranks {list(f.ranks)}, {100 * f.cost:.1f} % from step {f.onset}"
          for f in run.injected) or "nothing"
      found = "; ".join(f"{f.mode} {100 * f.share:.1f} % ranks {list(f.ranks)} {list(f.hosts)}"
                        for f in run.found) or "nothing"
      lines.append(f"{run.name}: {', '.join(wrong)} | injected: {injected} | found: {found}")
  return lines
