"""Which partitions of a program meet in a collective, from every form in which XLA says so.

XLA writes replica groups one by one; as a grid of numbers counted up, transposed perhaps; or as
axes of a mesh, whose devices may be in another order, and whose axes may be parts of one: the part
of size 4, say, that has size 2 of the axis before it. Numbers of fields are as in `collectives`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxpace.observation.partitioned import wire
from jaxpace.observation.partitioned.wire import TimestampError

Groups = tuple[tuple[int, ...], ...]


_LISTED, _LIST, _GRID, _ALONG, _OF_JOB = 49, 87, 92, 93, 71
"""In an instruction: groups one by one, and in a message of their own; a grid; axes of a mesh; and
whether devices are numbered as in the whole job, which goes with groups."""


def of_instruction(fields: Sequence[wire.Field], partitions: int) -> Groups:
  """Who meets in a collective.

  Args:
    partitions: how many there are: no groups means all of them.

  Returns:
    The groups, in the order in which they are written.

  Raises:
    TimestampError: they are written in a form that is not known.
  """
  if grid := wire.inside(fields, _GRID):
    return as_groups(_counted([wire.number(grid, 1), wire.number(grid, 2)],
                              wire.numbers(grid, 3), wire.numbers(grid, 4)))
  if said := wire.inside(fields, _ALONG):
    mesh = wire.inside(said, 1)
    sizes = [wire.number(wire.read(axis), 2) for axis in wire.every(mesh, 1)]
    devices: Any = wire.numbers(mesh, 2) or None
    if grid := wire.inside(mesh, 3):
      devices = _counted([-1], wire.numbers(grid, 1), wire.numbers(grid, 2))
    return along(sizes, [_part(wire.read(part), sizes) for part in wire.every(said, 2)], devices)
  listed = wire.every(fields, _LISTED) or wire.every(wire.inside(fields, _LIST), 1)
  if not listed and wire.number(fields, _OF_JOB):
    raise TimestampError("replica groups are in a form that is not known")
  return (tuple(tuple(wire.numbers(wire.read(group), 1)) for group in listed)
          or (tuple(range(partitions)),))


def _part(said: Sequence[wire.Field], sizes: Sequence[int]) -> tuple[int, int, int]:
  axis, part = wire.number(said, 1), wire.inside(said, 2)
  if axis >= len(sizes):
    raise TimestampError(f"a mesh of {len(sizes)} axes has none of number {axis}")
  return axis, *((wire.number(part, 1), wire.number(part, 2)) if part else (1, sizes[axis]))


def _counted(shape: Sequence[int], reshape: Sequence[int], order: Sequence[int]) -> np.ndarray:
  """Numbers from 0, laid out in `reshape`, its axes put in `order` if there is one, seen as
  `shape`.

  Raises:
    TimestampError: the sizes don't agree.
  """
  try:
    return np.arange(math.prod(reshape)).reshape(reshape).transpose(order or None).reshape(shape)
  except ValueError as error:
    raise TimestampError(f"no grid: {shape} of {reshape} in the order {order}") from error


def along(sizes: Sequence[int], parts: Sequence[tuple[int, int, int]],
          devices: np.ndarray | None = None) -> Groups:
  """Groups of partitions that meet along parts of a mesh's axes.

  Args:
    sizes: of the mesh's axes, slowest first.
    parts: what they meet along, in the order in which a group counts: number of the axis, product
      of its parts before this one, and size of the part.
    devices: the mesh's partitions in the order of its axes; counted up where None.

  Raises:
    TimestampError: there is no such part, or two overlap.
  """
  total = math.prod(sizes)
  order = np.arange(total) if devices is None else np.asarray(devices).reshape(-1)
  if order.size != total:
    raise TimestampError(f"{order.size} devices on a mesh of {total}")
  places = np.array(np.unravel_index(np.arange(total), sizes))
  # Of each place that along the parts, and that along all else.
  inner, outer, width = np.zeros(total, int), places.copy(), 1
  for axis, before, size in parts:
    step, rest = divmod(sizes[axis], before * size)
    if rest:
      raise TimestampError(f"an axis of size {sizes[axis]} has no part of {size} after {before}")
    digit = places[axis] // step % size
    outer[axis] -= digit * step
    inner, width = inner * size + digit, width * size
  if (outer < 0).any():
    raise TimestampError(f"parts of an axis overlap: {parts}")
  rows = np.lexsort((inner, np.ravel_multi_index(tuple(outer), sizes))).reshape(-1, width)
  return as_groups(order[rows])


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
    mesh: names and sizes of the mesh's axes, slowest first.
    devices: the mesh's partitions in the order of its axes; counted up where None.

  Returns:
    Names of axes longer than 1; () where the groups are those of no choice of axes.
  """
  wanted = canonical(groups)
  sizes = [size for _, size in mesh]
  long = [(axis, 1, size) for axis, size in enumerate(sizes) if size > 1]
  for chosen in range(1, 1 << len(long)):
    parts = [part for place, part in enumerate(long) if chosen >> place & 1]
    try:
      met = along(sizes, parts, devices)
    except TimestampError:
      return ()
    if canonical(met) == wanted:
      return tuple(mesh[axis][0] for axis, *_ in parts)
  return ()
