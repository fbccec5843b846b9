"""The one sentence a person can act on."""

from __future__ import annotations

import numpy as np

from jaxpace.core.words import Sentence, plural, some_ranks
from jaxpace.diagnose.diagnosis import Diagnosis
from jaxpace.diagnose.inconclusive import unrecorded, unseen_sentence, untimed
from jaxpace.diagnose.lateness import spell
from jaxpace.diagnose.limits import COSTLY, MIN_STEPS, PART
from jaxpace.diagnose.mechanism import crowded_processors, throttled
from jaxpace.diagnose.modes.inputs import FewPauses, Finding
from jaxpace.diagnose.selected_steps import mean_known
from jaxpace.diagnose.what_if import Alternative
from jaxpace.diagnose.words.codes import Verdict
from jaxpace.diagnose.words.evidence import Evidence
from jaxpace.diagnose.words.names import (
  hosts_of,
  joined,
  milliseconds,
  name_process,
  named,
  percent,
)


def verdict_on(facts: Diagnosis) -> Sentence:
  """Says what to do about the costliest finding, or that there is none; clears no rank that it
  can't see."""
  if missing := unrecorded(facts.run):
    return missing
  said = _with_other_shapes(facts, _on_those_seen(facts))
  # What names a rank does not clear it.
  named_ranks = {rank for finding in facts.findings if finding.mode != Verdict.CONTENTION
                 for rank in finding.ranks}
  unseen = [rank for rank in facts.unseen if rank not in named_ranks]
  if not unseen or facts.step_time is None or not facts.run.collectives:
    return said
  hidden = unseen_sentence(facts.run, unseen)
  if len(unseen) == facts.run.ranks:
    return Sentence(Verdict.UNSEEN_RANKS, hidden)
  if facts.findings and facts.findings[0].mode != Verdict.CONTENTION:
    return Sentence(said.code, f"{said} {hidden}")
  # What may be waiting for them is no crowded fabric before they are seen.
  others = "As far as the others tell" if facts.findings else "Of the others"
  return Verdict.UNSEEN_RANKS.say(unseen=hidden, others=others, said=_lower(said))


def _with_other_shapes(facts: Diagnosis, said: Sentence) -> Sentence:
  """A verdict with a word on steps that it leaves out, where they take much more than others."""
  others = facts.selected.of_others
  if facts.step_time is None or not others.size:
    return said
  if facts.in_other_shapes * (1 - facts.step_time.mean / others.mean()) < COSTLY:
    return said
  more = Verdict.OTHER_SHAPES.say(part=percent(facts.in_other_shapes))
  if said.code == Verdict.HEALTHY:
    return Sentence(more.code, f"No lasting fault{said.removeprefix('Healthy')} {more}")
  return Sentence(said.code, f"{said} {more}")


def on_late_ranks(facts: Diagnosis) -> str:
  """What a verdict says of the costliest finding that names ranks; empty where that is none, or
  costs little."""
  return next((_of_mode(facts, finding) for finding in facts.findings
               if finding.ranks and _worth(facts, finding) >= COSTLY), "")


def _on_those_seen(facts: Diagnosis) -> Sentence:
  run, step_time, earliness = facts.run, facts.step_time, facts.lateness.earliness
  if step_time is None:
    return Verdict.NO_STEPS.say(steps=plural(facts.selected.recorded, "step"))
  if facts.findings:
    return _found(facts)
  if facts.inconclusive:
    return Sentence(Verdict.UNTOLD, facts.inconclusive)
  if not run.collectives:
    return Verdict.NO_COLLECTIVES.say()
  most, lasting = _lasting(facts)
  if run.ranks < 2:
    said = lasting or Verdict.HEALTHY.say("alone")
    return Sentence(said.code, f"{said} {_largest(facts)}")
  if facts.selected.size < MIN_STEPS:
    return Verdict.TOO_FEW_STEPS.say("counted", counted=facts.selected.size, needed=MIN_STEPS,
        waiting=100 * earliness / step_time.mean)
  hidden = untimed(run)
  if hidden:
    number = sum(hidden.values())
    what = joined([name if times == 1 else f"{times} of {name}"
                   for (name, _), times in hidden.items()])
    return Verdict.UNTIMED.say(collectives=plural(number, "collective"),
        are="is" if number == 1 else "are", what=what, largest=_largest(facts))
  if facts.doubt:
    said = Verdict.DOUBT.say(doubt=facts.doubt, waiting=percent(earliness / step_time.mean))
    return Sentence(said.code, _with_gaps(facts, said, 0.0))
  if facts.few_pauses:
    return _only_paused(facts)
  unnamed = facts.unnamed
  if unnamed:
    where = (f"is for rank {unnamed.rank} in few steps" if unnamed.few and unnamed.rank is not None
             else "comes from few steps" if unnamed.few else
             f"is most of it for rank {unnamed.rank}, last in {percent(unnamed.often)} of the steps"
             if unnamed.rank is not None else "is for ranks in turn, for no cause that shows")
    said = Verdict.UNNAMED_WAITING.say(part=percent(unnamed.share), where=where)
    if lasting and most > unnamed.share:
      return Sentence(lasting.code, f"{lasting} Besides, {said.partition(': ')[2]}")
    return Sentence(said.code, f"{said} {lasting}") if lasting else said
  waiting = (f"no rank is persistently late, and waiting for late ranks takes "
             f"{100 * earliness / step_time.mean:.1f} % of the step")
  if lasting:
    return Sentence(lasting.code, f"{lasting} Besides, {waiting}.")
  return Verdict.HEALTHY.say("waiting", waiting=waiting, largest=_largest(facts))


