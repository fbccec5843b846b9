"""The programs of several processes: which of them are the same. Each process numbers its own."""

from __future__ import annotations

import hashlib
import json
from collections import Counter

from jaxpace.core.observed import ObservedCollective, ObservedPlan, ObservedProgram

_OWN = ("number", "bare_compile_s", "stamped_compile_s", "notices", "unstamped")


class ProgramsByKey:
  """Programs by a key that is the same in every process that compiled the same."""

  def __init__(self) -> None:
    """Begins without any."""
    self.by_key: dict[str, ObservedProgram] = {}
    self._groups: dict[tuple[str, int], dict[int, tuple[int, ...]]] = {}

  def add(self, plan: ObservedPlan) -> dict[int, str]:
    """Takes in a process's programs.

    Programs are the same if they have the same name, ranks and collectives; of several that are
    the same within a process, the k-th is the other process's k-th.

    Returns:
      The key of each of its programs, by its number.
    """
    keys, met = {}, Counter[str]()
    described = plan.to_json()["programs"]
    for program, document in zip(plan.programs, described, strict=True):
      text = json.dumps({name: value for name, value in document.items() if name not in _OWN},
                        sort_keys=True)
      digest = hashlib.sha256(text.encode()).hexdigest()[:10]
      key = f"{digest}-{met[digest]}" if met[digest] else digest
      met[digest] += 1
      keys[program.number] = key
      self.by_key.setdefault(key, program)
    return keys

  def collective(self, key: str, place: int) -> ObservedCollective:
    """Returns a program's collective by its place in the list."""
    return self.by_key[key].collectives[place]

  def group(self, key: str, place: int, rank: int) -> tuple[int, ...]:
    """Returns the ranks that a rank meets in a collective, itself included, rising."""
    known = self._groups.get((key, place))
    if known is None:
      program = self.by_key[key]
      each = program.collectives[place]
      found = each.groups or _joined(each.pairs) or (program.ranks,)
      known = {r: tuple(sorted(set(members))) for members in found for r in members}
      self._groups[key, place] = known
    return known.get(rank, (rank,))


def _joined(pairs: tuple[tuple[int, int], ...]) -> tuple[tuple[int, ...], ...]:
  """Ranks that pairs of source and target connect."""
  parent: dict[int, int] = {}

  def root(rank: int) -> int:
    parent.setdefault(rank, rank)
    while parent[rank] != rank:
      parent[rank] = parent[parent[rank]]
      rank = parent[rank]
    return rank

  for source, target in pairs:
    parent[root(source)] = root(target)
  groups: dict[int, list[int]] = {}
  for rank in parent:
    groups.setdefault(root(rank), []).append(rank)
  return tuple(tuple(sorted(group)) for group in groups.values())
