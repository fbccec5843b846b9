"""Collectives of compiled programs, compared: number, kind, groups of ranks, operands."""

from __future__ import annotations

import re
from typing import NamedTuple

_KINDS = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all",
          "collective-broadcast", "ragged-all-to-all")
_LINE = re.compile(rf"= (?P<types>.*?) (?P<kind>{'|'.join(_KINDS)})(?:-start)?\(")
_TYPE = re.compile(r"[a-z]+[0-9]*(?:e[0-9]m[0-9]\w*)?\[[0-9,]*\]")
_GROUPS = re.compile(r"(?:replica_groups|source_target_pairs)=(\{\{.*?\}\}|\{\}|\[[^ ]*)")


class Collective(NamedTuple):
  """One collective operation of a compiled program."""

  kind: str
  groups: str
  operands: tuple[str, ...]  # types of its results, sorted; layouts left out


def collectives(text: str) -> list[Collective]:
  """Every collective of a compiled program's text, sorted."""
  found = []
  for line in text.splitlines():
    if match := _LINE.search(line):
      groups = _GROUPS.search(line)
      found.append(Collective(match["kind"], groups[1].rstrip(",") if groups else "",
                              tuple(sorted(_TYPE.findall(match["types"])))))
  return sorted(found)


class Comparison(NamedTuple):
  """What became of the collectives of a program."""

  added: tuple[str, ...]
  """Operands that joined collectives which are otherwise the same."""
  missing: tuple[Collective, ...]
  """Collectives that are gone, or whose own operands or groups changed."""
  new: tuple[Collective, ...]
  """Collectives that were not there."""

  def same_but_for(self, most: int) -> bool:
    """Whether nothing changed but for at most so many operands that joined."""
    return not self.missing and not self.new and len(self.added) <= most


def compare(bare: str, changed: str) -> Comparison:
  """Compares the texts of two compiled programs."""
  left = collectives(changed)
  unmatched = []
  for one in collectives(bare):
    if one in left:
      left.remove(one)
    else:
      unmatched.append(one)
  added: list[str] = []
  missing = []
  for one in unmatched:
    extra = [(other, rest) for other in left
             if other[:2] == one[:2]
             and (rest := _beyond(other.operands, one.operands)) is not None]
    if not extra:
      missing.append(one)
      continue
    other, rest = min(extra, key=lambda pair: len(pair[1]))
    left.remove(other)
    added += rest
  return Comparison(tuple(added), tuple(missing), tuple(left))


def _beyond(more: tuple[str, ...], less: tuple[str, ...]) -> list[str] | None:
  """What `more` has beyond `less`; None if it lacks some of it."""
  rest = list(more)
  for item in less:
    if item not in rest:
      return None
    rest.remove(item)
  return rest
