"""What every pacer's `update` takes inside a step, on one core, at many ranks.

    python -m experiments.measure.update_cost

Each `update` runs in a compiled loop in which every field of the observation changes from turn to
turn, in turns with the same loop without a pacer. Between turns its state is packed, as it is
between steps. Writes docs/measurements/update_cost.json and .md. Nothing else should run meanwhile.
"""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

import jaxpace
from experiments.lib import measured
from experiments.lib.paired import estimate, interleave, seconds_each
from experiments.measure.null_pacing import BUSY, TRANSFER, pin_to_one_core
from jaxpace.coordination.take_turns import TURNS
from jaxpace.core import packing
from jaxpace.core.types import Moment

TARGET = 10.0  # us
SLOTS = 16


def pacers(ranks: int) -> dict[str, jaxpace.Pacer]:
  """What is timed, by name."""
  early, shift = jaxpace.pace_early_ranks(), jaxpace.interleave_jobs(floor=TRANSFER)
  return {
      "pace_early_ranks": early,
      "interleave_jobs": shift,
      "guard(pace_early_ranks)": jaxpace.guard(early),
      "chain(pace_early_ranks, interleave_jobs)": jaxpace.chain(early, shift),
      "only_ranks(limit(pace_early_ranks))":
      jaxpace.only_ranks(jaxpace.limit(early, 5e-3), range(min(8, ranks))),
      "steerable(guard(pace_early_ranks))": jaxpace.steerable(jaxpace.guard(early)),
      "steerable(chain(guard(pace_early_ranks), interleave_jobs))": jaxpace.steerable(
          jaxpace.chain(jaxpace.guard(early), shift)),
      **{f"take_turns(by={by!r}){what}": of(jaxpace.take_turns(by=by, floor=TRANSFER))
         for by in ("bucket", "message")
         for what, of in (("", lambda pacer: pacer), (", its hold once", asked))},
  }


def asked(pacer: jaxpace.Pacer) -> jaxpace.Pacer:
  """A pacer that takes turns, its `hold` as `update`: asked once, to be timed like the others."""
  hold = pacer.hold
  assert hold is not None

  def init(ranks: int) -> Any:
    return pacer.init(ranks)._replace(mode=np.int32(TURNS))

  def update(seen: jaxpace.Observation, state: Any) -> tuple[jaxpace.Decision, Any]:
    # Now of a free link, now of one in use.
    heard = seen.step_time * jnp.where(seen.step % np.int32(2) > np.int32(0), np.float32(0.01),
                                       np.float32(0.1))
    moment = Moment(step=seen.step, slot=seen.step % np.int32(SLOTS), heard=heard,
                    listened=seen.step % np.int32(3), held=heard, step_held=seen.step_time)
    told, after = hold(moment, state)
    return jaxpace.Decision(told.seconds, {"listen": told.listen.astype(jnp.float32)}), after

  return jaxpace.Pacer(init, update)


def loop(pacer: jaxpace.Pacer | None, ranks: int, turns: int) -> Callable[[], Any]:
  """Compiles `turns` updates of one rank, or the same without the pacer."""
  later = np.random.default_rng(0).normal(1, 0.05, ranks).astype(np.float32)
  arrivals = jnp.asarray(np.float32(BUSY) * later)

  def turn(k: jax.Array, carry: Any) -> Any:
    state, arrivals, delay, waits, took = carry
    seen = jaxpace.Observation(
        step=k, rank=jnp.int32(1), arrivals=arrivals,
        delays=jnp.where(arrivals < np.float32(BUSY), delay, np.float32(0)), waits=waits,
        step_time=took, job_step_time=took, job_transfers=waits)
    # Never the same twice, or the compiler would take the work out of the loop; read in full, or it
    # would shrink it.
    extra = jnp.max(seen.arrivals + seen.delays) * np.float32(1e-3)
    wave = np.float32(1) + np.float32(0.1) * jnp.sin(k.astype(jnp.float32))
    if pacer is not None:
      decision, after = pacer.update(seen, packing.unpack(state))
      state, delay = packing.pack(after, state.layout), decision.delay
      extra += sum(jnp.nan_to_num(value) for value in decision.info.values()) * np.float32(1e-6)
    else:
      # or the delays above would be the same in every turn, and free
      delay = np.float32(1e-4 * BUSY) * wave
    return (state, arrivals * np.float32(0.999) + np.float32(1e-3 * BUSY), delay,
            jnp.full((SLOTS,), TRANSFER, jnp.float32) * wave, np.float32(BUSY) * wave + extra)

  state = packing.pack(pacer.init(ranks)) if pacer is not None else ()
  start = (state, arrivals, jnp.float32(0), jnp.full((SLOTS,), TRANSFER, jnp.float32),
           jnp.float32(BUSY))
  compiled = jax.jit(lambda start: jax.lax.fori_loop(0, turns, turn, start))
  return lambda: jax.block_until_ready(compiled(start))


def size(pacer: jaxpace.Pacer, ranks: int) -> dict[str, int]:
  """What needs no clock: a state's own arrays, and kernels of the compiled `update`, untaken
  branches included."""
  state = pacer.init(ranks)
  scalar, each, slots = jnp.float32(0), jnp.zeros((ranks,)), jnp.zeros((SLOTS,))
  seen = jaxpace.Observation(step=jnp.int32(0), rank=jnp.int32(0), arrivals=each, delays=each,
                             waits=slots, step_time=scalar, job_step_time=scalar,
                             job_transfers=slots)
  text = jax.jit(pacer.update).lower(seen, state).compile().as_text() or ""
  return {"arrays": len(jax.tree.leaves(state)), "kernels": text.count(" fusion(")}


