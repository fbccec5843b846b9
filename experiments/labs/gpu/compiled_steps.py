"""Eight GPUs that are not there, and steps as trainers write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from experiments.labs.gpu.observed_steps import Step, transformer

P = PartitionSpec
RANKS = 8

# Of an NVIDIA H200, as its properties are published; XLA asks for them where no device answers.
_TARGET = """
gpu_device_info {
  threads_per_block_limit: 1024  threads_per_warp: 32  shared_memory_per_block: 49152  shared_memory_per_core: 233472
  threads_per_core_limit: 2048  core_count: 132  fpus_per_core: 128  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535  block_dim_limit_z: 65535  memory_bandwidth: 4800000000000  l2_cache_size: 62914560
  clock_rate_ghz: 1.98  device_memory_size: 150754820096  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 }  registers_per_core_limit: 65536  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
runtime_version { major: 12 minor: 9 patch: 0 }
device_description_str: "NVIDIA H200"
"""  # noqa: E501


def gpus(*axes: str) -> Mesh:
  """Eight GPUs that are not there, halved along each axis but the first.

  Raises:
    SystemExit: JAX has no compiler for them.
  """
  try:
    topology = topologies.get_topology_desc(platform="cuda", target_config=_TARGET,
                                            topology=f"1x1x{RANKS}")
  except (NotImplementedError, RuntimeError) as error:
    raise SystemExit(
        f"JAX can't compile for GPUs here ({error}). Install its compiler in an environment of "
        'its own: pip install "jax[cuda13]". No GPU and no driver is needed.') from None
  sizes = (RANKS >> len(axes) - 1, *[2] * (len(axes) - 1))
  return topologies.make_mesh(topology, sizes, axes)


def placed(tree: Any, mesh: Mesh, spec: PartitionSpec) -> Any:
  sharding = NamedSharding(mesh, spec)
  return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
                      tree)


def _floats(*shape: int) -> Any:
  return jax.ShapeDtypeStruct(shape, jnp.float32)


def _tensor_parallel() -> Step:
  """Eight layers of two matrices, cut along the second axis of the mesh by the compiler."""
  mesh = gpus("data", "model")

  def step(state: Any, batch: Any) -> Any:
    def loss(state: Any) -> Any:
      x = batch
      for up, down in state:
        x = x + jnp.tanh(x @ up) @ down
      return (x * x).mean()

    value, slopes = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, slopes), value

  up, down = (placed(_floats(*shape), mesh, spec) for shape, spec in (
      ((512, 2048), P(None, "model")), ((2048, 512), P("model", None))))
  state = [(up, down)] * 8
  return Step(step, state, placed(_floats(64, 512), mesh, P("data")),
              (jax.tree.map(lambda leaf: leaf.sharding, state), NamedSharding(mesh, P())))


def _mapped(body: Callable[..., Any], mesh: Mesh, *shape: int) -> Step:
  specs = P("data"), P("data")
  step = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P("data"), check_vma=False)
  weights, batch = (placed(_floats(RANKS, *each), mesh, P("data"))
                    for each in (shape, (64, shape[-1])))
  return Step(step, weights, batch, NamedSharding(mesh, P("data")))


def _pipeline() -> Step:
  """One layer a device; what it made goes to the next one in a loop, and back in its gradient."""
  ring = [(place, (place + 1) % RANKS) for place in range(RANKS)]

  def step(weights: Any, batch: Any) -> Any:
    def loss(weights: Any) -> Any:
      def turn(x: Any, _: Any) -> Any:
        return jax.lax.ppermute(jnp.tanh(x @ weights[0]), "data", ring), None

      out, _ = jax.lax.scan(turn, batch[0], length=2 * RANKS)
      return (out * out).mean()

    return weights - 0.1 * jax.grad(loss)(weights)

  return _mapped(step, gpus("data"), 512, 512)


def _experts() -> Step:
  """An expert a device: rows go to theirs and come back."""
  def step(weights: Any, batch: Any) -> Any:
    def loss(weights: Any) -> Any:
      sent = jax.lax.all_to_all(batch[0].reshape(RANKS, -1, 512), "data", 0, 0)
      back = jax.lax.all_to_all(jnp.tanh(sent @ weights[0]), "data", 0, 0)
      return jax.lax.pmean((back * back).mean(), "data")

    return weights - 0.1 * jax.grad(loss)(weights)

  return _mapped(step, gpus("data"), 512, 512)


def _solver() -> Step:
  """Iterations until all devices agree that it is enough, and a branch that all or none take."""
  def step(weights: Any, batch: Any) -> Any:
    def on(state: Any) -> Any:
      return (state[1] > 1e-3) & (state[2] < 50)

    def iterate(state: Any) -> Any:
      x, _, count = state
      x = x - 0.01 * (x @ weights[0])
      norm = jax.lax.psum(jnp.linalg.norm(x), "data")
      x = jax.lax.cond(norm > 10.0, lambda x: x / jax.lax.pmax(jnp.abs(x).max(), "data"),
                       lambda x: x, x)
      return x, norm, count + 1

    solved, _, _ = jax.lax.while_loop(on, iterate, (batch[0], jnp.float32(1), 0))
    return weights * (solved * solved).mean()

  return _mapped(step, gpus("data"), 512, 512)


OBSERVED: dict[str, Callable[[], Step]] = {
    "data parallel, 4x512": lambda: transformer(gpus("data"), 4, 512, fsdp=False, scan=False),
    "FSDP, scan, remat, 24x1024": lambda: transformer(gpus("data"), 24, 1024, fsdp=True, scan=True),
    "tensor parallel, 8 layers": _tensor_parallel,
    "pipeline in a loop": _pipeline,
    "experts": _experts,
    "loop until all agree, branch": _solver,
}
