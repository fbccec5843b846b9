"""Replica groups in every form they are printed in, against an array that is laid out and cut."""

import itertools
import math

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from jaxpace.observation.partitioned import groups

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
  found = groups.along(names, [groups.AxisPart(f"axis{axis}") for axis in axes], order)
  assert groups.canonical(found) == met(devices, axes)
  said = "mesh[" + ",".join(f"'{name}'={size}" for name, size in names) + "]"
  if order is not None:
    said += ", device_ids=(" + ",".join(map(str, order)) + ")"
  said += " {" + ",".join(f"'axis{axis}'" for axis in axes) + "}"
  assert groups.canonical(groups.parse(said, devices.size)) == met(devices, axes)
  long = tuple(f"axis{axis}" for axis in axes if sizes[axis] > 1)
  assert groups.axes_of(found, names, order) == long


@hypothesis.given(st.sampled_from([(8, 2, 2), (12, 2, 3), (12, 1, 4), (16, 4, 2), (6, 3, 2)]),
                  st.sampled_from([1, 2, 3]))
def test_parts_of_an_axis_are_those_of_the_axis_split(part, other):
  size, before, inside = part
  after = size // before // inside
  devices = np.arange(other * size).reshape(other, before, inside, after)
  found = groups.parse(f"mesh[x={other},y={size}] {{y:({before}){inside}}}", other * size)
  assert groups.canonical(found) == met(devices, [2])


@pytest.mark.parametrize(("said", "partitions", "wanted"), [
    ("{{0,1},{2,3}}", 4, ((0, 1), (2, 3))),
    ("{{0, 2}, {1, 3}}", 4, ((0, 2), (1, 3))),
    ("{}", 3, ((0, 1, 2),)),
    ("{{}}", 2, ((),)),
    ("[2,2]<=[4]", 4, ((0, 1), (2, 3))),
    ("[2,2]<=[2,2]T(1,0)", 4, ((0, 2), (1, 3))),
    ("[4,2]<=[2,2,2]T(0,2,1)", 8, ((0, 2), (1, 3), (4, 6), (5, 7))),
    ("[1,4]<=[4]", 4, ((0, 1, 2, 3),)),
    ("mesh['a'=4,'b'=1] {'a'}", 4, ((0, 1, 2, 3),)),
    ("mesh['axis_0'=1,'axis_1'=2,'axis_2'=2], device_ids=([2,2]T(1,0)) {'axis_2'}", 4,
     ((0, 2), (1, 3))),
    ("mesh[a=2,b=2], device_ids=([4]<=[2,2]T(1,0)) {b}", 4, ((0, 2), (1, 3))),
    ("mesh['a'=2,'b'=2], device_ids=(0,2,1,3) {'a'}", 4, ((0, 1), (2, 3))),
    ("mesh['a'=8] {'a':(1)2,'a':(4)2}", 8, ((0, 1, 4, 5), (2, 3, 6, 7))),
    ("mesh['a'=2,'b'=2] {'a','b'}", 4, ((0, 1, 2, 3),)),
    ("mesh['a'=2,'b'=2] {}", 4, ((0,), (1,), (2,), (3,))),
])
def test_forms_that_xla_prints(said, partitions, wanted):
  found = groups.parse(said, partitions)
  assert groups.canonical(found) == groups.canonical(wanted)


@pytest.mark.parametrize("said", [
    "", "all", "mesh[a=2] {b}", "mesh[a=4] {a:(3)2}", "mesh[a=2,b=2], device_ids=(0,1) {a}",
    "[3,3]<=[8]", "mesh[a=2", "[2,2]<=[4]T(1,0)", "mesh['a'=2] {'a','a'}"])
def test_what_is_no_known_form_is_refused(said):
  with pytest.raises(groups.GroupsError):
    groups.parse(said, 8)


def test_groups_of_no_axes_have_none():
  mesh = [("data", 2), ("model", 2)]
  assert groups.axes_of(((0, 3), (1, 2)), mesh) == ()
  assert groups.axes_of(((0,), (1,), (2,), (3,)), mesh) == ()
  assert groups.axes_of(((1, 3), (2, 0)), mesh) == ("data",)
  assert groups.axes_of(((0, 1, 2, 3),), mesh) == ("data", "model")
  assert groups.axes_of(((0, 1),), []) == ()
