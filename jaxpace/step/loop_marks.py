"""Marks around the collectives of an instrumented step that stamps can't reach: those in loops,
branches and `jax.checkpoint`."""

from __future__ import annotations

import jax

from jaxpace.communication import inside, program
from jaxpace.core.marks import slot_tags
from jaxpace.execution import Clock, marks, native


class LoopMarks:
  """Puts the marks of one instrumented step in. Its program has one number, however often it is
  traced."""

  def __init__(self, slots: int):
    """Takes no number: that is done when the first mark is due.

    Args:
      slots: stamped collectives a step that have a slot; tags of marks begin behind theirs.
    """
    self._first_tag = slot_tags(slots)[0]
    self.number: int | None = None
    """The program's, among those of this process that have marks."""

  def put(self, flat: program.Program, axis: tuple[str, ...], clock: Clock,
          automatic: bool) -> tuple[inside.MarkedProgram, tuple[str, ...]]:
    """Puts marks around the hidden collectives of a step.

    Args:
      flat: the traced step.
      axis: the data axis.
      clock: what stamps are taken with.
      automatic: whether some axes of the mesh are the compiler's.

    Returns:
      The step with its marks, and a notice where it can't have any.
    """
    if not flat.hidden:
      return inside.MarkedProgram(flat, (), ()), ()
    if why := self._unfit(clock, automatic):
      return (inside.MarkedProgram(flat, (), ()),
              (f"Collectives in loops, branches and jax.checkpoint are not timed: {why}",))
    return inside.marked(flat, axis, self.mark, self._first_tag), ()

  def _unfit(self, clock: Clock, automatic: bool) -> str:
    """Why there can't be marks; empty where there can."""
    if clock.name != "native":
      return f"that takes the native clock, not {clock.name!r}."
    if automatic:
      return "some axes of the mesh are the compiler's."
    if why := marks.unavailable():
      return why
    if self.number is None:
      self.number = marks.next_program()
    if self.number >= marks.MOST_PROGRAMS:
      return "this process has too many programs with timestamps."
    return ""

  def mark(self, values: list[jax.Array], *waited: jax.Array, tag: int) -> list[jax.Array]:
    """Hands `values` on after a mark that waits for them and for `waited`."""
    assert self.number is not None, "marks are put in after it is known"
    return native.mark(values, *waited, program=self.number, tag=tag)


__all__ = ["LoopMarks"]
