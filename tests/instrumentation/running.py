"""Runs a step bare and instrumented, and compares: results bit by bit, collectives of the compiled
programs, timestamps."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jaxpace
from jaxpace.core.types import Decision, Pacer
from jaxpace.record.ring.instrumented import Decisions, held_in_ring
from tests.instrumentation import models

P = PartitionSpec
PAUSE = 3e-4  # s, what `restless` asks for


def mesh_of(**axes: int) -> Mesh:
  """A mesh of the first devices: mesh_of(data=4), mesh_of(data=2, model=2)."""
  shape = tuple(axes.values())
  return jax.make_mesh(shape, tuple(axes), axis_types=(AxisType.Auto,) * len(shape),
                       devices=jax.devices()[:int(np.prod(shape))])


def restless() -> Pacer:
  """A pacer that delays another rank in every step, whatever it observes."""

  def update(observation, turn):
    mine = turn % observation.arrivals.shape[0] == observation.rank
    return Decision(jnp.where(mine, jnp.float32(PAUSE),
                              jnp.float32(0)), {"turn": turn.astype(jnp.float32)}), turn + 1

  return Pacer(lambda ranks: np.int32(0), update)


def bits(tree: Any) -> list[bytes]:
  """Every leaf's dtype, shape and bytes."""

  def plain(leaf):
    return jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf

  arrays = [np.asarray(plain(jnp.asarray(leaf))) for leaf in jax.tree.leaves(tree)]
  return [f"{array.dtype}{array.shape}".encode() + array.tobytes() for array in arrays]


def instrumented(step: Callable[..., Any], mesh: Mesh, *specs: Any, out: Any = P(),
                 axis: Any = "data", check_vma: bool = False, donate: tuple[int, ...] = (),
                 **settings: Any) -> tuple[Any, Callable[..., Any], Any]:
  """Instruments a step and jits it under shard_map, with specs of its own arguments and results;
  `donate` counts the pace state. Returns what `jaxpace.instrument` did, the jitted step, and the
  pace state."""
  paced, spec = jaxpace.instrument(step, axis, **settings), jaxpace.spec(mesh)
  run = jax.jit(jax.shard_map(paced, mesh=mesh, in_specs=(spec, *specs), out_specs=(spec, out),
                              check_vma=check_vma), donate_argnums=donate)
  return paced, run, paced.init(mesh)


@dataclasses.dataclass
class Pair:
  """A step, bare and instrumented, both compiled."""

  paced: Any
  bare: Callable[..., Any]
  instrumented: Callable[..., Any]
  pace: Any
  bare_hlo: str
  hlo: str
  place: Callable[[Any, Any], tuple[Any, Any]]  # (state, batch), laid out over the mesh

  def run(self, state: Any, batches: Sequence[Any], steps: int) -> tuple[Any, Any]:
    """Threads both through the same batches. Returns their last outputs: bare, instrumented."""
    batches = [self.place(state, batch)[1] for batch in batches]
    expected = found = (self.place(state, batches[0])[0], None)
    for k in range(steps):
      batch = batches[k % len(batches)]
      expected = self.bare(expected[0], batch)
      self.pace, found = self.instrumented(self.pace, found[0], batch)
      # many devices on few cores: a rank many steps behind the others starves them of threads
      if k % 4 == 0:
        jax.block_until_ready((expected, found))
    return expected, found

  def check_bits(self, state: Any, batches: Sequence[Any], steps: int) -> Any:
    """Asserts that state and outputs are equal bit by bit after `steps`, and that the state has
    moved."""
    before = bits(state)
    expected, found = self.run(state, batches, steps)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    assert bits(found) == bits(expected)
    assert bits(found[0]) != before
    assert all(np.isfinite(np.asarray(leaf, np.float32)).all() for leaf in jax.tree.leaves(found)
               if jnp.issubdtype(leaf.dtype, jnp.floating))
    return found


def pair(step: Callable[..., Any], mesh: Mesh, state: Any, batch: Any, *, check_vma: bool = False,
         state_spec: Any = P(), batch_spec: Any = P("data"), out_spec: Any = None,
         axis: Any = "data", **settings: Any) -> Pair:
  """Compiles `step` (state, batch) -> (state, metrics) under shard_map, bare and instrumented."""
  out_spec = (state_spec, P()) if out_spec is None else out_spec
  paced, run, pace = instrumented(step, mesh, state_spec, batch_spec, out=out_spec, axis=axis,
                                  check_vma=check_vma, **settings)
  bare = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(state_spec, batch_spec),
                               out_specs=out_spec, check_vma=check_vma))

  def place(state, batch):
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), (state_spec, batch_spec),
                             is_leaf=lambda spec: isinstance(spec, P))
    return jax.device_put((state, batch), shardings)

  # What is looked at is what runs; and each is compiled once.
  compiled_bare = bare.lower(*place(state, batch)).compile()
  compiled = run.lower(pace, *place(state, batch)).compile()
  return Pair(paced, compiled_bare, compiled, pace, compiled_bare.as_text(), compiled.as_text(),
              place)


class Loop:
  """A small instrumented step over some ranks, and its states as they are threaded through it."""

  def __init__(self, pacer: Pacer, ranks: int = 2, donate: tuple[int, ...] = ()):
    self.mesh = mesh_of(data=ranks)
    self.paced, self.step, self.pace = instrumented(
        models.plain_step, self.mesh, P(), P("data"), pacer=pacer, share=True, donate=donate)
    self.batch, self.state = models.batches(ranks)[0], models.mlp_params()

  def run(self, steps: int) -> Any:
    """Trains for some steps; returns the pace state."""
    for _ in range(steps):
      self.pace, (self.state, _) = jax.block_until_ready(
          self.step(self.pace, self.state, self.batch))
    return self.pace


