"""Which partitions of a program meet in a collective, from every form in which XLA says so.

XLA writes replica groups one by one; as a grid of numbers counted up, transposed perhaps; or as
axes of a mesh, whose devices may be in another order, and whose axes may be parts of one: the part
of size 4, say, that has size 2 of the axis before it. Numbers of fields are as in `collectives`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxpace.observation.partitioned import wire

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


_LISTED, _LIST, _GRID, _ALONG, _OF_JOB = 49, 87, 92, 93, 71
"""In an instruction: groups one by one, and in a message of their own; a grid; axes of a mesh; and
whether devices are numbered as in the whole job, which goes with groups."""


def of_instruction(fields: Sequence[wire.Field], partitions: int) -> Groups:
  """Who meets in a collective.

  Args:
    fields: of its instruction.
    partitions: how many there are: no groups means all of them.

  Returns:
    The groups, in the order in which they are written.

  Raises:
    GroupsError: they are written in a form that is not known.
  """
  if grid := wire.inside(fields, _GRID):
    return as_groups(_counted([wire.number(grid, 1), wire.number(grid, 2)],
                              wire.numbers(grid, 3), wire.numbers(grid, 4)))
  if said := wire.inside(fields, _ALONG):
    mesh = wire.inside(said, 1)
    axes = [(wire.string(axis, 1), wire.number(axis, 2))
            for axis in map(wire.read, wire.every(mesh, 1))]
    devices: Any = wire.numbers(mesh, 2) or None
    if grid := wire.inside(mesh, 3):
      devices = _counted([-1], wire.numbers(grid, 1), wire.numbers(grid, 2))
    return along(axes, [_part(wire.read(part), axes) for part in wire.every(said, 2)], devices)
  listed = wire.every(fields, _LISTED) or wire.every(wire.inside(fields, _LIST), 1)
  if not listed and wire.number(fields, _OF_JOB):
    raise GroupsError("replica groups are in a form that is not known")
  return (tuple(tuple(wire.numbers(wire.read(group), 1)) for group in listed)
          or (tuple(range(partitions)),))


def _part(axis: Sequence[wire.Field], axes: Sequence[tuple[str, int]]) -> AxisPart:
  place, part = wire.number(axis, 1), wire.inside(axis, 2)
  if place >= len(axes):
    raise GroupsError(f"the mesh has no axis {place}")
  return AxisPart(axes[place][0], *((wire.number(part, 1), wire.number(part, 2)) if part else ()))


def _counted(shape: Sequence[int], reshape: Sequence[int], order: Sequence[int]) -> np.ndarray:
  """Numbers from 0, laid out in `reshape`, its axes put in `order` if there is one, seen as
  `shape`.

  Raises:
    GroupsError: the sizes don't agree.
  """
  try:
    return np.arange(math.prod(reshape)).reshape(reshape).transpose(order or None).reshape(shape)
  except ValueError as error:
    raise GroupsError(f"no grid: {shape} of {reshape} in the order {order}") from error


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
