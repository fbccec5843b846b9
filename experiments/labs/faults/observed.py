"""A trainer under plain `jit` in the place of the lab's own step: `jaxpace.observe` times its
collectives.

Layers in a scan, rematerialised, parameters sharded over `fsdp`, the batch over `data` and `fsdp`:
gathers in the forward and the backward pass, gradients scattered and summed. A rank works at the
begin of each layer, before it takes part in gathering that layer's parameters, by sleep, so that
two cores do not set the pace; a fault's extra work lies in one layer or in all. What was slept is
read off the clock beside each sleep, apart from any mark.
"""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpace
from experiments.labs.faults.schedule import Schedule
from experiments.labs.faults.spec import Spec
from experiments.labs.faults.worker import Process, slept_in
from jaxpace.observation.clocks import Clock, resolve_clock

LAYERS, WIDTH, BATCH = 3, 32, 16
WORK, EXTRA = range(2)
BOTH = ("data", "fsdp")


def layer_of(spec: Spec) -> int | None:
  """The layer that a run's extra work lies in, by its seed; None: it is spread over all of them."""
  place = spec.seed % (LAYERS + 1)
  return None if place == LAYERS else place


def mesh_of(devices: int) -> Mesh:
  """Parameters are sharded over two devices; what is more is data parallel."""
  return jax.make_mesh((devices // 2, 2), BOTH, axis_types=(AxisType.Auto,) * 2)


def make_step(clock: Clock, mesh: Mesh) -> Any:
  """Makes the step `(state, asked) -> state`.

  `asked` is float32 [K, layers, R, 2]: seconds of work and of extra work in each step. The state
  holds the parameters, the batch, the number of the step and `spent`, [K, layers, R, 2]: what was
  really slept.
  """
  shards = {"up": P(None, "fsdp"), "down": P("fsdp", None)}

  def each(hidden: jax.Array, up: jax.Array, down: jax.Array, seconds: jax.Array) -> Any:
    values, worked = slept_in(clock, [hidden, up, down], seconds[0, WORK])
    values, more = slept_in(clock, values, seconds[0, EXTRA])
    return (*values, jnp.stack([worked, more])[None])

  island = jax.shard_map(each, mesh=mesh,
                         in_specs=(P(BOTH, None), shards["up"], shards["down"], P(BOTH, None)),
                         out_specs=(P(BOTH, None), shards["up"], shards["down"], P(BOTH, None)),
                         check_vma=False)

  def block(hidden: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    whole = [jax.lax.with_sharding_constraint(w, NamedSharding(mesh, P(None, None)))
             for w in (up, down)]
    return hidden + jnp.tanh(hidden @ whole[0]) @ whole[1]

  def loss_of(params: Any, batch: jax.Array, seconds: jax.Array) -> tuple[jax.Array, jax.Array]:
    def layer(hidden: jax.Array, own: Any) -> tuple[jax.Array, jax.Array]:
      weights, asked = own
      hidden, up, down, spent = island(hidden, weights["up"], weights["down"], asked)
      # What was slept stays outside: remat would sleep again in the backward pass.
      return jax.checkpoint(block)(hidden, up, down), spent

    hidden, spent = jax.lax.scan(layer, batch, (params, seconds))
    return jnp.mean(hidden ** 2), spent

  def step(state: dict[str, Any], asked: jax.Array) -> dict[str, Any]:
    seconds = jax.lax.dynamic_index_in_dim(asked, state["step"], keepdims=False)
    (_, spent), gradient = jax.value_and_grad(loss_of, has_aux=True)(
        state["params"], state["batch"], seconds)
    params = jax.tree.map(lambda a, b: a - jnp.float32(1e-3) * b, state["params"], gradient)
    kept = jax.lax.dynamic_update_index_in_dim(state["spent"], spent, state["step"], axis=0)
    return {**state, "params": params, "step": state["step"] + 1, "spent": kept}

  return step


class ObservedProcess(Process):
  """The same process of the lab, its step under plain `jit` and observed."""

  def __init__(self, steps: int, hosts_seconds: float):
    """Compiles.

    Args:
      steps: most steps a run may have.
      hosts_seconds: between two samples of the host's counters.
    """
    self.mesh: Mesh = mesh_of(jax.device_count())
    self.index, self.steps, self.hosts_seconds = jax.process_index(), steps, hosts_seconds
    self.devices = list(self.mesh.devices.flat)
    # The lab numbers ranks as JAX does; the mesh holds them in an order of its own.
    order = jax.devices()
    self.column = [self.devices.index(device) for device in order]
    self.own = [rank for rank, device in enumerate(order) if device.process_index == self.index]
    put = {name: NamedSharding(self.mesh, spec) for name, spec in (
        ("up", P(None, None, "fsdp")), ("down", P(None, "fsdp", None)), ("batch", P(BOTH, None)),
        ("asked", P(None, None, BOTH, None)), ("all", P()))}
    self.shardings = put
    state = {"params": {"up": put["up"], "down": put["down"]}, "batch": put["batch"],
             "step": put["all"], "spent": put["asked"]}
    self.step = jaxpace.observe(jax.jit(make_step(resolve_clock(), self.mesh),
                                        in_shardings=(state, put["asked"]), out_shardings=state,
                                        donate_argnums=0))
    self._put_in_place(np.zeros((steps, LAYERS, len(order), 2), np.float32))
    self.state = self.step(self.state, self.asked)
    jax.block_until_ready(self.state)

  def _recorder(self, directory: pathlib.Path) -> Any:
    return jaxpace.Recorder(directory, self.step, hosts=self.hosts_seconds)

  def begin(self, spec: Spec, todo: Schedule) -> None:
    """Puts a run's schedule and a new state in place, and waits until they are there."""
    ranks, steps = todo.work.shape
    asked = np.zeros((self.steps, LAYERS, ranks, 2), np.float32)
    asked[:steps, :, :, WORK] = todo.work.T[:, None] / LAYERS
    place = layer_of(spec)
    if place is None:
      asked[:steps, :, :, EXTRA] = todo.extra.T[:, None] / LAYERS
    else:
      asked[:steps, place, :, EXTRA] = todo.extra.T
    self._put_in_place(asked)

  def one_step(self, recorder: jaxpace.Recorder) -> None:
    """Runs and records a step, and waits for it."""
    self.state = self.step(self.state, self.asked)
    recorder.record()
    jax.block_until_ready(self.state)

  def spent(self) -> np.ndarray:
    """[own ranks, K, 3] seconds really slept in the steps of the run, of all layers together;
    nothing is computed."""
    by_device = {shard.device: np.asarray(shard.data)[:, :, 0].sum(axis=1)
                 for shard in self.state["spent"].addressable_shards}
    own = np.stack([by_device[jax.devices()[rank]] for rank in self.own])  # [own, K, 2]
    return np.stack([own[..., WORK], np.zeros_like(own[..., WORK]), own[..., EXTRA]], axis=-1)

  def _put_in_place(self, asked: Any) -> None:
    """A new state, and the schedule [K, layers, R, 2], whose ranks are put where the mesh has
    them."""
    random = np.random.default_rng(0)
    by_place = np.empty_like(asked)
    by_place[:, :, self.column] = asked
    self.asked = self._placed(by_place, "asked")
    self.state = {
        "params":
        {name: self._placed(0.1 * random.standard_normal((LAYERS, *shape)).astype(np.float32), name)
         for name, shape in (("up", (WIDTH, 4 * WIDTH)), ("down", (4 * WIDTH, WIDTH)))},
        "batch": self._placed(random.standard_normal((BATCH, WIDTH)).astype(np.float32), "batch"),
        "step": self._placed(np.zeros((), np.int32), "all"),
        "spent": self._placed(np.zeros_like(asked), "asked")}
    jax.block_until_ready((self.asked, self.state))

  def _placed(self, values: np.ndarray, name: str) -> jax.Array:
    return jax.make_array_from_callback(values.shape, self.shardings[name],
                                        lambda index: values[index])


