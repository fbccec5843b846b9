"""A step that writes events by itself, with timestamps known in advance: an oracle for all that is
recorded."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpace.core.observed import InstrumentedFunction
from jaxpace.core.plan import Plan, Timestamp
from jaxpace.core.ring_layout import DECISION_VALUE, DELAY_VALUE, STEP_VALUE, timestamp_tags
from jaxpace.observation.clocks import host_ring, native, words
from jaxpace.observation.clocks.operands import Event
from jaxpace.record.ring.executions import Executions
from tests.record.ring.programs import traced

ORIGIN = 5_000_000_000_000  # ns; above 2**32, so that the high words count

PLAN = Plan(
    axis="data", ranks=8, clock="fake",
    marks=(Timestamp("start", "gap"), Timestamp("delay", "delay"), Timestamp("phase", "forward"),
           Timestamp("phase", "backward"), Timestamp("enter", "sync", 0),
           Timestamp("exit", "sync", 0),
           Timestamp("phase", "my_loss"), Timestamp("end", "update")),
    collectives=(traced(0, "psum.grads", bytes=4096, operands=3),),
    decisions=("slack",))

DURATIONS = (0, 10_000, 200_000, 300_000, 5_000, 40_000, 7_000, 60_000)
"""ns from the timestamp before, in the order of the timestamps."""
PERIOD = 1_000_000


def timestamp(step: int, rank: int, mark: int) -> int:
  """Time in ns of a timestamp."""
  return ORIGIN + step * PERIOD + rank * 11 + sum(DURATIONS[:mark + 1])


class FakePace(NamedTuple):
  rank: jax.Array  # [ranks] int32
  step: jax.Array  # [ranks] uint32
  end: jax.Array  # [ranks, 2] uint32, what the last event comes before


@functools.cache
def number() -> int:
  """Of the step's program, one for all tests of a process."""
  return host_ring.next_program()


class FakePaced(InstrumentedFunction):
  """Stands for the instrumented function: has a plan and settings."""

  def __init__(self, plan: Plan | None = PLAN):
    self.plan = None if plan is None else dataclasses.replace(plan, program=number())
    self.number = number()
    self.devices = tuple(device.id for device in jax.devices())
    host_ring.unwritable("native")

  def settings_json(self) -> dict[str, Any]:
    return {"clock": "fake", "pacer": None}


def advance(pace: FakePace) -> FakePace:
  """One step of one rank, which writes its events: leaves [1], [1], [1, 2]."""
  to = Event(number(), None)
  step, chain = pace.step[0], pace.end[0]
  # step * PERIOD + rank * 11 stays below 2**32 for the steps used here.
  late = step * jnp.uint32(PERIOD) + pace.rank[0].astype(jnp.uint32) * jnp.uint32(11)
  tags = timestamp_tags(PLAN.marks)
  numbers = [words.of_bits(step), words.of_bits(jnp.float32(0.25e-3)),
             words.of_bits(step.astype(jnp.float32) * jnp.float32(0.5))]
  for mark, tag in enumerate(tags):
    constant = ORIGIN + sum(DURATIONS[:mark + 1])
    began = jnp.array([constant >> 32, constant & 0xFFFFFFFF], jnp.uint32)
    time = words.add(began, jnp.stack([jnp.uint32(0), late]))
    if mark == 1:
      chain = native.note(chain, jnp.stack(numbers), to.at(STEP_VALUE))
    chain = native.note(chain, time[None], to.at(tag))
  return FakePace(pace.rank, pace.step + 1, chain[None])


def init(mesh: Mesh, step: int = 0) -> FakePace:
  """A pace state over all devices of a mesh with the axis "data"."""
  ranks = mesh.devices.size
  sharding = NamedSharding(mesh, PartitionSpec("data"))

  def put(value: np.ndarray) -> jax.Array:
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

  return FakePace(put(np.arange(ranks, dtype=np.int32)), put(np.full(ranks, step, np.uint32)),
                  put(np.zeros((ranks, 2), np.uint32)))


def make_step(mesh: Mesh) -> Any:
  """A jitted step that takes the pace state by donation."""
  spec = PartitionSpec("data")
  return jax.jit(jax.shard_map(advance, mesh=mesh, in_specs=(spec,), out_specs=spec,
                               check_vma=False), donate_argnums=0)


def mesh() -> Mesh:
  """All devices along "data"."""
  return Mesh(np.array(jax.devices()), ("data",))


def executions(steps: list[int], rank: int = 0, first: int = 0,
               delay: float = 0.25e-3) -> Executions:
  """The same steps' events made without JAX; `first` is the number of the first execution."""
  events: list[tuple[int, int, int]] = []
  for place, step in enumerate(steps):
    events += [(place, STEP_VALUE, step), (place, DELAY_VALUE, _bits(delay)),
               (place, DECISION_VALUE, _bits(step * 0.5))]
    events += [(place, tag, timestamp(step, rank, mark))
               for mark, tag in enumerate(timestamp_tags(PLAN.marks)) if 0 < mark < 7]
  of, tag, ns = np.array(events, np.int64).reshape(-1, 3).T
  return Executions(np.arange(first, first + len(steps)), *(
      np.array([timestamp(step, rank, mark) for step in steps], np.int64) for mark in (0, 7)),
                    of, tag.astype(np.uint32), ns)


def _bits(value: float) -> int:
  return int(np.float32(value).view(np.uint32))
