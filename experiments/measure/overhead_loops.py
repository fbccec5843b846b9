"""The training step whose overhead is measured, bare and instrumented, in loops that run a block at
a time."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import jaxpace


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
  params = [{"w": (rng.standard_normal((a, b)) / np.sqrt(a)).astype(np.float32),
             "b": np.zeros(b, np.float32)}
            for a, b in zip(sizes[:-1], sizes[1:], strict=True)]
  data = {"x": rng.standard_normal((batch, inputs)).astype(np.float32),
          "y": rng.integers(0, 10, batch, np.int32)}
  return (params, jax.tree.map(np.zeros_like, params)), data


def _bare(mesh: Mesh) -> Callable[..., Any]:
  return jax.jit(jax.shard_map(mlp_step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(),
                               check_vma=False),
                 donate_argnums=0)


def _instrumented(mesh: Mesh,
                  **options: Any) -> tuple[Callable[..., Any], Any, jaxpace.Instrumented]:
  paced = jaxpace.instrument(mlp_step, "data", **options)
  spec = jaxpace.spec(mesh)
  step = jax.jit(jax.shard_map(paced, mesh=mesh, in_specs=(spec, P(), P("data")),
                               out_specs=(spec, P()), check_vma=False), donate_argnums=(0, 1))
  return step, paced.init(mesh), paced


class Loop:
  """A training loop that can be run a block at a time."""

  def __init__(self, mesh: Mesh, state: Any, batch: Any, paced: dict[str, Any] | None = None,
               folder: str | None = None, hosts: bool = True, sharing_time: int = 1):
    """Compiles, and runs two steps.

    Args:
      mesh: all devices, along "data".
      state, batch: of `mlp`.
      paced: options of `jaxpace.instrument`; None leaves the step bare.
      folder: run directory; None records nothing.
      hosts: whether the recorder samples the host.
      sharing_time: how many loops take turns. The recorder copies once a second; a loop that runs
        in only one second out of five would copy five times as often as a loop by itself.
    """
    sharding = jax.sharding.NamedSharding(mesh, P())
    self.state = jax.tree.map(lambda leaf: jax.make_array_from_callback(
        leaf.shape, sharding, lambda index: leaf[index]), state)
    self.batch = jax.tree.map(lambda leaf: jax.make_array_from_callback(
        leaf.shape, jax.sharding.NamedSharding(mesh, P("data")), lambda index: leaf[index]), batch)
    self.recorder: jaxpace.Recorder | None = None
    self.paced = paced is not None
    if paced is None:
      self.step = _bare(mesh)
    else:
      self.step, self.pace, instrumented = _instrumented(mesh, **paced)
      if folder is not None:
        self.recorder = jaxpace.Recorder(folder, instrumented, handle_sigterm=False, hosts=hosts,
                                         every_seconds=float(sharing_time))
        self.recorder.open()
    self.steps = self.faults = 0  # page faults of the process, after the first block
    self.cpu_seconds: list[float] = []  # of the process, a step, of each block after the first
    self.block(2)
    self.steps = self.faults = 0
    self.cpu_seconds.clear()

  def block(self, steps: int) -> float:
    """Runs steps as a training loop does, without waiting in between; mean seconds of one."""
    faults, cpu, start = (resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.process_time(),
                          time.perf_counter())
    for _ in range(steps):
      loss = self.call()
      if self.recorder is not None:
        self.recorder.record(self.pace)
    jax.block_until_ready(loss)
    seconds = (time.perf_counter() - start) / steps
    self.cpu_seconds.append((time.process_time() - cpu) / steps)
    self.steps += steps
    self.faults += resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    return seconds

  def call(self) -> jax.Array:
    """Dispatches one step and returns its loss."""
    if self.paced:
      self.pace, (self.state, loss) = self.step(self.pace, self.state, self.batch)
    else:
      self.state, loss = self.step(self.state, self.batch)
    return loss

  def close(self) -> None:
    if self.recorder is not None:
      self.recorder.close()


def batch_for(mesh: Mesh, seconds: float) -> int:
  """Batch size whose bare step takes about this long."""
  batch = 64
  for _ in range(6):
    state, data = mlp(batch)
    loop = Loop(mesh, state, data)
    took = min(loop.block(5) for _ in range(5))
    if abs(took / seconds - 1) < 0.1:
      break
    batch = max(8, int(batch * min(max(seconds / took, 0.25), 8)))
  return batch
