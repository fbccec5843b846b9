"""Parameters are the same, bit for bit, with the instrument on, pacing, and removed; so are the
collectives."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpace.observation.clocks import gate, resolve_clock, words
from tests.instrumentation import models
from tests.instrumentation.running import extra_operands, host_callbacks, mesh_of, pair, restless
from tests.quick import QUICK

pytestmark = pytest.mark.optimized(always=True)

STEPS = 20 if QUICK else 200
DTYPES = {"float32": (jnp.float32, jnp.float32), "bf16-compute": (jnp.float32, jnp.bfloat16),
          "bf16-params": (jnp.bfloat16, jnp.bfloat16)}


def block_params(width, dtype):
  """One pre-norm transformer block on FEATURES inputs, CLASSES outputs."""
  shapes = {"in": (models.FEATURES, width), "qkv": (width, 3 * width), "up": (width, 2 * width),
            "down": (2 * width, width), "out": (width, models.CLASSES)}
  params = {name: models.normal(i, *shape, dtype=dtype) / jnp.asarray(np.sqrt(shape[0]), dtype)
            for i, (name, shape) in enumerate(shapes.items())}
  return params | {"scale": jnp.ones(width, dtype), "shift": jnp.zeros(width, dtype),
                   "bias": jnp.zeros(models.CLASSES, dtype)}


def norm(x, scale, shift):
  wide = x.astype(jnp.float32)
  wide = (wide - wide.mean(-1, keepdims=True)) * jax.lax.rsqrt(wide.var(-1, keepdims=True) + 1e-5)
  return wide.astype(x.dtype) * scale + shift


def block(params, x, act):
  h = x @ params["in"]
  q, k, v = jnp.split(norm(h, params["scale"], params["shift"]) @ params["qkv"], 3, axis=-1)
  weights = jax.nn.softmax(jnp.einsum("btd,bsd->bts", q, k)
                           / jnp.asarray(np.sqrt(q.shape[-1]), x.dtype))
  h = h + jnp.einsum("bts,bsd->btd", weights, v)
  h = (h + act(norm(h, params["scale"], params["shift"]) @ params["up"]) @ params["down"]
       * jnp.asarray(0.7, x.dtype))
  return h @ params["out"] + params["bias"]


def block_loss(compute, act):
  """A loss full of products that end in sums: where fused multiply-adds come and go."""

  def loss(params, batch):
    x, y = batch
    cast = jax.tree.map(lambda p: p.astype(compute), params)
    out = block(cast, x.astype(compute), act).astype(jnp.float32)
    fit = jnp.mean(jnp.square(out - y) + out * y * jnp.float32(0.1)
                   - jax.nn.log_softmax(out) * jax.nn.softmax(y))
    return (fit + jnp.float32(1e-4) * sum(jnp.sum(jnp.square(p.astype(jnp.float32)))
                                          for p in jax.tree.leaves(params)))

  return loss


def momentum_step(loss_fn, by_autodiff):
  def step(state, batch):
    params, velocity = state
    if by_autodiff:
      loss, grads = jax.value_and_grad(lambda p: jax.lax.pmean(loss_fn(p, batch), "data"))(params)
    else:
      loss, grads = jax.lax.pmean(jax.value_and_grad(loss_fn)(params, batch), "data")
    velocity = jax.tree.map(lambda v, g: v * jnp.asarray(0.9, v.dtype) + g, velocity, grads)
    params = jax.tree.map(lambda p, v: p * jnp.asarray(0.999, p.dtype)
                          - v * jnp.asarray(0.02, p.dtype),
                          params, velocity)
    return (params, velocity), loss

  return step


@pytest.mark.long
@pytest.mark.parametrize("dtype, ranks, by_autodiff, act, settings", [
    ("float32", 2, False, jax.nn.gelu, {"clock": "native"}),
    ("float32", 2, False, jax.nn.silu, {"clock": "callback", "pacer": restless(), "share": True}),
    ("bf16-compute", 4, True, jax.nn.gelu, {"pacer": restless(), "share": None}),
    ("bf16-params", 2, False, jax.nn.gelu, {"share": True, "pacer": restless()}),
    ("bf16-params", 8, False, jax.nn.silu, {"share": True}),
], ids=lambda value: getattr(value, "__name__", None)
                         or (value if isinstance(value, str) else None))
def test_a_transformer_block_after_many_steps(dtype, ranks, by_autodiff, act, settings):
  stored, compute = DTYPES[dtype]
  params = block_params(8, stored)
  state = (params, jax.tree.map(jnp.zeros_like, params))
  data = [(models.normal(50 + k, 2 * ranks, 4, models.FEATURES),
           models.normal(70 + k, 2 * ranks, 4, models.CLASSES)) for k in range(3)]
  step = momentum_step(block_loss(compute, act), by_autodiff)
  both = pair(step, mesh_of(data=ranks), state, data[0], check_vma=by_autodiff, **settings)
  both.check_bits(state, data, STEPS)
  assert len(extra_operands(both.bare_hlo, both.hlo)) <= 1
  if both.paced.plan.clock == "native":
    assert host_callbacks(both.hlo) == 0


@pytest.mark.long
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_gradients_of_half_precision_alone(dtype):
  params, data = models.mlp_params(dtype=dtype), models.batches(4, dtype=dtype)
  both = pair(models.halves_step, mesh_of(data=4), params, data[0], share=True, pacer=restless())
  both.check_bits(params, data, STEPS)
  assert both.paced.plan.share == (dtype == jnp.bfloat16)
  assert len(extra_operands(both.bare_hlo, both.hlo)) <= 1


@pytest.mark.long
@pytest.mark.parametrize("tx", [
    optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2)),
    optax.chain(optax.add_decayed_weights(1e-3), optax.sgd(0.05, momentum=0.9, nesterov=True)),
], ids=["clip-adam", "decay-nesterov"])
def test_optax_transformations(tx):
  params = models.mlp_params()
  state, data = (params, tx.init(params)), models.batches(4)
  both = pair(models.optax_step(tx), mesh_of(data=4), state, data[0], pacer=restless())
  both.check_bits(state, data, STEPS)
  assert len(extra_operands(both.bare_hlo, both.hlo)) <= 1


def test_gradients_cast_up_for_the_sum_and_down_again():
  """XLA elides pairs of conversions around the all-reduce; nothing may come between them."""

  def loss(params, batch):
    cast = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    return jnp.mean(jnp.square(models.mlp(cast, batch[0].astype(jnp.bfloat16)).astype(jnp.float32)
                               - batch[1]))

  def step(params, batch):
    value, grads = jax.value_and_grad(loss)(params, batch)
    wide = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
    grads = jax.tree.map(lambda g: g.astype(jnp.bfloat16), jax.lax.pmean(wide, "data"))
    return models.sgd(params, grads), jax.lax.pmean(value, "data")

  params, data = models.mlp_params(dtype=jnp.bfloat16), models.batches(2)
  pair(step, mesh_of(data=2), params, data[0], pacer=restless()).check_bits(params, data, STEPS)


@pytest.mark.parametrize("name", ["native", "callback"])
def test_timestamps_inside_a_differentiated_function_leave_the_gradient_bitwise_equal(name):
  if name == "native" and resolve_clock().notice:
    pytest.skip(resolve_clock().notice)
  clock = resolve_clock(name)

  def loss(w, x):
    return jnp.sum(jnp.tanh(x @ w) ** jnp.float32(2))

  def timestamped(w, x):
    first = clock.timestamp(words.zero(), w, x)
    hidden = jnp.tanh(x @ w)
    _, after = clock.delay(jnp.sum(hidden) * jnp.float32(1e-9), 0.01, first, hidden)
    return jnp.sum(gate(clock, after, [hidden])[0] ** jnp.float32(2)), after

  w = jax.random.normal(jax.random.key(0), (7, 5))
  x = jax.random.normal(jax.random.key(1), (3, 7))
  plain = jax.jit(jax.grad(loss))(w, x)
  timed, timestamp = jax.jit(jax.grad(timestamped, has_aux=True))(w, x)
  np.testing.assert_array_equal(np.asarray(plain), np.asarray(timed))
  assert words.to_ns(np.asarray(timestamp)) > 0
