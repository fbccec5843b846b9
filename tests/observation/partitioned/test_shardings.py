"""Layouts in XLA's words become digits of a partition's number that give the same tiles."""

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpace.observation.partitioned import shardings
from jaxpace.observation.partitioned.collectives import TimestampError
from tests.quick import examples


def from_digits(found, at, count):
  """Tiles of sharding `at`, counted again from the digits."""
  number = np.stack(np.unravel_index(np.arange(count), found.sizes), axis=1)
  places = np.zeros((count, len(found.dims[at])), np.int64)
  for dim, order in enumerate(found.dims[at]):
    for digit in order:
      places[:, dim] = places[:, dim] * found.sizes[digit] + number[:, digit]
  return places


@st.composite
def layouts(draw):
  """A mesh, and specs on it of two dimensions each, each axis in at most one place."""
  sizes = draw(st.sampled_from([(8,), (2, 4), (4, 2), (2, 2, 2), (6,), (2, 3), (3, 2)]))
  names = [f"axis{place}" for place in range(len(sizes))]
  specs = []
  for _ in range(draw(st.integers(1, 3))):
    dims = ([], [])
    for name in draw(st.permutations(names)):
      where = draw(st.integers(0, 2))
      if where < 2:
        dims[where].append(name)
    specs.append(PartitionSpec(*(tuple(dim) or None for dim in dims)))
  return sizes, names, specs


@hypothesis.settings(max_examples=examples(60))
@hypothesis.given(layouts())
def test_the_layouts_of_a_mesh_come_back(layout):
  sizes, names, specs = layout
  count = int(np.prod(sizes))
  devices = np.array(jax.devices()[:count]).reshape(sizes)
  shape = (48, 48)
  mesh = Mesh(devices, names)
  tiles = []
  for spec in specs:
    sharding = NamedSharding(mesh, spec)
    place = {device: at for at, device in enumerate(devices.flat)}
    wanted = np.zeros((count, 2), np.int64)
    widths = sharding.shard_shape(shape)
    for device, index in sharding.devices_indices_map(shape).items():
      wanted[place[device]] = [(cut.start or 0) // width
                               for cut, width in zip(index, widths, strict=True)]
    tiles.append(wanted)
    axes = ",".join(f"'{name}'={size}" for name, size in zip(names, sizes, strict=True))
    # A spec has one axis as a word, several as a tuple.
    named = [(dim,) if isinstance(dim, str) else dim or () for dim in spec]
    dims = ", ".join("{" + ", ".join(f"'{name}'" for name in dim) + "}" for dim in named)
    said = f"{{mesh[{axes}], [{dims}]}}"
    np.testing.assert_array_equal(shardings.tiles(said, 2, count), wanted)
  found = shardings.digits(tiles, count)
  assert np.prod(found.sizes) == count
  for at, wanted in enumerate(tiles):
    np.testing.assert_array_equal(from_digits(found, at, count), wanted)


