"""The live view as one line a refresh, for a pipe or a log."""

from __future__ import annotations

from jaxpace.diagnosis.diagnosis import SHARES
from jaxpace.diagnosis.live.alive import duration
from jaxpace.diagnosis.live.look import Snapshot
from jaxpace.diagnosis.wording import milliseconds
from jaxpace.trace.plain_text import plain, shortened


def line(look: Snapshot, news: list[str], encoding: str = "utf-8") -> str:
  """Says the look in one line.

  Args:
    look: what to say.
    news: sentences that have not been said yet; they come last.
    encoding: of the output.
  """
  words = []
  if look.state.kind != "running":
    words.append(look.state.sentence)
  if look.step >= 0:
    words.append(f"step {look.step:,}"
                 + (f" (attempt {look.attempt + 1})" if look.attempt > 0 else "") + ";")
  numbers = look.numbers
  if numbers is not None:
    words.append(f"{milliseconds(numbers.mean)} a step (median {milliseconds(numbers.median)}, "
                 f"99th percentile {milliseconds(numbers.p99)});")
    if numbers.shares:
      words.append(", ".join(f"{name} {100 * numbers.shares[name]:.1f} %" for name in SHARES) + ";")
    if numbers.late:
      latest = numbers.late[0]
      where = f" on {shortened(latest.host)}" if latest.host else ""
      words.append(f"latest rank {latest.rank}{where} by {milliseconds(latest.lateness)};")
    if numbers.pacing.on is not None:
      effect = ("" if numbers.pacing.effect is None
                else f", effect {100 * numbers.pacing.effect:+.1f} %")
      words.append(f"guard {'on' if numbers.pacing.on else 'off'}{effect};")
  if look.age is not None:
    words.append(f"rows {duration(look.age)} old.")
  return plain(" ".join([*words, *news]), encoding)


class News:
  """Tells what was not told before, of onsets, events and notes."""

  def __init__(self) -> None:
    """Nothing was told."""
    self._told: set[str] = set()

  def of(self, look: Snapshot) -> list[str]:
    """Returns new sentences, in their order."""
    every = ([told.sentence for told in look.told] + [event.sentence for event in look.events]
             + list(look.notes))
    fresh = [sentence for sentence in dict.fromkeys(every) if sentence not in self._told]
    self._told = set(every)
    return fresh
