"""What a reader of the report must know to read it rightly."""

from __future__ import annotations

import numpy as np

from jaxpace.costs.fabric_file import MeasuredFabric
from jaxpace.diagnosis.accounting import account, busy
from jaxpace.diagnosis.codes import Note, Sentence
from jaxpace.diagnosis.counters import CROWDED
from jaxpace.diagnosis.diagnosis import Diagnosis
from jaxpace.diagnosis.few_pauses import few_pauses
from jaxpace.diagnosis.findings import milliseconds, name_rank
from jaxpace.diagnosis.floor import RUNNING_MINIMUM, joined_ranks
from jaxpace.diagnosis.queues import unexplained_queue
from jaxpace.diagnosis.selected_steps import WARMUP_FACTOR, WARMUP_STEPS
from jaxpace.diagnosis.stages import sentences as stage_sentences
from jaxpace.diagnosis.unnamed import unnamed_waiting
from jaxpace.diagnosis.untimed import NO_SLOT, untimed
from jaxpace.diagnosis.untold import once
from jaxpace.diagnosis.untold import sentence as untold_sentence
from jaxpace.diagnosis.wording import joined, percent
from jaxpace.trace.along_axis import groups
from jaxpace.trace.problems import list_ranks, plural
from jaxpace.trace.run import Run

_ONE_OFF = 0.01
"""A single step whose waiting takes this share of the whole window is told apart."""
_WAITING = {"compute": "longer compute", "runtime": "longer gaps between steps", "pacing": "delays"}


def notes_on(diagnosis: Diagnosis, fabric: MeasuredFabric | None = None, unfinished: np.ndarray | None = None
             ) -> tuple[Sentence, ...]:
  """Sentences on how the numbers came about; the reader's own problems are the run's.

  Args:
    diagnosis: without its notes.
    fabric: that was given as the quiet one, if any was.
    unfinished: numbers of the last steps, left out because some ranks' rows are missing.
  """
  run = diagnosis.run
  notes: list[Sentence] = []
  if diagnosis.selected.warmup.size:
    steps = diagnosis.selected.warmup
    notes.append(Sentence(Note.WARMUP,
        f"Warm-up left out: step{'s' if steps.size > 1 else ''} {list_ranks(steps)} (of the first "
        f"{WARMUP_STEPS} steps, all up to the last that took over {WARMUP_FACTOR:g} times the median)."))
  if unfinished is not None and unfinished.size:
    notes.append(Sentence(Note.UNFINISHED,
        f"The last {plural(unfinished.size, 'step')} left out, from step {unfinished[0]:,} on: rows of some "
        "ranks are missing there. They come later while the job runs, and never if a process was killed."))
  uncounted = diagnosis.recorded - diagnosis.selected.size - diagnosis.selected.warmup.size
  uncounted -= 0 if unfinished is None else unfinished.size
  if diagnosis.step_time and uncounted > 1:
    notes.append(Sentence(Note.UNMEASURED,
        f"{plural(uncounted, 'step')} can't be measured: a step counts from the exit before it, which is not "
        "recorded."))
  if diagnosis.step_time:
    notes += _measured(diagnosis)
  if diagnosis.untold is not None and diagnosis.findings:  # without any the verdict says it
    notes.append(Sentence(Note.UNTOLD, untold_sentence(diagnosis.untold, len(run.collectives))))
  notes += _groups(diagnosis)
  if fabric is not None and run.collectives and diagnosis.floor.source == RUNNING_MINIMUM:
    notes.append(Sentence(Note.FABRIC_UNUSED,
        f"The quiet fabric that was given ({fabric.source}) says nothing of this run's collectives over "
        f"{plural(joined_ranks(run), 'rank')}, so it was not used: measure it as the job runs, on as many "
        "hosts and processes."))
  jumped = np.flatnonzero(diagnosis.totals.jumped)
  if jumped.size:
    number = plural(int(diagnosis.totals.jumped.sum()), "step")
    notes.append(Sentence(Note.CLOCK_JUMPED,
        f"The clock of rank{'s' if jumped.size > 1 else ''} {list_ranks(jumped)} jumped, or stamps are "
        f"damaged: {number} of theirs left out, as long as on no other rank."))
  if diagnosis.preempted >= CROWDED:
    notes.append(Sentence(Note.CROWDED_PROCESSORS,
        f"Other programs run on the hosts' processors: up to {diagnosis.preempted:.0f} involuntary switches "
        "of a process a step. Ragged gaps and transfers are put down to that, not to the job or the fabric."))
  plan = run.plan
  for (name, reason), times in untimed(run).items():
    if reason == NO_SLOT:
      notes.append(Sentence(Note.NO_SLOT,
          f"{plural(times, 'collective')} had no slot left and count as compute: give `instrument` more "
          "slots."))
      continue
    many = f"{times} of {name}" if times > 1 else name
    notes.append(Sentence(Note.NOT_STAMPED,
        f"Not stamped: {many} ({reason}); {'their' if times > 1 else 'its'} waiting counts as compute."))
  noticed = once(notice for notice in plan.get("notices") or () if isinstance(notice, str))
  notes += [Sentence(Note.PLAN_NOTICE, notice) for notice in noticed]
  return tuple(notes)


