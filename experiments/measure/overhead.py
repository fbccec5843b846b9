"""What being measured costs: bare steps against instrumented ones, paired and interleaved in one
run.

    python -m experiments.measure.overhead                  # one process: stamps, step sizes, dispatch; then 2 and 4
    processes
    python -m experiments.measure.overhead --parts alone
    python -m experiments.measure.overhead --parts where    # which part of jaxpace the overhead of a step is

Writes docs/measurements/overhead.json and .md with the command and the machine. Nothing else should
run meanwhile.
"""  # noqa: E501

from __future__ import annotations

import functools
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
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxpace
from experiments.lib import measured
from experiments.lib.paired import Estimate, estimate, interleave, seconds_each
from experiments.measure import overhead_tables, overhead_where
from experiments.measure.overhead_loops import Loop, batch_for, mlp, one_device
from jaxpace.execution import hold, resolve_clock, words

_PARTS = ("alone", "steps", "where", "dispatch", "processes")
_parts = flags.DEFINE_list("parts", ",".join(_PARTS), f"Which of {', '.join(_PARTS)} to measure.")
_out = flags.DEFINE_string("out", "docs/measurements/overhead.json",
                           "File the figures are written to.")
_sizes = flags.DEFINE_list("sizes_ms", "2,5,20,50", "Sizes of the bare step to aim at, in ms.")
_rounds = flags.DEFINE_integer("rounds", 80, "Rounds of interleaved blocks.", lower_bound=4)
_worker = flags.DEFINE_string("worker", "",
                              "Internal: this is one process of several; file for process "
                              "0's figures.")

Blocks = dict[str, Callable[[], float]]


def main(_: list[str]) -> None:
  logging.getLogger("jax").setLevel(logging.WARNING)
  unknown = set(_parts.value) - set(_PARTS)
  if unknown:
    raise app.UsageError(f"--parts: {', '.join(sorted(unknown))} is none of {', '.join(_PARTS)}.")
  measured.keep_memory("experiments.measure.overhead")
  if _worker.value:
    jaxpace.distributed.initialize()
    several_processes(pathlib.Path(_worker.value))
    return
  out = pathlib.Path(_out.value)
  figures: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
  now = measured.circumstances("experiments.measure.overhead")
  figures |= {name: value for name, value in now.items() if name != "intervals"}
  # Parts may be of different runs.
  figures["parts"] = figures.get("parts", {}) | {part: {
      "command": now["command"], "date": now["date"], "load": now["load_average_at_start"],
      "rounds": _rounds.value, "intervals": now["intervals"]} for part in _parts.value}
  if "alone" in _parts.value:
    figures["alone"] = alone()
  if "steps" in _parts.value:
    figures["steps"] = step_sizes()
  if "where" in _parts.value:
    figures["where"] = overhead_where.measure([float(size) for size in _sizes.value
                                               if float(size) >= 5], _rounds.value)
  if "dispatch" in _parts.value:
    figures["dispatch"] = dispatch()
  if "processes" in _parts.value:
    figures["processes"] = {str(n): launch(n) for n in (2, 4)}
  measured.write(figures, overhead_tables.lines(figures), out)


def show(title: str, name: str, value: Estimate, unit: str) -> None:
  print(f"{title:<44} {name:<26} {value.value:9.3f} {unit}   [{value.low:.3f}, {value.high:.3f}]",
        flush=True)


# Each piece alone.


def alone() -> dict[str, Any]:
  """Microseconds of one stamp with what it holds back, of the state's upkeep, and of
  `Recorder.record`."""
  result: dict[str, Any] = {}
  count = 200
  for name in ("native", "callback"):
    clock = resolve_clock(name)

    def chain(stamp: jax.Array, value: jax.Array, clock: Any, stamps: bool) -> jax.Array:
      for _ in range(count):
        value = value * jnp.float32(1.0000001) + jnp.float32(1e-9)
        if stamps:
          stamp = clock.stamp(stamp, value)
          (value,) = hold(clock, stamp, [value])
        else:
          value = jnp.sin(value)  # keeps the chain from being folded
      return value

    with_stamps = jax.jit(functools.partial(chain, clock=clock, stamps=True))
    without = jax.jit(functools.partial(chain, clock=clock, stamps=False))
    _seconds_each_chain(with_stamps)
    _seconds_each_chain(without)
    figures = interleave({"with": functools.partial(_seconds_each_chain, with_stamps),
                          "without": functools.partial(_seconds_each_chain, without)},
                         _rounds.value)
    each = estimate((figures["with"] - figures["without"]) / count * 1e6)
    result[f"stamp_and_hold_{name}_us"] = each.to_json()
    show("stamp, with the value it holds back", name, each, "us")
  upkeep = estimate(_upkeep_us())
  result["upkeep_us"] = upkeep.to_json()
  show("ring, clockwork of the state", "per step", upkeep, "us")
  record = estimate(_record_us())
  result["record_us"] = record.to_json()
  show("Recorder.record on the training thread", "per step", record, "us")
  return result


