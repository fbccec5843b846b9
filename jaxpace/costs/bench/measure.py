"""Times collectives over sizes, inside one compiled loop, on all devices of the job."""

from __future__ import annotations

import functools
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpace.costs.bench.fit import Timing
from jaxpace.costs.fabric_file import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER

_SAMPLE_SECONDS = 0.03
_MOST_TURNS = 1000


def host_of_processes(name: str) -> list[int]:
  """Host of every process, as a number that processes of one host share. All processes must call
  this."""
  own = np.array([zlib.crc32(name.encode()) & 0x7FFFFFFF], np.int32)
  return [int(x) for x in np.asarray(multihost_utils.process_allgather(own)).reshape(-1)]


def measure(kind: str, group: Group, sizes: Sequence[int], repeats: int,
            devices: Sequence[jax.Device],
            progress: Callable[[int, int], None] | None = None) -> list[Timing]:
  """Times one kind of collective at one level. All processes must call this alike.

  A sample is a loop of many collectives, each waiting for the one before, in one compiled program,
  less the same program with no turn of the loop: what it costs to call is not in it. Every group of
  the level exchanges at once.

  Args:
    kind: one of `jaxpace.costs.fabric_file.KINDS`.
    group: the level.
    sizes: bytes of the whole vector; of a shift, of a rank's part. Rounded up to what divides among
      the ranks.
    repeats: samples a size.
    devices: the devices, at the positions that `group` names.
    progress: called with the sizes done and their number.
  """
  layout = np.array([[devices[i] for i in members] for members in group.members])
  mesh = Mesh(layout, ("group", "rank"))
  found = []
  for done, size in enumerate(sizes):
    elements = -(-size // (4 * layout.shape[1])) * layout.shape[1]
    own = elements // layout.shape[1] if kind == ALL_GATHER else elements
    sharding = NamedSharding(mesh, P(("group", "rank")))
    zeros = np.zeros(own, np.float32)
    timed = _Timed(_loop(kind, mesh), jax.make_array_from_callback(
        (own * layout.size,), sharding, functools.partial(_part, zeros)))
    timed(1)  # compiles, and meets the others for the first time
    once = _agreed(max(min(timed(1) for _ in range(2)), 1e-6))
    turns = int(np.clip(_SAMPLE_SECONDS / once, 3, _MOST_TURNS))
    empty = float(np.median([timed(0) for _ in range(3)]))
    samples = tuple(max(timed(turns) - empty, 0.0) / turns for _ in range(repeats))
    found.append(Timing(4 * elements, samples))
    del timed
    if progress:
      progress(done + 1, len(sizes))
  return found


def _loop(kind: str, mesh: Mesh) -> Any:
  size = mesh.shape["rank"]

  def collective(x: jax.Array) -> jax.Array:
    if kind == ALL_REDUCE:
      return jax.lax.psum(x, "rank")
    if kind == REDUCE_SCATTER:
      return jax.lax.psum_scatter(x, "rank", tiled=True)
    if kind == ALL_GATHER:
      return jax.lax.all_gather(x, "rank", tiled=True)
    return jax.lax.ppermute(x, "rank", [(i, (i + 1) % size) for i in range(size)])

  def turn(_: Any, x: jax.Array) -> jax.Array:
    # The next one's operand depends on this one's result, by one element: nothing else is moved.
    return x.at[0].set(collective(x)[0] * jnp.float32(0.5))

  def run(x: jax.Array, turns: jax.Array) -> jax.Array:
    return jax.lax.fori_loop(0, turns, turn, x)

  spec = P(("group", "rank"))
  # Donated: a program without a turn must not pay for a copy of the vector.
  return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=(spec, P()), out_specs=spec,
                               check_vma=False),
                 donate_argnums=0)


class _Timed:
  """Runs the loop on a vector that it hands on from call to call."""

  def __init__(self, loop: Any, vector: jax.Array) -> None:
    self._loop, self._vector = loop, vector

  def __call__(self, turns: int) -> float:
    """Seconds that so many turns take."""
    begin = time.perf_counter()
    self._vector = jax.block_until_ready(self._loop(self._vector, np.int32(turns)))
    return time.perf_counter() - begin


def _part(part: np.ndarray, index: Any) -> np.ndarray:
  return part


def _agreed(seconds: float) -> float:
  """The longest that any process saw: all must make as many turns."""
  if jax.process_count() == 1:
    return seconds
  own = np.array([min(int(seconds * 1e6), 2**31 - 1)], np.int32)
  return float(np.max(multihost_utils.process_allgather(own))) * 1e-6


PROCESS, HOST, HOSTS = "process", "host", "between hosts"


class Group(NamedTuple):
  """A level, and the devices that exchange at it: every group does at the same time."""

  level: str
  # positions of the devices, by group; all groups are of one size
  members: tuple[tuple[int, ...], ...]
  ranks: int | None  # most ranks that the level joins; None where nothing here limits it


def levels(process_of: Sequence[int],
           host_of_process: Sequence[int]) -> tuple[list[Group], list[str]]:
  """Finds the levels, the smallest first.

  Args:
    process_of: process of every device.
    host_of_process: host of every process, any numbers.

  Returns:
    The levels that have two devices or more to a group, and sentences on those that could not be
    made.
  """
  host_of = [host_of_process[p] for p in process_of]
  everyone = tuple(range(len(process_of)))
  several_hosts = len(set(host_of)) > 1
  found: list[Group] = []
  notes: list[str] = []
  for level, owner in ((PROCESS, list(process_of)), (HOST, host_of),
                       (HOSTS, [0] * len(process_of))):
    members = tuple(tuple(d for d in everyone if owner[d] == key) for key in dict.fromkeys(owner))
    if level == HOSTS and not several_hosts:
      continue
    if found and members == found[-1].members:
      continue
    if len({len(m) for m in members}) > 1:
      notes.append(f"Level '{level}' was left out: its groups are of {min(map(len, members))} to "
                   f"{max(map(len, members))} devices, and all must be of one size.")
      continue
    size = len(members[0])
    if size > 1:
      found.append(Group(level, members, None if level == HOSTS else size))
  return found, notes
