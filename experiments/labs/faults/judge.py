"""Diagnoses the runs of a lab and puts what was found beside what was injected."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from experiments.labs.faults import truth
from experiments.labs.faults.make import FABRIC, LABEL, label
from experiments.labs.faults.scores import COSTLY, STRETCH, Found, Injected, Judged
from experiments.labs.faults.spec import (
  AMPLIFICATION,
  CONTENTION,
  HEALTHY,
  LOCALITY,
  RUNTIME,
  STRAGGLER,
  Spec,
  from_json,
  layout,
)
from jaxpace.costs.fabric_file import MeasuredFabric, read_fabric
from jaxpace.diagnose import diagnosis as document
from jaxpace.diagnose import stream
from jaxpace.diagnose.diagnose import diagnose
from jaxpace.diagnose.links import read_links
from jaxpace.diagnose.worth import parse
from jaxpace.runs.reader import read_run
from jaxpace.runs.run import HostCauses, Run, RunError

WAYS = ("all", "counters", "bare")
"""What a diagnosis may go by besides the timestamps: hosts' counters, link probe and measured
fabric; counters; nothing."""


@dataclasses.dataclass(frozen=True)
class Labelled:
  """A run that was made, and what is true of it."""

  path: pathlib.Path
  spec: Spec
  truth: dict[str, Any]
  twin_step_time: float | None


def labelled(directory: pathlib.Path, only: Sequence[str] = ()) -> list[Labelled]:
  """Reads the labels of all runs that are complete; what is true of them is worked out anew from
  what was measured.

  Raises:
    ValueError: there is none.
  """
  found = []
  for path in sorted(directory.glob(f"*/{LABEL}")):
    name = path.parent.name
    if only and not any(part in name for part in only):
      continue
    spec = from_json(json.loads(path.read_text())["spec"])
    try:
      found.append(Labelled(path.parent, spec, label(directory, spec)["truth"],
                            _twin_step_time(directory, spec)))
    except FileNotFoundError:
      continue  # its twin is being made anew
  if not found:
    raise ValueError(
        f"{directory} holds no run with a label{' of that name' if only else ''}: make them "
        "with --make.")
  return found


def _twin_step_time(directory: pathlib.Path, spec: Spec) -> float | None:
  if spec.twin is None:
    return None
  twin = dataclasses.replace(spec, faults=(), twin=None, name=spec.twin)
  return truth.truth(twin, truth.read(directory / twin.name, twin), None).step_time


def fabric(one: Labelled) -> MeasuredFabric | None:
  """What the all-reduce of a run's layout takes on the quiet fabric; None where that was not
  measured."""
  path = one.path.parent / FABRIC.format(one.spec.layout)
  return read_fabric(path) if path.exists() else None


def without_counters(run: Run) -> Run:
  """The run as it would be, had the hosts not been watched: neither samples nor columns of
  causes."""
  return dataclasses.replace(run, host_samples=None, host_causes=HostCauses())


def judge(runs: Sequence[Labelled],
          progress: Callable[[int, int], None]) -> dict[str, list[Judged]]:
  """Diagnoses every run in each of `WAYS`.

  Args:
    runs: with their labels.
    progress: called with the number of runs done and in all.

  Returns:
    By way, the runs in their order.
  """
  judged: dict[str, list[Judged]] = {how: [] for how in WAYS}
  for number, one in enumerate(runs):
    for how, found in _judge(one).items():
      judged[how].append(found)
    progress(number + 1, len(runs))
  return judged


def _judge(one: Labelled) -> dict[str, Judged]:
  try:
    run = read_run(one.path / "run")
    followed = follow(one, run)
    return {how: _diagnosed(one, followed, run, how) for how in WAYS}
  except RunError as error:
    return dict.fromkeys(WAYS, dataclasses.replace(blank(one), trouble=str(error)))


def blank(one: Labelled) -> Judged:
  """What is known before the run is read."""
  spec = one.spec
  injected = tuple(Injected(f["kind"], f["mode"], tuple(f["ranks"]), tuple(f["hosts"]), f["onset"],
                            f["cost"], f["cost_active"], f["began"]) for f in one.truth["faults"])
  control = not spec.faults and HEALTHY in spec.name
  return Judged(spec.name, spec.layout, layout(spec.layout).ranks, control, injected, (),
                one.truth["shares"], untouched=one.truth["untouched"])


def follow(one: Labelled, run: Run) -> Judged:
  """Judges what the stream of alarms tells of a run; nothing else is diagnosed."""
  known = blank(one)
  detected, noticed, early = detection(run, known.injected)
  followed = dataclasses.replace(known, detected=detected, noticed=noticed, false_alarms=len(early),
                                 steps=len(run.steps))
  if not known.control:
    return followed
  found = truth.read(one.path, one.spec)
  return dataclasses.replace(
      followed, disturbed=truth.disturbed(found, COSTLY, STRETCH),
      of_disturbances=sum(truth.lost(found, alarm.onset, alarm.step) >= COSTLY for alarm in early))


def _diagnosed(one: Labelled, known: Judged, run: Run, how: str) -> Judged:
  asked = _what_if(known.injected, how)
  diagnosis = diagnose(without_counters(run) if how == "bare" else run,
                       asked=(parse(asked),) if asked else (),
                       fabric=fabric(one) if how == "all" else None,
                       links=read_links(one.path / "run") if how == "all" else None)
  found = document.to_json(diagnosis)
  findings = tuple(Found(f["mode"], f["share"], f["confidence"], tuple(f["ranks"]),
                         tuple(f["hosts"]))
                   for f in found["findings"])
  predicted = found["what_if"]["asked"][0]["step_time"] if asked else None
  answer = None
  if predicted is not None and one.twin_step_time is not None:
    answer = (predicted, one.twin_step_time, _healthy_steps(one, run, diagnosis.selected.mask))
  return dataclasses.replace(known, found=findings, what_if=answer)


def _healthy_steps(one: Labelled, run: Run, counted: np.ndarray) -> float:
  """Seconds per step of this very run without its fault, by the injectors' times, in the steps that
  the report counts."""
  found, twin = (truth.read(one.path.parent / name, one.spec)
                 for name in (one.spec.name, one.spec.twin or one.spec.name))
  inside = np.isin(np.arange(one.spec.steps), run.steps[counted])
  told = truth.truth(one.spec, found._replace(step=np.where(inside, found.step, np.nan)), twin)
  return told.step_time * (1 - told.faults[0].cost)


_ALARMS = {STRAGGLER: stream.LATE, LOCALITY: stream.LATE, AMPLIFICATION: stream.WAITING,
           CONTENTION: stream.TRANSFER, RUNTIME: stream.GAP}
"""What the stream calls each mode when it begins."""


def detection(run: Run, injected: Sequence[Injected]
              ) -> tuple[dict[int, int | None], dict[int, int | None], list[stream.Alarm]]:
  """Follows a run step by step, as it would be followed live.

  Args:
    run: the whole run.
    injected: its faults.

  Returns:
    Steps from when a fault first did anything to the first alarm of the right kind, and of a right
    rank if it names one, by the place of each fault that begins mid-run, None where there is none;
    the same to the first alarm of any kind; and the alarms before anything was injected.
  """
  _, alarms = stream.follow(stream.init(run.ranks), run)
  begun = [alarm for alarm in alarms if not alarm.over]
  found: dict[int, int | None] = {}
  noticed: dict[int, int | None] = {}
  for place, fault in enumerate(injected):
    if fault.onset > 0:
      kind = stream.TRANSFER if fault.kind == "misplaced_link" else _ALARMS[fault.mode]
      began = max(fault.onset, fault.began)  # a rare pause can't be noticed before it strikes
      since = [alarm for alarm in begun if alarm.step >= began]
      right = [alarm for alarm in since if alarm.kind == kind
               and (alarm.rank is None or alarm.rank in fault.ranks)]
      found[place], noticed[place] = (some[0].step - began if some else None
                                      for some in (right, since))
  first = min((fault.onset for fault in injected), default=None)
  return found, noticed, [alarm for alarm in begun if first is None or alarm.step < first]


def _what_if(injected: Sequence[Injected], how: str) -> str | None:
  """What to take out of a run so that its healthy twin is left; None where nothing gives that.

  Taking all skew out takes the twin's own out as well, so stragglers intermittently have no such
  question. By the timestamps alone pauses can't be told from other gaps: then all jitter is taken
  out, the twin's own as well.
  """
  if len(injected) != 1:
    return None
  fault = injected[0]
  if fault.mode in (STRAGGLER, LOCALITY) and fault.kind != "misplaced_link":
    return ",".join(f"rank:{rank}" for rank in fault.ranks)
  if fault.mode == RUNTIME:
    return "jitter" if how == "bare" else "pauses"
  return "fabric_contention" if fault.mode == CONTENTION else None