def wanted(ranks: int, only: str) -> dict[str, jaxpace.Pacer]:
  """What is timed of `pacers`: those whose names hold the text."""
  return {name: pacer for name, pacer in pacers(ranks).items() if only in name}


def measure(ranks: int, rounds: int, turns: int, only: str = "") -> dict[str, list[float]]:
  """Microseconds of one update of each pacer, [mean, low, high]."""
  loops = ({"": loop(None, ranks, turns)}
           | {name: loop(pacer, ranks, turns) for name, pacer in wanted(ranks, only).items()})
  for run in loops.values():
    run()
  blocks = {name: (lambda run=run: seconds_each(run, 1) / turns) for name, run in loops.items()}
  found = interleave(blocks, rounds)
  return {name: estimate((seconds - found[""]) * 1e6).to_json() for name, seconds in found.items()
          if name}


def with_kept(figures: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
  """Adds pacers that were not timed this time, of an earlier run with the same ranks, and says
  so."""
  if set(before["ranks"]) != set(figures["ranks"]):
    return figures
  new = next(iter(figures["ranks"].values()))
  kept = [name for name in next(iter(before["ranks"].values())) if name not in new
          and name in pacers(4)]
  if not kept:
    return figures
  older = [group | {"pacers": [name for name in group["pacers"] if name in kept]}
           for group in before.get("kept", ())]
  told = {name for group in older for name in group["pacers"]}
  groups = [*older, {"pacers": [name for name in kept if name not in told]} | {
      name: before[name] for name in ("command", "date", "load_average_at_start", "rounds",
                                      "turns")}]
  return figures | {
      "ranks": {ranks: {name: before["ranks"][ranks][name] for name in kept} | found
                for ranks, found in figures["ranks"].items()},
      "sizes": {name: before["sizes"][name] for name in kept} | figures["sizes"],
      "kept": [group for group in groups if group["pacers"]]}


def lines(figures: dict[str, Any]) -> list[str]:
  """The figures as a page."""
  page = measured.introduction("The cost of `update`", figures)
  page += [f"One `update` in a compiled loop on one core, {SLOTS} collectives, less the same loop "
           f"without a pacer; {figures['rounds']} interleaved timings of {figures['turns']:,} "
           f"updates. {measured.about_intervals(figures.get('intervals'), figures['rounds'])} "
           f"Wanted: at most {TARGET:g} us at 1,024 ranks. Kernels: of the compiled `update`, "
           "branches that are rarely taken included. A step takes a pacer's state in, and gives it "
           "out, as one array, whatever its own: each would cost the step's caller about 0.7 us "
           "beside this. Packing is part of what is timed.", ""]
  if figures.get("precedence"):
    page += ["Measured with real-time priority: other programs that ran took no time from it.", ""]
  for kept in figures.get("kept", ()):
    page += [f"{', '.join(f'`{name}`' for name in kept['pacers'])}: of `{kept['command']}`, "
             f"{kept['date']}, {kept['rounds']} timings, load average at the start "
             f"{kept['load_average_at_start']}.", ""]
  if any("hold" in name for name in figures["sizes"]):
    page += ["*Its hold once*: not `update` but the question before a collective, of a pacer that "
             "takes turns. A step asks it once before each collective, and once more each time "
             "that it has listened.", ""]
  rows = []
  for name in next(iter(figures["ranks"].values())):
    cells = [f"{value[0]:.2f} [{value[1]:.2f}, {value[2]:.2f}]"
             for value in (found[name] for found in figures["ranks"].values())]
    most = figures["ranks"].get("1024", {}).get(name)
    its = figures["sizes"][name]
    told = (None if most is None else "met" if most[2] <= TARGET else "MISSED" if most[1] > TARGET
            else "not shown")
    rows.append([f"`{name}`", its["arrays"], its["kernels"], *cells, told])
  columns = [f"{ranks} ranks, us" for ranks in figures["ranks"]]
  return (page + measured.table(["pacer", "arrays of its state", "kernels", *columns, "target"],
                                rows))


def define_flags() -> None:
  """Defines this program's flags; not when it is imported, since other programs have flags of the
  same names."""
  flags.DEFINE_list("ranks", ["4", "64", "1024"], "Numbers of ranks.")
  flags.DEFINE_integer("rounds", 40, "Timings of each.", lower_bound=2)
  flags.DEFINE_integer("turns", 2000, "Updates of one timing.", lower_bound=10)
  flags.DEFINE_string("only", "", "Part of the names of those that are timed. What an earlier run "
                                  "has found of the others is kept.")
  flags.DEFINE_string("out", "docs/measurements/update_cost.json",
                      "File the figures are written to.")


def main(_: list[str]) -> None:
  its = flags.FLAGS
  jax.config.update("jax_platforms", "cpu")
  jax.devices()
  pin_to_one_core()
  figures: dict[str, Any] = measured.circumstances("experiments.measure.update_cost") | {
      "rounds": its.rounds, "turns": its.turns, "ranks": {},
      "precedence": os.sched_getscheduler(0) == os.SCHED_RR}
  for ranks in its.ranks:
    figures["sizes"] = {name: size(pacer, int(ranks))
                        for name, pacer in wanted(int(ranks), its.only).items()}
    figures["ranks"][ranks] = measure(int(ranks), its.rounds, its.turns, its.only)
    for name, value in figures["ranks"][ranks].items():
      print(f"  {ranks:>5} ranks  {name:<60} {value[0]:7.2f} us [{value[1]:.2f}, {value[2]:.2f}]",
            flush=True)
  out = pathlib.Path(its.out)
  if its.only and out.exists():
    figures = with_kept(figures, json.loads(out.read_text()))
  measured.write(figures, lines(figures), out)


if __name__ == "__main__":
  define_flags()
  app.run(main)
