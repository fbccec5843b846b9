"""What watchdogs found while the job ran, in sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxpace.diagnosis.codes import Note, Sentence
from jaxpace.live.watchdog.verdict import where

_MOST = 8


def hung(events: Sequence[Mapping[str, Any]]) -> list[Sentence]:
  """Says which processes hung, at which step, where and for how long.

  Args:
    events: as `jaxpace.live.watchdog.events.read_events` returns them, in order. What doesn't look like one is left
    out.

  Returns:
    A sentence for each hang, the first few; later words on a step that still hangs go into the last one's numbers.
  """
  hangs: dict[Any, Mapping[str, Any]] = {}
  taken: dict[Any, float] = {}
  step = None
  for event in events:
    kind, waited, seconds = event.get("event"), _seconds(event.get("waited")), _seconds(event.get("seconds"))
    if kind == "late" and isinstance(event.get("step"), int) and waited is not None:
      step = event["step"]
      hangs[step] = event
    elif kind == "resumed" and step is not None and seconds is not None:
      taken[step] = max(taken.get(step, 0.0), seconds)
  said = [_sentence(event, taken.get(step)) for step, event in hangs.items()]
  rest = len(said) - _MOST
  return said[:_MOST] + ([Sentence(Note.HUNG, f"Watchdog: {rest} more steps hung.")] if rest > 0 else [])


def _sentence(event: Mapping[str, Any], taken: float | None) -> Sentence:
  lates = event.get("late")
  late = [one for one in lates if isinstance(one, dict)] if isinstance(lates, list | tuple) else []
  others = f"; {len(late) - _MOST:,} more" if len(late) > _MOST else ""
  who = "; ".join(_name(one) for one in late[:_MOST]) + others
  who = who or "all processes were inside it: a device or the network hung"
  ended = f"for {taken:.0f} s" if taken is not None else f"for {float(event['waited']):.0f} s and more"
  return Sentence(Note.HUNG, f"Watchdog: step {event['step']} hung {ended}; {who}.")


def _name(late: Mapping[str, Any]) -> str:
  host, phase = late.get("host"), late.get("phase")
  name = f"process {late.get('process')}" + (f" ({host})" if host else "")
  state = late.get("state")
  if state == "absent":
    return f"{name} was never heard of"
  if state == "left":
    return f"{name} had left its loop"
  was = f"was {where(phase)}" if isinstance(phase, str) else "had not arrived"
  return f"{name} {was}" + (", and silent" if state in ("silent", "service") else "")


def _seconds(value: object) -> float | None:
  return float(value) if isinstance(value, int | float) and 0 <= value < float("inf") else None
