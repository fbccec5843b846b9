"""What a recorded run says, as values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxpace.core.words import Sentence
from jaxpace.costs.fabric_file import kind_in
from jaxpace.diagnose.floor import shares_of_ranks
from jaxpace.diagnose.hang import Hang
from jaxpace.diagnose.limits import LISTED, SCHEMA
from jaxpace.diagnose.modes.inputs import EvidenceInputs
from jaxpace.diagnose.pacing import PacingEffect, WorkMoved
from jaxpace.diagnose.selected_steps import StepTime, mean_known
from jaxpace.diagnose.waiting_places import CollectiveShare, Overlap, places
from jaxpace.diagnose.words.codes import Verdict, codes
from jaxpace.diagnose.words.names import hosts_of, ranks_by_host
from jaxpace.diagnose.worth import Worth
from jaxpace.files.plain import to_plain
from jaxpace.hosts.locality.job import WARNING, job_concerns

_NO_WORDS_YET = Sentence(Verdict.NO_STEPS, "")


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Diagnosis(EvidenceInputs, Worth):
  """What a recorded run says: all that the stages found, what mending is worth, and words.

  Arrays are [R] over ranks unless noted; NaN where a rank has no data.
  """

  step_time: StepTime | None  # of all steps that count; None where none does
  shares: dict[str, float] | None  # by name in `SHARES`, sum 1
  # mean seconds per step waited, by the cause of the last rank's lateness
  waiting: dict[str, float]
  measured: PacingEffect | None  # what a guard measured of pacing; None where none ran
  # what sharing work by speed did; None where no work was shared
  work_moved: WorkMoved | None
  for_data: float | None  # mean seconds per step waited for data; None where that isn't measured
  events: tuple[Mapping[str, Any], ...]  # what watchdogs found
  # on signs that groups wait for each other as the stages of a pipeline do
  stages: tuple[Sentence, ...]
  # of an observed step, by collective, those with most waiting first
  waits: tuple[CollectiveShare, ...]
  # what of the collectives is waited for, and what computing hides; None without any
  overlap: Overlap | None
  verdict: Sentence = _NO_WORDS_YET
  notes: tuple[Sentence, ...] = ()

  @property
  def in_other_shapes(self) -> float:
    """Part of the time that steps took that are left out since they are of another shape."""
    left_out = float(self.selected.of_others.sum())
    return left_out / (left_out + float(self.steps.sum())) if left_out else 0.0


# The diagnosis as the JSON document that `jaxpace report --json` writes.

def to_json(diagnosis: Diagnosis, hang: Hang | None = None) -> dict[str, Any]:
  """Returns plain lists, dicts and scalars; durations in seconds; null where a value is not known,
  never NaN.

  A key of the schema whose analysis needs what was not recorded, or is not made, is there and null.
  """
  run = diagnosis.run
  document = {
      "schema": SCHEMA,
      "run": run.id,
      "path": str(run.path),
      "ranks": run.ranks_in_all,
      "processes": _processes(diagnosis),
      "hosts": sorted(hosts_of(run, range(run.ranks))),
      "steps": diagnosis.selected.recorded,
      "steps_counted": diagnosis.counted,
      "steps_in_full": diagnosis.selected.size,
      "first_step": int(run.all_steps.steps[0]),
      "last_step": int(run.all_steps.steps[-1]),
      "window": list(run.window),
      "warmup": diagnosis.selected.warmup.tolist(),
      "clock": run.info.get("clock") or run.plan.get("clock"),
      "missing": _missing(diagnosis),
      "not_judged": list(diagnosis.unseen),
      "step_time": diagnosis.step_time._asdict() if diagnosis.step_time
      else dict.fromkeys(("mean", "median", "p99", "cv")),
      "shares": diagnosis.shares,
      "waiting": diagnosis.waiting or None,
      "waiting_for_data": diagnosis.for_data,
      "floor_source": diagnosis.floor.source if run.collectives else None,
      "findings": [finding.to_json() for finding in diagnosis.findings],
      "verdict": str(diagnosis.verdict),
      "verdict_code": str(diagnosis.verdict.code),
      "what_if": _what_if(diagnosis),
      "pacing": _pacing(diagnosis),
      "per_rank": _per_rank(diagnosis),
      "per_host": _per_host(diagnosis) if diagnosis.step_time else {},
      "phases": {name: {"median": float(np.nanmedian(medians)),
                        "slowest_rank": int(np.nanargmax(medians)),
                        "slowest_median": float(np.nanmax(medians))}
                 for name, medians in diagnosis.phases.items()},
      "collectives": _collectives(diagnosis),
      "waits": [waits.to_json(diagnosis.step_time.mean) for waits in diagnosis.waits[:LISTED]]
               if diagnosis.step_time else [],
      "overlap": diagnosis.overlap.to_json(diagnosis.step_time.mean)
                 if diagnosis.overlap and diagnosis.step_time else None,
      "locality": {"processes": len(run.locality),
                   "warnings": [c for c in job_concerns(run.locality)
                                if c.level == WARNING]},
      "link_probe": _link_probe(diagnosis),
      "hang": hang.to_json() if hang else None,
      "hangs": [dict(event) for event in diagnosis.events],
      "notes": [str(note) for note in diagnosis.notes],
      "note_codes": codes(diagnosis.notes),
      "problems": list(run.problems),
  }
  return to_plain(document)


def _processes(diagnosis: Diagnosis) -> int:
  run = diagnosis.run
  declared = run.info.get("processes")
  seen = len(set(run.process_of_rank[run.process_of_rank >= 0].tolist())
             | {p.process for p in run.processes})
  return max(seen, declared if isinstance(declared, int) else 0)


def _missing(diagnosis: Diagnosis) -> dict[str, Any]:
  run = diagnosis.run
  present = run.attempt[:, run.inside] >= 0
  recording, recorded = present.any(axis=1), (run.attempt >= 0).any(axis=1)
  some = present.any(axis=0)
  lacking = (~present[:, some]).sum(axis=1)
  return {
      "ranks": sorted({*np.flatnonzero(~recording & recorded).tolist(), *run.silent.tolist()}),
      "steps": int((~some).sum()),
      "rank_steps": {str(r): int(lacking[r]) for r in np.flatnonzero(recording & (lacking > 0))},
  }


def _what_if(diagnosis: Diagnosis) -> dict[str, Any]:
  step = diagnosis.step_time
  result: dict[str, Any] = {
      "no_skew": None, "no_contention": diagnosis.no_contention,
      "no_runtime_jitter": diagnosis.no_runtime_jitter, "work_shared": diagnosis.work_shared,
      "without_rank": diagnosis.without_rank, "without_host": diagnosis.without_host,
      "stages": bool(diagnosis.stages),
      "asked": [{"without": text, **a._asdict()} for text, a in diagnosis.asked]}
  if diagnosis.no_skew and step:
    result["no_skew"] = {**diagnosis.no_skew._asdict(),
                         "skew": diagnosis.lateness.earliness / step.mean if step.mean else 0.0}
  if diagnosis.without_late:
    result["without_late_ranks"] = {"ranks": diagnosis.lateness.late.tolist(),
                                    **diagnosis.without_late._asdict()}
  return result


def _pacing(diagnosis: Diagnosis) -> dict[str, Any]:
  present = int(diagnosis.totals.present.sum())
  found = diagnosis.measured
  return {"active_share": diagnosis.totals.delayed / present if present else None,
          **(found.to_json() if found else {"effect": None, "effect_interval": None, "blocks": 0}),
          **({"work": diagnosis.work_moved.to_json()} if diagnosis.work_moved else {})}


def _per_rank(diagnosis: Diagnosis) -> list[dict[str, Any]]:
  run, totals, lateness = diagnosis.run, diagnosis.totals, diagnosis.lateness
  step = totals.per_step["step"]
  elapsed = float(np.nansum(step))
  late = set(lateness.late.tolist()) if diagnosis.without_rank else set()
  shares = (shares_of_ranks(totals, diagnosis.floor, ([rank] for rank in range(run.ranks)))
            if diagnosis.step_time else [None] * run.ranks)
  rows: list[dict[str, Any]] = []
  for rank in np.flatnonzero(run.there).tolist():
    number = int(totals.present[rank])
    mean = {name: float(values[rank]) / number if number else float("nan")
            for name, values in totals.per_rank.items()}
    waiting = mean["waiting_compute"] + mean["waiting_runtime"] + mean["waiting_pacing"]
    rows.append({
        "rank": rank, "host": run.host_of_rank(rank) or None,
        "process": int(run.process_of_rank[rank]) if run.process_of_rank[rank] >= 0 else None,
        "steps": number, "lateness": lateness.mean[rank] if number else None,
        "confidence": lateness.confidence[rank], "late": rank in late,
        "last_share": float(totals.last[rank]) / number if number else None,
        "cost_share": float(totals.blame[rank]) / elapsed if elapsed else None,
        "step_time": mean["step"], "compute": mean["compute"], "runtime": mean["runtime"],
        "pacing": mean["pacing"], "waiting": waiting, "shares": shares[rank]})
  return rows


def _per_host(diagnosis: Diagnosis) -> dict[str, dict[str, float]]:
  ranks = {host: own for host, own in ranks_by_host(diagnosis.run).items() if host}
  shares = shares_of_ranks(diagnosis.totals, diagnosis.floor, ranks.values())
  return {host: own for host, own in zip(ranks, shares, strict=True) if own is not None}


def _collectives(diagnosis: Diagnosis) -> list[dict[str, Any]]:
  mask, kept = diagnosis.selected.mask, diagnosis.totals.groups
  at = places(diagnosis.run)
  rows: list[dict[str, Any]] = []
  for c, collective in enumerate(diagnosis.run.collectives):
    rows.append({"slot": collective.slot, "name": collective.name, "bytes": collective.bytes,
                 "kind": "point_to_point" if collective.point_to_point
                 else kind_in(diagnosis.run, collective),
                 "groups": kept.grouped[c].size,
                 "transfer": mean_known(diagnosis.totals.transfer[c][mask]),
                 "floor": float(diagnosis.floor.floor[c]),
                 "contention": mean_known(diagnosis.floor.contention[c][mask]),
                 "waiting": mean_known(diagnosis.totals.earliness[c][mask])})
    if diagnosis.overlap is not None:
      exposed, hidden, behind = (diagnosis.totals.overlap[:, c] / diagnosis.selected.size).tolist()
      rows[-1] |= {"in_flight": exposed + hidden + behind, "exposed": exposed, "hidden": hidden,
                   "behind_others": behind, "meanwhile": at[c].meanwhile}
    if diagnosis.run.observed:
      rows[-1] |= {"of": at[c].of, "axis": at[c].axis, "phase": at[c].phase, "source": at[c].source,
                   "operation": at[c].operation, "loops": [list(loop) for loop in at[c].loops]}
  return rows


def _link_probe(diagnosis: Diagnosis) -> dict[str, Any] | None:
  links = diagnosis.links
  if links is None:
    return None
  return {"when_unix_ns": links.when_unix_ns,
          "culprits": [culprit.to_json() for culprit in links.culprits],
          "cannot_tell": links.cannot_tell or None}


def hang_only(path: str, hang: Hang, problem: str) -> dict[str, Any]:
  """The document of a run that hung before it had recorded a step; `problem` says why there is no
  more."""
  return to_plain({"schema": SCHEMA, "run": hang.run, "path": path, "steps": 0,
                   "hang": hang.to_json(), "problems": [problem]})
