"""The one sentence a person can act on."""

from __future__ import annotations

from jaxpace.diagnosis.counted import MIN_STEPS
from jaxpace.diagnosis.diagnosis import Diagnosis
from jaxpace.diagnosis.few_pauses import few_pauses
from jaxpace.diagnosis.findings import CONTENTION, JITTER, LOCALITY, PERSISTENT, Finding
from jaxpace.diagnosis.unnamed import unnamed_waiting
from jaxpace.diagnosis.untold import sentence as untold_sentence
from jaxpace.diagnosis.untold import unseen_sentence
from jaxpace.diagnosis.when import spell
from jaxpace.diagnosis.wording import joined, milliseconds, named, percent
from jaxpace.trace.problems import list_ranks, plural


def verdict_on(diagnosis: Diagnosis) -> str:
  """Says what to do about the costliest finding, or that there is none; clears no rank that it can't see."""
  said = _on_those_seen(diagnosis)
  if not diagnosis.unseen or diagnosis.step_time is None or not diagnosis.run.collectives:
    return said
  if len(diagnosis.unseen) == diagnosis.run.ranks:
    return unseen_sentence(diagnosis.run, diagnosis.unseen)
  hidden = unseen_sentence(diagnosis.run, diagnosis.unseen)
  if diagnosis.findings and diagnosis.findings[0].mode != CONTENTION:
    return f"{said} {hidden}"
  # What may be waiting for them is no crowded fabric before they are seen.
  return f"{hidden} {'As far as the others tell' if diagnosis.findings else 'Of the others'}: {_lower(said)}"


def _on_those_seen(diagnosis: Diagnosis) -> str:
  run, step_time = diagnosis.run, diagnosis.step_time
  if step_time is None:
    return (f"Nothing to judge: {plural(diagnosis.recorded, 'step')} recorded, and none of them has a recorded step "
            "before it to measure from. Let the job run on.")
  if diagnosis.findings:
    said = _of_mode(diagnosis, diagnosis.findings[0])
    others = [f"{f.mode.replace('_', ' ')} ({100 * f.share:.0f} %)" for f in diagnosis.findings[1:]]
    return f"{said} Then: {joined(others)}." if others else said
  if diagnosis.untold is not None:
    return untold_sentence(diagnosis.untold, len(run.collectives))
  if not run.collectives:
    return "No collective was recorded: it can't be told whether ranks wait for each other; see the notes."
  if run.ranks < 2:
    return f"Healthy: one rank has nobody to wait for. {_largest(diagnosis)}"
  if diagnosis.counted.size < MIN_STEPS:
    return (f"Too few steps to judge: {diagnosis.counted.size} count, {MIN_STEPS} are needed. So far waiting for late "
            f"ranks takes {100 * diagnosis.earliness / step_time.mean:.1f} % of the step.")
  if diagnosis.doubt:
    return (f"It can't be told whether a rank is late: {diagnosis.doubt}, and waiting takes "
            f"{percent(diagnosis.earliness / step_time.mean)} of the step; see the notes.")
  pauses = few_pauses(diagnosis)
  if pauses:
    return (f"No lasting fault, but few long pauses: {pauses[0].cause} took {percent(pauses[0].share)} of the time in "
            f"{plural(len(pauses[0].steps), 'step')}; see the notes.")
  unnamed = unnamed_waiting(diagnosis)
  if unnamed:
    where = "comes from few steps" if unnamed.few else "is for ranks by turns, without a cause that shows"
    return (f"No lasting fault: no rank is persistently late, and the waiting ({percent(unnamed.share)} of the time) "
            f"{where}: see the notes.")
  return (f"Healthy: no rank is persistently late, and waiting for late ranks takes "
          f"{100 * diagnosis.earliness / step_time.mean:.1f} % of the step. {_largest(diagnosis)}")


def _of_mode(diagnosis: Diagnosis, finding: Finding) -> str:
  assert diagnosis.step_time is not None
  cost = f"{milliseconds(finding.share * diagnosis.step_time.mean)} ({100 * finding.share:.0f} % of it)"
  subject = _subject(finding)
  if finding.mode == PERSISTENT:
    return _persistent(diagnosis, finding)
  if finding.mode == LOCALITY:
    return f"Every step loses {cost} to the place of {subject}: {_lower(finding.advice)}"
  if finding.mode == CONTENTION:
    whose = f"the link of {named(finding.hosts)}" if finding.hosts else "a crowded fabric"
    return f"Every step loses {cost} to {whose}: {_lower(finding.advice)}"
  if finding.mode == JITTER:
    return f"Every step loses {cost} to pauses between steps on {subject or 'all ranks'}: {_lower(finding.advice)}"
  return f"Every step waits {cost} for ranks that change from step to step: {_lower(finding.advice)}"


def _subject(finding: Finding) -> str:
  hosts = named(finding.hosts)
  if not finding.ranks:
    return hosts
  ranks = f"rank{'s' if len(finding.ranks) > 1 else ''} {list_ranks(finding.ranks)}"
  return f"{ranks} on {hosts}" if hosts else ranks


def _persistent(diagnosis: Diagnosis, finding: Finding) -> str:
  ranks = list(finding.ranks)
  lateness = [max(e.lateness for e in diagnosis.lateness.episodes if e.rank == rank) for rank in ranks]
  after = diagnosis.without_late if set(ranks) == set(diagnosis.lateness.late.tolist()) else None
  after = after or diagnosis.without_rank[ranks[0]]
  amount = milliseconds(min(lateness))
  if len(ranks) > 1 and milliseconds(max(lateness)) != amount:
    amount += f" to {milliseconds(max(lateness))}"
  assert diagnosis.step_time is not None
  does = "they arrive" if len(ranks) > 1 else "it arrives"
  return (f"Look at {_subject(finding)}: {does} {amount} late {spell(finding.first_step, finding.last_step)}, and "
          f"without that a step would take {milliseconds(after.step_time)} instead of "
          f"{milliseconds(diagnosis.step_time.mean)} ({after.speedup:.2f} times as fast).")


def _largest(diagnosis: Diagnosis) -> str:
  """Where most of the step goes."""
  assert diagnosis.shares is not None
  name, share = max(diagnosis.shares.items(), key=lambda entry: entry[1])
  return f"Most of it is {name} ({100 * share:.0f} %)."


def _lower(text: str) -> str:
  return text[0].lower() + text[1:]