# Collectives of a compiled program.

_KINDS = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all",
          "collective-broadcast")
_HLO = re.compile(rf"= (.*?) ({'|'.join(_KINDS)})(?:-start)?\((.*)")
_RANKS = re.compile(r"(?:replica_groups|source_target_pairs)=(\{\{.*?\}\}|\{\}|\[[^ ]*)")
_TYPE = re.compile(r"[a-z]+[0-9]*\[[0-9,]*\]")

Operands = collections.Counter[str]


def hlo_collectives(text: str) -> list[tuple[str, Operands]]:
  """Kind with its groups of ranks, and results (types, layouts left out), of every collective of a
  compiled program."""
  found = [(f"{kind} {' '.join(_RANKS.findall(rest))}", collections.Counter(_TYPE.findall(types)))
           for types, kind, rest in _HLO.findall(text)]
  return sorted(found, key=lambda item: (item[0], sorted(item[1].items())))


def host_callbacks(text: str) -> int:
  """Calls of Python from a compiled program."""
  return len(re.findall(r'custom_call_target="[^"]*python[^"]*"', text))


def extra_operands(bare: str, instrumented: str) -> list[str]:
  """Operands that instrumentation added to the collectives of a program, each collective's others
  being unchanged."""
  left = hlo_collectives(instrumented)
  extra: list[str] = []
  unmatched = []
  for kind, operands in hlo_collectives(bare):
    if (kind, operands) in left:
      left.remove((kind, operands))
    else:
      unmatched.append((kind, operands))
  for kind, operands in unmatched:
    wider = [other for other in left if other[0] == kind and operands <= other[1]]
    assert wider, f"{kind} of {dict(operands)} is gone; there is {left}"
    left.remove(wider[0])
    extra += list((wider[0][1] - operands).elements())
  assert not left, f"new collectives: {left}"
  return extra


# Collectives of a traced program.

COLLECTIVES = {"psum", "psum2", "psum_invariant", "pmax", "pmin", "ppermute", "all_gather",
               "all_gather_invariant", "reduce_scatter", "psum_scatter", "all_to_all", "pbroadcast"}


def jaxpr_collectives(jaxpr: Any, axis: str) -> Iterator[Any]:
  """Every collective equation over `axis`, at any depth."""
  for eqn in jaxpr.eqns:
    axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    if eqn.primitive.name in COLLECTIVES and axis in (axes if isinstance(axes, tuple) else (axes,)):
      yield eqn
    for value in eqn.params.values():
      for item in value if isinstance(value, (tuple, list)) else (value,):
        inner = getattr(item, "jaxpr", item)
        if hasattr(inner, "eqns"):
          yield from jaxpr_collectives(inner, axis)


def bytes_of(eqn: Any) -> int:
  return sum(int(np.prod(var.aval.shape)) * var.aval.dtype.itemsize for var in eqn.invars)


# Timestamps.


def seen(pace: Any, plan: Any) -> list[tuple[Decisions, np.ndarray]]:
  """What the ring holds of the steps of this process's ranks that led to a pace state, oldest
  first, with their timestamps."""
  jax.block_until_ready(pace)
  mine = pace.step.addressable_shards[0].data if isinstance(pace.step, jax.Array) else pace.step
  done = int(np.asarray(mine).reshape(-1)[0])
  found = [(Decisions._make(each[max(0, len(times) - done):] for each in own),
            times[max(0, len(times) - done):]) for own, times in held_in_ring(plan)]
  assert all(own.step[-1] == done - 1 and (np.diff(own.step) == 1).all() for own, _ in found)
  return found


def times(pace: Any, plan: Any) -> np.ndarray:
  """Timestamps of the steps in the ring, oldest first: [ranks, steps, timestamps] int64 ns."""
  return np.stack([times for _, times in seen(pace, plan)])


def column(pace: Any, plan: Any, name: str) -> np.ndarray:
  """A float32 number of each step: "delay" or "applied", or a decision's name: [ranks, steps], in
  the order of `times`."""
  every = [own for own, _ in seen(pace, plan)]
  if name in ("delay", "applied"):
    return np.stack([getattr(own, name) for own in every])
  return np.stack([own.decisions[:, plan.decisions.index(name)] for own in every])


def segments(timestamps: np.ndarray, plan: Any) -> dict[str, np.ndarray]:
  """Time of every phase: name -> [ranks, steps] ns; the gap and the delay left out."""
  totals: dict[str, np.ndarray] = {}
  for i, mark in enumerate(plan.marks):
    if i and mark.segment != "delay":
      totals[mark.segment] = totals.get(mark.segment, 0) + timestamps[:, :, i] - timestamps[:, :,
                                                                                            i - 1]
  return totals


def at(plan: Any, kind: str, slot: int | None = None) -> int:
  """Place of a timestamp."""
  return next(i for i, mark in enumerate(plan.marks) if mark.kind == kind
              and slot in (None, mark.collective))


def arrivals(pace: Any, plan: Any) -> np.ndarray:
  """DESIGN 2: enter[r,k] - exit[r,k-1] - delay applied: [ranks, steps - 1] s, of the step's first
  collective."""
  timestamps = times(pace, plan)
  last = max(i for i, mark in enumerate(plan.marks) if mark.kind == "exit")
  busy = (timestamps[:, 1:, at(plan, "enter", 0)] - timestamps[:, :-1, last]) * 1e-9
  return busy - column(pace, plan, "applied")[:, 1:]
