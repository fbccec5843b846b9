"""Whether a job hangs, or hung when it ended, and why: by where the rings of marks say that its
ranks are. Pure."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxpace.diagnosis import codes
from jaxpace.diagnosis.codes import Sentence
from jaxpace.trace.flight.told import CauseInWords, Flight, told

USUAL_STEPS = 20.0
"""Ranks that wait for longer than so many of the usual steps hang, if that is longer than the
following."""
RUNNING_SECONDS, FIRST_SECONDS = 10.0, 60.0
"""In a job that runs; the latter before a few steps have shown how long they take."""
ENDED_SECONDS = 3.0
"""In a job that was killed: nobody waits any more for it to go on."""
_MOST = 3
_CODES = {"absent": codes.HangCode.ABSENT, "order": codes.HangCode.ORDER,
          "stuck": codes.HangCode.STUCK, "unknown": codes.HangCode.UNKNOWN}


@dataclasses.dataclass(frozen=True)
class Hang:
  """Why ranks wait, that which keeps most of them first."""

  running: bool
  """Whether the job still lives; else this is how it ended."""
  causes: tuple[CauseInWords, ...]
  seconds: float | None
  """How long a rank has waited because of the first cause."""
  left_out: tuple[str, ...]
  """Rings that could not be used, in sentences."""
  run: str = ""
  """Id of the run; empty where it isn't known."""

  @property
  def sentences(self) -> tuple[Sentence, ...]:
    """All of it in words, each with the code of its cause."""
    said = [Sentence(_CODES[one.cause.kind], sentence) for one in self.causes[:_MOST]
            for sentence in one.sentences]
    more = len(self.causes) - _MOST
    if more > 0:
      said.append(Sentence(_CODES[self.causes[_MOST].cause.kind],
                           f"{more} more causes hold fewer ranks."))
    return tuple(said)

  def to_json(self) -> dict[str, Any]:
    """Returns plain lists, dicts and scalars."""
    return {
        "running": self.running, "seconds": self.seconds,
        "causes": [{"code": str(_CODES[one.cause.kind]), "sentences": one.sentences, **one.document}
                   for one in self.causes[:64]],
        "left_out": list(self.left_out)}


def find_hang(flight: Flight | None) -> Hang | None:
  """Tells what keeps a job from going on.

  At any moment of a healthy job some ranks wait for others, for milliseconds. Said is only what has
  lasted longer than steps take, or what ended the others: a process that died in the middle.

  Args:
    flight: where its ranks are, see `jaxpace.trace.flight.read.read_flight`; None of a run without
      rings.

  Returns:
    None where nothing is to be said.
  """
  if flight is None or flight.clean:
    return None
  usual = flight.usual
  if usual is None:
    limit = FIRST_SECONDS if flight.running else ENDED_SECONDS
  else:
    limit = max(RUNNING_SECONDS if flight.running else ENDED_SECONDS, USUAL_STEPS * usual)
  causes = tuple(one for one in told(flight) if (flight.waited(one.cause) or 0.0) >= limit
                 or _died(flight, one))
  if not causes:
    return None
  return Hang(flight.running, causes, flight.waited(causes[0].cause), flight.left_out, flight.run)


def _died(flight: Flight, one: CauseInWords) -> bool:
  """Whether those who waited have failed, and those they waited for are gone without a word."""
  waiting = [flight.positions[rank].state for wait in one.cause.waits for rank in wait.waiting]
  kept = [flight.positions[rank].state for rank in one.cause.ranks if rank in flight.positions]
  gone = [state == "gone" or (state == "running" and not flight.running) for state in kept]
  return "failed" in waiting and any(gone)
