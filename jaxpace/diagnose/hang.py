"""What a job waits for, or waited for last: by where the rings of timestamps say that its ranks
are. Pure."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxpace.core.words import Sentence, plural
from jaxpace.diagnose.words.codes import HangCode, codes
from jaxpace.diagnose.words.names import NAMED
from jaxpace.hang.describe import CauseInWords, Flight, describe
from jaxpace.hang.waits import SHORT, too_long

FIRST_SECONDS = 60.0
"""Of a wait that is reported before a few steps have shown how long they take."""


@dataclasses.dataclass(frozen=True)
class Hang:
  """Why ranks wait, that which keeps most of them first."""

  running: bool
  """Whether a process of the job wrote to its ring while the rings were watched."""
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
    said = [Sentence(HangCode(each.code), each) for one in self.causes[:NAMED]
            for each in one.sentences]
    more = len(self.causes) - NAMED
    if more > 0:
      said.append(Sentence(HangCode(self.causes[NAMED].cause.kind),
                           f"{plural(more, 'more cause')} not listed, with at most as many ranks."))
    return tuple(said)

  @property
  def title(self) -> str:
    """What the sentences answer."""
    return "What the job waits for" if self.running else "What the job waited for last"

  def to_json(self) -> dict[str, Any]:
    """Returns plain lists, dicts and scalars."""
    return {
        "title": self.title, "running": self.running, "seconds": self.seconds,
        "causes": [{"code": one.cause.kind, "sentences": list(map(str, one.sentences)),
                    "sentence_codes": codes(one.sentences), **one.document}
                   for one in self.causes[:64]],
        "left_out": list(self.left_out)}


def find_hang(flight: Flight | None) -> Hang | None:
  """Tells what keeps a job from going on.

  At any moment of a healthy job some ranks wait for others, for milliseconds. Reported is only what
  has lasted longer than steps take, or what ended the others: a process that died in the middle.
  For a job of which no process writes any more nobody waits to go on.

  Returns:
    None where nothing is to be said.
  """
  if flight is None:
    return None
  if flight.running:
    limit = FIRST_SECONDS if flight.usual is None else too_long(flight.usual)
  else:
    limit = too_long(flight.usual or 0.0, SHORT)
  causes = tuple(one for one in describe(flight) if (flight.waited(one.cause) or 0.0) >= limit
                 or _died(flight, one))
  if not causes:
    return None
  return Hang(flight.running, causes, flight.waited(causes[0].cause), flight.left_out, flight.run)


def _died(flight: Flight, one: CauseInWords) -> bool:
  """Whether those who waited have given up, and those they waited for no longer write."""
  waiting = [flight.positions[rank].state for wait in one.cause.waits for rank in wait.waiting]
  kept = [flight.positions[rank].state for rank in one.cause.ranks if rank in flight.positions]
  return "closed" in waiting and "silent" in kept