def _only_paused(facts: Diagnosis) -> Sentence:
  return Sentence(Verdict.FEW_PAUSES, "No lasting fault, but "
                  + _paused(facts.few_pauses[0], facts.selected.size))


def _paused(pauses: FewPauses, counted: int) -> str:
  took = f"{pauses.cause} took {percent(pauses.share)} of the time"
  if len(pauses.steps) > 1:
    most = "" if pauses.most_in is None else f", most of it in step {pauses.most_in}"
    return (f"long pauses: {took} in {plural(len(pauses.steps), 'step')}{most}; see the notes.")
  return (f"one long pause: {took}, all of it in step {pauses.steps[0]}. How often such a pause "
          f"comes does not show in {plural(counted, 'step')}.")


def _lasting(facts: Diagnosis) -> tuple[float, Sentence | None]:
  """What takes `COSTLY` of the step and is no finding: data that all wait for, transfers that take
  longer than their best; or `PART` of it: gaps that are always as long.

  Where several do, the verdict names all, the largest one first; it comes with its share.
  """
  found = _between_steps(facts)
  slower = facts.no_contention
  if slower and facts.run.ranks > 1 and slower.saving >= COSTLY:
    found.append((slower.saving, Verdict.SLOW_TRANSFERS.say(saving=percent(slower.saving),
        speedup=slower.speedup, why=_why_slow(facts, slower))))
  if not found:
    return 0.0, None
  found.sort(key=lambda one: -one[0])
  return found[0][0], Sentence(found[0][1].code, " ".join(str(said) for _, said in found))


def _why_slow(facts: Diagnosis, quick: Alternative) -> str:
  """Why transfers take longer than the quickest ones, as far as the hosts' columns show."""
  assert facts.step_time is not None
  held = throttled(facts)
  if held and held[1] >= PART * quick.saving * facts.step_time.mean:
    return (f"{name_process(facts.run, held[0])} is held back by its CPU limit, for "
            f"{milliseconds(held[1])} per step, and transfers wait for it")
  if crowded_processors(facts):
    return "the hosts' processors are shared, and transfers wait for them"
  if len(hosts_of(facts.run, range(facts.run.ranks))) > 1:
    return "whether the network or waiting for processors makes them so does not show in this run"
  return "they stay on one host, whose processors and memory carry them"


def _between_steps(facts: Diagnosis) -> list[tuple[float, Sentence]]:
  """Data that all wait for, and gaps that are always long, each with its share; the gaps are those
  of ranks that are not late."""
  step_time = facts.step_time
  assert step_time is not None
  found: list[tuple[float, Sentence]] = []
  data = facts.for_data or 0.0
  if data >= COSTLY * step_time.mean:
    found.append((data / step_time.mean, Verdict.DATA_WAITS.say(data=milliseconds(data),
        part=percent(data / step_time.mean))))
  gaps = facts.phases.get("gap")
  late = sorted({rank for finding in facts.findings for rank in finding.ranks})
  gap = 0.0 if gaps is None else max(
      float(np.nan_to_num(mean_known(np.delete(gaps, late)))) - data, 0.0)
  if gap >= PART * step_time.mean:
    found.append((gap / step_time.mean, Verdict.IDLE_BETWEEN.say(gap=milliseconds(gap),
        part=percent(gap / step_time.mean))))
  return found


