"""Layout of one row of the ring of stamps inside the pace state.

A row is uint32 throughout: x64 is off in most programs, float32 seconds since an epoch are
worthless, so times are (high, low) words of nanoseconds and float32 values are stored by their
bits.

    column 0      step index
    column 1      flags, see `VALID`
    column 2      delay asked, float32 bits, seconds
    column 3      delay applied, float32 bits, seconds
    column 4-27   decision columns, float32 bits, named by `Plan.decisions`
    column 28-    stamps, (high, low) words of nanoseconds, one pair for each `Plan.marks` entry
    then          where a pacer holds collectives back (`Plan.holds`), `HELD` columns for each of
                  the plan's collectives: lost by holding, (high, low) words of nanoseconds,
                  `NOT_HELD` where nothing could be held; asked for and listened, float32 bits,
                  seconds, NaN where the pacer wasn't asked or its answer not followed; heard the
                  last time it listened, float32 bits, NaN where it didn't; how often it listened
    then          the number of readings of the step, and the first `READINGS` of them in order,
                  each (heard, told) by their float32 bits
"""

from __future__ import annotations

STEP, FLAGS, DELAY_ASKED, DELAY_APPLIED, DECISIONS = 0, 1, 2, 3, 4
MAX_DECISIONS = 24
"""Every pacer of the package chained, guarded and steered takes 17."""
STAMPS = DECISIONS + MAX_DECISIONS
VALID = 1
"""Flag of a row that holds a completed step; an untouched row is all zeros."""

MAX_PHASE_MARKS = 16
"""Marks left for phase boundaries beside the collectives' own."""


HELD = 5
"""Columns of each collective where a pacer holds back."""
NOT_HELD = 0xFFFFFFFF
"""Both words of what was lost where nothing could be held."""
READINGS = 64
"""Readings of a step that are kept; more are counted. 512 bytes of a row."""


def max_marks(slots: int) -> int:
  """Number of stamps a row has room for: start, delay, end, phases, and two a slot."""
  return 3 + MAX_PHASE_MARKS + 2 * slots


def row_width(slots: int, holds: bool = False) -> int:
  """Number of uint32 columns of a row, where collectives are held back or not."""
  return STAMPS + 2 * max_marks(slots) + (held_width(slots) if holds else 0)


def held_width(collectives: int) -> int:
  """Number of columns behind the stamps where so many collectives are held back."""
  return HELD * collectives + 1 + 2 * READINGS
