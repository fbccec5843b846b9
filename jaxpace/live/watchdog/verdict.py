"""Who keeps the others waiting: from what the processes say of themselves. Pure: no clock, no I/O.

A process that waits inside a step has arrived; one that has not called it, or that says nothing any
more, has not. A step that has completed anywhere was called by all: each holds a collective over
all processes. The step that is waited for is the one after the last that any process has seen
complete: loops may run ahead of their devices by different numbers of steps, so the farthest step
called says nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from jaxpace.live.watchdog.heartbeat import Heartbeat, LastHeartbeat

State = Literal["silent", "outside", "left", "absent", "service"]
"""Why a process has not arrived.

"silent": nothing has been heard of it lately; "outside": it answers, its loop is elsewhere; "left":
it has closed its watchdog; "absent": it was never heard of; "service": process 0, and the store
that lives in it, answer nobody.
"""


@dataclasses.dataclass(frozen=True)
class LateProcess:
  """A process that has not arrived."""

  process: int
  state: State
  host: str = ""
  pid: int = 0
  last_step: int | None = None  # last step it is known to have called; None where nobody knows
  phase: str = ""  # where its loop is, or was when it was last heard of
  seconds: float = 0.0  # since it was heard of, or since a step of it completed, approximately
  stack: str = ""

  def sentence(self) -> str:
    """Says it in words, without the stack."""
    who = f"process {self.process}" + (f" (host {self.host}, pid {self.pid})" if self.host else "")
    if self.state == "absent":
      return (f"{who} was never heard of: it has not opened its watchdog, has ended, or can't be "
              "reached")
    last = ("; its last step isn't known" if self.last_step is None
            else f"; its last step is {self.last_step}")
    if self.state == "service":
      return (f"{who} does not answer, nor does the coordination service, which lives in it: it "
              f"stands still, has ended, or can't be reached from here{last}")
    if self.state == "left":
      return f"{who} has closed its watchdog: its loop has ended, or an error left it{last}"
    place = where(self.phase)
    if self.state == "silent":
      return (f"{who} has not been heard of for {self.seconds:.1f} s: it stands still, is swapped "
              "out, has ended or can't be reached, or native code holds its interpreter; when last "
              f"heard of it was {place}{last}")
    return f"{who} is {place}, and has completed no step for {self.seconds:.1f} s{last}"


@dataclasses.dataclass(frozen=True)
class Late:
  """What a watchdog has found.

  Attributes:
    step: the step that is waited for, counted from 1 as the watchdog sees them: the first call is
      step 1.
    waited: seconds since a step last completed here.
    late: those that have not arrived; empty where all have.
    arrived: indices of those that have called the step.
    process: index of the process that says so.
    marks: which collective of an observed step is not finished, who waits in it and for whom, in
      sentences.
    causes: the same briefly: "kind", "ranks" and "collective" of each cause, that which keeps most
      ranks first.
  """

  step: int
  waited: float
  late: tuple[LateProcess, ...]
  arrived: tuple[int, ...]
  process: int
  marks: tuple[str, ...] = ()
  causes: tuple[dict[str, Any], ...] = ()

  def text(self) -> str:
    """Says it in words, a line for each late process, each stack indented below its process."""
    lines = [f"step {self.step} has not completed for {self.waited:.1f} s."]
    if not self.late:
      all_of_them = (f"All {len(self.arrived)} processes have" if len(self.arrived) > 1
                     else "This process has")
      lines[0] += f" {all_of_them} called it" + ("." if self.marks else (
          ": a device, the network or a function of the host that it calls keeps it, or it takes "
          "this long."))
    lines += [f"  {'in the step' if not i else 'and'}: {sentence}"
              for i, sentence in enumerate(self.marks)]
    for process in self.late:
      lines.append(f"  not arrived: {process.sentence()}")
      lines += [f"    | {line}" for line in process.stack.splitlines()]
    if self.late and self.arrived:
      lines.append(f"  have called it: {_ranges(self.arrived)}")
    return "\n".join(lines)

  def to_json(self) -> dict[str, Any]:
    """Returns plain lists, dicts and scalars."""
    return dataclasses.asdict(self)


def excused(last_heartbeats: Mapping[int, LastHeartbeat], silence: float) -> float:
  """Seconds since the last process said that it would take long (a pause, a compilation); 0 while
  one does.

  Args:
    heard: words by process.
    silence: seconds after which a process counts as silent: its excuse no longer holds.

  Returns:
    Infinity if nobody did.
  """
  fresh = [one for one in last_heartbeats.values() if one.silence <= silence and not one.left]
  return min((0.0 if one.heartbeat.excused == 0 else one.heartbeat.excused + one.silence
              for one in fresh),
             default=float("inf"))


def speaker(last_heartbeats: Mapping[int, LastHeartbeat], silence: float, own: int) -> int:
  """The one process that tells: the lowest that is heard of and has itself waited too long; or
  `own`."""
  return min([own, *(process for process, one in last_heartbeats.items()
                     if one.silence <= silence and one.heartbeat.waiting and not one.left)])


def judge(last_heartbeats: Mapping[int, LastHeartbeat], processes: int, silence: float, own: int,
          waited: float) -> Late:
  """Says who has not arrived.

  Args:
    heard: words by process, this process's own included.
    processes: number of processes of the job.
    silence: seconds without a new word after which a process counts as silent.
    own: this process.
    waited: seconds since a step last completed here.
  """
  # No step has completed that one of those heard of now has not called, whatever the others take
  # for completed: where all results are donated they can only count calls.
  called = [one.heartbeat.entered for one in last_heartbeats.values() if one.left
            or one.silence <= silence]
  step = 1 + min([max(one.heartbeat.completed for one in last_heartbeats.values()), *called])
  late, arrived = [], []
  for process in range(processes):
    one = last_heartbeats.get(process)
    if one is None:
      late.append(LateProcess(process, "absent"))
      continue
    heartbeat = one.heartbeat
    if one.left:
      late.append(_late(heartbeat, "left"))
    elif one.silence > silence:
      late.append(_late(heartbeat._replace(entered=max(heartbeat.entered, step - 1)), "silent",
                        one.silence))
    elif heartbeat.entered < step:
      late.append(_late(heartbeat, "outside", heartbeat.age + one.silence, heartbeat.stack))
    else:
      arrived.append(process)
  return Late(step, waited, tuple(late), tuple(arrived), own)


def without_service(last_heartbeats: Mapping[int, LastHeartbeat], own: LastHeartbeat,
                    waited: float) -> Late:
  """Names process 0, in which the store lives that does not answer: all that a process can know by
  itself.

  Args:
    heard: words heard before.
    own: this process's own.
    waited: seconds since a step last completed here.
  """
  inside = own.heartbeat.entered > own.heartbeat.completed
  step = own.heartbeat.completed + 1
  if 0 in last_heartbeats:
    heartbeat = last_heartbeats[0].heartbeat
    zero = _late(heartbeat._replace(entered=max(heartbeat.entered, step - 1)), "service",
                 last_heartbeats[0].silence)
  else:
    zero = LateProcess(0, "service", last_step=step - 1)
  return Late(step, waited, (zero,), (own.heartbeat.process,) if inside else (),
              own.heartbeat.process)


def _late(heartbeat: Heartbeat, state: State, seconds: float = 0.0, stack: str = "") -> LateProcess:
  return LateProcess(heartbeat.process, state, heartbeat.host, heartbeat.pid, heartbeat.entered,
                     heartbeat.phase, seconds, stack)


def where(phase: str) -> str:
  """Says in words where a loop is."""
  known = {"step": "in its step", "between steps": "between two steps",
           "compiling": "compiling", "data": "waiting for data",
           "checkpoint": "writing a checkpoint", "": "not yet at its first step"}
  return known.get(phase, f"in {phase!r}")


def _ranges(processes: tuple[int, ...]) -> str:
  """"0-2, 5" of (0, 1, 2, 5)."""
  pieces: list[list[int]] = []
  for process in processes:
    if pieces and process == pieces[-1][1] + 1:
      pieces[-1][1] = process
    else:
      pieces.append([process, process])
  words = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in pieces)
  return f"process{'es' if len(processes) > 1 else ''} {words}"
