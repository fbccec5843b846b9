"""What being measured costs: bare steps against instrumented ones, paired and interleaved in one run.

    python -m experiments.overhead                  # one process: stamps, step sizes, dispatch; then 2 and 4 processes
    python -m experiments.overhead --parts alone

Writes docs/measurements/overhead.json and .md with the command and the machine. Nothing else should run meanwhile.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import pathlib
import resource
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
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import jaxpace
import jaxpace.distributed
from experiments import measured, overhead_tables
from experiments.paired import Estimate, estimate, interleave, seconds_each
from jaxpace.execution import hold, resolve_clock, words

_PARTS = ("alone", "steps", "dispatch", "processes")
_parts = flags.DEFINE_list("parts", ",".join(_PARTS), f"Which of {', '.join(_PARTS)} to measure.")
_out = flags.DEFINE_string("out", "docs/measurements/overhead.json", "File the figures are written to.")
_sizes = flags.DEFINE_list("sizes_ms", "2,5,20,50", "Sizes of the bare step to aim at, in ms.")
_rounds = flags.DEFINE_integer("rounds", 80, "Rounds of interleaved blocks.", lower_bound=4)
_worker = flags.DEFINE_string("worker", "", "Internal: this is one process of several; file for process 0's figures.")

Blocks = dict[str, Callable[[], float]]


def main(_: list[str]) -> None:
  logging.getLogger("jax").setLevel(logging.WARNING)
  unknown = set(_parts.value) - set(_PARTS)
  if unknown:
    raise app.UsageError(f"--parts: {', '.join(sorted(unknown))} is none of {', '.join(_PARTS)}.")
  measured.keep_memory("experiments.overhead")
  if _worker.value:
    jaxpace.distributed.initialize()
    several_processes(pathlib.Path(_worker.value))
    return
  out = pathlib.Path(_out.value)
  figures: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
  figures |= measured.circumstances("experiments.overhead")
  if "alone" in _parts.value:
    figures["alone"] = alone()
  if "steps" in _parts.value:
    figures["steps"] = step_sizes()
  if "dispatch" in _parts.value:
    figures["dispatch"] = dispatch()
  if "processes" in _parts.value:
    figures["processes"] = {str(n): launch(n) for n in (2, 4)}
  measured.write(figures, overhead_tables.lines(figures), out)


def show(title: str, name: str, value: Estimate, unit: str) -> None:
  print(f"{title:<44} {name:<26} {value.median:9.3f} {unit}   [{value.low:.3f}, {value.high:.3f}]", flush=True)


# Each piece alone.


def alone() -> dict[str, Any]:
  """Microseconds of one stamp with what it holds back, of the state's upkeep, and of `Recorder.record`."""
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
                          "without": functools.partial(_seconds_each_chain, without)}, _rounds.value)
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
    return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())), None, None
  instrumented = jaxpace.instrument(step, "data", clock="native")
  spec = jaxpace.spec(mesh)
  compiled = jax.jit(
      jax.shard_map(instrumented, mesh=mesh, in_specs=(spec, P(), P("data")), out_specs=(spec, P())), donate_argnums=0)
  return compiled, instrumented.init(mesh), instrumented


def _upkeep_us() -> np.ndarray:
  """Instrumented minus bare, of a step that does nothing else: three stamps and the state's own arithmetic."""
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
  figures = interleave({"bare": lambda: seconds_each(bare_step, 100), "paced": lambda: seconds_each(paced_step, 100)},
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


def one_device() -> Mesh:
  return jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])


def mlp_step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
  """A train step of a three-layer perceptron with momentum; its work is set by the batch."""

  def loss_fn(params: Any) -> jax.Array:
    x = batch["x"]
    for layer in params[:-1]:
      x = jax.nn.relu(x @ layer["w"] + layer["b"])
    logits = x @ params[-1]["w"] + params[-1]["b"]
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), batch["y"][:, None], axis=1))

  params, momentum = state
  loss, grads = jax.value_and_grad(loss_fn)(params)
  grads, loss = jax.lax.pmean((grads, loss), "data")
  momentum = jax.tree.map(lambda m, g: jnp.float32(0.9) * m + g, momentum, grads)
  params = jax.tree.map(lambda p, m: p - jnp.float32(1e-3) * m, params, momentum)
  return (params, momentum), loss


