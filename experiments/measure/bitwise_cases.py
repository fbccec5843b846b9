"""One process, several devices: a train step bare and instrumented, compared bit by bit."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpace
from experiments.lib import hlo
from experiments.measure import bitwise_models
from jaxpace.observation.clocks import resolve_clock
from jaxpace.record.ring.instrumented import held_in_ring

LAYOUTS = ("check_vma", "no_check_vma", "pmap")
_BLOCK = 8  # steps between waits: many steps ahead, the devices of one process starve each other
_WAYS_EACH = 2
NULL = "not at all, but returns a gradient too"
"""A harmless change of the bare step, for comparison: what XLA makes of that is no work of
jaxpace."""


class Case(NamedTuple):
  """What is trained, in which precision, how it is spread over how many ranks."""

  model: str
  dtype: str
  layout: str
  ranks: int


class Way(NamedTuple):
  """A way of instrumenting."""

  clock: str
  share: bool | None
  paced: bool
  """A pacer delays a random rank in every step; else there is none."""
  recorded: bool

  def __str__(self) -> str:
    return ", ".join([self.clock, "shared" if self.share else "share=None",
                      "delays" if self.paced else "no pacer",
                      "recorded" if self.recorded else "not recorded"])


_MORE = "['metrics']['gradients']"
WAYS = (Way("native", True, True, True), Way("native", None, False, True),
        Way("callback", True, True, False), Way("native", True, False, False),
        Way("callback", None, False, True), Way("native", None, True, False))


def chosen(cell: int, models: Sequence[str], *,
           everything: bool) -> list[tuple[str, tuple[Way, ...]]]:
  """Models and ways of instrumenting for the cell of that number; over all cells they take
  turns."""
  if everything:
    return [(model, WAYS) for model in models]
  count = min(2, len(models))
  result = []
  for i in range(count):
    # Both move on by one more after each three cells (numbers of ranks) and each nine (a
    # precision).
    model = (cell * count + i + cell // 3 + cell // 9) % len(models)
    first = cell * _WAYS_EACH + 3 * i + cell // 3
    result.append((models[model], tuple(WAYS[(first + j) % len(WAYS)] for j in range(_WAYS_EACH))))
  return result


def unruly() -> jaxpace.Pacer:
  """A pacer that delays one rank in every step, which one and by how much drawn at random, up to
  0.3 ms."""

  def update(observation: jaxpace.Observation,
             key: jax.Array) -> tuple[jaxpace.Decision, jax.Array]:
    key, who, long = jax.random.split(key, 3)  # the same on every rank
    chosen = jax.random.randint(who, (), 0, observation.arrivals.shape[0])
    delay = jax.random.uniform(long, (), jnp.float32, 0, 3e-4)
    return jaxpace.Decision(jnp.where(chosen == observation.rank, delay, jnp.float32(0)), {}), key

  return jaxpace.Pacer(lambda ranks: jax.random.PRNGKey(0), update)


def bits(tree: Any) -> dict[str, bytes]:
  """Dtype, shape and bytes of every leaf of this process, by its path."""
  return {jax.tree_util.keystr(path): b"".join(
      f"{part.data.dtype}{part.data.shape}".encode() + np.asarray(part.data).tobytes()
      for part in leaf.addressable_shards)
          for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


class Result(NamedTuple):
  """A finished run."""

  bits: dict[str, bytes]
  hlo: str
  shared: bool
  changed: bool  # the state moved at all, and is finite
  # [ranks here, rows] s, applied in the last steps, where instrumented
  delays: np.ndarray | None = None


def run(case: Case, ways: Sequence[Way], steps: int, null: bool = True) -> list[dict[str, Any]]:
  """Trains a case bare, then in each way and, if `null`, as `NULL` says; a row of comparison for
  each."""
  job = bitwise_models.MODELS[case.model](case.ranks, *bitwise_models.DTYPES[case.dtype])
  bare = train(job, case, None, steps)
  rows = [compare(case, str(way), bare, train(job, case, way, steps)) for way in ways]
  if null:
    rows.append(compare(case, NULL, bare, train(job, case, None, steps, more=True)))
  return rows


def compare(case: Case, way: str, bare: Result, found: Result) -> dict[str, Any]:
  """One row: whether bits and collectives are equal, and what is not."""
  leaves = sorted(path for path in bare.bits.keys() | found.bits.keys()
                  if bare.bits.get(path) != found.bits.get(path) and not path.startswith(_MORE))
  changes = hlo.compare(bare.hlo, found.hlo)
  equal = changes.same_but_for(1 if found.shared else 0)
  return {**case._asdict(), "way": way, "shared": found.shared,
          "bits_equal": not leaves and bare.changed, "leaves": leaves,
          "compared_leaves": len(bare.bits), "hlo_equal": equal, "collectives": len(
              hlo.collectives(bare.hlo)), "added": list(changes.added),
          "hlo": "" if equal
          else f"gone {list(changes.missing)}, new {list(changes.new)}, joined {changes.added}"}


def train(job: bitwise_models.Job, case: Case, way: Way | None, steps: int, more: bool = False,
          pacer: jaxpace.Pacer | None = None,
          after_step: Callable[[], None] | None = None) -> Result:
  """Trains `steps` steps: bare if `way` is None, returning gradients too if `more`. One
  compilation.

  `pacer` stands in for `unruly`; `after_step()` is called after every instrumented step.
  """
  step = job.step(by_autodiff=case.layout == LAYOUTS[0], more=more)
  paced = None
  if way is not None:
    if way.clock == "native":
      resolve_clock("native")  # says why, where it can't be had
    paced = jaxpace.instrument(step, "data", (pacer or unruly()) if way.paced else None,
                               clock=way.clock, share=way.share)
  launch = _pmap if case.layout == "pmap" else _shard_map
  compiled, pace, state, batches = launch(job, case, step, paced)
  before = bits(state)
  out: Any = None
  with _recorder(way, paced) as record:
    for number in range(steps):
      if paced is None:
        state, out = compiled(state, batches[number % len(batches)])
      else:
        pace, (state, out) = compiled(pace, state, batches[number % len(batches)])
        record()
        if after_step is not None:
          after_step()
      if number % _BLOCK == _BLOCK - 1:
        jax.block_until_ready(out)
    jax.block_until_ready(state)
  after = bits(state)
  finite = all(np.isfinite(np.asarray(leaf.addressable_shards[0].data, np.float32)).all()
               for leaf in jax.tree.leaves((state, out)))
  return Result(after | bits({"metrics": out}), compiled.as_text(),
                bool(paced is not None and paced.plan is not None and paced.plan.share),
                finite and after.keys() == before.keys() and after != before,
                None if paced is None or paced.plan is None else np.stack([
                    own.applied for own, _ in held_in_ring(paced.plan)]))


@contextlib.contextmanager
def _recorder(way: Way | None, paced: Any) -> Iterator[Callable[[], None]]:
  if way is None or not way.recorded:
    yield lambda: None
    return
  with tempfile.TemporaryDirectory() as folder, jaxpace.Recorder(folder, paced) as recorder:
    yield recorder.record


def _shard_map(job: bitwise_models.Job, case: Case, step: Any,
               paced: Any) -> tuple[Any, Any, Any, list[Any]]:
  mesh = jax.make_mesh((case.ranks,), ("data",), axis_types=(AxisType.Auto,),
                       devices=jax.devices()[:case.ranks])
  check = case.layout == LAYOUTS[0]
  state = place(job.state, NamedSharding(mesh, P()))
  batches = [place(batch, NamedSharding(mesh, P("data"))) for batch in job.batches]
  if paced is None:
    function = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(),
                             check_vma=check)
    return jax.jit(function).lower(state, batches[0]).compile(), None, state, batches
  spec = jaxpace.spec(mesh)
  pace = paced.init(mesh)
  function = jax.shard_map(paced, mesh=mesh, in_specs=(spec, P(), P("data")), out_specs=(spec, P()),
                           check_vma=check)
  return (jax.jit(function, donate_argnums=0).lower(pace, state, batches[0]).compile(), pace, state,
          batches)


def place(tree: Any, sharding: NamedSharding) -> Any:
  """Global arrays of host values that every process has."""
  return jax.tree.map(lambda leaf: jax.make_array_from_callback(
      np.shape(leaf), sharding, lambda index: np.asarray(leaf)[index]), tree)


def _pmap(job: bitwise_models.Job, case: Case, step: Any,
          paced: Any) -> tuple[Any, Any, Any, list[Any]]:
  devices = jax.local_devices()[:case.ranks]

  def spread(tree: Any, split: bool) -> Any:
    stacked = jax.tree.map(lambda leaf: np.reshape(leaf, (case.ranks, -1, *np.shape(leaf)[1:]))
                           if split else
                           np.stack([np.asarray(leaf)] * case.ranks), tree)
    return jax.pmap(lambda tree: tree, devices=devices)(stacked)

  state = spread(job.state, split=False)
  batches = [spread(batch, split=True) for batch in job.batches]
  if paced is None:
    function = jax.pmap(step, axis_name="data", devices=devices)
    return function.lower(state, batches[0]).compile(), None, state, batches
  pace = jax.pmap(lambda tree: tree, devices=devices)(paced.init(devices=devices))
  function = jax.pmap(paced, axis_name="data", devices=devices)
  return function.lower(pace, state, batches[0]).compile(), pace, state, batches