@pytest.mark.parametrize(("said", "rank", "wanted"), [
    ("{replicated}", 1, [[0], [0], [0], [0]]),
    ("{devices=[4]<=[4]}", 1, [[0], [1], [2], [3]]),
    ("{devices=[2,2]<=[4]}", 2, [[0, 0], [0, 1], [1, 0], [1, 1]]),
    ("{devices=[2,2]<=[2,2]T(1,0)}", 2, [[0, 0], [1, 0], [0, 1], [1, 1]]),
    ("{devices=[2,1,2]<=[4] last_tile_dim_replicate}", 2, [[0, 0], [0, 0], [1, 0], [1, 0]]),
    ("{devices=[4]0,2,1,3}", 1, [[0], [2], [1], [3]]),
    ("{devices=[2,2]<=[4] last_tile_dims={replicated}}", 1, [[0], [0], [1], [1]]),
    ("{devices=[4]<=[4] memory_kind=pinned_host}", 1, [[0], [1], [2], [3]]),
    ("{replicated}", 0, [[], [], [], []]),
    # From jaxlib 0.11 on.
    ("{mesh[], replicated}", 1, [[0], [0], [0], [0]]),
    ("{mesh[], replicated}", 0, [[], [], [], []]),
    ("{mesh[], [{}, {?}]}", 2, [[0, 0], [0, 0], [0, 0], [0, 0]]),
    ("{mesh['a'=2,'b'=2], []}", 0, [[], [], [], []]),
    ("{mesh['a'=2,'b'=2], [{'a'}, {}]}", 2, [[0, 0], [0, 0], [1, 0], [1, 0]]),
    ("{mesh['a'=2,'b'=2], [{'b'}, {'a'}]}", 2, [[0, 0], [1, 0], [0, 1], [1, 1]]),
    ("{mesh['a'=2,'b'=2], [{'b', 'a'}]}", 1, [[0], [2], [1], [3]]),
    ("{mesh['a'=2,'b'=2], [{'b', ?}, {?}]}", 2, [[0, 0], [1, 0], [0, 0], [1, 0]]),
    ("{mesh['a'=4], [{'a':(1)2}, {'a':(2)2}]}", 2, [[0, 0], [0, 1], [1, 0], [1, 1]]),
    ("{mesh['a'=4], [{'a':(2)2}], replicated={'a':(1)2}}", 1, [[0], [1], [0], [1]]),
    ("{mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)), [{'a'}]}", 1, [[0], [1], [0], [1]]),
    ("{mesh['a'=4], device_ids=(0,2,1,3), [{'a'}], metadata={op_name=\"x\"}}", 1,
     [[0], [2], [1], [3]]),
])
def test_what_xla_says_of_tiles(said, rank, wanted):
  np.testing.assert_array_equal(
      shardings.tiles(said, rank, 4), np.array(wanted).reshape(4, rank))


@pytest.mark.parametrize("said", [
    "{maximal device=0}", "{manual}", "{unknown}", "{devices=[2,2]<=[4] last_tile_dims={manual}}",
    "{devices=[2]<=[2]}", "{devices=[2,2,1,1]<=[4]}", "",
    "{mesh['a'=2], [{'a'}]}", "{mesh['a'=4], [{'a'}, {}]}", "{mesh['a'=4], [{'b'}]}",
    "{mesh['a'=4], [{'a':(3)2}]}", "{mesh['a'=4], device_ids=(0,1), [{'a'}]}",
    "{mesh['a'=2,'b'=2], [{'a'}], unreduced={'b'}}", "{mesh['a'=2,'b'=2], [{'a'}], manual={'b'}}",
    "{mesh['a'=2,'b'=2], [{'a'}], replicated={'b'}, manual={}}", "{mesh[], [{}, {}]}",
    "{mesh[], [{'a'}]}", "{mesh[0], maximal device=0}"])
def test_layouts_that_are_not_known_are_refused(said):
  with pytest.raises(TimestampError):
    shardings.tiles(said, 1, 4)


def test_layouts_with_no_digits_in_common_are_refused():
  # The second swaps two partitions of four, which no digits of 2 x 2 do.
  odd = np.array([[0], [1], [3], [2]])
  with pytest.raises(TimestampError):
    shardings.digits([odd], 4)


@pytest.mark.parametrize(("said", "parts"), [
    ("{replicated}", ["{replicated}"]),
    ("{{replicated}, {devices=[2,2]<=[4] last_tile_dims={replicated}}}",
     ["{replicated}", "{devices=[2,2]<=[4] last_tile_dims={replicated}}"]),
    ("{{devices=[4]0,2,1,3},{replicated}}", ["{devices=[4]0,2,1,3}", "{replicated}"]),
    ("{{mesh[], replicated}, {mesh['a'=4], [{}, {'a'}]}}",
     ["{mesh[], replicated}", "{mesh['a'=4], [{}, {'a'}]}"]),
    ("{mesh['a'=4], [{}, {'a'}]}", ["{mesh['a'=4], [{}, {'a'}]}"]),
])
def test_a_tuple_is_parted(said, parts):
  assert shardings.split(said) == parts
