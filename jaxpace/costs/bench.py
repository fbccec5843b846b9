"""Times collectives over sizes, inside one compiled loop, on all devices of the job; fits latency α
and time per byte β to the times, robustly, with intervals. See docs/forecast.md."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpace.costs.alpha_beta import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, coefficients
from jaxpace.costs.fabric_file import SCHEMA, Cost, Estimate

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
    group: the level.
    sizes: bytes of the whole vector; of a shift, of a rank's part. Rounded up to what divides among
      the ranks.
    repeats: samples per size.
    devices: the devices, at the positions that `group` names.
  """
  layout = np.array([[devices[i] for i in members] for members in group.members])
  mesh = Mesh(layout, ("group", "rank"))
  found = []
  for done, size in enumerate(sizes):
    elements = -(-size // (4 * layout.shape[1])) * layout.shape[1]
    own = elements // layout.shape[1] if kind == ALL_GATHER else elements
    timed = _timed(_loop(kind, mesh), jnp.zeros(
        own * layout.size, jnp.float32, device=NamedSharding(mesh, P(("group", "rank")))))
    timed(1)  # compiles, and meets the others for the first time
    once = _agreed(max(min(timed(1) for _ in range(2)), 1e-6))
    turns = int(np.clip(_SAMPLE_SECONDS / once, 3, _MOST_TURNS))
    empty = float(np.median([timed(0) for _ in range(3)]))
    samples = tuple(max(timed(turns) - empty, 0.0) / turns for _ in range(repeats))
    found.append((4 * elements, samples))
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


def _timed(loop: Any, vector: jax.Array) -> Callable[[int], float]:
  """What gives the seconds that so many turns take, on a vector that it hands on from call to call.
  """
  def seconds(turns: int) -> float:
    nonlocal vector
    begin = time.perf_counter()
    vector = jax.block_until_ready(loop(vector, np.int32(turns)))
    return time.perf_counter() - begin

  return seconds


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
  """Finds the levels that have two devices or more to a group, the smallest first, by the process
  of each device and the host of each process, any numbers; and sentences on those that could not be
  made."""
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


_DRAWS = 300
_HUBER = 1.345
_INTERVAL = (0.05, 0.95)


Timing = tuple[int, tuple[float, ...]]
"""Of one kind of collective at one size: bytes, and samples in seconds."""


def fit(kind: str, algorithm: str, ranks: int, measured: Sequence[Timing]) -> Cost:
  """Fits t = a·α + b·m·β to the medians of every size.

  Relative errors count, so that a small collective says as much of α as a large one of β; Huber
  weights (scale from the median absolute error) keep one odd size from bending both. Neither is
  below 0. The 90 % intervals come from drawing the samples of every size, and the sizes, anew: how
  far the law itself is off is in them.

  Args:
    kind: one of `jaxpace.costs.fabric_file.KINDS`.
    algorithm: whose coefficients hold.
    ranks: ranks that took part.
    measured: one entry a size; at least one.

  Raises:
    ValueError: nothing was measured.
  """
  if not measured:
    raise ValueError("fit needs at least one measured size.")
  a, b = coefficients(kind, algorithm, ranks)
  rows = np.array([[a, b * size] for size, _ in measured])
  middle = [float(np.median(samples)) for _, samples in measured]
  seconds = np.maximum(middle, 1e-9)
  [(alpha, beta)] = _solve(rows[None], seconds[None])
  misfit = float(np.abs(rows @ [alpha, beta] / seconds - 1).max())
  random = np.random.default_rng(0)
  chosen = random.integers(0, len(measured), (_DRAWS, len(measured)))
  medians = np.stack([np.median(random.choice(samples, (_DRAWS, len(samples))), axis=1)
                      for _, samples in measured], axis=1)
  again = np.maximum(np.take_along_axis(medians, chosen, axis=1), 1e-9)
  drawn = _solve(rows[chosen], again)
  low, high = np.quantile(drawn, _INTERVAL, axis=0)
  estimates = [Estimate(x, min(float(low[i]), x), max(float(high[i]), x))
               for i, x in enumerate((alpha, beta))]
  return Cost(estimates[0], estimates[1], algorithm,
              tuple((size, taken) for (size, _), taken in zip(measured, middle, strict=True)),
              misfit)


def _solve(rows: np.ndarray, seconds: np.ndarray) -> np.ndarray:
  """[D, 2] α and β, 0 or more, by iterated Huber weights on relative errors, of rows [D, S, 2] and
  seconds [D, S]."""
  relative = rows / seconds[..., None]
  weights = np.ones_like(seconds)
  solution = np.zeros((len(rows), 2))
  for _ in range(20):
    before, solution = solution, _positive(relative, weights)
    error = np.abs((relative * solution[:, None]).sum(axis=2) - 1)
    scale = np.maximum(np.median(error, axis=1, keepdims=True) / 0.6745, 1e-6)
    weights = np.minimum(1.0, _HUBER * scale / np.maximum(error, 1e-12))
    if np.allclose(before, solution, rtol=1e-6, atol=0):
      break
  return solution


def _positive(relative: np.ndarray, weights: np.ndarray) -> np.ndarray:
  """[D, 2] weighted least squares of relative @ x = 1 with x >= 0: both, or the better one
  alone."""
  a, b = relative[..., 0], relative[..., 1]
  aa, ab, bb = ((weights * x * y).sum(axis=1) for x, y in ((a, a), (a, b), (b, b)))
  sa, sb = ((weights * x).sum(axis=1) for x in (a, b))
  determinant = aa * bb - ab**2
  regular = determinant > 1e-10 * aa * bb
  bottom = np.where(regular, determinant, 1.0)
  both = np.stack([(sa * bb - sb * ab) / bottom, (sb * aa - sa * ab) / bottom], axis=1)
  zero = np.zeros(len(aa))
  alone = [np.stack([_ratio(sa, aa), zero], axis=1), np.stack([zero, _ratio(sb, bb)], axis=1)]
  # Of one unknown, the least squares are the total less s² / square.
  better = np.where((_ratio(sa**2, aa) >= _ratio(sb**2, bb))[:, None], *alone)
  return np.where((regular & (both >= 0).all(axis=1))[:, None], both, better)


def _ratio(top: np.ndarray, bottom: np.ndarray) -> np.ndarray:
  return np.divide(top, bottom, out=np.zeros_like(top), where=bottom > 0)


def to_json(levels: Sequence[tuple[Group, Mapping[str, tuple[Cost, Sequence[Timing]]]]],
            facts: Mapping[str, Any], notes: Sequence[str]) -> dict[str, Any]:
  """Returns plain lists, dicts and scalars, seconds and bytes, of what was fitted and measured by
  level and kind, and of facts of the job: versions, devices, processes, hosts."""
  return {"schema": SCHEMA, "kind": "jaxpace bench", **facts, "levels": [
      {"level": group.level, "ranks": group.ranks, "measured": len(group.members[0]),
       "groups": len(group.members),
       "collectives": {kind: _cost(found, measured) for kind, (found, measured) in by_kind.items()}}
      for group, by_kind in levels], "notes": list(notes)}


def _cost(found: Cost, measured: Sequence[Timing]) -> dict[str, Any]:
  return {"algorithm": found.algorithm, "alpha": found.alpha.to_json(),
          "beta": found.beta.to_json(), "misfit": found.misfit, "points": [
              {"bytes": size, "seconds": float(np.median(samples)),
               "low": float(np.quantile(samples, 0.05)), "high": float(np.quantile(samples, 0.95)),
               "samples": len(samples)} for size, samples in measured]}
