"""Where the ranks of a process are, as a short text for a heartbeat."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable

from jaxpace.trace.flight.positions import NewestExecution, Position
from jaxpace.trace.flight.programs import ProgramsByKey

_NEWEST = 2
"""Executions of a rank that are told: that under way, and one of another program."""


def to_text(positions: Iterable[Position], most: int) -> str:
  """Writes positions; ranks that are at the same place share their entry. What does not fit is left
  out.

  Args:
    positions: of one process's ranks.
    most: characters, at most.
  """
  entries: dict[str, list[int]] = {}
  for one in positions:
    executions = [[each.program, each.number, each.ended, list(each.entered), list(each.left),
                   each.last]
                  for each in one.executions[-_NEWEST:]]
    times = [None if value is None else round(value, 2)
             for value in (one.quiet, one.usual, one.waiting)]
    entries.setdefault(json.dumps([executions, *times], separators=(",", ":")), []).append(one.rank)
  pieces: list[str] = []
  left = most - 2
  for text, ranks in entries.items():
    piece = f"[{json.dumps(ranks, separators=(',', ':'))},{text}]"
    needed = len(piece) + (1 if pieces else 0)
    if needed > left:
      continue
    left -= needed
    pieces.append(piece)
  return f"[{','.join(pieces)}]" if pieces else ""


def from_text(text: str, process: int, host: str, programs: ProgramsByKey,
              silence: float = 0.0) -> list[Position]:
  """Reads `to_text`; what can't be read, or is of programs that are not known here, is left out.

  Args:
    text: what `to_text` wrote.
    process: whose positions they are.
    host: its name.
    programs: those known here.
    silence: seconds since it was written.
  """
  found: list[Position] = []
  try:
    for ranks, (executions, *times) in json.loads(text) if text else []:
      quiet, usual, waiting = (None if value is None else float(value) for value in times)
      made = tuple(_execution(*each) for each in executions)
      if not all(_fits(each, programs) for each in made):
        continue
      one = Position(-1, process, made, None if quiet is None else quiet + silence, usual,
                     host=host, waiting=None if waiting is None else waiting + silence)
      found += [dataclasses.replace(one, rank=int(rank)) for rank in ranks]
  except (TypeError, ValueError):
    return found
  return found


def _execution(program: str, number: int | None, ended: bool, entered: list[int], left: list[int],
               last: list[int] | None) -> NewestExecution:
  return NewestExecution(str(program), None if number is None else int(number), bool(ended),
                         tuple(map(int, entered)), tuple(map(int, left)),
                         None if last is None else (int(last[0]), int(last[1]), bool(last[2])))


def _fits(one: NewestExecution, programs: ProgramsByKey) -> bool:
  program = programs.by_key.get(one.program)
  return (program is not None and len(one.entered) == len(one.left) == len(program.collectives)
          and (one.last is None or 0 <= one.last[0] < len(program.collectives)))
