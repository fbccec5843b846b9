"""Which of a function's compiled programs a call runs, told from its arguments.

JAX dispatches a known program without saying which. Where a function has one program nothing is
looked at; where it has several, only those leaves of the arguments that tell them apart.
"""

from __future__ import annotations

from typing import Any

import jax


class Dispatched:
  """The programs of one function, and the arguments that each was compiled for."""

  def __init__(self) -> None:
    self.only: int | None = None
    """The one program that has marks; None where there is none yet, or several."""
    self.several = False
    self._known: list[tuple[Any, tuple[Any, ...], int | None]] = []
    # Places of the leaves that tell programs apart, programs by these, and the last one learned:
    # put in place as one, since other threads look meanwhile.
    self._told: tuple[tuple[int, ...], dict[Any, int | None], int | None] = ((), {}, None)

  def learn(self, args: Any, kwargs: Any, number: int | None) -> None:
    """Remembers that such arguments run this program; None is one without marks."""
    tree, described = look_of(args, kwargs)
    self._known = [*(known for known in self._known if known[:2] != (tree, described)),
                   (tree, described, number)]
    places = set(self._told[0])
    for other_tree, other, _ in self._known:
      if other_tree == tree:
        places |= {place for place, (one, two) in enumerate(zip(described, other, strict=True))
                   if one != two}
    ordered, by_look = tuple(sorted(places)), {}
    for exactly in (False, True):
      for one, one_described, known in self._known:
        by_look[one, _look(one_described, ordered, exactly)] = known
    self._told = ordered, by_look, number
    self.several = len(self._known) > 1
    self.only = None if self.several else number

  def number(self, args: Any, kwargs: Any) -> int | None:
    """The program that these arguments run; None where it has no marks."""
    if not self.several:
      return self.only
    leaves, tree = jax.tree.flatten((args, kwargs))
    described = _Some(leaves)
    places, by_look, last = self._told
    for exactly in (True, False):
      found = by_look.get((tree, _look(described, places, exactly)), _UNKNOWN)
      if found is not _UNKNOWN:
        return found
    return last

  def knows(self, args: Any, kwargs: Any) -> bool:
    """Whether a program was compiled for exactly such arguments."""
    look = look_of(args, kwargs)
    return any(known[:2] == look for known in self._known)


def look_of(args: Any, kwargs: Any) -> tuple[Any, tuple[Any, ...]]:
  """What a program is compiled for: the tree of the arguments, and each leaf described."""
  leaves, tree = jax.tree.flatten((args, kwargs))
  return tree, tuple(_described(leaf) for leaf in leaves)


def _look(described: Any, places: tuple[int, ...], exactly: bool) -> tuple[Any, ...]:
  """What tells programs apart, with the values of plain numbers or with their types only."""
  seen = [described[place] for place in places if place < len(described)]
  return tuple(one if exactly or not _plain(one) else one[0] for one in seen)


class _Some:
  """Leaves that are described when they are looked at."""

  def __init__(self, leaves: list[Any]):
    self._leaves = leaves

  def __len__(self) -> int:
    return len(self._leaves)

  def __getitem__(self, place: int) -> Any:
    return _described(self._leaves[place])


_UNKNOWN: Any = object()


def _plain(described: Any) -> bool:
  return isinstance(described, tuple) and len(described) == 2 and isinstance(
      described[1], (int, float, complex)) and not isinstance(described[1], bool)


def _described(leaf: Any) -> Any:
  """What a program is compiled for, of one leaf of the arguments."""
  shape = getattr(leaf, "shape", None)
  if shape is None:
    try:
      hash(leaf)
    except TypeError:
      return type(leaf)
    # A number may be a static argument, a program for each, or an operand of one program.
    return type(leaf), leaf
  return (tuple(shape), getattr(leaf, "dtype", None), getattr(leaf, "weak_type", False),
          getattr(leaf, "sharding", None), getattr(leaf, "committed", None))
