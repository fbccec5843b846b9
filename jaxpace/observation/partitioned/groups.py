"""Which partitions of a program meet in a collective, from every form in which XLA says so.

XLA writes replica groups as lists, `{{0,1},{2,3}}`; as a grid of numbers counted up, transposed
perhaps, `[2,2]<=[2,2]T(1,0)`; or as axes of a mesh, `mesh['a'=2,'b'=2] {'b'}`, whose devices may
be in another order, `device_ids=([4]<=[2,2]T(1,0))`, and whose axes may be parts of one,
`'a':(2)4`: the part of size 4 that has size 2 of the axis before it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

Groups = tuple[tuple[int, ...], ...]


class GroupsError(ValueError):
  """Replica groups are written in a form that is not known."""


class AxisPart(NamedTuple):
  """An axis of a mesh, or a part of it."""

  name: str
  before: int | None = None
  """Product of the axis' parts before this one; None for the whole axis."""
  size: int | None = None
  """Size of the part; None for the whole axis."""


_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_AXIS = re.compile(r"'?([^'\"=,\s\[\]]+)'?\s*=\s*(\d+)")
_PART = re.compile(r"'?([^'\":,\s{}]+)'?(?::\((\d+)\)(\d+))?")


def numbers(text: str) -> tuple[int, ...]:
  """Reads `1,2,3`, with spaces or without."""
  return tuple(int(number) for number in re.findall(r"\d+", text))


def counted(shape: Sequence[int], reshape: Sequence[int], order: Sequence[int] | None
            ) -> np.ndarray:
  """Numbers from 0, laid out in `reshape`, its axes put in `order`, seen as `shape`.

  Raises:
    GroupsError: the sizes don't agree.
  """
  try:
    grid = np.arange(math.prod(reshape)).reshape(reshape)
    return (grid if order is None else grid.transpose(order)).reshape(shape)
  except ValueError as error:
    raise GroupsError(f"no grid: {shape} of {reshape} in the order {order}") from error


