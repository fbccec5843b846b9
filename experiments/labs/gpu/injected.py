"""Known lengths put into an instrumented step, and delays a pacer asks for: what the recorded
timestamps say of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpace
from experiments.labs.gpu import hosttime, kernels, transformer
from experiments.labs.gpu.bench import Bench
from jaxpace.core.plan import Plan
from jaxpace.core.types import Decision, Observation
from jaxpace.record.ring.instrumented import held_in_ring

INJECTED_S = (0.0, 10e-6, 50e-6, 200e-6, 1e-3, 5e-3, 20e-3)
DELAYED_S = (0.0, 20e-6, 100e-6, 500e-6, 2e-3, 10e-3)
WARM = 4  # steps left out at the beginning
BEFORE, AFTER = "before the collective", "after it"


def spinning_step(bench: Bench, size: transformer.Size) -> Callable[..., Any]:
  """A train step that spins before and after its collective: (state, tokens, ns before, ns after)
  -> (state, loss)."""
  clock = bench.timer()

  def last(tree: Any, nanoseconds: jax.Array, *others: jax.Array) -> jax.Array:
    """`scale` of a tree, after a spin that begins when all else is there."""
    return kernels.busy(clock, bench.platform, tree["scale"], nanoseconds, *others,
                        *jax.tree.leaves(tree))

  def step(state: Any, batch: jax.Array, before: jax.Array,
           after: jax.Array) -> tuple[Any, jax.Array]:
    value, slopes = jax.value_and_grad(transformer.loss)(state[0], batch, size)
    slopes = {**slopes, "scale": last(slopes, before, value)}
    slopes, value = jax.lax.pmean((slopes, value), "data")
    moved, *rest = transformer.adam(state, transformer.clipped(slopes))
    return ({**moved, "scale": last(moved, after, *jax.tree.leaves(rest))}, *rest), value

  return step


def asking(table: Sequence[float]) -> jaxpace.Pacer:
  """A pacer that asks for these delays in turn, whatever it sees."""

  def update(observation: Observation, state: Any) -> tuple[Decision, Any]:
    values = jnp.asarray(np.asarray(table, np.float32))
    return Decision(values[observation.step % jnp.int32(len(table))], {}), state

  return jaxpace.Pacer(lambda ranks: np.zeros((), np.int32), update)


def readings(plan: Plan, times: np.ndarray) -> dict[str, np.ndarray]:
  """What a recorded run says of its steps, from the timestamps [n, timestamps] ns of steps that
  follow each other.

  Returns:
    [n - 1] seconds each, from the second step on: `arrival`, `start to enter`, `wait` (enter to
    exit), `exit to end`, `arrival of the next` (NaN at the last step), `delay` (by its timestamps).
  """
  place = {kind: [i for i, mark in enumerate(plan.marks) if mark.kind == kind] for kind in
           ("start", "delay", "enter", "exit", "end")}
  start, end = times[:, place["start"][0]], times[:, place["end"][0]]
  begun = times[:, place["delay"][0]] if place["delay"] else start
  enter, leave = times[:, place["enter"][0]], times[:, place["exit"][-1]]
  delay = begun - start
  arrival = enter[1:] - leave[:-1] - delay[1:]
  found = {"arrival": arrival, "start to enter": (enter - begun)[1:], "wait": (leave - enter)[1:],
           "exit to end": (end - leave)[1:], "delay": delay[1:]}
  seconds = {name: value * 1e-9 for name, value in found.items()}
  seconds["arrival of the next"] = np.append(seconds["arrival"][1:], np.nan)
  return seconds


def grown(values: np.ndarray, kinds: np.ndarray) -> Mapping[int, float]:
  """By kind above 0: the median of its values minus that of kind 0's; NaN left out: [n] s, [n]
  int."""
  base = np.nanmedian(values[kinds == 0])
  return {int(kind): float(np.nanmedian(values[kinds == kind]) - base) for kind in np.unique(kinds)
          if kind}


def run(bench: Bench) -> None:
  """Section injected."""
  read = hosttime.reader(bench)
  hosttime.note_offset(bench, read, bench.times(200, 100, 20))
  size = transformer.SIZES["small" if bench.size != "tiny" else "tiny"]
  mesh, spec = bench.mesh(), jaxpace.spec(bench.mesh())
  lengths = INJECTED_S if bench.size != "tiny" else (0.0, 2e-3, 5e-3)
  paced = jaxpace.instrument(spinning_step(bench, size), "data", clock=bench.clock)
  step: Any = jax.jit(jax.shard_map(paced, mesh=mesh, in_specs=(spec, P(), P("data"), P(), P()),
                                    out_specs=(spec, P()), check_vma=False), donate_argnums=(0, 1))
  everywhere = NamedSharding(mesh, P())
  state = jax.tree.map(lambda leaf: jax.device_put(leaf, everywhere), transformer.fresh(size))
  batch = jax.device_put(transformer.tokens(size), NamedSharding(mesh, P("data")))
  ns = [jax.device_put(np.int32(round(length * 1e9)), everywhere) for length in lengths]
  pace = paced.init(mesh)
  step = step.lower(pace, state, batch, ns[0], ns[0]).compile()
  text = step.as_text()
  kept = text.count("all-reduce(") + text.count("all-reduce-start(")
  bench.figure("all-reduces in the compiled step", kept)
  if not kept:
    bench.note("One device: XLA removed the all-reduce, so its entry and exit stamps have nothing "
               "between them. What is checked is when it would be entered.")
  for where in (BEFORE, AFTER):
    kinds = np.random.default_rng(1).permutation(
        np.tile(np.arange(len(lengths)), bench.times(60, 25, 4)))
    kinds = np.concatenate([np.zeros(WARM, np.int64), kinds])
    per_ring = 100
    taken: dict[str, list[np.ndarray]] = {}
    for begin in range(0, len(kinds), per_ring):
      part = kinds[begin:begin + per_ring]
      for kind in part:
        pair = (ns[kind], ns[0]) if where == BEFORE else (ns[0], ns[kind])
        pace, (state, value) = step(pace, state, batch, *pair)
      jax.block_until_ready(value)
      assert paced.plan is not None
      times = held_in_ring(paced.plan)[0][1][-len(part):]
      for name, found in (*readings(paced.plan, times).items(), ("kind", part[1:])):
        taken.setdefault(name, []).append(found[(WARM if not begin else 0):])
    every = {name: np.concatenate(parts) for name, parts in taken.items()}
    _report(bench, where, every, lengths)
  _pacer(bench, size, state, batch)
  hosttime.note_offset(bench, read, bench.times(200, 100, 20))


def _report(bench: Bench, where: str, every: Mapping[str, np.ndarray],
            lengths: Sequence[float]) -> None:
  nothing = float(np.nanmedian(every["arrival"][every["kind"] == 0]))
  bench.figure(f"arrival with nothing injected {where}", nothing * 1e6, "us")
  checked = (("arrival", "start to enter") if where == BEFORE
             else ("exit to end", "arrival of the next"))
  for name in checked:
    for kind, seconds in grown(every[name], every["kind"]).items():
      bench.within(f"{lengths[kind] * 1e6:g} us injected {where}, in `{name}`", seconds,
                   lengths[kind])
  for kind, seconds in grown(every["wait"], every["kind"]).items():
    bench.within(f"{lengths[kind] * 1e6:g} us injected {where} leave `wait` as it was",
                 seconds, 0.0)


def _pacer(bench: Bench, size: transformer.Size, state: Any, batch: jax.Array) -> None:
  """A pacer that asks for known delays: what was asked, what was applied, and that arrivals are
  without it."""
  asked = DELAYED_S if bench.size != "tiny" else (0.0, 2e-3, 5e-3)
  kinds = np.random.default_rng(2).permutation(np.tile(np.arange(len(asked)),
                                                       bench.times(16, 8, 4)))
  mesh, spec = bench.mesh(), jaxpace.spec(bench.mesh())
  paced = jaxpace.instrument(transformer.train_step(size), "data",
                             asking([asked[kind] for kind in kinds]), clock=bench.clock)
  step = jax.jit(jax.shard_map(paced, mesh=mesh, in_specs=(spec, P(), P("data")),
                               out_specs=(spec, P()), check_vma=False), donate_argnums=(0, 1))
  pace = paced.init(mesh)
  for _ in range(len(kinds) + 1):
    pace, (state, value) = step(pace, state, batch)
  jax.block_until_ready(value)
  assert paced.plan is not None
  seen, times = held_in_ring(paced.plan)[0]
  found = readings(paced.plan, times)
  told, applied = seen.delay[1:].astype(np.float64), seen.applied[1:].astype(np.float64)
  wanted = np.asarray([asked[kind] for kind in kinds])[(seen.step[1:] - 1) % len(kinds)]
  bench.holds("what the pacer asked for is what the ring says it asked for",
              bool(np.allclose(told, wanted, rtol=1e-6)), f"{len(wanted)} steps")
  kind = np.searchsorted(asked, wanted)
  late = (np.arange(len(kind)) >= WARM).nonzero()[0]
  for k in range(1, len(asked)):
    own = late[kind[late] == k]
    bench.within(f"a pacer's delay of {asked[k] * 1e6:g} us, as applied, median",
                 float(np.median(applied[own])), asked[k])
  for k, seconds in grown(found["start to enter"][late], kind[late]).items():
    bench.within(
        f"a pacer's delay of {asked[k] * 1e6:g} us leaves the way to the collective as it was",
        seconds, 0.0, least=20e-6)
