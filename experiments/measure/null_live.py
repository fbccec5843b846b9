"""Pacing a live step where it can gain nothing and must not cost: ranks that don't affect each
other.

    python -m experiments.measure.null_live
    python -m experiments.measure.null_live --rounds=4 --warm_up=80 --jobs=1      # to try it

Ranks sleep for their busy times inside the compiled step, so they share no processor. Blocks of two
steps take turns: with pacing, without, and without once more (A/A), in an order drawn by a hash of
the round, all within one compiled step; the three blocks of a round have the same busy times, so
that a step is compared with the one of the same busy times some ten steps away. One process with
two devices, and several with gloo between them, each on processors of its own where there are
enough. Writes docs/measurements/null_live.json and .md. Nothing else should run meanwhile.
"""

from __future__ import annotations

import gc
import itertools
import json
import logging
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpace
from experiments.lib import measured
from experiments.lib.paired import Estimate, median_of_many, ratio_of_means, rounds_needed

BLOCK, BUSY, LATE = 2, 10e-3, 3e-3  # steps, s, s
_CUT = 0.25  # of a usual step; what a pair differs by beyond is somebody else's pause
ON, OFF, AGAIN = range(3)
_ORDERS = np.array(list(itertools.permutations((ON, OFF, AGAIN))), np.int32)
TARGET = 0.5
"""%, the upper end of the 95 % interval of on against off."""
SHAPES = ("jitter", "straggler")


