"""A step that writes ring rows by itself, with stamps known in advance: an oracle for all that is
recorded."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpace.core import ring
from jaxpace.core.plan import Collective, Mark, Plan
from jaxpace.core.recordable import Recordable

SLOTS = 2
WIDTH = ring.row_width(SLOTS)
ORIGIN = 5_000_000_000_000  # ns; above 2**32, so that the high words count

PLAN = Plan(
    axis="data", ranks=8, clock="fake",
    marks=(Mark("start", "gap"), Mark("delay", "delay"), Mark("phase", "forward"),
           Mark("phase", "backward"), Mark("enter", "sync", 0), Mark("exit", "sync", 0),
           Mark("phase", "my_loss"), Mark("end", "update")),
    collectives=(Collective(0, "psum.grads", ("psum",), "data", 4096, 3, ("float32",),
                            "backward"),),
    decisions=("slack",))

DURATIONS = (0, 10_000, 200_000, 300_000, 5_000, 40_000, 7_000, 60_000)
"""ns from the mark before, in the order of the marks."""
PERIOD = 1_000_000


def stamp(step: int, rank: int, mark: int) -> int:
  """Time in ns of a mark."""
  return ORIGIN + step * PERIOD + rank * 11 + sum(DURATIONS[:mark + 1])


class FakePace(NamedTuple):
  ring: jax.Array  # [ranks, rows, WIDTH] uint32
  rank: jax.Array  # [ranks] int32
  step: jax.Array  # [ranks] uint32


class FakePaced(Recordable):
  """Stands for the instrumented function: has a plan and settings."""

  def __init__(self, plan: Plan | None = PLAN):
    self.plan = plan

  def settings_json(self) -> dict[str, Any]:
    return {"clock": "fake", "pacer": None}


def _row(step: jax.Array, rank: jax.Array) -> jax.Array:
  """[WIDTH] uint32 row of a step; times by 64-bit arithmetic in two words."""
  def words(mark: int) -> list[jax.Array]:
    constant = ORIGIN + sum(DURATIONS[:mark + 1])
    # step * PERIOD + rank * 11 stays below 2**32 for the steps used here.
    low_add = step * jnp.uint32(PERIOD) + rank.astype(jnp.uint32) * jnp.uint32(11)
    low = jnp.uint32(constant & 0xFFFFFFFF) + low_add
    high = jnp.uint32(constant >> 32) + (low < low_add).astype(jnp.uint32)
    return [high, low]

  floats = jnp.stack([jnp.float32(0.25e-3), jnp.float32(0.125e-3),
                      step.astype(jnp.float32) * jnp.float32(0.5)])
  bits = jax.lax.bitcast_convert_type(floats, jnp.uint32)
  head = jnp.stack([step, jnp.uint32(ring.VALID), *bits])
  stamps = jnp.stack([word for mark in range(len(DURATIONS)) for word in words(mark)])
  row = jnp.zeros(WIDTH, jnp.uint32).at[:head.size].set(head)
  return row.at[ring.STAMPS:ring.STAMPS + stamps.size].set(stamps)


def advance(pace: FakePace) -> FakePace:
  """One step of one rank: leaves [1, rows, WIDTH], [1], [1]."""
  rows = pace.ring.shape[-2]
  row = _row(pace.step[0], pace.rank[0])
  return FakePace(pace.ring.at[0, (pace.step[0] % rows).astype(jnp.int32)].set(row), pace.rank,
                  pace.step + 1)


def init(mesh: Mesh, rows: int = 16, step: int = 0) -> FakePace:
  """A pace state over all devices of a mesh with the axis "data"."""
  ranks = mesh.devices.size
  sharding = NamedSharding(mesh, PartitionSpec("data"))

  def put(value: np.ndarray) -> jax.Array:
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

  return FakePace(put(np.zeros((ranks, rows, WIDTH), np.uint32)),
                  put(np.arange(ranks, dtype=np.int32)), put(np.full(ranks, step, np.uint32)))


def make_step(mesh: Mesh) -> Any:
  """A jitted step that takes the pace state by donation."""
  spec = PartitionSpec("data")
  return jax.jit(jax.shard_map(advance, mesh=mesh, in_specs=(spec,), out_specs=spec),
                 donate_argnums=0)


def mesh() -> Mesh:
  """All devices along "data"."""
  return Mesh(np.array(jax.devices()), ("data",))


def numpy_rows(steps: list[int], rank: int = 0) -> np.ndarray:
  """[n, WIDTH] rows made without JAX."""
  rows = np.zeros((len(steps), WIDTH), np.uint32)
  for row, step in zip(rows, steps, strict=True):
    row[ring.STEP], row[ring.FLAGS] = step, ring.VALID
    row[ring.DELAY_ASKED:ring.DECISIONS + 1] = np.array([0.25e-3, 0.125e-3, step * 0.5],
                                                        np.float32).view(np.uint32)
    for mark in range(len(DURATIONS)):
      time = stamp(step, rank, mark)
      row[ring.STAMPS + 2 * mark:ring.STAMPS + 2 * mark + 2] = time >> 32, time & 0xFFFFFFFF
  return rows