def _seconds_each_chain(function: Callable[..., jax.Array]) -> float:
  value = jnp.ones((64,), jnp.float32)
  return seconds_each(lambda: function(words.zero(), value).block_until_ready(), 10)


def _tiny(paced: bool) -> tuple[Callable[..., Any], Any, jaxpace.Instrumented | None]:
  """A step with nothing in it but its all-reduce, on one device."""
  mesh = one_device()

  def step(state: jax.Array, batch: jax.Array) -> jax.Array:
    return state + jax.lax.psum(batch, "data")

  if not paced:
    return (jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())),
            None, None)
  instrumented = jaxpace.instrument(step, "data", clock="native")
  spec = jaxpace.spec(mesh)
  compiled = jax.jit(
      jax.shard_map(instrumented, mesh=mesh, in_specs=(spec, P(), P("data")),
                    out_specs=(spec, P())), donate_argnums=0)
  return compiled, instrumented.init(mesh), instrumented


def _upkeep_us() -> np.ndarray:
  """Instrumented minus bare, of a step that does nothing else: three stamps and the state's own
  arithmetic."""
  bare, _, _ = _tiny(False)
  paced, pace, _ = _tiny(True)
  state, batch = jnp.zeros((8,)), jnp.ones((8,))
  holder = [pace]

  def bare_step() -> None:
    bare(state, batch).block_until_ready()

  def paced_step() -> None:
    holder[0], out = paced(holder[0], state, batch)
    out.block_until_ready()
    holder[0].step.block_until_ready()

  bare_step()
  paced_step()
  figures = interleave({"bare": lambda: seconds_each(bare_step, 100),
                        "paced": lambda: seconds_each(paced_step, 100)},
                       _rounds.value)
  return (figures["paced"] - figures["bare"]) * 1e6


def _record_us() -> np.ndarray:
  paced, pace, instrumented = _tiny(True)
  state, batch = jnp.zeros((8,)), jnp.ones((8,))
  means = []
  with tempfile.TemporaryDirectory() as folder, jaxpace.Recorder(folder, instrumented) as recorder:
    for _ in range(_rounds.value):
      spent = 0.0
      for _ in range(200):
        pace, out = paced(pace, state, batch)
        out.block_until_ready()
        start = time.perf_counter()
        recorder.record(pace)
        spent += time.perf_counter() - start
      means.append(spent / 200 * 1e6)
  return np.asarray(means)


# Whole steps.


def step_sizes() -> dict[str, Any]:
  """Overhead in percent of bare steps of several sizes, one device, recording on; an A/A arm beside
  it."""
  result: dict[str, Any] = {}
  mesh = one_device()
  for size in map(float, _sizes.value):
    batch = batch_for(mesh, size * 1e-3)
    steps = max(2, round(100 / size))
    with tempfile.TemporaryDirectory() as root:
      state, data = mlp(batch)
      arms: dict[str, dict[str, Any] | None] = {
          "bare": None, "bare_again": None, "native": {"clock": "native", "share": None},
          "native_no_phases": {"clock": "native", "share": None, "phases": False},
          "callback": {"clock": "callback", "share": None}}
      loops = {name: Loop(mesh, state, data, paced, os.path.join(root, name),
                          sharing_time=len(arms))
               for name, paced in arms.items()}
      figures = interleave({name: functools.partial(loop.block, steps)
                            for name, loop in loops.items()},
                           _rounds.value, progress=measured.progress(f"{size:g} ms", _rounds.value))
      for loop in loops.values():
        loop.close()
    entry: dict[str, Any] = {"bare_ms": estimate(figures["bare"] * 1e3).to_json(),
                             "steps_per_block": steps,
                             "faults": {name: loop.faults / loop.steps
                                        for name, loop in loops.items()}}
    for name in ("bare_again", "native", "native_no_phases", "callback"):
      extra = estimate((figures[name] / figures["bare"] - 1) * 100)
      entry[f"{name}_percent"] = extra.to_json()
      entry[f"{name}_extra_us"] = estimate((figures[name] - figures["bare"]) * 1e6).to_json()
      show(f"step of {np.median(figures['bare']) * 1e3:.2f} ms, one device", name, extra, "%")
    result[f"{size:g}"] = entry
  return result