def mlp(batch: int, width: int = 256, inputs: int = 64) -> tuple[Any, Any]:
  """State and one batch, numpy, the same on every process."""
  rng = np.random.default_rng(0)
  sizes = [inputs, width, width, 10]
  params = [{"w": (rng.standard_normal((a, b)) / np.sqrt(a)).astype(np.float32), "b": np.zeros(b, np.float32)}
            for a, b in zip(sizes[:-1], sizes[1:], strict=True)]
  data = {"x": rng.standard_normal((batch, inputs)).astype(np.float32), "y": rng.integers(0, 10, batch, np.int32)}
  return (params, jax.tree.map(np.zeros_like, params)), data


def _bare(mesh: Mesh) -> Callable[..., Any]:
  return jax.jit(jax.shard_map(mlp_step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False),
                 donate_argnums=0)


def _instrumented(mesh: Mesh, **options: Any) -> tuple[Callable[..., Any], Any, jaxpace.Instrumented]:
  paced = jaxpace.instrument(mlp_step, "data", **options)
  spec = jaxpace.spec(mesh)
  step = jax.jit(jax.shard_map(paced, mesh=mesh, in_specs=(spec, P(), P("data")), out_specs=(spec, P()),
                               check_vma=False), donate_argnums=(0, 1))
  return step, paced.init(mesh), paced


class _Loop:
  """A training loop that can be run a block at a time; recorded if it is instrumented."""

  def __init__(self, mesh: Mesh, state: Any, batch: Any, folder: str | None, **options: Any):
    sharding = jax.sharding.NamedSharding(mesh, P())
    self.state = jax.tree.map(lambda leaf: jax.make_array_from_callback(
        leaf.shape, sharding, lambda index: leaf[index]), state)
    self.batch = jax.tree.map(lambda leaf: jax.make_array_from_callback(
        leaf.shape, jax.sharding.NamedSharding(mesh, P("data")), lambda index: leaf[index]), batch)
    self.recorder: jaxpace.Recorder | None = None
    self.steps = self.faults = 0  # page faults of the process; counted after the first block
    if folder is None:
      self.step = _bare(mesh)
    else:
      self.step, self.pace, paced = _instrumented(mesh, **options)
      self.recorder = jaxpace.Recorder(folder, paced, handle_sigterm=False)
      self.recorder.__enter__()
    self.block(2)
    self.steps = self.faults = 0

  def block(self, steps: int) -> float:
    """Runs steps as a training loop does, without waiting in between; mean seconds of one."""
    loss: Any = None
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    start = time.perf_counter()
    for _ in range(steps):
      if self.recorder is None:
        self.state, loss = self.step(self.state, self.batch)
      else:
        self.pace, (self.state, loss) = self.step(self.pace, self.state, self.batch)
        self.recorder.record(self.pace)
    jax.block_until_ready(loss)
    seconds = (time.perf_counter() - start) / steps
    self.steps += steps
    self.faults += resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    return seconds

  def close(self) -> None:
    if self.recorder is not None:
      self.recorder.__exit__(None, None, None)


def step_sizes() -> dict[str, Any]:
  """Overhead in percent of bare steps of several sizes, one device, recording on; an A/A arm beside it."""
  result: dict[str, Any] = {}
  mesh = one_device()
  for size in map(float, _sizes.value):
    batch = _batch_for(mesh, size * 1e-3)
    steps = max(2, round(100 / size))
    with tempfile.TemporaryDirectory() as root:
      state, data = mlp(batch)
      loops = {"bare": _Loop(mesh, state, data, None), "bare_again": _Loop(mesh, state, data, None),
               "native": _Loop(mesh, state, data, os.path.join(root, "n"), clock="native", share=None),
               "native_no_phases": _Loop(mesh, state, data, os.path.join(root, "p"), clock="native", phases=False,
                                         share=None),
               "callback": _Loop(mesh, state, data, os.path.join(root, "c"), clock="callback", share=None)}
      figures = interleave({name: functools.partial(loop.block, steps) for name, loop in loops.items()},
                           _rounds.value, progress=measured.progress(f"{size:g} ms", _rounds.value))
      for loop in loops.values():
        loop.close()
    entry: dict[str, Any] = {"bare_ms": estimate(figures["bare"] * 1e3).to_json(), "steps_per_block": steps,
                             "faults": {name: loop.faults / loop.steps for name, loop in loops.items()}}
    for name in ("bare_again", "native", "native_no_phases", "callback"):
      extra = estimate((figures[name] / figures["bare"] - 1) * 100)
      entry[f"{name}_percent"] = extra.to_json()
      entry[f"{name}_extra_us"] = estimate((figures[name] - figures["bare"]) * 1e6).to_json()
      show(f"step of {np.median(figures['bare']) * 1e3:.2f} ms, one device", name, extra, "%")
    result[f"{size:g}"] = entry
  return result


