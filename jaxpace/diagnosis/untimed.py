"""Collectives that the step has and that were not timed: ranks meet there too, and who is late
doesn't show."""

from __future__ import annotations

import collections

from jaxpace.trace.run import Run


def untimed(run: Run) -> dict[tuple[str, str], int]:
  """How many collectives were not stamped, by name and reason; those that found no slot too."""
  entries = run.plan.get("unstamped")
  found: dict[tuple[str, str], int] = collections.Counter(
      (str(entry.get("primitive") or entry.get("name")),
       str(entry.get("reason", "no reason given")))
      for entry in (entries if isinstance(entries, list) else []) if isinstance(entry, dict))
  overflow = run.plan.get("overflow")
  if isinstance(overflow, int) and overflow > 0:
    found["collectives", NO_SLOT] = overflow
  return dict(found)


NO_SLOT = "no slot left"

__all__ = ["NO_SLOT", "untimed"]