def dispatch() -> dict[str, Any]:
  """How long the call of a step of about 50 ms holds the training thread: small where dispatch is
  asynchronous."""
  mesh = one_device()
  batch = batch_for(mesh, 50e-3)
  clocks: dict[str, dict[str, Any] | None] = {
      "bare": None, "native": {"clock": "native"}, "callback": {"clock": "callback"}}
  calls: dict[str, list[float]] = {name: [] for name in clocks}
  with tempfile.TemporaryDirectory() as root:
    state, data = mlp(batch)
    loops = {name: Loop(mesh, state, data, options, os.path.join(root, name),
                        sharing_time=len(clocks))
             for name, options in clocks.items()}

    def whole(name: str) -> float:
      loop, start = loops[name], time.perf_counter()
      loss = loop.call()
      calls[name].append(time.perf_counter() - start)
      if loop.recorder is not None:
        loop.recorder.record(loop.pace)
      jax.block_until_ready(loss)
      return time.perf_counter() - start

    # In turns: measured one after the other, a bare step once took 51 ms and one with callbacks 34.
    steps = interleave({name: functools.partial(whole, name) for name in loops}, _rounds.value)
    for loop in loops.values():
      loop.close()
  result = {}
  for name, took in steps.items():
    result[name] = {"call_ms": estimate(np.asarray(calls[name]) * 1e3).to_json(),
                    "step_ms": estimate(took * 1e3).to_json(),
                    "step_percent": estimate((took / steps["bare"] - 1) * 100).to_json()}
    show("call of a step returns after", name, estimate(np.asarray(calls[name]) * 1e3), "ms")
  return result


# Several processes.


def launch(processes: int) -> dict[str, Any]:
  """Runs this program in several processes and returns process 0's figures."""
  with tempfile.TemporaryDirectory() as root:
    target = os.path.join(root, "figures.json")
    command = [sys.executable, "-m", "jaxpace.cli", "run", "--no-record", "--nproc", str(processes),
               "--logs", os.path.join(root, "logs"), "--", sys.executable, "-m",
               "experiments.measure.overhead", f"--worker={target}", f"--rounds={_rounds.value}"]
    subprocess.run(command, check=True)
    figures = json.loads(pathlib.Path(target).read_text())
  return figures


def several_processes(target: pathlib.Path) -> None:
  """One process of several: bare, share=None and share=True in turns. All processes draw the same
  order."""
  mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
  state, data = mlp(64 * jax.device_count(), width=32)
  with tempfile.TemporaryDirectory() as root:
    arms = {"bare": None, "bare_again": None, "share_none": {"share": None},
            "share": {"share": True}}
    loops = {name: Loop(mesh, state, data, paced, os.path.join(root, name), sharing_time=len(arms))
             for name, paced in arms.items()}
    figures = interleave({name: functools.partial(loop.block, 10) for name, loop in loops.items()},
                         _rounds.value)
    for loop in loops.values():
      loop.close()
  if jax.process_index() != 0:
    return
  entry: dict[str, Any] = {"bare_ms": estimate(figures["bare"] * 1e3).to_json()}
  for name in ("bare_again", "share_none", "share"):
    extra = estimate((figures[name] - figures["bare"]) * 1e6)
    entry[f"{name}_extra_us"] = extra.to_json()
    entry[f"{name}_percent"] = estimate((figures[name] / figures["bare"] - 1) * 100).to_json()
    show(f"{jax.process_count()} gloo processes, bare {np.median(figures['bare']) * 1e3:.2f} ms",
         name, extra, "us")
  target.write_text(json.dumps(entry))


if __name__ == "__main__":
  app.run(main)