def _batch_for(mesh: Mesh, seconds: float) -> int:
  """Batch size whose bare step takes about this long."""
  batch = 64
  for _ in range(6):
    state, data = mlp(batch)
    loop = _Loop(mesh, state, data, None)
    took = min(loop.block(5) for _ in range(5))
    if abs(took / seconds - 1) < 0.1:
      break
    batch = max(8, int(batch * min(max(seconds / took, 0.25), 8)))
  return batch


def dispatch() -> dict[str, Any]:
  """How long the call of a step of about 50 ms holds the training thread: small where dispatch is asynchronous."""
  mesh = one_device()
  batch = _batch_for(mesh, 50e-3)
  result = {}
  for name, options in (("bare", None), ("native", {"clock": "native"}), ("callback", {"clock": "callback"})):
    state, data = mlp(batch)
    with tempfile.TemporaryDirectory() as root:
      loop = _Loop(mesh, state, data, None if options is None else root, **(options or {}))
      calls, steps = [], []
      for _ in range(max(_rounds.value // 2, 10)):
        start = time.perf_counter()
        if options is None:
          loop.state, loss = loop.step(loop.state, loop.batch)
        else:
          loop.pace, (loop.state, loss) = loop.step(loop.pace, loop.state, loop.batch)
        calls.append(time.perf_counter() - start)
        if loop.recorder is not None:
          loop.recorder.record(loop.pace)
        jax.block_until_ready(loss)
        steps.append(time.perf_counter() - start)
      loop.close()
    result[name] = {"call_ms": estimate(np.asarray(calls) * 1e3).to_json(),
                    "step_ms": estimate(np.asarray(steps) * 1e3).to_json()}
    show("call of a step returns after", name, estimate(np.asarray(calls) * 1e3), "ms")
  return result


# Several processes.


def launch(processes: int) -> dict[str, Any]:
  """Runs this program in several processes and returns process 0's figures."""
  with tempfile.TemporaryDirectory() as root:
    target = os.path.join(root, "figures.json")
    command = [sys.executable, "-m", "jaxpace.cli", "launch", "--nproc", str(processes), "--logs",
               os.path.join(root, "logs"), "--", sys.executable, "-m", "experiments.overhead",
               f"--worker={target}", f"--rounds={_rounds.value}"]
    subprocess.run(command, check=True)
    figures = json.loads(pathlib.Path(target).read_text())
  return figures


def several_processes(target: pathlib.Path) -> None:
  """One process of several: bare, share=None and share=True in turns. All processes draw the same order."""
  mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
  state, data = mlp(64 * jax.device_count(), width=32)
  with tempfile.TemporaryDirectory() as root:
    loops = {"bare": _Loop(mesh, state, data, None), "bare_again": _Loop(mesh, state, data, None),
             "share_none": _Loop(mesh, state, data, os.path.join(root, "n"), share=None),
             "share": _Loop(mesh, state, data, os.path.join(root, "s"), share=True)}
    figures = interleave({name: functools.partial(loop.block, 10) for name, loop in loops.items()}, _rounds.value)
    for loop in loops.values():
      loop.close()
  if jax.process_index() != 0:
    return
  entry: dict[str, Any] = {"bare_ms": estimate(figures["bare"] * 1e3).to_json()}
  for name in ("bare_again", "share_none", "share"):
    extra = estimate((figures[name] - figures["bare"]) * 1e6)
    entry[f"{name}_extra_us"] = extra.to_json()
    entry[f"{name}_percent"] = estimate((figures[name] / figures["bare"] - 1) * 100).to_json()
    show(f"{jax.process_count()} gloo processes, bare {np.median(figures['bare']) * 1e3:.2f} ms", name, extra, "us")
  target.write_text(json.dumps(entry))


if __name__ == "__main__":
  app.run(main)