def _waited(run: Run, step: int) -> float:
  """Seconds that the first rank waited in a step for the last: what the job lost, not its mean over ranks."""
  found = account(busy(run, slice(step, step + 1)))
  return float(np.nanmax(found.waiting_compute + found.waiting_runtime + found.waiting_pacing))


def _measured(diagnosis: Diagnosis) -> list[Sentence]:
  run, totals = diagnosis.run, diagnosis.totals
  notes: list[Sentence] = []
  assert diagnosis.step_time is not None
  if run.collectives and not diagnosis.floor.known:
    notes.append(Sentence(Note.LOWER_BOUND,
        "Contention is a lower bound: the floor of a transfer is the lowest running median of "
        f"{diagnosis.floor.width} steps of this run ({diagnosis.floor.source}), not that of a quiet fabric."))
  queue = unexplained_queue(diagnosis)
  if queue:
    notes.append(Sentence(Note.QUEUE,
        f"Data queue on the way: a round trip between the hosts takes {milliseconds(queue.trip)}, the "
        f"shortest {milliseconds(queue.shortest)}, and transfers are {percent(queue.share)} of the step. "
        "Whether that is this job's own traffic on a slow network or others' can't be told without a known "
        "floor: `--floor` takes what `jaxpace bench` measured."))
  whole = totals.earliness.sum(axis=0)
  if np.isfinite(whole).any() and diagnosis.selected.size >= 100:
    worst = int(np.nanargmax(whole))
    share = float(whole[worst]) / (diagnosis.step_time.mean * diagnosis.selected.size)
    if share > _ONE_OFF:
      lost = milliseconds(_waited(run, worst))
      notes.append(Sentence(Note.ONE_OFF,
          f"One-off: in step {run.steps[worst]} alone the others waited {lost} for "
          f"{name_rank(run, int(totals.last_rank[worst])).replace('Rank', 'rank', 1)}; as the mean over all "
          f"ranks that is {100 * share:.1f} % of all the time recorded."))
  unnamed = unnamed_waiting(diagnosis) if diagnosis.untold is None else None
  if unnamed:
    total = sum(diagnosis.waiting.values())
    causes = [f"{percent(diagnosis.waiting[name] / total)} for {words}" for name, words in _WAITING.items()
              if diagnosis.waiting.get(name, 0.0) > 0]
    where = f": {list_ranks(unnamed.steps)}" if unnamed.few else ""
    notes.append(Sentence(Note.WAITING_FOR,
        f"Of the waiting for late ranks, {joined(causes)}. Half of it is in {len(unnamed.steps)} of "
        f"{plural(diagnosis.selected.size, 'step')}{where}."))
  for pauses in few_pauses(diagnosis):
    notes.append(Sentence(Note.FEW_PAUSES,
        f"Few long pauses: {pauses.cause} took {milliseconds(pauses.seconds)}, {percent(pauses.share)} of "
        f"all the time counted, in {plural(len(pauses.steps), 'step')}: {list_ranks(pauses.steps)}. So few "
        "are no finding, but that is what they cost."))
  if abs(diagnosis.spread) > 0.02 * diagnosis.step_time.mean:
    notes.append(Sentence(Note.SPREAD,
        f"Ranks leave the collectives {milliseconds(abs(diagnosis.spread))} apart from each other on average; "
        "that is part of transfer."))
  if totals.delayed:
    notes.append(Sentence(Note.PACED,
        "Pacing was active: lateness, blame and what-if are by arrivals with each rank's own delay taken out."))
  return notes


def _groups(diagnosis: Diagnosis) -> list[Sentence]:
  """Who never meets whom, and what stages mean."""
  run = diagnosis.run
  notes: list[Sentence] = []
  if not diagnosis.step_time or not run.collectives:
    return []
  kept = diagnosis.totals.groups
  if kept is not None and kept.found.apart:
    number = int(kept.found.joined.max()) + 1
    notes.append(Sentence(Note.GROUPS_APART,
        f"The ranks are {number} groups that never meet in a stamped collective: each rank is compared with "
        "those of its own group, and the job's figures are means over all ranks."))
  elif kept is None and groups(run.info, run.ranks) is None:
    notes.append(Sentence(Note.MEETING_UNKNOWN,
        "run.json does not tell which ranks meet in a collective (no `settings` with `mesh` and `axis` of as "
        "many devices): all of them are taken to."))
  return notes + (stage_sentences(diagnosis.stages, len(run.collectives)) if diagnosis.stages else [])
