"""A small train step in which one rank is made late in a chosen place, by a known time, without
being compiled anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpace
from jaxpace.execution import Clock, hold, resolve_clock, words

PLACES = ("forward", "backward", "update")
LIMIT = 1.0  # s, no injected delay is longer


class Fault(NamedTuple):
  """What is injected in one step; arrays, so that one compiled program serves every fault."""

  rank: np.ndarray  # [] int32
  seconds: np.ndarray  # [3] float32, one for each of `PLACES`


def fault(place: str = "forward", rank: int = 0, seconds: float = 0.0) -> Fault:
  """A fault in one place; nothing anywhere if `seconds` is 0."""
  values = np.zeros(len(PLACES), np.float32)
  values[PLACES.index(place)] = seconds
  return Fault(np.int32(rank), values)


def held_back(clock: Clock, value: Any, seconds: jax.Array) -> tuple[Any, jax.Array]:
  """What `jaxpace.delay` does, but tells how long it really slept.

  Returns:
    The value, later, and the seconds between the delay's own two clock readings, float32 [].
  """
  leaves, tree = jax.tree.flatten(value)
  before, after = clock.delay(seconds, LIMIT, words.zero(), *leaves)
  return jax.tree.unflatten(tree, hold(clock, after, leaves)), words.seconds_between(before, after)


def late_step(clock: Clock) -> Callable[..., Any]:
  """Makes the per-device step `(params, batch, fault) -> (params, slept)`.

  `slept` is float32 [1, 3]: what this rank slept in each of `PLACES`. The gradients are averaged
  over "data".
  """

  @jax.custom_vjp
  def late_backward(value: jax.Array, seconds: jax.Array, probe: jax.Array) -> jax.Array:
    return value

  def backward(seconds: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    late, slept = held_back(clock, cotangent, seconds)
    return late, jnp.zeros_like(seconds), slept  # the probe's "gradient" carries the time out

  late_backward.defvjp(lambda value, seconds, probe: (value, seconds), backward)

  def step(params: Any, batch: Any, fault: Fault) -> tuple[Any, jax.Array]:
    mine = jax.lax.axis_index("data") == fault.rank
    forward, backward, update = jnp.where(mine, fault.seconds, jnp.float32(0))

    def loss_fn(params: Any, probe: jax.Array) -> tuple[jax.Array, jax.Array]:
      hidden = jnp.tanh(batch["x"] @ params["in"])
      hidden, slept = held_back(clock, hidden, forward)
      hidden = late_backward(hidden, backward, probe)
      scores = jax.nn.log_softmax(hidden @ params["out"])
      return -jnp.mean(jnp.take_along_axis(scores, batch["y"][:, None], axis=1)), slept

    (loss, slept_forward), (grads, slept_backward) = jax.value_and_grad(loss_fn, (
        0, 1), has_aux=True)(
            params, jnp.float32(0))
    grads, _ = jax.lax.pmean((grads, loss), "data")
    grads, slept_update = held_back(clock, grads, update)
    params = jax.tree.map(lambda p, g: p - jnp.float32(1e-3) * g, params, grads)
    return params, jnp.stack([slept_forward, slept_backward, slept_update])[None]

  return step


class LateJob:
  """That step, instrumented, on every rank of a mesh. The fault sleeps natively where it can,
  whatever clock stamps.

  A host callback that sleeps takes up to a millisecond more than it says, which is no fault of the
  stamps.
  """

  def __init__(self, mesh: Mesh, *, clock: str, rows: int, share: bool | None, width: int = 64):
    self.mesh = mesh
    self.ranks = int(mesh.shape["data"])
    self.paced = jaxpace.instrument(late_step(resolve_clock()), "data", clock=clock, share=share,
                                    slots=2, rows=rows)
    spec = jaxpace.spec(mesh)
    self.step = jax.jit(
        jax.shard_map(self.paced, mesh=mesh, in_specs=(spec, P(), P("data"), P()),
                      out_specs=(spec, (P(), P("data"))), check_vma=False), donate_argnums=(0, 1))
    self.pace = self.paced.init(mesh)
    rng = np.random.default_rng(0)
    examples = 16 * self.ranks
    self.params = self._put({"in": rng.standard_normal((8, width), np.float32),
                             "out": rng.standard_normal((width, 4), np.float32)}, P())
    self.batch = self._put({"x": rng.standard_normal((examples, 8), np.float32),
                            "y": rng.integers(0, 4, examples, np.int32)}, P("data"))

  def _put(self, tree: Any, spec: Any) -> Any:
    sharding = NamedSharding(self.mesh, spec)
    return jax.tree.map(lambda leaf: jax.make_array_from_callback(
        leaf.shape, sharding, lambda index: leaf[index]), tree)

  def run(self, fault: Fault) -> jax.Array:
    """Dispatches one step; returns what the ranks slept in it, [ranks, 3]."""
    self.pace, (self.params, slept) = self.step(self.pace, self.params, self.batch, fault)
    return slept
