"""Replica groups in every form they are written in, against an array that is laid out and cut."""

import itertools
import math

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from jaxpace.observation.partitioned import groups, wire

SIZES = st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=4).filter(
    lambda sizes: math.prod(sizes) <= 48)


def met(order, axes):
  """Groups that meet along these axes of an array of devices: one for each place on the others."""
  rest = [range(size) if axis not in axes else [0] for axis, size in enumerate(order.shape)]
  found = []
  for place in itertools.product(*rest):
    index = tuple(slice(None) if axis in axes else at for axis, at in enumerate(place))
    found.append(tuple(sorted(int(one) for one in np.asarray(order[index]).reshape(-1))))
  return tuple(sorted(found))


def packed(number, values):
  return wire.text(number, b"".join(map(wire.of_number, values)))


def listed(*rows, number=49):
  """Groups one by one, as an instruction of a compiled program has them."""
  return [wire.message(number, packed(1, row)) for row in rows]


def grid(shape, sizes, order=()):
  """Groups as a grid of numbers counted up."""
  count, size = shape
  return [wire.message(92, wire.whole(1, count), wire.whole(2, size), packed(3, sizes),
                       packed(4, order))]


def of_mesh(axes, parts, devices=(), transposed=None):
  """Groups along parts of a mesh's axes: (number of the axis, or with what is before, and size)."""
  mesh = [wire.message(1, wire.text(1, name), wire.whole(2, size)) for name, size in axes]
  mesh += [wire.message(3, *(packed(1 + i, each) for i, each in enumerate(transposed)))
           ] if transposed else [packed(2, devices)]
  along = [wire.message(2, wire.whole(1, axis), *(
      [wire.message(2, wire.whole(1, part[0]), wire.whole(2, part[1]))] if part else []))
      for axis, *part in parts]
  return [wire.message(93, wire.message(1, *mesh), *along)]


@st.composite
def meshes(draw):
  sizes = draw(SIZES)
  count = math.prod(sizes)
  order = draw(st.one_of(st.none(), st.permutations(range(count)).map(np.array)))
  axes = draw(st.sets(st.integers(0, len(sizes) - 1), min_size=1))
  return sizes, order, sorted(axes)


@hypothesis.given(meshes())
def test_axes_of_a_mesh_are_cut_as_numpy_cuts_it(mesh):
  sizes, order, axes = mesh
  names = [(f"axis{place}", size) for place, size in enumerate(sizes)]
  devices = (np.arange(math.prod(sizes)) if order is None else order).reshape(sizes)
  found = groups.along(sizes, [(axis, 1, sizes[axis]) for axis in axes], order)
  assert groups.canonical(found) == met(devices, axes)
  said = of_mesh(names, [(axis,) for axis in axes], () if order is None else order.tolist())
  assert groups.canonical(groups.of_instruction(said, devices.size)) == met(devices, axes)
  long = tuple(f"axis{axis}" for axis in axes if sizes[axis] > 1)
  assert groups.axes_of(found, names, order) == long


@hypothesis.given(st.sampled_from([(8, 2, 2), (12, 2, 3), (12, 1, 4), (16, 4, 2), (6, 3, 2)]),
                  st.sampled_from([1, 2, 3]))
def test_parts_of_an_axis_are_those_of_the_axis_split(part, other):
  size, before, inside = part
  after = size // before // inside
  devices = np.arange(other * size).reshape(other, before, inside, after)
  found = groups.of_instruction(
      of_mesh([("x", other), ("y", size)], [(1, before, inside)]), other * size)
  assert groups.canonical(found) == met(devices, [2])


@pytest.mark.parametrize(("said", "partitions", "wanted"), [
    (listed((0, 1), (2, 3)), 4, ((0, 1), (2, 3))),
    ([wire.message(87, *listed((0, 2), (1, 3), number=1))], 4, ((0, 2), (1, 3))),
    ([], 3, ((0, 1, 2),)),
    (listed(()), 2, ((),)),
    (grid((2, 2), (4,)), 4, ((0, 1), (2, 3))),
    (grid((2, 2), (2, 2), (1, 0)), 4, ((0, 2), (1, 3))),
    (grid((4, 2), (2, 2, 2), (0, 2, 1)), 8, ((0, 2), (1, 3), (4, 6), (5, 7))),
    (of_mesh([("a", 4), ("b", 1)], [(0,)]), 4, ((0, 1, 2, 3),)),
    (of_mesh([("axis_0", 1), ("axis_1", 2), ("axis_2", 2)], [(2,)], transposed=((2, 2), (1, 0))), 4,
     ((0, 2), (1, 3))),
    (of_mesh([("a", 2), ("b", 2)], [(0,)], (0, 2, 1, 3)), 4, ((0, 1), (2, 3))),
    (of_mesh([("a", 8)], [(0, 1, 2), (0, 4, 2)]), 8, ((0, 1, 4, 5), (2, 3, 6, 7))),
    (of_mesh([("a", 2), ("b", 2)], [(0,), (1,)]), 4, ((0, 1, 2, 3),)),
    (of_mesh([("a", 2), ("b", 2)], []), 4, ((0,), (1,), (2,), (3,))),
])
def test_forms_that_xla_writes(said, partitions, wanted):
  found = groups.of_instruction(said, partitions)
  assert groups.canonical(found) == groups.canonical(wanted)


@pytest.mark.parametrize("said", [
    [wire.whole(71, 1), wire.text(123, b"of another XLA")], of_mesh([("a", 2)], [(1,)]),
    of_mesh([("a", 4)], [(0, 3, 2)]), of_mesh([("a", 2), ("b", 2)], [(0,)], (0, 1)),
    grid((3, 3), (8,)), grid((2, 2), (4,), (1, 0)), of_mesh([("a", 2)], [(0,), (0,)])])
def test_what_is_no_known_form_is_refused(said):
  with pytest.raises(wire.TimestampError):
    groups.of_instruction(said, 8)


def test_groups_of_no_axes_have_none():
  mesh = [("data", 2), ("model", 2)]
  assert groups.axes_of(((0, 3), (1, 2)), mesh) == ()
  assert groups.axes_of(((0,), (1,), (2,), (3,)), mesh) == ()
  assert groups.axes_of(((1, 3), (2, 0)), mesh) == ("data",)
  assert groups.axes_of(((0, 1, 2, 3),), mesh) == ("data", "model")
  assert groups.axes_of(((0, 1),), []) == ()
