"""Are exit stamps late where the update is heavy? Nothing is held back by them: the update could start first.

The sync and update columns of an instrumented step whose update takes milliseconds (Adam on millions of parameters),
against the same step with its update held back until all gradients are reduced, and against the same update and
all-reduce, each compiled and timed alone; all in turns.
"""

from __future__ import annotations

import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpace
from experiments import measured
from experiments.paired import estimate, interleave
from jaxpace.execution import hold, resolve_clock, words
from jaxpace.trace.decode import decode

_RANKS = 2
_PARAMETERS = 1 << 22
_LEAVES = (1, 16)


def measure(rounds: int) -> list[dict[str, Any]]:
  """Runs it for one large leaf and for the same number of parameters in many leaves."""
  return [_measure(leaves, rounds) for leaves in _LEAVES]


def _measure(leaves: int, rounds: int, parameters: int = _PARAMETERS) -> dict[str, Any]:
  mesh = jax.make_mesh((_RANKS,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:_RANKS])
  sharding = NamedSharding(mesh, P())
  side = int((parameters // leaves) ** 0.5)
  tx, clock = optax.adam(1e-3), resolve_clock()

  def update(state: Any, sums: Any) -> Any:
    params, opt = state
    grads = jax.tree.map(lambda leaf: leaf / _RANKS, sums)  # here: held or not, it is fused into the update's kernels
    updates, opt = tx.update(grads, opt, params)
    return optax.apply_updates(params, updates), opt

  def reduce(grads: Any, loss: jax.Array) -> Any:
    return jax.lax.psum((grads, loss), "data")

  def hold_update(grads: Any) -> Any:
    """Opaque to XLA: no part of the update before the clock was read, after the first element of every gradient."""
    stamp = clock.stamp(words.zero(), *[leaf[0, :1] for leaf in grads])
    return hold(clock, stamp, grads)

  def step(state: Any, batch: jax.Array, held: bool = False) -> Any:
    def loss_fn(params: Any) -> jax.Array:
      x = batch
      for weights in params:
        x = jnp.tanh(x @ weights)
      return jnp.mean(jnp.square(x))

    loss, grads = jax.value_and_grad(loss_fn)(state[0])
    grads, loss = reduce(grads, loss)
    grads = hold_update(grads) if held else grads
    return update(state, grads), loss / _RANKS

  rng = np.random.default_rng(0)
  weights = [rng.standard_normal((side, side), np.float32) / np.float32(side ** 0.5) for _ in range(leaves)]

  def fresh() -> Any:
    params = jax.device_put(weights, sharding)
    return params, jax.device_put(tx.init(params), sharding)

  def compiled(function: Any, specs: Any, out: Any, donate: Any) -> Any:
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False),
                   donate_argnums=donate)

  steps = {"whole": jaxpace.instrument(step, "data", slots=2, rows=4),
           "held": jaxpace.instrument(functools.partial(step, held=True), "data", slots=2, rows=4)}
  spec = jaxpace.spec(mesh)
  whole = {name: compiled(paced, (spec, P(), P("data")), (spec, P()), (0, 1)) for name, paced in steps.items()}
  alone = compiled(update, (P(), P()), P(), 0)
  reduced = compiled(reduce, (P(), P()), P(), 0)
  nothing = compiled(lambda state, grads: (state, jnp.sum(grads[0][:1, :1])), (P(), P()), P(), 0)
  batch = jax.device_put(rng.standard_normal((8 * _RANKS, side), np.float32), NamedSharding(mesh, P("data")))
  grads = jax.device_put(weights, sharding)
  loss = jax.device_put(np.float32(0), sharding)
  now: dict[str, Any] = {name: fresh() for name in ("whole", "held", "alone", "nothing")}
  now |= {"reduced": jax.tree.map(jnp.copy, grads), "pace": {name: paced.init(mesh) for name, paced in steps.items()}}
  columns: dict[tuple[str, str], list[float]] = {(name, column): [] for name in steps for column in ("sync", "update")}

  def run_step(name: str) -> float:
    start = time.perf_counter()
    now["pace"][name], (now[name], value) = whole[name](now["pace"][name], now[name], batch)
    jax.block_until_ready((now[name], value))
    took = time.perf_counter() - start
    ring, plan = np.asarray(now["pace"][name].ring), steps[name].plan
    assert plan is not None
    parts = [decode(ring[rank], plan, rank, 0, 0)[0] for rank in range(_RANKS)]
    sync, after = (np.asarray([part[column][-1] for part in parts], np.float64) * 1e-6
                   for column in ("sync_ns", "update_ns"))
    columns[name, "sync"].append(float(sync.min()))  # that of the rank that came last: the transfer
    columns[name, "update"].append(float(after.max()))
    return took * 1e3

  def timed(name: str, call: Any) -> float:
    start = time.perf_counter()
    now[name] = call(now[name])
    jax.block_until_ready(now[name])
    return (time.perf_counter() - start) * 1e3

  def run_nothing(state: Any) -> Any:
    return nothing(state, grads)[0]

  blocks = {"whole": functools.partial(run_step, "whole"), "held": functools.partial(run_step, "held"),
            "alone": functools.partial(timed, "alone", lambda state: alone(state, grads)),
            "nothing": functools.partial(timed, "nothing", run_nothing),
            "reduced": functools.partial(timed, "reduced", lambda values: reduced(values, loss)[0])}
  for block in blocks.values():
    block()
  for values in columns.values():
    values.clear()
  figures = interleave(blocks, rounds, progress=measured.progress(f"update of {leaves} leaves", rounds))
  recorded = {key: np.asarray(values) for key, values in columns.items()}
  alone_ms = figures["alone"] - figures["nothing"]
  missing = recorded["held", "update"] - recorded["whole", "update"]
  return {"leaves": leaves, "parameters": side * side * leaves, "clock": clock.name,
          "step_ms": estimate(figures["whole"]).to_json(),
          "sync_column_ms": estimate(recorded["whole", "sync"]).to_json(),
          "sync_held_ms": estimate(recorded["held", "sync"]).to_json(),
          "all_reduce_alone_ms": estimate(figures["reduced"] - figures["nothing"]).to_json(),
          "update_column_ms": estimate(recorded["whole", "update"]).to_json(),
          "update_held_ms": estimate(recorded["held", "update"]).to_json(),
          "update_alone_ms": estimate(alone_ms).to_json(),
          "missing_from_update_ms": estimate(missing).to_json()}
