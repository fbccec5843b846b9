"""How inputs and outputs are laid out over partitions, from the words XLA says it in.

XLA writes `{devices=[2,1,2]<=[4] last_tile_dim_replicate}`: which partition has which tile; or,
since jaxlib 0.11, `{mesh['a'=2,'b'=2], [{'a'}, {}]}`: axes of a mesh, or parts of them, for each
dimension. The compiler's own language for the same wants one mesh for all values, and theirs may
have several. Here the mesh's axes are the digits of a partition's number: one for each prime factor
of their count.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jaxpace.observation.partitioned import groups
from jaxpace.observation.partitioned.collectives import TimestampError
from jaxpace.observation.partitioned.text import parts


class Digits(NamedTuple):
  """Shardings as digits of a partition's number."""

  sizes: tuple[int, ...]
  """Sizes of the digits, slowest first; their product is the number of partitions."""
  dims: tuple[tuple[tuple[int, ...], ...], ...]
  """For each sharding and each of its dimensions the digits that number its tiles, slowest
  first."""


_DEVICES = re.compile(r"\{devices=(\[[\d,]+\](?:<=\[[\d,]+\](?:T\([\d,]+\))?|[\d,]+))"
                      r"((?: last_tile_dim_replicate| last_tile_dims=\{[a-z, ]*\})?)"
                      r"(?: memory_kind=\S+)?(?: metadata=.*)?\}")

_NAMED = re.compile(r"\{(?P<mesh>mesh\[[^\]]*\](?:,\s*device_ids=\((?:[^()]|\([^()]*\))*\))?),\s*"
                    r"(?:replicated|\[(?P<dims>[^\]]*)\](?:,\s*replicated=\{[^}]*\})?)"
                    r"(?:,\s*metadata=.*)?\}")


def split(text: str) -> list[str]:
  """Parts a tuple's sharding, `{{replicated}, {devices=[4]<=[4]}}`, or returns the one it is.

  >>> split("{{replicated}, {devices=[4]<=[4]}}")
  ['{replicated}', '{devices=[4]<=[4]}']
  """
  # XLA counts: /*index=5*/{replicated}
  text = re.sub(r"/\*.*?\*/", "", text).strip()
  return parts(text[1:-1]) if text.startswith("{{") else [text]


def tiles(text: str, rank: int, partitions: int) -> np.ndarray:
  """Which tile each partition has.

  Args:
    text: a sharding in XLA's words.
    rank: dimensions of the value.
    partitions: how many partitions there are.

  Returns:
    [partitions, rank]: the tile's place along each dimension.

  Raises:
    TimestampError: the form is not known, or it is a value of only one partition.
  """
  if re.match(r"\{replicated\b", text):
    return np.zeros((partitions, rank), np.int64)
  if found := _NAMED.fullmatch(text):
    return _tiles_of_mesh(found["mesh"], found["dims"], rank, partitions)
  found = _DEVICES.fullmatch(text)
  if found is None:
    raise TimestampError(f"a value is laid out in a way that is not known: {text[:80]}")
  grid = groups.array_of(found[1])
  if grid.size != partitions or grid.ndim < rank or (
      grid.ndim > rank + 1 and not found[2].endswith("}")):
    raise TimestampError(f"a value of {rank} dimensions is laid out as {text[:80]}")
  if "manual" in found[2] or "unreduced" in found[2]:
    raise TimestampError(f"a value is laid out as {text[:80]}")
  places = np.zeros((partitions, rank), np.int64)
  for index, partition in np.ndenumerate(grid):
    places[partition] = index[:rank]
  return places


def _tiles_of_mesh(mesh: str, dims: str | None, rank: int, partitions: int) -> np.ndarray:
  """Tiles of a value whose dimensions are cut along axes of a mesh; all the same without `dims`."""
  places = np.zeros((partitions, rank), np.int64)
  if dims is None:
    return places
  # A question mark stands where the partitioner was free to add more.
  named = [groups.parts_of(dim.replace("?", "")) for dim in re.findall(r"\{([^}]*)\}", dims)]
  try:
    axes, devices = groups.mesh_of(mesh)
    # What is along no axis may be said of any mesh, of an empty one too: `{mesh[], [{}]}`.
    count = math.prod(size for _, size in axes) if any(named) else partitions
    if count != partitions or len(named) != rank:
      raise TimestampError(f"a value of {rank} dimensions is laid out over {partitions} partitions "
                          f"as {mesh}, [{dims}]")
    for dim, along in enumerate(named):
      for group in groups.along(axes, along, devices) if along else ():
        places[list(group), dim] = np.arange(len(group))
  except groups.GroupsError as error:
    raise TimestampError(f"a value is laid out in a way that is not known: {error}") from error
  return places


def digits(shardings: Sequence[np.ndarray], partitions: int) -> Digits:
  """Says which tile a partition has by digits of its number.

  Args:
    shardings: what `tiles` gave for each value.
    partitions: how many there are.

  Raises:
    TimestampError: no digits say all of them.
  """
  for sizes in _factorings(partitions):
    found = [_dimensions(places, sizes) for places in shardings]
    whole = [dims for dims in found if dims is not None]
    if len(whole) == len(found):
      return Digits(sizes, tuple(whole))
  raise TimestampError("inputs and outputs are laid out in ways that have no mesh in common")


def _factorings(count: int) -> Iterator[tuple[int, ...]]:
  primes, rest, prime = [], count, 2
  while rest > 1:
    while rest % prime == 0:
      primes.append(prime)
      rest //= prime
    prime += 1
  # The order of different primes matters: 6 counts as 2 threes or as 3 twos. They are few.
  yield from sorted(set(itertools.islice(itertools.permutations(primes), 5040)))


def _dimensions(places: np.ndarray, sizes: Sequence[int]) -> tuple[tuple[int, ...], ...] | None:
  """Digits of each dimension, or None where these digits can't say it."""
  rank = places.shape[1]
  chosen: list[list[tuple[int, int]]] = [[] for _ in range(rank)]
  for digit in range(len(sizes)):
    weight = places[math.prod(sizes[digit + 1:])]
    moved = np.flatnonzero(weight)
    if len(moved) > 1:
      return None
    if len(moved):
      chosen[moved[0]].append((int(weight[moved[0]]), digit))
  said = tuple(tuple(digit for _, digit in sorted(dim, reverse=True)) for dim in chosen)
  count = np.stack(np.unravel_index(np.arange(len(places)), tuple(sizes)), axis=1)
  for dim, order in enumerate(said):
    number = np.zeros(len(places), np.int64)
    for digit in order:
      number = number * sizes[digit] + count[:, digit]
    if not np.array_equal(number, places[:, dim]):
      return None
  return said
