"""The one sentence a person can act on."""

from __future__ import annotations

from jaxpace.diagnosis.counted import MIN_STEPS
from jaxpace.diagnosis.diagnosis import Diagnosis
from jaxpace.diagnosis.findings import COSTLY, PERSISTENT, hosts_of, milliseconds
from jaxpace.trace.problems import list_ranks, plural


def verdict_on(diagnosis: Diagnosis) -> str:
  """Says what to do about the costliest finding, or that there is none."""
  run, step_time = diagnosis.run, diagnosis.step_time
  if step_time is None:
    return (f"Nothing to judge: {plural(diagnosis.recorded, 'step')} recorded, and none of them has a recorded step "
            "before it to measure from. Let the job run on.")
  if diagnosis.findings:
    finding = diagnosis.findings[0]
    if finding.mode == PERSISTENT:
      return _persistent(diagnosis)
    waiting = finding.share * step_time.mean
    subject = "ranks that change from step to step"
    if finding.ranks:
      subject += f" (rank {finding.ranks[0]} most often)"
    elif finding.hosts:
      subject += f" (most of them on {finding.hosts[0]})"
    return (f"Every step waits {milliseconds(waiting)} ({100 * finding.share:.0f} % of it) for {subject}: "
            f"{_lower(finding.advice)}")
  if not run.collectives:
    return "No collective was recorded: it can't be told whether ranks wait for each other; see the notes."
  if run.ranks < 2:
    return f"Healthy: one rank has nobody to wait for. {_largest(diagnosis)}"
  if diagnosis.counted.size < MIN_STEPS:
    return (f"Too few steps to judge: {diagnosis.counted.size} count, {MIN_STEPS} are needed. So far waiting for late "
            f"ranks takes {100 * diagnosis.earliness / step_time.mean:.1f} % of the step.")
  if diagnosis.earliness >= COSTLY * step_time.mean:
    return ("No lasting fault: no rank is persistently late, and the waiting "
            f"({100 * diagnosis.earliness / step_time.mean:.0f} % of the time) comes from few stretches of the run: "
            "see the notes.")
  return (f"Healthy: no rank is persistently late, and waiting for late ranks takes "
          f"{100 * diagnosis.earliness / step_time.mean:.1f} % of the step. {_largest(diagnosis)}")


def _persistent(diagnosis: Diagnosis) -> str:
  finding = diagnosis.findings[0]
  ranks = list(finding.ranks)
  lateness = diagnosis.lateness.mean[ranks]
  after = diagnosis.without_late or diagnosis.without_rank[ranks[0]]
  hosts = hosts_of(diagnosis.run, ranks)
  where = f" on {', '.join(hosts[:3])}{' and others' if len(hosts) > 3 else ''}" if hosts else ""
  amount = milliseconds(float(lateness.min()))
  if len(ranks) > 1 and milliseconds(float(lateness.max())) != amount:
    amount += f" to {milliseconds(float(lateness.max()))}"
  several = len(ranks) > 1
  assert diagnosis.step_time is not None
  subject, does = ("ranks", "they arrive") if several else ("rank", "it arrives")
  return (f"Look at {subject} {list_ranks(ranks)}{where}: {does} "
          f"{amount} late throughout, and without that a step would take {milliseconds(after.step_time)} instead of "
          f"{milliseconds(diagnosis.step_time.mean)} ({after.speedup:.2f} times as fast).")


def _largest(diagnosis: Diagnosis) -> str:
  """Where most of the step goes."""
  assert diagnosis.shares is not None
  name, share = max(diagnosis.shares.items(), key=lambda entry: entry[1])
  return f"Most of it is {name} ({100 * share:.0f} %)."


def _lower(text: str) -> str:
  return text[0].lower() + text[1:]
