"""What a reader of the report must know to read it rightly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxpace.core.words import Sentence, duration, list_ranks, plural, some_ranks
from jaxpace.costs.fabric_file import MeasuredFabric
from jaxpace.diagnose.accounting import account
from jaxpace.diagnose.diagnosis import Diagnosis
from jaxpace.diagnose.floor import RUNNING_MINIMUM, joined_ranks
from jaxpace.diagnose.inconclusive import NO_SLOT, once, untimed
from jaxpace.diagnose.limits import EFFECT, LEAST, LISTED, MOST, PART
from jaxpace.diagnose.mechanism import crowded_processors, switches
from jaxpace.diagnose.phases import on_purpose
from jaxpace.diagnose.selected_steps import WARMUP_FACTOR, WARMUP_STEPS
from jaxpace.diagnose.step_times import busy
from jaxpace.diagnose.verdict import on_late_ranks
from jaxpace.diagnose.what_if import Alternative
from jaxpace.diagnose.words.codes import Verdict
from jaxpace.diagnose.words.names import NAMED, joined, milliseconds, name_rank, percent
from jaxpace.diagnose.words.notes import Note
from jaxpace.hang.alarms import where
from jaxpace.runs.groups import groups
from jaxpace.runs.loops import Loop, step_found
from jaxpace.runs.run import Run

_WAITING = {"compute": "longer compute", "runtime": "longer gaps between steps", "pacing": "delays"}


def notes_on(facts: Diagnosis, fabric: MeasuredFabric | None = None,
             in_loops: Sequence[Diagnosis | None] = ()) -> tuple[Sentence, ...]:
  """Sentences on how the numbers came about; the reader's own problems are the run's. `in_loops`
  is what was found in the other loops."""
  run, unfinished = facts.run, facts.selected.unfinished
  notes: list[Sentence] = []
  notes += _loops(run, in_loops)
  if facts.selected.impossible:
    notes.append(Note.IMPOSSIBLE_STEPS.say(steps=plural(facts.selected.impossible, "step")))
  if facts.selected.warmup.size:
    steps = facts.selected.warmup
    notes.append(Note.WARMUP.say(s="s" if steps.size > 1 else "", steps=list_ranks(steps),
        first=WARMUP_STEPS, factor=WARMUP_FACTOR))
  if unfinished.size:
    notes.append(Note.UNFINISHED.say(steps=plural(unfinished.size, "step"), first=unfinished[0]))
  others = facts.selected.of_others
  if others.size:
    notes.append(Note.OTHER_SHAPES.say(steps=plural(others.size, "step"),
        mean=milliseconds(float(others.mean())), part=percent(facts.in_other_shapes),
        paused=_paused_before(facts)))
  if run.aggregated is not None and facts.step_time and facts.selected.size < facts.counted:
    notes.append(Note.IN_FULL.say(detailed=facts.selected.size,
        steps=plural(facts.counted, "step")))
  uncounted = (facts.selected.recorded - facts.counted - others.size - facts.selected.warmup.size
               - unfinished.size)
  if facts.step_time and uncounted > 1:
    notes.append(Note.UNMEASURED.say(steps=plural(uncounted, "step")))
  if facts.step_time:
    notes += _measured(facts)
  if facts.inconclusive and facts.findings:  # without any the verdict says it
    notes.append(Sentence(Note.UNTOLD, facts.inconclusive))
  notes += _groups(facts)
  if fabric is not None and run.collectives and facts.floor.source == RUNNING_MINIMUM:
    notes.append(Note.FABRIC_UNUSED.say(source=fabric.source,
        ranks=plural(joined_ranks(run), "rank")))
  jumped = np.flatnonzero(facts.totals.jumped)
  if jumped.size:
    number = plural(int(facts.totals.jumped.sum()), "step")
    notes.append(Note.CLOCK_JUMPED.say(ranks=some_ranks(jumped), steps=number))
  if crowded_processors(facts):
    notes.append(Note.CROWDED_PROCESSORS.say(switches=switches(run, facts.selected)))
  for (name, reason), times in untimed(run).items():
    if reason == NO_SLOT:
      notes.append(Note.NO_SLOT.say(collectives=plural(times, "collective")))
      continue
    many = f"{times} of {name}" if times > 1 else name
    notes.append(Note.NOT_STAMPED.say(many=many, reason=reason,
        their="their" if times > 1 else "its"))
  noticed = once(notice for notice in run.plan.get("notices") or () if isinstance(notice, str))
  notes += [Sentence(Note.PLAN_NOTICE, notice) for notice in noticed]
  if facts.away is not None:
    ranks, steps = facts.away.ranks, run.steps[facts.away.steps]
    notes.append(Note.RANKS_AWAY.say(ranks=some_ranks(ranks).capitalize(),
        steps=plural(len(steps), "step"), numbers=list_ranks(steps),
        them="them" if len(ranks) > 1 else "it"))
  return (*notes, *facts.on_sampling, *hung(facts.events))


def _loops(run: Run, found: Sequence[Diagnosis | None]) -> list[Sentence]:
  """Says what else ran in a loop, and who is late there."""
  if len(run.loops) < 2:
    return []
  own, *others = run.loops
  return [Note.OTHER_LOOPS.say(
      loops=plural(len(run.loops), "loop"), step=joined(own.programs),
      part=percent(own.seconds / sum(loop.seconds for loop in run.loops)),
      others=joined([_loop(loop) for loop in others[:LISTED]])),
      *(Note.LATE_IN_LOOP.say(step=joined(loop.programs), said=said[0].lower() + said[1:],
                              first=other.run.window[0], stop=other.run.window[1])
        for loop, other in zip(others, found, strict=False)
        if other is not None and (said := on_late_ranks(other)))]


def _paused_before(facts: Diagnosis) -> str:
  """Who pauses before steps of other shapes, where that is much of what these take."""
  gaps, usual = facts.selected.gap_of_others, facts.phases.get("gap")
  if not gaps.size or usual is None or not np.isfinite(gaps).any():
    return ""
  beyond = np.nan_to_num(gaps - usual)
  own = np.flatnonzero(beyond >= MOST * beyond.max())
  if not beyond.max() >= PART * facts.selected.of_others.mean():
    return ""
  who = "all ranks" if len(own) == np.isfinite(gaps).sum() else f"{some_ranks(own)} alone"
  return f": before each, {who} spent {milliseconds(float(gaps[own].mean()))} between steps"


def _loop(loop: Loop) -> str:
  times = f", the longest of {len(loop.spans)} times" if loop.spans[1:] else ""
  first, last = loop.longest
  return f"{joined(loop.programs)}, {duration(loop.seconds)} (`--steps {first}:{last + 1}`{times})"


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
    notes.append(Note.LOWER_BOUND.say(width=facts.floor.width))
  whole = totals.earliness.sum(axis=0)
  if np.isfinite(whole).any() and facts.selected.size >= 100:
    worst = int(np.nanargmax(whole))
    share = float(whole[worst]) / (facts.step_time.mean * facts.selected.size)
    if share > LEAST:
      lost = milliseconds(_waited(run, worst))
      notes.append(Note.ONE_OFF.say(step=run.steps[worst], lost=lost,
          rank=name_rank(run, int(totals.last_rank[worst])).replace("Rank", "rank", 1),
          part=100 * share))
  unnamed = facts.unnamed if not facts.inconclusive else None
  if unnamed:
    total = sum(facts.waiting.values())
    causes = [f"{percent(facts.waiting[name] / total)} is for {words}"
              for name, words in _WAITING.items()
              if facts.waiting.get(name, 0.0) > 0]
    which = f": {list_ranks(unnamed.steps)}" if unnamed.few else ""
    notes.append(Note.WAITING_FOR.say(causes=joined(causes), few=len(unnamed.steps),
        steps=plural(facts.selected.size, "step"), which=which))
  notes += _other_programs(facts)
  for pauses in facts.few_pauses:
    most = (f", and {milliseconds(pauses.longest)} of it in step {pauses.most_in} alone"
            if pauses.most_in is not None else "")
    notes.append(Note.FEW_PAUSES.say(cause=pauses.cause, seconds=milliseconds(pauses.seconds),
        part=percent(pauses.share), steps=plural(len(pauses.steps), "step"),
        numbers=list_ranks(pauses.steps), most=most,
        why=f" {pauses.why}" if pauses.why else ""))
  notes += _slow_for_good(facts)
  staged = totals.groups.staged  # then it is their bubbles
  spread = abs(float(totals.per_step["spread"][facts.selected.mask].mean()))
  if spread > EFFECT * facts.step_time.mean and not staged:
    notes.append(Note.SPREAD.say(spread=milliseconds(spread)))
  if totals.delayed:
    notes.append(Note.PACED.say("report"))
  return notes


def _other_programs(facts: Diagnosis) -> list[Sentence]:
  """What all processes run between steps, where it takes time."""
  assert facts.step_time is not None
  seconds = on_purpose(facts.run)[facts.selected.mask]
  part = float(seconds.mean()) / facts.step_time.mean
  if part < LEAST:
    return []
  names = step_found(facts.run.info).get("beside") or ()
  programs = joined(names) if 0 < len(names) <= NAMED else "other programs, such as an evaluation"
  return [Note.OTHER_PROGRAMS.say(
      programs=programs, seconds=milliseconds(float(seconds.mean())), part=percent(part),
      often=percent(float((seconds > 0).mean())), longest=milliseconds(seconds.max()))]


def _slow_for_good(facts: Diagnosis) -> list[Sentence]:
  """What helps where ranks compute longer up to the end of the run, and what it would save: another
  host, or less of the work."""
  shared, mended = facts.work_shared, facts.without_late or next(
      iter(facts.without_rank.values()), None)
  for_good = [finding for finding in facts.findings
              if finding.mode == Verdict.PERSISTENT and finding.last_step is None]
  if (not for_good or shared is None or mended is None or facts.work_moved is not None
      or shared.saving < LEAST):
    return []
  return [Note.SLOW_FOR_GOOD.say(ranks=some_ranks(facts.lateness.late), mended=_step(mended),
              shared=_step(shared), total=8 * facts.run.ranks)]


def _step(alternative: Alternative) -> str:
  return (f"{milliseconds(alternative.step_time)} per step, {alternative.speedup:.2f} times as "
          "fast")


def _groups(facts: Diagnosis) -> list[Sentence]:
  """Who never meets whom, and what stages mean."""
  run = facts.run
  notes: list[Sentence] = []
  if not facts.step_time or not run.collectives:
    return []
  found = facts.totals.groups
  if found.apart:
    number = int(found.joined.max()) + 1
    notes.append(Note.GROUPS_APART.say("report", groups=number))
  elif found.all_meet and groups(run.info, run.ranks) is None:
    notes.append(Note.MEETING_UNKNOWN.say("report"))
  return [*notes, *facts.stages]


def hung(events: Sequence[Mapping[str, Any]]) -> list[Sentence]:
  """Says which processes hung, at which step, where and for how long.

  Returns:
    A sentence for each hang, the first few; later words on a step that still hangs go into the last
    one's numbers.
  """
  hangs: dict[int, Mapping[str, Any]] = {}
  taken: dict[int, float] = {}
  for event in events:
    known = {name for name in ("step", "waited", "seconds") if event.get(name) is not None}
    if event.get("event") == "late" and known >= {"step", "waited"}:
      hangs[event["step"]] = event
      last = event["step"]
    elif event.get("event") == "resumed" and hangs and "seconds" in known:
      taken[last] = max(taken.get(last, 0.0), event["seconds"])
  said = [_hang(event, taken.get(step)) for step, event in hangs.items()]
  rest = len(said) - LISTED
  return said[:LISTED] + ([Note.HUNG.say("more", rest=rest)] if rest > 0 else [])


def _hang(event: Mapping[str, Any], taken: float | None) -> Sentence:
  late, marks = event.get("late") or [], event.get("marks") or []
  others = f"; {len(late) - LISTED:,} more" if len(late) > LISTED else ""
  who = "; ".join(map(_process, late[:LISTED])) + others or "all processes had called it"
  ended = (f"took {taken:.0f} s" if taken is not None
           else f"had not completed after {event['waited']:.0f} s")
  return Note.HUNG.say("step", step=event["step"], ended=ended, who=who,
                       within=f" {marks[0]}" if marks else "")


def _process(late: Mapping[str, Any]) -> str:
  host, phase = late.get("host"), late.get("phase")
  name = f"process {late.get('process')}" + (f" ({host})" if host else "")
  state = late.get("state")
  if state == "absent":
    return f"{name} was never heard of"
  if state == "left":
    return f"{name} had closed its watchdog"
  was = "had not arrived" if phase is None else f"was {where(phase)}"
  return f"{name} {was}" + (", and silent" if state in ("silent", "service") else "")