def arm(step: jax.Array, warm_up: int) -> jax.Array:
  """Which of `ON`, `OFF` and `AGAIN` a step belongs to: [] int32 -> [] int32. `ON` while warming
  up."""
  block = jnp.maximum(step - np.int32(warm_up), np.int32(0)) // np.int32(BLOCK)
  mixed = (block // np.int32(3)).astype(jnp.uint32) * np.uint32(2654435761) + np.uint32(40503)
  mixed = (mixed ^ (mixed >> np.uint32(15))) * np.uint32(2246822519)
  which = ((mixed ^ (mixed >> np.uint32(13))) % np.uint32(len(_ORDERS))).astype(jnp.int32)
  return jnp.where(step < np.int32(warm_up), np.int32(ON),
                   jnp.asarray(_ORDERS)[which, block % np.int32(3)])


def gated(pacer: jaxpace.Pacer, warm_up: int) -> jaxpace.Pacer:
  """Obeys a pacer in the blocks of the arm `ON` only; it observes all along."""

  def update(observation: jaxpace.Observation, state: Any) -> tuple[jaxpace.Decision, Any]:
    decision, state = pacer.update(observation, state)
    # the delay is applied in the next step
    on = arm(observation.step + np.int32(1), warm_up) == np.int32(ON)
    return decision._replace(delay=jnp.where(on, decision.delay, np.float32(0))), state

  return jaxpace.Pacer(pacer.init, update)


def busy_times(shape: str, ranks: int, rounds: int) -> np.ndarray:
  """[rounds, BLOCK, ranks] float32 s: normal jitter of 5 %; or of 2 %, and the last rank late by 3
  ms throughout."""
  jitter = np.random.default_rng(ranks).normal(size=(rounds, BLOCK, ranks)).clip(-3, 3)
  if shape == "jitter":
    return (BUSY * (1 + 0.05 * jitter)).astype(np.float32)
  busy = BUSY * (1 + 0.02 * jitter)
  busy[..., -1] += LATE
  return busy.astype(np.float32)


def train_step(params: Any, batch: Any, busy: jax.Array) -> tuple[Any, jax.Array]:
  """A small step whose forward pass begins after this rank's busy time: busy [ranks] s."""

  def loss_fn(params: Any) -> jax.Array:
    x = jaxpace.delay(batch, busy[jax.lax.axis_index("data")], limit=0.1)
    return jnp.mean(jnp.square(jnp.tanh(x @ params["in"]) @ params["out"]))

  loss, grads = jax.lax.pmean(jax.value_and_grad(loss_fn)(params), "data")
  return jax.tree.map(lambda p, g: p - np.float32(1e-3) * g, params, grads), loss


def run(ranks: int, shape: str, rounds: int, warm_up: int) -> dict[str, Any]:
  """Runs all blocks on the first `ranks` devices: seconds [blocks, BLOCK], arms [blocks], delays
  [blocks, ranks]."""
  mesh = jax.make_mesh((ranks,), ("data",), axis_types=(AxisType.Auto,),
                       devices=jax.devices()[:ranks])
  paced = jaxpace.instrument(train_step, "data", gated(jaxpace.pace_early_ranks(), warm_up),
                             share=True, slots=2)
  spec = jaxpace.spec(mesh)
  step = jax.jit(jax.shard_map(paced, mesh=mesh, in_specs=(spec, P(), P("data"), P()),
                               out_specs=(spec, P()), check_vma=False))

  def put(leaf: np.ndarray, where: Any) -> jax.Array:
    return jax.make_array_from_callback(leaf.shape, NamedSharding(mesh, where),
                                        lambda index: leaf[index])

  rng = np.random.default_rng(0)
  params = {"in": put(rng.standard_normal((8, 32), np.float32), P()),
            "out": put(rng.standard_normal((32, 4), np.float32), P())}
  batch, pace = put(rng.standard_normal((8 * ranks, 8), np.float32), P("data")), paced.init(mesh)
  busy = busy_times(shape, ranks, rounds)
  seconds: list[float] = []
  delays: list[np.ndarray] = []

  def block(times: np.ndarray) -> None:
    nonlocal pace, params
    for row in times:
      start = time.perf_counter()
      pace, (params, _) = jax.block_until_ready(step(pace, params, batch, row))
      seconds.append(time.perf_counter() - start)
    delays.append(np.asarray(pace.delays.addressable_data(0))[0])  # of the last step, all ranks'

  for k in range(warm_up // BLOCK):
    block(busy[k % rounds])
  warmed = len(delays)
  gc.collect()
  gc.disable()  # its pauses are no part of the question
  try:
    for each in busy:
      for _ in range(3):
        block(each)
  finally:
    gc.enable()
  if paced.plan is None or not paced.plan.share:
    raise RuntimeError(
        f"The ranks' arrivals are not shared: {paced.plan and paced.plan.share_reason}")
  steps = warm_up + BLOCK * np.arange(3 * rounds)
  order = np.array([int(arm(jnp.int32(k), warm_up)) for k in steps])
  return {"seconds": np.reshape(seconds[BLOCK * warmed:], (-1, BLOCK)).tolist(),
          "arms": order.tolist(), "delays": np.stack(delays[warmed:]).tolist()}


def judge(found: dict[str, Any]) -> dict[str, Any]:
  """Compares the arms, step by step: the median of the differences, and their mean, cut; each with
  its interval.

  Both as shares of the usual step. A difference of two steps of the same busy times is cut to a
  quarter of that: what is beyond is a pause of the machine's, and a few of those decide a plain
  mean.
  """
  seconds, order = np.asarray(found["seconds"]), np.asarray(found["arms"])
  # [rounds * BLOCK] each
  by_arm = {which: seconds[order == which].reshape(-1) for which in (ON, OFF, AGAIN)}
  usual = float(np.median(by_arm[OFF]))
  delays = np.asarray(found["delays"])
  on, rest = delays[order == ON], delays[order != ON]
  result: dict[str, Any] = {"off_ms": median_of_many(by_arm[OFF] * 1e3).to_json(),
                            "mean_delay_ms": 1e3 * float(on.mean()),
                            "largest_mean_delay_ms": 1e3 * float(
                                on.mean(axis=0).max()),
                            "blocks_delayed": float((on > 0).any(axis=1).mean()),
                            "delay_while_off": float(rest.max())}
  for name, which in (("on", ON), ("again", AGAIN)):
    more = (by_arm[which] - by_arm[OFF]) / usual
    result[f"{name}_percent"] = median_of_many(100 * more).to_json()
    result[f"{name}_cut"] = float(np.mean(np.abs(more) > _CUT))
    # steps of one block are neighbours
    cut = np.clip(more, -_CUT, _CUT).reshape(-1, BLOCK).mean(axis=1)
    mean = ratio_of_means(1 + cut, np.ones_like(cut))
    result[f"{name}_mean_percent"] = [float(f"{100 * (x - 1):.6g}")
                                      for x in (mean.value, mean.low, mean.high)]
  for kind in ("percent", "mean_percent"):
    again = result[f"again_{kind}"]
    result[f"verdict_{kind}"] = verdict(result[f"on_{kind}"], again)
    result[f"rounds_needed_{kind}"] = rounds_needed(Estimate(*again), len(by_arm[OFF]) // BLOCK,
                                                    TARGET)
  return result


def verdict(on: list[float], again: list[float]) -> str:
  """Met if the upper end of [median, low, high] % is within `TARGET`; inconclusive where A/A's
  isn't on either side."""
  if max(-again[1], again[2]) > TARGET:
    return "inconclusive: A/A fails"
  return "met" if on[2] <= TARGET else "MISSED" if on[1] > TARGET else "not shown"


def lines(figures: dict[str, Any]) -> list[str]:
  """The figures as a page."""
  page = measured.introduction("Pacing where it can gain nothing, live", figures)
  page += [f"Ranks that sleep {1e3 * BUSY:g} ms inside the compiled step, with normal jitter of 5 "
           f"%; or of 2 % and one rank late by {1e3 * LATE:g} ms throughout, so that the others "
           f"are really delayed. `pace_early_ranks()` as it comes, share=True; {figures['rounds']} "
           f"rounds of three blocks of {BLOCK} steps with equal busy times: on, off, off again "
           "(A/A), in an order drawn for each round. Each step is waited for. On and A/A against "
           "off, step by step, in % of the usual step, with 95 % intervals: of the median of the "
           "differences (over steps), and of their mean (over rounds), each difference cut to "
           f"{100 * _CUT:g} % (the share of those that were is given). Wanted: at most +{TARGET:g} "
           "% at the upper end; inconclusive where A/A lies outside of that itself. Rounds needed: "
           "with which four runs in five would show that a cost of nothing is within it, by "
           "A/A's width.", ""]
  if "intervals" not in figures:
    page += [f"The intervals are a percentile bootstrap's. The {figures['rounds']} rounds were not "
             "kept; of so many such an interval covers as it should ([intervals](intervals.md)).",
             ""]
  for title, kind in (("Median of the differences", "percent"),
                      ("Mean of the differences, cut", "mean_percent")):
    rows = []
    for job, shapes in figures["jobs"].items():
      for shape, entry in shapes.items():
        rows.append([job, shape, f"{entry['off_ms'][0]:.2f}", _interval(entry[f"on_{kind}"]),
                     _interval(entry[f"again_{kind}"]), f"{100 * entry['again_cut']:.1f} %",
                     f"{entry['largest_mean_delay_ms']:.2f}",
                     f"{100 * entry['blocks_delayed']:.0f} %", entry[f"verdict_{kind}"],
                     entry.get(f"rounds_needed_{kind}")])
    page += [f"## {title}", "", *measured.table(
        ["job", "busy times", "off, ms", "on, %", "A/A, %", "A/A cut",
         "mean delay of the rank delayed most, ms", "blocks delayed", f"at most +{TARGET:g} %",
         "rounds needed"], rows)]
  return page


def _interval(value: list[float]) -> str:
  return f"{value[0]:+.3f} [{value[1]:+.3f}, {value[2]:+.3f}]"


def launch(processes: int, shape: str, rounds: int, warm_up: int) -> dict[str, Any]:
  """Runs this program in several processes; process 0's blocks."""
  with tempfile.TemporaryDirectory() as root:
    target = os.path.join(root, "found.json")
    command = [sys.executable, "-m", "jaxpace", "run", "--no-record", "--nproc", str(processes),
               "--logs", os.path.join(root, "logs"), "--", sys.executable, "-m",
               "experiments.measure.null_live", f"--worker={target}",
               f"--rounds={rounds}", f"--warm_up={warm_up}", f"--shapes={shape}"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    found: dict[str, Any] = json.loads(pathlib.Path(target).read_text())
  return found


def _own_processors() -> None:
  """Gives each process of the job processors of its own, before JAX counts them; none where they
  are too few."""
  place = jaxpace.distributed.place_from_environment(os.environ)
  allowed = sorted(os.sched_getaffinity(0))
  if place is not None and (own := len(allowed) // place.count) > 0:
    os.sched_setaffinity(0, allowed[own * place.index:own * (place.index + 1)])


def define_flags() -> None:
  """Defines this program's flags; not when it is imported, since other programs have flags of the
  same names."""
  flags.DEFINE_integer("rounds", 250, "Rounds of three blocks.", lower_bound=2)
  flags.DEFINE_integer("warm_up", 300, "Steps before them, with pacing.", lower_bound=BLOCK)
  flags.DEFINE_list("jobs", ["1", "2", "4"], "Numbers of processes; 1 has two devices.")
  flags.DEFINE_list("shapes", list(SHAPES), f"Which of {', '.join(SHAPES)}.")
  flags.DEFINE_string("out", "docs/measurements/null_live.json", "File the figures are written to.")
  flags.DEFINE_string("worker", "",
                      "Internal: this is one process of several; file for process 0's figures.")


def main(_: list[str]) -> None:
  its = flags.FLAGS
  logging.getLogger("jax").setLevel(logging.WARNING)
  warm_up = its.warm_up // BLOCK * BLOCK
  if its.worker:
    _own_processors()
    jaxpace.distributed.initialize()
    found = run(jax.device_count(), its.shapes[0], its.rounds, warm_up)
    if jax.process_index() == 0:
      pathlib.Path(its.worker).write_text(json.dumps(found))
    return
  jax.config.update("jax_platforms", "cpu")
  jax.config.update("jax_num_cpu_devices", 2)  # not by the environment, which the workers inherit
  figures = measured.circumstances("experiments.measure.null_live") | {
      "rounds": its.rounds, "warm_up": warm_up,
      "jobs": {}}
  for count in map(int, its.jobs):
    title = "1 process, 2 devices" if count == 1 else f"{count} processes, gloo"
    find: Callable[..., dict[str, Any]] = run if count == 1 else launch
    figures["jobs"][title] = {}
    for shape in its.shapes:
      entry = judge(find(2 if count == 1 else count, shape, its.rounds, warm_up))
      figures["jobs"][title][shape] = entry
      print(f"{title:<22} {shape:<10} off {entry['off_ms'][0]:.2f} ms; on {entry['on_percent']} %, "
            f"A/A {entry['again_percent']} %, delays up to {entry['largest_mean_delay_ms']:.2f} "
            f"ms: {entry['verdict_percent']}", flush=True)
  measured.write(figures, lines(figures), pathlib.Path(its.out))


if __name__ == "__main__":
  define_flags()
  app.run(main)
