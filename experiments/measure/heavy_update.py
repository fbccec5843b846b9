"""Are exit stamps late where the update is heavy? Nothing is held back by them: the update could
start first.

The sync and update columns of an instrumented step whose update takes milliseconds (Adam on
millions of parameters), against the same step with its update held back until all gradients are
reduced, and against the same update and all-reduce, each compiled and timed alone; all in turns.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpace
from experiments.lib import measured
from experiments.lib.paired import estimate, interleave
from jaxpace.execution import hold, resolve_clock, words
from jaxpace.trace.decode import decode

_RANKS = 2
_PARAMETERS = 1 << 22
_LEAVES = (1, 16)
_WHOLE = ("whole", "held")


def measure(rounds: int) -> list[dict[str, Any]]:
  """Runs it for one large leaf and for the same number of parameters in many leaves."""
  return [_measure(leaves, rounds) for leaves in _LEAVES]


def _measure(leaves: int, rounds: int, parameters: int = _PARAMETERS) -> dict[str, Any]:
  loops = _Loops(leaves, parameters)
  blocks: dict[str, Callable[[], float]] = {
      **{name: functools.partial(loops.step, name) for name in _WHOLE},
      **{name: functools.partial(loops.part, name) for name in ("alone", "nothing", "reduced")}}
  for block in blocks.values():
    block()
  for values in loops.columns.values():
    values.clear()
  figures = interleave(blocks, rounds,
                       progress=measured.progress(f"update of {leaves} leaves", rounds))
  recorded = {key: np.asarray(values) for key, values in loops.columns.items()}
  found = {"step_ms": figures["whole"], "sync_column_ms": recorded["whole", "sync"],
           "sync_held_ms": recorded["held", "sync"],
           "all_reduce_alone_ms": figures["reduced"] - figures["nothing"],
           "update_column_ms": recorded["whole", "update"],
           "update_held_ms": recorded["held", "update"], "update_alone_ms": figures["alone"]
           - figures["nothing"], "missing_from_update_ms": recorded["held", "update"]
           - recorded["whole", "update"]}
  return {"leaves": leaves, "parameters": loops.side**2 * leaves, "clock": loops.clock.name,
          **{name: estimate(values).to_json() for name, values in found.items()}}


class _Loops:
  """The instrumented step, as it is ("whole") and "held", and its parts by themselves, each with a
  state of its own."""

  def __init__(self, leaves: int, parameters: int):
    self.side = int((parameters // leaves) ** 0.5)
    self.tx, self.clock = optax.adam(1e-3), resolve_clock()
    # In milliseconds, as recorded: the transfer, and the longest update.
    self.columns: dict[tuple[str, str], list[float]] = {
        (name, column): [] for name in _WHOLE for column in ("sync", "update")}
    mesh = jax.make_mesh((_RANKS,), ("data",), axis_types=(AxisType.Auto,),
                         devices=jax.devices()[:_RANKS])
    sharding, spec = NamedSharding(mesh, P()), jaxpace.spec(mesh)

    def compiled(function: Any, specs: Any, out: Any, donate: Any) -> Any:
      return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=out,
                                   check_vma=False),
                     donate_argnums=donate)

    self._paced = {name: jaxpace.instrument(functools.partial(self._step, held=name == "held"),
                                            "data", slots=2, rows=4)
                   for name in _WHOLE}
    self._whole = {name: compiled(paced, (spec, P(), P("data")), (spec, P()), (0, 1))
                   for name, paced in self._paced.items()}
    alone, reduced = compiled(self._update, (P(),
                                             P()), P(), 0), compiled(_reduce, (P(), P()), P(), 0)
    nothing = compiled(lambda state, grads: (state, jnp.sum(grads[0][:1, :1])), (P(), P()), P(), 0)

    rng = np.random.default_rng(0)
    weights = [rng.standard_normal((self.side, self.side), np.float32)
               / np.float32(self.side ** 0.5)
               for _ in range(leaves)]
    self._batch = jax.device_put(rng.standard_normal((8 * _RANKS, self.side), np.float32),
                                 NamedSharding(mesh, P("data")))
    grads, loss = jax.device_put(weights, sharding), jax.device_put(np.float32(0), sharding)

    def fresh() -> Any:
      params = jax.device_put(weights, sharding)
      return params, jax.device_put(self.tx.init(params), sharding)

    self._states: dict[str, Any] = {name: fresh() for name in (*_WHOLE, "alone", "nothing")}
    self._states["reduced"] = jax.tree.map(jnp.copy, grads)
    self._paces = {name: paced.init(mesh) for name, paced in self._paced.items()}
    self._parts: dict[str, Callable[[Any], Any]] = {
        "alone": lambda state: alone(state, grads),
        "reduced": lambda values: reduced(values, loss)[0],
        "nothing": lambda state: nothing(state, grads)[0]}

  def step(self, name: str) -> float:
    """Runs a whole step and keeps its columns; milliseconds."""
    start = time.perf_counter()
    self._paces[name], (self._states[name], value) = self._whole[name](
        self._paces[name], self._states[name], self._batch)
    jax.block_until_ready((self._states[name], value))
    took = time.perf_counter() - start
    ring, plan = np.asarray(self._paces[name].ring), self._paced[name].plan
    assert plan is not None
    parts = [decode(ring[rank], plan, rank, 0, 0)[0] for rank in range(_RANKS)]
    sync, after = (np.asarray([part[column][-1] for part in parts], np.float64) * 1e-6
                   for column in ("sync_ns", "update_ns"))
    # that of the rank that came last: the transfer
    self.columns[name, "sync"].append(float(sync.min()))
    self.columns[name, "update"].append(float(after.max()))
    return took * 1e3

  def part(self, name: str) -> float:
    """Runs a part by itself; milliseconds."""
    start = time.perf_counter()
    self._states[name] = self._parts[name](self._states[name])
    jax.block_until_ready(self._states[name])
    return (time.perf_counter() - start) * 1e3

  def _step(self, state: Any, batch: jax.Array, held: bool) -> Any:
    def loss_fn(params: Any) -> jax.Array:
      x = batch
      for weights in params:
        x = jnp.tanh(x @ weights)
      return jnp.mean(jnp.square(x))

    loss, grads = jax.value_and_grad(loss_fn)(state[0])
    grads, loss = _reduce(grads, loss)
    grads = self._hold(grads) if held else grads
    return self._update(state, grads), loss / _RANKS

  def _hold(self, grads: Any) -> Any:
    """Opaque to XLA: no part of the update before the clock was read, after the first element of
    every gradient."""
    stamp = self.clock.stamp(words.zero(), *[leaf[0, :1] for leaf in grads])
    return hold(self.clock, stamp, grads)

  def _update(self, state: Any, sums: Any) -> Any:
    params, opt = state
    # here: held or not, it is fused into the update's kernels
    grads = jax.tree.map(lambda leaf: leaf / _RANKS, sums)
    updates, opt = self.tx.update(grads, opt, params)
    return optax.apply_updates(params, updates), opt


def _reduce(grads: Any, loss: jax.Array) -> Any:
  return jax.lax.psum((grads, loss), "data")
