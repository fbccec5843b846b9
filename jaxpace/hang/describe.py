"""What the rings of a job tell of a step that does not end, in sentences and as plain values.
Pure.

A sentence says what timestamps show. Where they can't tell two situations apart, it names both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxpace.core.words import Sentence, duration, plural, some_ranks
from jaxpace.hang import waits
from jaxpace.hang.positions import NewestExecution, Position, ProgramsByKey
from jaxpace.hang.waits import Cause, GroupRun, Wait
from jaxpace.record.ring.plan import iterations_in_words, iterations_of

_MOST_PLACES = 4
_MOST_BEHIND = 3


@dataclasses.dataclass(frozen=True)
class Flight:
  """Where all ranks are, as far as their rings are at hand."""

  positions: Mapping[int, Position]
  programs: ProgramsByKey
  left_out: tuple[str, ...] = ()
  """Rings that are not used, and why, in sentences."""
  running: bool = True
  """Whether a process of the job wrote to its ring while the rings were watched, or they were not
  watched."""
  watched: float = 0.0
  """Seconds for which the rings were watched."""
  run: str = ""
  """Id of the run; empty where it isn't known."""

  @property
  def usual(self) -> float | None:
    """Seconds that a step usually takes; None where that is not known yet."""
    known = sorted(one.usual for one in self.positions.values() if one.usual is not None)
    return known[len(known) // 2] if known else None

  def waited(self, cause: Cause) -> float | None:
    """Seconds that the rank which has waited longest has waited because of a cause; None where not
    known."""
    known = [self.positions[rank].waiting for wait in cause.waits for rank in wait.waiting]
    return max((seconds for seconds in known if seconds is not None), default=None)


@dataclasses.dataclass(frozen=True)
class CauseInWords:
  """A cause in words."""

  cause: Cause
  sentences: tuple[Sentence, ...]
  """What is waited for, then where the ranks in question are, how their processes are, and what
  else waits for that; the code says the kind of the cause, where a rank is instead, or how its
  process is, see `jaxpace.diagnose.words.codes.HangCode`."""
  document: dict[str, Any]
  """The same as plain values."""


def describe(flight: Flight) -> tuple[CauseInWords, ...]:
  """Says why collectives are not finished, that which keeps most ranks first; () where none is
  under way."""
  found = waits.causes(waits.unfinished(flight.positions, flight.programs), flight.programs)
  return tuple(_tell(flight, cause) for cause in found)


def _tell(flight: Flight, cause: Cause) -> CauseInWords:
  places = [(rank, place(flight, rank, cause)) for rank in cause.ranks if cause.kind == "absent"]
  said = [Sentence(cause.kind, _sentence(flight, cause))]
  said += [Sentence(where.code, f"{_rank(flight, rank)} {where}.")
           for rank, where in places[:_MOST_PLACES]]
  if len(places) > _MOST_PLACES:
    said.append(Sentence(cause.kind,
                         f"{plural(len(places) - _MOST_PLACES, 'more rank')} of these not listed."))
  said += _processes(flight, cause)
  if cause.behind:
    said.append(Sentence(cause.kind, _behind(flight, cause)))
  return CauseInWords(cause, tuple(said), {
      "kind": cause.kind, "ranks": list(cause.ranks), "seconds": flight.waited(cause),
      "waits": [_document(flight, wait) for wait in cause.waits[:64]],
      "behind": [_document(flight, wait) for wait in cause.behind[:64]],
      "places": [_place(flight, rank, where) for rank, where in places[:1024]]})


def _sentence(flight: Flight, cause: Cause) -> str:
  wait = cause.waits[0]
  long = flight.waited(cause)
  waited = _waits(flight, wait.waiting, long)
  for_long = "" if long is None else f" for {duration(long)}"
  what = meeting(flight.programs, wait.meeting)
  call = f"Call {wait.meeting.number} of {flight.programs.by_key[wait.meeting.program].name}: "
  waiting = some_ranks(wait.waiting)
  more = (f" (and others in {plural(len(cause.waits) - 1, 'more collective')})"
          if len(cause.waits) > 1 else "")
  if cause.kind == "absent":
    missing = [rank for rank in cause.ranks if rank in wait.absent]
    seen = ("" if all(flight.positions[rank].state == "running" for rank in missing)
            else f", as far as {'its' if len(missing) == 1 else 'their'} last timestamps show")
    return (f"{call}{waiting} {waited} in {what}{more} for {some_ranks(missing)}, which "
            f"{_has(missing)} not entered it{seen}.")
  if cause.kind == "order":
    pieces = [f"{some_ranks(one.waiting)} entered {meeting(flight.programs, one.meeting)} and "
              f"{_waits(flight, one.waiting)} for {some_ranks(one.absent)}"
              for one in cause.waits[:_MOST_BEHIND]]
    return (f"{call}{some_ranks(cause.ranks)} {_waits(flight, cause.ranks, long)} for each other, "
            f"having entered different collectives: "
            f"{'; '.join(pieces)}. What they run differs, or the order in which they run it.")
  if cause.kind == "stuck":
    left = (f"and {some_ranks(wait.left)} left it; {waiting} "
            f"{'is' if len(wait.waiting) == 1 else 'are'} still inside"
            if wait.left else "and none has left it")
    return (f"{call}all of {some_ranks(wait.meeting.group)} have entered {what}, {left}{for_long}: "
            "the network between them, a device, or a process of theirs that has ended or stands "
            "still; or it takes this long.")
  return (f"{call}{waiting} {waited} in {what}{more}; no ring at hand shows "
          f"whether {some_ranks(cause.ranks)} {_has(cause.ranks)} entered it.")


def place(flight: Flight, rank: int, cause: Cause) -> Sentence:
  """Says where a rank is instead, as what follows its name in a sentence."""
  where = flight.positions[rank]
  wait = next((one for one in cause.waits if rank in one.absent), cause.waits[0])
  execution, current = where.of(wait.meeting.program), where.current
  ago = _ago(where)
  is_in, has = ("is", "has") if where.state == "running" else ("was", "had")
  if execution is not None and not execution.ended and execution.number == wait.meeting.number:
    if execution.last is None:
      return Sentence("in_call", f"began the call{ago}, and {has} entered no collective of it")
    return Sentence("in_call", _after(flight, execution, ago, is_in))
  if (execution is not None and execution is current and not execution.ended
      and execution.number is not None):
    return Sentence("earlier_call", f"{is_in} still in call {execution.number}: it "
                    + ("began that" + ago if execution.last is None
                       else _after(flight, execution, ago, is_in)))
  if current is not None and not current.ended:
    name = flight.programs.by_key[current.program].name
    return Sentence(
        "other_program",
        f"{is_in} in another program, {name}{ago and ', with its last timestamp' + ago}")
  begun = f"{has} not begun the call"
  beside = _beside(flight, rank, wait.meeting)
  if beside:
    return Sentence("device_behind", f"{begun}, which {some_ranks(beside)} of the same process "
                    f"{_has(beside)} begun: its device has other work, or, on a CPU, no thread "
                    "(the devices of a process share threads, and calls that run ahead can take "
                    "all)")
  last = "no timestamp of it is left" if current is None else (
      f"its last timestamp{_of_call(flight, current, wait.meeting.program)} was written"
      f"{ago or ' before'}")
  return Sentence("not_begun", f"{begun}: {last}" + (
      "; between calls timestamps cannot show whether its process is in Python (a data loader, a "
      "checkpoint, an evaluation) or in a program without timestamps" if is_in == "is" else ""))


def _after(flight: Flight, execution: NewestExecution, ago: str, is_in: str) -> str:
  """What its last timestamp shows of a rank that is in no collective."""
  assert execution.last is not None
  each, iteration, leaves = execution.last
  name = occurrence(flight.programs, execution.program, each, iteration)
  return (f"left {name}{ago}, and {is_in} in what follows" if leaves else f"entered {name}{ago}")


def _of_call(flight: Flight, current: NewestExecution, program: str) -> str:
  call = "" if current.number is None else f"call {current.number} of "
  if current.program == program and call:
    return f", of call {current.number},"
  return f", of {call}{flight.programs.by_key[current.program].name},"


def _ago(where: Position) -> str:
  """When its last timestamp was written, by the clock of its own host."""
  if where.quiet is None:
    return ""
  since = {"running": "ago", "closed": "before its recording was closed"}
  return f" {duration(where.quiet)} {since.get(where.state, 'before its process last wrote')}"


def _beside(flight: Flight, rank: int, call: GroupRun) -> list[int]:
  """Ranks of its process that have begun a call: their process has made it."""
  own = flight.positions[rank].process
  found = []
  for other, where in sorted(flight.positions.items()):
    execution = where.of(call.program) if where.process == own and other != rank else None
    if execution is not None and execution.number is not None and execution.number >= call.number:
      found.append(other)
  return found


def _processes(flight: Flight, cause: Cause) -> Iterator[Sentence]:
  """How the processes of the ranks in question are, where they no longer write."""
  positions = {flight.positions[rank].process: flight.positions[rank] for rank in cause.ranks
               if rank in flight.positions}
  for process, where in sorted(positions.items())[:_MOST_PLACES]:
    name = f"Process {process}{' on ' + where.host if where.host else ''}"
    last = f" Its process file gives a reason: {where.ended_by}." if where.ended_by else ""
    if where.state == "closed":
      yield Sentence("closed", f"{name} has closed its recording; timestamps cannot show what it "
                     "has done since." + last)
    elif where.state == "silent" and flight.watched:
      others = "" if flight.running else ", like all others,"
      yield Sentence("silent", f"{name}{others} wrote nothing in the {duration(flight.watched)} "
                     "for which its ring was watched: it has ended, stands still, or can't write "
                     "to this directory." + last)


def meeting(programs: ProgramsByKey, one: GroupRun) -> str:
  """Names a meeting: "all-reduce.3, turn 17 of 32 (model.py:120), over data among ranks 0-3"."""
  each = programs.collective(one.program, one.place)
  axes = f", over {' and '.join(each.axes)}" if each.axes else ","
  kind = "" if each.name.startswith(each.kind) else (
      f", {'an' if each.kind[:1] in 'aeiou' else 'a'} {each.kind}")
  return (f"{occurrence(programs, one.program, one.place, one.iteration)}{kind}{axes} among "
          f"{some_ranks(one.group)}")


def occurrence(programs: ProgramsByKey, key: str, place: int, iteration: int) -> str:
  """Names a collective in one iteration of its loops: "all-reduce.3, turn 17 of 32 (model.py:120)".
  Turns begin at 0."""
  each = programs.collective(key, place)
  iterations = iterations_in_words(iterations_of(each.loops, iteration))
  return each.name + (f", {iterations}" if iterations else "") + (f" ({each.source})" if each.source
                                                                  else "")


def _behind(flight: Flight, cause: Cause) -> str:
  pieces = [f"{some_ranks(wait.waiting)} in {meeting(flight.programs, wait.meeting)}"
            for wait in cause.behind[:_MOST_BEHIND]]
  more = len(cause.behind) - _MOST_BEHIND
  return ("Ranks wait behind these: " + "; ".join(pieces)
          + (f"; and others in {plural(more, 'more collective')}" if more > 0 else "") + ".")


def _document(flight: Flight, wait: Wait) -> dict[str, Any]:
  one = wait.meeting
  each = flight.programs.collective(one.program, one.place)
  return {
      "program": flight.programs.by_key[one.program].name, "call": one.number,
      "collective": each.name, "kind": each.kind, "axes": list(each.axes), "group": list(one.group),
      "source": each.source, "operation": each.operation, "turn": one.iteration,
      "loops": iterations_of(each.loops, one.iteration),
      "waiting": list(wait.waiting), "absent": list(wait.absent), "left": list(wait.left),
      "unknown": list(wait.unknown)}


def _place(flight: Flight, rank: int, said: Sentence) -> dict[str, Any]:
  where = flight.positions[rank]
  current: NewestExecution | None = where.current
  last = current.last if current is not None else None
  document: dict[str, Any] = {
      "rank": rank, "process": where.process, "host": where.host or None, "state": where.state,
      "seconds": where.quiet, "program": None, "call": None, "between_calls": True, "last": None,
      "code": said.code, "words": str(said)}
  if current is not None:
    document |= {"program": flight.programs.by_key[current.program].name, "call": current.number,
                 "between_calls": current.ended}
    if last is not None:
      document["last"] = {"collective": flight.programs.collective(current.program, last[0]).name,
                          "turn": last[1], "left": last[2]}
  return document


def _rank(flight: Flight, rank: int) -> str:
  where = flight.positions[rank]
  return f"Rank {rank} (process {where.process}{' on ' + where.host if where.host else ''})"


def _waits(flight: Flight, ranks: Sequence[int], seconds: float | None = None) -> str:
  """That ranks wait, or waited where nothing more is heard of them."""
  over = all(flight.positions[rank].state != "running" for rank in ranks)
  if seconds is None:
    return "waited" if over else "waits" if len(ranks) == 1 else "wait"
  return f"{'had' if over else _has(ranks)} waited {duration(seconds)}"


def _has(ranks: Sequence[int]) -> str:
  return "has" if len(ranks) == 1 else "have"
