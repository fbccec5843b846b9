"""A training step in the forms in which people write them, its loop over micro-batches their own or
`jaxpace.accumulate`: in one process or several."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpace

FORMS = {"plain": P(), "fsdp": P(None, "data"), "tensor": P(None, None, "model"), "steps": P(),
         "nnx": P()}
"""Layout of the parameters, [layers, in, out]: on a mesh of the data axis, and for "tensor" of
another one."""
TOTAL, CAPACITY, SIZE, EXAMPLES, LAYERS, WIDTH = 8, 5, 2, 48, 3, 8
UNEVEN = {2: [3, 5], 4: [4, 1, 1, 2]}
STEPS = 20
"""Of which sixteen are even, and the rest not."""


class Model(nnx.Module):
  def __init__(self, weights: Any):
    self.weights = nnx.Param(weights)


class Form:
  """A form of a step on four devices, of one process or several."""

  def __init__(self, name: str):
    self.name, self.layout = name, FORMS[name]
    axes = {"data": 2, "model": 2} if name == "tensor" else {"data": 4}
    self.ranks = axes["data"]
    self.mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), devices=jax.devices()[:4],
                              axis_types=(AxisType.Auto,) * len(axes))
    drawn = np.random.default_rng(0)
    self.source = {"x": drawn.standard_normal((EXAMPLES, WIDTH), np.float32)}
    self.weights = 0.3 * drawn.standard_normal((LAYERS, WIDTH, WIDTH), np.float32)
    descent = optax.sgd(0.05, momentum=0.9)
    self.optimizer = (optax.MultiSteps(descent, 2).gradient_transformation() if name == "steps"
                      else descent)

  def loss_fn(self, weights: Any, batch: Any) -> Any:
    """Layers in a scan, each computed again in the backward pass."""
    @jax.checkpoint
    def layer(h: Any, w: Any) -> Any:
      return jnp.tanh(h @ w), None
    out, _ = jax.lax.scan(layer, batch["x"], weights)
    return jnp.sum((out - batch["x"]) ** 2), jnp.float32(SIZE)

  def own_loop(self, weights: Any, batch: Any, counts: Any) -> Any:
    """The trainer's own: each rank's micro-batches in a scan, one sum over the ranks after it."""
    del counts

    def each(weights: Any, batch: Any) -> Any:
      def turn(sums: Any, one: Any) -> Any:
        (loss, n), grads = jax.value_and_grad(self.loss_fn, has_aux=True)(weights, one)
        return jax.tree.map(jnp.add, sums, (loss, n, grads)), None
      zero = (jnp.float32(0), jnp.float32(0), jax.tree.map(jnp.zeros_like, weights))
      even = jax.tree.map(lambda leaf: leaf[:TOTAL // self.ranks], batch)
      loss, n, grads = jax.lax.psum(jax.lax.scan(turn, zero, even)[0], "data")
      return loss / n, jax.tree.map(lambda grad: grad / n, grads)

    return jax.shard_map(each, mesh=self.mesh, axis_names={"data"}, in_specs=(P(), P("data")),
                         out_specs=P(), check_vma=False)(weights, batch)

  def shared_loop(self, weights: Any, batch: Any, counts: Any) -> Any:
    return jaxpace.accumulate(self.loss_fn, weights, batch, counts, mesh=self.mesh)

  def jitted(self, loop: Any) -> Any:
    """The step with one of the loops, and the state that it begins with."""
    place = NamedSharding(self.mesh, self.layout)
    weights = jax.make_array_from_callback(self.weights.shape, place, lambda at: self.weights[at])
    if self.name == "nnx":
      model = Model(weights)
      optimizer = nnx.Optimizer(model, self.optimizer, wrt=nnx.Param)

      @nnx.jit
      def module_step(model: Any, optimizer: Any, batch: Any, counts: Any) -> Any:
        params = nnx.state(model, nnx.Param)
        loss, grads = loop(params["weights"].get_value(), batch, counts)
        optimizer.update(model, nnx.State({"weights": params["weights"].replace(grads)}))
        return loss

      return module_step, (model, optimizer)

    def train_step(weights: Any, moments: Any, batch: Any, counts: Any) -> Any:
      loss, grads = loop(weights, batch, counts)
      updates, moments = self.optimizer.update(grads, moments, weights)
      after = optax.apply_updates(weights, updates)
      return jax.lax.with_sharding_constraint(after, place), moments, loss

    return jax.jit(train_step, donate_argnums=(0, 1)), (weights,
                                                        jax.jit(self.optimizer.init)(weights))

  def run(self, loop: Any, feed: Any = None) -> tuple[list[np.ndarray], list[list[int]]]:
    """Runs the step; returns this process's part of the parameters after each, and the counts."""
    step, state = self.jitted(loop)
    even = np.full(self.ranks, TOTAL // self.ranks, np.int32)
    order = self.feed(None)
    if feed is not None:
      step = jaxpace.observe(step)
    seen, ran = [], []
    for number in range(STEPS):
      share = order.share(number, even) if feed is None else feed.next(step)
      out = step(*state, share.batch(self.source), share.counts)
      if self.name == "nnx":
        weights = state[0].weights.get_value()
      else:
        weights, *_ = state = out[:2]
      seen.append(np.concatenate([np.asarray(shard.data).reshape(-1)
                                  for shard in weights.addressable_shards]))
      ran.append(share.counts.tolist())
    return seen, ran

  def feed(self, balancer: Any) -> Any:
    return jaxpace.shares(self.mesh, examples=EXAMPLES, size=SIZE, total_micro_batches=TOTAL,
                          capacity=CAPACITY, balancer=balancer)

  def turning(self) -> Any:
    """Uneven counts once all ranks were seen to be busy in two steps."""
    even, other = [TOTAL // self.ranks] * self.ranks, UNEVEN[self.ranks]

    def update(observation: Any, known: Any) -> Any:
      known = known + jnp.all(observation.arrivals > 0).astype(jnp.int32)
      return jnp.where(known > 1, jnp.array(other, jnp.int32), jnp.array(even, jnp.int32)), known

    return jaxpace.Balancer(lambda ranks: jnp.int32(0), update, TOTAL)


def check(name: str) -> list[list[int]]:
  """Runs a form with either loop, compares the parameters, and returns the counts of the steps.

  Even counts leave the bits of the trainer's own loop; uneven ones add up in another order.
  """
  form = Form(name)
  own, _ = form.run(form.own_loop)
  shared, ran = form.run(form.shared_loop, form.feed(form.turning()))
  even = [TOTAL // form.ranks] * form.ranks
  assert ran == [even] * 16 + [UNEVEN[form.ranks]] * (STEPS - 16), ran
  assert np.abs(own[-1] - own[0]).max() > 1e-2, "it trains"
  for number, (one, other) in enumerate(zip(own, shared, strict=True)):
    if number < 16:
      assert one.tobytes() == other.tobytes(), (name, number, np.abs(one - other).max())
    np.testing.assert_allclose(other, one, rtol=0, atol=1e-6 * np.abs(one).max())
  return ran