def array_of(text: str) -> np.ndarray:
  """Reads `[2,2]<=[4]`, `[2,2]<=[2,2]T(1,0)`, `2,0,3,1` or `[2]1,0`.

  Raises:
    GroupsError: it is none of them.
  """
  text = text.strip()
  if found := _IOTA.fullmatch(text):
    order = numbers(found[3]) if found[3] else None
    return counted(numbers(found[1]), numbers(found[2]), order)
  # Printed as a counted grid whose shape goes without saying.
  if found := re.fullmatch(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
    sizes = numbers(found[1])
    return counted((math.prod(sizes),), sizes, numbers(found[2]) if found[2] else None)
  if found := re.fullmatch(r"\[([\d,]+)\]([\d,\s]+)", text):
    listed = np.array(numbers(found[2]))
    shape = numbers(found[1])
    if listed.size != math.prod(shape):
      raise GroupsError(f"{listed.size} numbers are no grid of {shape}")
    return listed.reshape(shape)
  if re.fullmatch(r"[\d,\s]+", text):
    return np.array(numbers(text))
  raise GroupsError(f"no list of devices: {text[:80]!r}")


def along(axes: Sequence[tuple[str, int]], parts: Sequence[AxisPart],
          devices: np.ndarray | None = None) -> Groups:
  """Groups of partitions that meet along parts of a mesh's axes.

  Args:
    axes: names and sizes of the mesh's axes, slowest first.
    parts: what they meet along, in the order in which a group counts.
    devices: the mesh's partitions in the order of its axes; counted up where None.

  Raises:
    GroupsError: there is no such axis, or no such part of it.
  """
  total = math.prod(size for _, size in axes)
  order = np.arange(total) if devices is None else np.asarray(devices).reshape(-1)
  if order.size != total:
    raise GroupsError(f"{order.size} devices on a mesh of {total}")
  sizes = dict(axes)
  cuts: dict[str, set[int]] = {name: {1, size} for name, size in axes}
  wanted = []
  for part in parts:
    if part.name not in sizes:
      raise GroupsError(f"the mesh has no axis {part.name!r}")
    first = 1 if part.before is None else part.before
    last = sizes[part.name] if part.size is None else first * part.size
    if last > sizes[part.name] or sizes[part.name] % last:
      raise GroupsError(f"axis {part.name!r} of size {sizes[part.name]} has no part up to {last}")
    cuts[part.name] |= {first, last}
    wanted.append((part.name, first, last))
  dims: list[int] = []
  places: dict[tuple[str, int], int] = {}
  for name, _ in axes:
    steps = sorted(cuts[name])
    for low, high in zip(steps, steps[1:], strict=False):
      if high % low:
        raise GroupsError(f"parts of the axis {name!r} overlap: {steps}")
      places[name, low] = len(dims)
      dims.append(high // low)
  inner = []
  for name, first, last in wanted:
    inner += [places[name, low] for low in sorted(cuts[name]) if first <= low < last]
  if len(set(inner)) != len(inner):
    raise GroupsError(f"an axis is named twice: {parts}")
  outer = [place for place in range(len(dims)) if place not in inner]
  width = math.prod(dims[place] for place in inner)
  grid = order.reshape(dims or (1,))
  if dims:
    grid = grid.transpose([*outer, *inner])
  return as_groups(grid.reshape(-1, width))


def as_groups(rows: np.ndarray | Sequence[Sequence[int]]) -> Groups:
  """Rows of numbers as tuples of plain integers."""
  return tuple(tuple(int(one) for one in row) for row in rows)


def parse(text: str, partitions: int) -> Groups:
  """Reads what an HLO instruction says after `replica_groups=`.

  Args:
    text: the form, as printed.
    partitions: how many there are: an empty list means all of them.

  Returns:
    The groups, in the order in which they are written.

  Raises:
    GroupsError: the form is not known.
  """
  text = text.strip()
  if text.startswith("{"):
    rows = re.findall(r"\{([\d,\s]*)\}", text[1:-1])
    listed = tuple(numbers(row) for row in rows)
    return listed or (tuple(range(partitions)),)
  if text.startswith("["):
    return as_groups(np.atleast_2d(array_of(text)))
  found = re.fullmatch(r"(mesh\[.*)\{([^}]*)\}", text)
  if found is None:
    raise GroupsError(f"replica groups in a form that is not known: {text[:80]!r}")
  axes, devices = mesh_of(found[1])
  return along(axes, parts_of(found[2]), devices)


def mesh_of(text: str) -> tuple[list[tuple[str, int]], np.ndarray | None]:
  """Reads `mesh['a'=2,'b'=2]` or `mesh['a'=2,'b'=2], device_ids=([4]<=[2,2]T(1,0))`.

  Returns:
    Names and sizes of its axes, slowest first, and its partitions in that order: None where they
    are counted up.

  Raises:
    GroupsError: the form is not known.
  """
  found = re.fullmatch(r"mesh\[([^\]]*)\](?:,\s*device_ids=\((.*)\))?", text.strip())
  if found is None:
    raise GroupsError(f"a mesh in a form that is not known: {text[:80]!r}")
  return ([(name, int(size)) for name, size in _AXIS.findall(found[1])],
          array_of(found[2]) if found[2] else None)


def parts_of(text: str) -> list[AxisPart]:
  """Reads `'a','b'` or `'a':(1)2`: axes of a mesh, or parts of them."""
  return [AxisPart(name, *((int(before), int(size)) if before else ()))
          for name, before, size in _PART.findall(text)]


def canonical(groups: Groups) -> Groups:
  """The same groups, whatever order they and their members were written in."""
  return tuple(sorted(tuple(sorted(group)) for group in groups))


def axes_of_pairs(pairs: Sequence[tuple[int, int]], mesh: Sequence[tuple[str, int]],
                  devices: np.ndarray | None = None) -> tuple[str, ...]:
  """Axes of a mesh along which any pair of a permute differs; the mesh as in `axes_of`."""
  if not mesh or not pairs:
    return ()
  sizes = [size for _, size in mesh]
  order = np.arange(math.prod(sizes)) if devices is None else devices
  place = np.argsort(order)
  if max(map(max, pairs)) >= len(place):
    return ()
  source, target = (np.stack(np.unravel_index(place[list(each)], sizes))
                    for each in zip(*pairs, strict=True))
  return tuple(name for (name, _), differ in zip(mesh, (source != target).any(axis=1), strict=True)
               if differ)


def axes_of(groups: Groups, mesh: Sequence[tuple[str, int]], devices: np.ndarray | None = None
            ) -> tuple[str, ...]:
  """Axes of a mesh along which these groups meet, slowest first.

  Args:
    groups: groups of partitions.
    mesh: names and sizes of the mesh's axes, slowest first.
    devices: the mesh's partitions in the order of its axes; counted up where None.

  Returns:
    Names of axes longer than 1; () where the groups are those of no choice of axes.
  """
  wanted = canonical(groups)
  long = [name for name, size in mesh if size > 1]
  for chosen in range(1, 1 << len(long)):
    names = [name for place, name in enumerate(long) if chosen >> place & 1]
    try:
      met = along(mesh, [AxisPart(name) for name in names], devices)
    except GroupsError:
      return ()
    if canonical(met) == wanted:
      return tuple(names)
  return ()
