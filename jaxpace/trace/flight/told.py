"""What the rings of a job tell of a step that does not end, in sentences and as plain values.
Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxpace.trace.flight import waits
from jaxpace.trace.flight.positions import NewestExecution, Position
from jaxpace.trace.flight.programs import ProgramsByKey
from jaxpace.trace.flight.waits import Cause, GroupRun, Wait
from jaxpace.trace.marks.slots import turns_in_words, turns_of
from jaxpace.trace.problems import list_ranks, plural

_MOST_PLACES = 4
_MOST_BEHIND = 3


@dataclasses.dataclass(frozen=True)
class Flight:
  """Where all ranks are, as far as their rings are at hand."""

  positions: Mapping[int, Position]
  programs: ProgramsByKey
  left_out: tuple[str, ...] = ()
  """Rings that are not used, and why, in sentences."""
  missing: tuple[int, ...] = ()
  """Processes of the job without a ring that can be used."""
  running: bool = True
  """Whether a process of the job lives, as far as that is known."""
  clean: bool = False
  """Whether all processes have closed their recordings without an error."""
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
  sentence: str
  places: tuple[str, ...]
  """Where the ranks in question are, a sentence each."""
  behind: str
  """What else waits for that; empty where nothing does."""
  document: dict[str, Any]
  """The same as plain values."""

  @property
  def sentences(self) -> list[str]:
    """All of it."""
    return [self.sentence, *self.places, *filter(None, [self.behind])]


def told(flight: Flight) -> tuple[CauseInWords, ...]:
  """Says why collectives are not finished, that which keeps most ranks first; () where none is
  under way."""
  found = waits.causes(waits.unfinished(flight.positions, flight.programs), flight.programs)
  return tuple(_tell(flight, cause) for cause in found)


def _tell(flight: Flight, cause: Cause) -> CauseInWords:
  places = [(rank, where_is(flight, rank, cause)) for rank in cause.ranks
            if cause.kind == "absent"
            or (cause.kind == "stuck" and flight.positions[rank].state == "gone")]
  said = [f"{_rank(flight, rank)} {place}." for rank, place in places[:_MOST_PLACES]]
  if len(places) > _MOST_PLACES:
    said.append(f"So are {plural(len(places) - _MOST_PLACES, 'rank')} more, not listed.")
  return CauseInWords(cause, _sentence(flight, cause), tuple(said), _behind(flight, cause), {
      "kind": cause.kind, "ranks": list(cause.ranks), "seconds": flight.waited(cause),
      "waits": [_document(flight, wait) for wait in cause.waits[:64]],
      "behind": [_document(flight, wait) for wait in cause.behind[:64]],
      "places": [_place(flight, rank, words) for rank, words in places[:1024]]})


def _sentence(flight: Flight, cause: Cause) -> str:
  wait = cause.waits[0]
  long = flight.waited(cause)
  for_long = "" if long is None else f" for {seconds(long)}"
  what = meeting(flight.programs, wait.meeting)
  call = f"Call {wait.meeting.number} of {flight.programs.by_key[wait.meeting.program].name}: "
  waiting = _ranks(wait.waiting)
  more = (f" (and others in {plural(len(cause.waits) - 1, 'more collective')})"
          if len(cause.waits) > 1 else "")
  if cause.kind == "absent":
    missing = [rank for rank in cause.ranks if rank in wait.absent]
    has = "has" if len(missing) == 1 else "have"
    return (f"{call}{waiting} {_waits(wait.waiting, long)} in {what}{more} for {_ranks(missing)}, "
            f"which {has} not entered it.")
  if cause.kind == "order":
    pieces = [f"{_ranks(one.waiting)} entered {meeting(flight.programs, one.meeting)} and "
              f"{_waits(one.waiting)} for {_ranks(one.absent)}"
              for one in cause.waits[:_MOST_BEHIND]]
    wait_for = "wait" if long is None else f"have waited {seconds(long)}"
    return (f"{call}ranks {wait_for} for each other, having entered different collectives: "
            f"{'; '.join(pieces)}. Their processes run different programs, or run them in "
            "different orders.")
  if cause.kind == "stuck":
    if wait.left:
      return (f"{call}all of {_ranks(wait.meeting.group)} have entered {what}, and "
              f"{_ranks(wait.left)} left it; {waiting} {_are(wait.waiting)} still "
              f"inside{for_long}: the network between them, or a peer that died.")
    return (f"{call}all of {_ranks(wait.meeting.group)} have entered {what} and none has left "
            f"it{for_long}: no rank is late; the network between them hangs, or a peer died in it.")
  return (f"{call}{waiting} {_waits(wait.waiting, long)} in {what}{more}; of {_ranks(cause.ranks)} "
          "no ring is at hand that tells whether they have entered.")


def where_is(flight: Flight, rank: int, cause: Cause) -> str:
  """Says where a rank is instead, as what follows its name in a sentence."""
  where = flight.positions[rank]
  over = where.state == "gone" or not flight.running
  ago = "" if where.quiet is None else (
      f" {seconds(where.quiet)} {'before its process was last heard of' if over else 'ago'}")
  is_in = "was" if over else "is"
  wait = next((one for one in cause.waits if rank in one.absent), cause.waits[0])
  execution = where.of(wait.meeting.program)
  current = where.current
  if cause.kind == "stuck":
    return ("was in it when its process ended, or came to stand "
            f"still{ago and '; it had entered' + ago}")
  if execution is not None and not execution.ended and execution.number == wait.meeting.number:
    if execution.last is None:
      place = f"has begun the call{ago}, and has entered no collective of it"
    else:
      each, turn, leaves = execution.last
      name = occurrence(flight.programs, execution.program, each, turn)
      place = f"{'left' if leaves else 'entered'} {name}{ago}, and {is_in} in what follows"
  elif current is not None and current is not execution and not current.ended:
    name = flight.programs.by_key[current.program].name
    place = f"{is_in} in another program, {name}{ago and ', with its last mark' + ago}"
  else:
    last = ("no call" if execution is None else f"call {execution.number}"
            if execution.number is not None else "calls")
    place = (f"has not begun the call: its last mark, of {last}, was written{ago or ' before'}; "
             f"its process {is_in} between two steps, in Python (a data loader, a checkpoint, an "
             "evaluation)")
  others = {one.state for one in flight.positions.values()}
  if where.state == "gone" and others != {"gone"}:
    place += ". Its process has ended without a word, or stands still"
  elif where.state == "left":
    place += ". Its process has left its loop: its recording is closed"
  elif where.state == "failed":
    place += ". Its process has ended with an error"
  return place


def meeting(programs: ProgramsByKey, one: GroupRun) -> str:
  """Names a meeting: "all-reduce.3, turn 17 of 32 (model.py:120), over data among ranks 0-3"."""
  each = programs.collective(one.program, one.place)
  axes = f", over {' and '.join(each.axes)}" if each.axes else ","
  kind = "" if each.name.startswith(each.kind) else f", {_a(each.kind)}"
  return (f"{occurrence(programs, one.program, one.place, one.turn)}{kind}{axes} among "
          f"{_ranks(one.group)}")


def occurrence(programs: ProgramsByKey, key: str, place: int, turn: int) -> str:
  """Names a collective in one turn of its loops: "all-reduce.3, turn 17 of 32 (model.py:120)".
  Turns begin at 0."""
  each = programs.collective(key, place)
  turns = turns_in_words(turns_of(each.loops, turn))
  return each.name + (f", {turns}" if turns else "") + (f" ({each.source})" if each.source else "")


def seconds(value: float) -> str:
  """A duration in words.

  >>> seconds(0.0123), seconds(3.25), seconds(312), seconds(16440)
  ('12 ms', '3.2 s', '5 min 12 s', '4 h 34 min')
  """
  if value < 1.0:
    return f"{1e3 * value:.0f} ms"
  if value < 10.0:
    return f"{value:.1f} s"
  whole = round(value)
  if whole < 120:
    return f"{whole} s"
  return (f"{whole // 60} min {whole % 60} s" if whole < 7200
          else f"{whole // 3600} h {whole % 3600 // 60} min")


def _behind(flight: Flight, cause: Cause) -> str:
  if not cause.behind:
    return ""
  pieces = [f"{_ranks(wait.waiting)} in {meeting(flight.programs, wait.meeting)}"
            for wait in cause.behind[:_MOST_BEHIND]]
  more = len(cause.behind) - _MOST_BEHIND
  return ("Behind that wait " + "; ".join(pieces)
          + (f"; and ranks in {plural(more, 'collective')} more" if more > 0 else "") + ".")


def _document(flight: Flight, wait: Wait) -> dict[str, Any]:
  one = wait.meeting
  each = flight.programs.collective(one.program, one.place)
  return {
      "program": flight.programs.by_key[one.program].name, "call": one.number,
      "collective": each.name, "kind": each.kind, "axes": list(each.axes), "group": list(one.group),
      "source": each.source, "operation": each.operation, "turn": one.turn,
      "loops": turns_of(each.loops, one.turn),
      "waiting": list(wait.waiting), "absent": list(wait.absent), "left": list(wait.left),
      "unknown": list(wait.unknown)}


def _place(flight: Flight, rank: int, words: str) -> dict[str, Any]:
  where = flight.positions[rank]
  current: NewestExecution | None = where.current
  last = current.last if current is not None else None
  document: dict[str, Any] = {
      "rank": rank, "process": where.process, "host": where.host or None, "state": where.state,
      "seconds": where.quiet, "program": None, "call": None, "between_calls": True, "last": None,
      "words": words}
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


def _ranks(ranks: Sequence[int]) -> str:
  return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {list_ranks(ranks)}"


def _waits(ranks: Sequence[int], duration: float | None = None) -> str:
  one = len(ranks) == 1
  if duration is None:
    return "waits" if one else "wait"
  return f"{'has' if one else 'have'} waited {seconds(duration)}"


def _are(ranks: Sequence[int]) -> str:
  return "is" if len(ranks) == 1 else "are"


def _a(kind: str) -> str:
  return f"{'an' if kind[:1] in 'aeiou' else 'a'} {kind}"