def _with_gaps(facts: Diagnosis, said: str, share: float) -> str:
  """A sentence on what takes a share of the step, and what more than that takes between steps."""
  return " ".join([said, *(str(more) for part, more in _between_steps(facts) if part > share)])


def _found(facts: Diagnosis) -> Sentence:
  said = _of_mode(facts, facts.findings[0])
  others = [f"{f.mode.replace('_', ' ')} {f'of {some_ranks(f.ranks)} ' if f.ranks else ''}"
            f"({100 * f.share:.0f} %)" for f in facts.findings[1:]]
  if others:
    said = f"{said} Then: {joined(others)}."
  if (worth := sum(_worth(facts, finding) for finding in facts.findings)) >= COSTLY:
    said = _with_gaps(facts, said, worth)
    if facts.few_pauses and facts.few_pauses[0].share > facts.findings[0].share:
      said = f"{said} Besides, {_paused(facts.few_pauses[0], facts.selected.size)}"
    return Sentence(facts.findings[0].mode, said)
  if facts.few_pauses:
    return _only_paused(facts)
  return Verdict.COSTS_LITTLE.say(largest=_largest(facts), said=said)


def _worth(facts: Diagnosis, finding: Finding) -> float:
  """Part of the step that mending it would save."""
  after = mended(facts, finding)
  return max(finding.share, after.saving) if after else finding.share


def mended(facts: Diagnosis, finding: Finding) -> Alternative | None:
  """The step without the ranks of a finding being late; None for other findings."""
  if finding.mode not in (Verdict.PERSISTENT, Verdict.LOCALITY) or not finding.ranks:
    return None
  everyone = set(finding.ranks) == set(facts.lateness.late.tolist())
  return (facts.without_late if everyone else None) or facts.without_rank.get(finding.ranks[0])


def _of_mode(facts: Diagnosis, finding: Finding) -> str:
  assert facts.step_time is not None
  cost = f"{milliseconds(finding.share * facts.step_time.mean)} ({100 * finding.share:.0f} % of it)"
  if finding.mode == Verdict.PERSISTENT:
    return _persistent(facts, finding)
  subject, late = _subject(finding), sorted({rank for f in facts.findings for rank in f.ranks})
  alike = any(each.code == Evidence.PAUSE_ALIKE for each in finding.evidence)
  lost_to = {
      Verdict.LOCALITY: f"the place of {subject}",
      Verdict.CONTENTION: f"the link of {named(finding.hosts)}" if finding.hosts else
                          "a crowded host" if "shared_host" in finding.causes else
                          "a crowded fabric",
      Verdict.JITTER: "pauses between steps" + (
          f" on {subject}" if subject else " on all ranks" if alike else "")}.get(finding.mode)
  if lost_to:
    said = f"On average a step loses {cost} to {lost_to}"
  elif finding.ranks:
    said = f"On average a step waits {cost} for {subject}, which takes long now and then"
  else:
    said = f"On average a step waits {cost} " + (
        f"because lateness varies, beside what it waits for {some_ranks(late)} as a rule"
        if late else "for ranks that change from step to step")
  return f"{said}: {_lower(finding.advice)}"


def _subject(finding: Finding) -> str:
  hosts = named(finding.hosts)
  if not finding.ranks:
    return hosts
  return some_ranks(finding.ranks) + (f" on {hosts}" if hosts else "")


def _persistent(facts: Diagnosis, finding: Finding) -> str:
  ranks, lateness = list(finding.ranks), facts.lateness
  after = mended(facts, finding)
  assert facts.step_time is not None and after is not None
  saved = (f"and without that a step would take {milliseconds(after.step_time)} instead of "
           f"{milliseconds(facts.step_time.mean)} ({after.speedup:.2f} times as fast).")
  several = len(ranks) > 1
  late = [max(e.lateness for e in lateness.episodes if e.rank == rank) for rank in ranks]
  amount = milliseconds(min(late))
  if several and milliseconds(max(late)) != amount:
    amount += f" to {milliseconds(max(late))}"
  does = "they arrive" if several else "it arrives"
  return (f"Look at {_subject(finding)}: {does} {amount} late "
          f"{spell(finding.first_step, finding.last_step)}, {saved}")


def _largest(facts: Diagnosis) -> str:
  """Where most of the step goes."""
  assert facts.shares is not None
  name, share = max(facts.shares.items(), key=lambda entry: entry[1])
  return f"Most of the step is {name} ({100 * share:.0f} %)."


def _lower(text: str) -> str:
  return text[0].lower() + text[1:]
