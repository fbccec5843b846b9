"""What a reader of the report must know to read it rightly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxpace.costs.fabric_file import MeasuredFabric
from jaxpace.diagnose.accounting import account
from jaxpace.diagnose.codes import (
  Note,
  Sentence,
  joined,
  milliseconds,
  name_rank,
  percent,
  some_ranks,
)
from jaxpace.diagnose.diagnosis import Diagnosis
from jaxpace.diagnose.floor import RUNNING_MINIMUM, joined_ranks
from jaxpace.diagnose.inconclusive import NO_SLOT, once, untimed
from jaxpace.diagnose.limits import EFFECT, LEAST, LISTED
from jaxpace.diagnose.mechanism import CROWDED
from jaxpace.diagnose.modes.inputs import PERSISTENT
from jaxpace.diagnose.selected_steps import WARMUP_FACTOR, WARMUP_STEPS
from jaxpace.diagnose.step_times import busy
from jaxpace.diagnose.verdict import few_pauses, unnamed_waiting
from jaxpace.diagnose.what_if import Alternative
from jaxpace.runs.alarms import where
from jaxpace.runs.groups import groups
from jaxpace.runs.problems import list_ranks, plural
from jaxpace.runs.run import Run

_WAITING = {"compute": "longer compute", "runtime": "longer gaps between steps", "pacing": "delays"}


def notes_on(facts: Diagnosis, fabric: MeasuredFabric | None = None) -> tuple[Sentence, ...]:
  """Sentences on how the numbers came about; the reader's own problems are the run's.

  Args:
    facts: of the run.
    fabric: that was given as the quiet one, if any was.
  """
  run, unfinished = facts.run, facts.selected.unfinished
  notes: list[Sentence] = []
  if facts.selected.impossible:
    notes.append(Sentence(Note.IMPOSSIBLE_STEPS,
        f"{plural(facts.selected.impossible, 'step')} left out: by their timestamps they took no "
        "time, less than none, or more than eleven days. Are the columns nanoseconds of one clock "
        "for each rank?"))
  if facts.selected.warmup.size:
    steps = facts.selected.warmup
    notes.append(Sentence(Note.WARMUP,
        f"Warm-up left out: step{'s' if steps.size > 1 else ''} {list_ranks(steps)} (of the first "
        f"{WARMUP_STEPS} steps, all up to the last that took over {WARMUP_FACTOR:g} times "
        "the median)."))
  if unfinished.size:
    notes.append(Sentence(Note.UNFINISHED,
        f"The last {plural(unfinished.size, 'step')} left out, from step {unfinished[0]:,} on: "
        "rows of some ranks are missing there. They come later while the job runs, and never if a "
        "process was killed."))
  if run.aggregated is not None and facts.step_time:
    notes.append(Sentence(Note.IN_FULL,
        f"{facts.selected.size:,} of {plural(facts.counted, 'step')} that count are "
        "detailed, with a row for each collective: shares, waits and what-if are of these. Step "
        "times, how late each rank is and since when are of all."))
  uncounted = facts.selected.recorded - facts.counted - facts.selected.warmup.size - unfinished.size
  if facts.step_time and uncounted > 1:
    notes.append(Sentence(Note.UNMEASURED,
        f"{plural(uncounted, 'step')} can't be measured: a step counts from the exit before it, "
        "which is not recorded."))
  if facts.step_time:
    notes += _measured(facts)
  if facts.inconclusive and facts.findings:  # without any the verdict says it
    notes.append(Sentence(Note.UNTOLD, facts.inconclusive))
  notes += _groups(facts)
  if fabric is not None and run.collectives and facts.floor.source == RUNNING_MINIMUM:
    notes.append(Sentence(Note.FABRIC_UNUSED,
        f"The quiet fabric that was given ({fabric.source}) says nothing of this run's collectives "
        f"over {plural(joined_ranks(run), 'rank')}, so it was not used: measure it as the job "
        "runs, on as many hosts and processes."))
  jumped = np.flatnonzero(facts.totals.jumped)
  if jumped.size:
    number = plural(int(facts.totals.jumped.sum()), "step")
    notes.append(Sentence(Note.CLOCK_JUMPED,
        f"The clock of {some_ranks(jumped)} jumped, or "
        f"timestamps are damaged: {number} of theirs left out, as long as on no other rank."))
  if facts.preempted >= CROWDED:
    notes.append(Sentence(Note.CROWDED_PROCESSORS,
        f"Processes share the hosts' processors: up to {facts.preempted:.0f} involuntary switches "
        "of one a step. Ragged gaps and transfers are put down to that, not to the job or the "
        "fabric."))
  plan = run.plan
  for (name, reason), times in untimed(run).items():
    if reason == NO_SLOT:
      notes.append(Sentence(Note.NO_SLOT,
          f"{plural(times, 'collective')} had no slot left and count as compute: give `instrument` "
          "more slots."))
      continue
    many = f"{times} of {name}" if times > 1 else name
    notes.append(Sentence(Note.NOT_STAMPED,
        f"Without timestamps: {many} ({reason}); {'their' if times > 1 else 'its'} waiting counts "
        "as compute."))
  noticed = once(notice for notice in plan.get("notices") or () if isinstance(notice, str))
  notes += [Sentence(Note.PLAN_NOTICE, notice) for notice in noticed]
  return tuple(notes)


def _waited(run: Run, step: int) -> float:
  """Seconds that the first rank waited in a step for the last: what the job lost, not its mean over
  ranks."""
  found = account(busy(run, slice(step, step + 1)))
  return float(np.nanmax(found.waiting_compute + found.waiting_runtime + found.waiting_pacing))


def _measured(facts: Diagnosis) -> list[Sentence]:
  run, totals = facts.run, facts.totals
  notes: list[Sentence] = []
  assert facts.step_time is not None
  if run.collectives and not facts.floor.known:
    notes.append(Sentence(Note.LOWER_BOUND,
        "Contention is a lower bound: the floor of a transfer is the lowest running median of "
        f"{facts.floor.width} steps of this run ({facts.floor.source}), not that of a "
        "quiet fabric."))
  whole = totals.earliness.sum(axis=0)
  if np.isfinite(whole).any() and facts.selected.size >= 100:
    worst = int(np.nanargmax(whole))
    share = float(whole[worst]) / (facts.step_time.mean * facts.selected.size)
    if share > LEAST:
      lost = milliseconds(_waited(run, worst))
      notes.append(Sentence(Note.ONE_OFF,
          f"One-off: in step {run.steps[worst]} alone the others waited {lost} for "
          f"{name_rank(run, int(totals.last_rank[worst])).replace('Rank', 'rank', 1)}; as the mean "
          f"over all ranks that is {100 * share:.1f} % of all the time recorded."))
  unnamed = unnamed_waiting(facts) if not facts.inconclusive else None
  if unnamed:
    total = sum(facts.waiting.values())
    causes = [f"{percent(facts.waiting[name] / total)} for {words}"
              for name, words in _WAITING.items()
              if facts.waiting.get(name, 0.0) > 0]
    which = f": {list_ranks(unnamed.steps)}" if unnamed.few else ""
    notes.append(Sentence(Note.WAITING_FOR,
        f"Of the waiting for late ranks, {joined(causes)}. Half of it is in {len(unnamed.steps)} "
        f"of {plural(facts.selected.size, 'step')}{which}."))
  for pauses in few_pauses(facts):
    notes.append(Sentence(Note.FEW_PAUSES,
        f"Long pauses: {pauses.cause} took {milliseconds(pauses.seconds)}, "
        f"{percent(pauses.share)} of all the time counted, in {plural(len(pauses.steps), 'step')}: "
        f"{list_ranks(pauses.steps)}. They are no finding, but that is what they cost."))
  notes += _slow_for_good(facts)
  staged = totals.groups is not None and totals.groups.found.staged  # then it is their bubbles
  if abs(facts.spread) > EFFECT * facts.step_time.mean and not staged:
    notes.append(Sentence(Note.SPREAD,
        f"Ranks leave the collectives {milliseconds(abs(facts.spread))} apart from each other on "
        "average; that is part of transfer."))
  if totals.delayed:
    notes.append(Sentence(Note.PACED,
        "Pacing was active: lateness, blame and what-if are by arrivals with each rank's own delay "
        "taken out."))
  return notes


def _slow_for_good(facts: Diagnosis) -> list[Sentence]:
  """What helps where ranks compute longer up to the end of the run, and what it would save: another
  host, or less of the work."""
  shared, mended = facts.work_shared, facts.without_late or next(
      iter(facts.without_rank.values()), None)
  for_good = [finding for finding in facts.findings
              if finding.mode == PERSISTENT and finding.last_step is None]
  if (not for_good or shared is None or mended is None or facts.work_moved is not None
      or 1 - 1 / shared.speedup < LEAST):
    return []
  total = 8 * facts.run.ranks
  return [Sentence(Note.SLOW_FOR_GOOD,
      f"What would help {some_ranks(facts.lateness.late)}: a host as quick as the others' "
      f"({_step(mended)}); or, without a spare, fewer micro-batches ({_step(shared)}, the more of "
      "them there are the nearer). For that `loss, grads = jaxpace.accumulate(loss_fn, params, "
      "micro_batches, counts, mesh=mesh, fetch=True, weighted=False)` takes the place of the loop "
      f"over them, `feed = jaxpace.shares(mesh, total_micro_batches={total})`, of all ranks "
      "together, goes before the training loop, and `feed.next(step).counts` into each step. A "
      "step without such a loop gets one by the same lines, its batch reshaped to "
      f"[{total}, rows, ...], unless its loss looks across the batch. Fewer rows of one batch, "
      "padded and masked, would save nothing: all ranks run one program, which computes the "
      "padding.")]


def _step(alternative: Alternative) -> str:
  return (f"{milliseconds(alternative.step_time)} per step, {alternative.speedup:.2f} times as "
          "fast")


def _groups(facts: Diagnosis) -> list[Sentence]:
  """Who never meets whom, and what stages mean."""
  run = facts.run
  notes: list[Sentence] = []
  if not facts.step_time or not run.collectives:
    return []
  kept = facts.totals.groups
  if kept is not None and kept.found.apart:
    number = int(kept.found.joined.max()) + 1
    notes.append(Sentence(Note.GROUPS_APART,
        f"The ranks are {number} groups that never meet in a collective with timestamps: each rank "
        "is compared with those of its own group, and the job's figures are means over all ranks."))
  elif kept is None and groups(run.info, run.ranks) is None:
    notes.append(Sentence(Note.MEETING_UNKNOWN,
        "run.json does not tell which ranks meet in a collective (no `settings` with `mesh` and "
        "`axis` of as many devices): all of them are taken to."))
  return [*notes, *facts.stages]


def hung(events: Sequence[Mapping[str, Any]]) -> list[Sentence]:
  """Says which processes hung, at which step, where and for how long.

  Args:
    events: as `jaxpace.runs.alarms.read_events` returns them, in order. What doesn't look
      like one is left
    out.

  Returns:
    A sentence for each hang, the first few; later words on a step that still hangs go into the last
    one's numbers.
  """
  hangs: dict[Any, Mapping[str, Any]] = {}
  taken: dict[Any, float] = {}
  step = None
  for event in events:
    kind, waited, seconds = (event.get("event"), _seconds(event.get("waited")),
                             _seconds(event.get("seconds")))
    if kind == "late" and isinstance(event.get("step"), int) and waited is not None:
      step = event["step"]
      hangs[step] = event
    elif kind == "resumed" and step is not None and seconds is not None:
      taken[step] = max(taken.get(step, 0.0), seconds)
  said = [_hang(event, taken.get(step)) for step, event in hangs.items()]
  rest = len(said) - LISTED
  return (said[:LISTED] + ([Sentence(Note.HUNG, f"Watchdog: more steps were overdue: {rest}.")]
                                if rest > 0 else []))


def _hang(event: Mapping[str, Any], taken: float | None) -> Sentence:
  lates = event.get("late")
  late = [one for one in lates if isinstance(one, dict)] if isinstance(lates, list | tuple) else []
  others = f"; {len(late) - LISTED:,} more" if len(late) > LISTED else ""
  who = "; ".join(_process(one) for one in late[:LISTED]) + others
  who = who or "all processes had called it"
  ended = (f"took {taken:.0f} s" if taken is not None
           else f"had not completed after {float(event['waited']):.0f} s")
  marks = event.get("marks")
  within = f" {marks[0]}" if isinstance(marks, list) and marks and isinstance(marks[0], str) else ""
  return Sentence(Note.HUNG, f"Watchdog: step {event['step']} {ended}; {who}.{within}")


def _process(late: Mapping[str, Any]) -> str:
  host, phase = late.get("host"), late.get("phase")
  name = f"process {late.get('process')}" + (f" ({host})" if host else "")
  state = late.get("state")
  if state == "absent":
    return f"{name} was never heard of"
  if state == "left":
    return f"{name} had closed its watchdog"
  was = f"was {where(phase)}" if isinstance(phase, str) else "had not arrived"
  return f"{name} {was}" + (", and silent" if state in ("silent", "service") else "")


def _seconds(value: object) -> float | None:
  return float(value) if isinstance(value, int | float) and 0 <= value < float("inf") else None
