"""Gradients over unequal numbers of micro-batches, against those of the whole batch at once."""

import functools
import re

import chex
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding

import jaxpace
from tests import quick
from tests.instrumentation.running import P, bits, instrumented, mesh_of

RANKS, CAPACITY, TOTAL, ROWS, WIDTH, KINDS = 4, 6, 12, 3, 8, 5
EVEN = (3, 3, 3, 3)
KEY = 7


@functools.cache
def params(dtype=jnp.float32):
  one, other = jax.random.split(jax.random.key(0))
  return {"w": (jax.random.normal(one, (WIDTH, WIDTH)) / 3).astype(dtype),
          "v": (jax.random.normal(other, (WIDTH, KINDS)) / 3).astype(dtype)}


def examples():
  """The global batch: [TOTAL, ROWS, WIDTH] inputs, [TOTAL, ROWS] targets, of which 0 is padding."""
  rng = np.random.default_rng(1)
  x = rng.normal(size=(TOTAL, ROWS, WIDTH)).astype(np.float32)
  return x, rng.integers(0, KINDS, (TOTAL, ROWS)).astype(np.int32)


def loss_fn(params, micro_batch, key=None):
  x, y = micro_batch
  hidden = jnp.tanh(x.astype(params["w"].dtype) @ params["w"])
  if key is not None:
    hidden = jnp.where(jax.random.bernoulli(key, 0.5, hidden.shape), hidden, jnp.zeros_like(hidden))
  return masked((hidden @ params["v"]).astype(jnp.float32), y)


def masked(logits, y):
  """The sum of what is lost where there is no padding, and of how much that is."""
  mask = (y > 0).astype(jnp.float32)
  each = -jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], 1)[:, 0]
  return jnp.sum(mask * each), jnp.sum(mask)


def shared_out(counts, capacity=CAPACITY):
  """The global batch in the ranks' parts, one after the other; what is not used is NaN: [R *
  capacity, ...]."""
  places = np.arange(len(counts) * capacity).reshape(len(counts), capacity)
  taken = np.concatenate([row[:count] for row, count in zip(places, counts, strict=True)])
  x, y = np.full((places.size, ROWS,
                  WIDTH), np.nan, np.float32), np.ones((places.size, ROWS), np.int32)
  x[taken], y[taken] = examples()
  return x, y


@functools.cache
def expected(dropout=False):
  """Loss and gradient of the whole batch at once, with no loop and no ranks."""
  return reference(params(), dropout)


def reference(of, dropout=False):
  x, y = examples()

  def loss(params):
    found = [loss_fn(params, (x[i], y[i]),
                     jax.random.fold_in(jax.random.key(KEY), i) if dropout else None)
             for i in range(TOTAL)]
    return sum(loss for loss, _ in found) / sum(weight for _, weight in found)

  return jax.value_and_grad(loss)(of)


def mapped(step, specs=(P(), P("data"), P()), out=P(), **settings):
  """A step on each of the ranks: of parameters, micro-batches, and counts."""
  return jax.jit(jax.shard_map(step, in_specs=specs, out_specs=out,
                               **{"mesh": mesh_of(data=RANKS), **settings}))


@functools.cache
def compiled(check_vma=True, dropout=False, **settings):
  def step(params, micro_batches, counts):
    key = jax.random.key(KEY) if dropout else None
    return jaxpace.accumulate(loss_fn, params, micro_batches, counts, key=key, **settings)

  return mapped(step, check_vma=check_vma)


def close(found, wanted, tolerance=3e-6):
  chex.assert_trees_all_close(found, wanted, rtol=tolerance * 10, atol=tolerance)


def of(*counts):
  return np.asarray(counts, np.int32)


@pytest.mark.parametrize("check_vma, dropout", [*quick.long((False, False)), (True, True)])
def test_any_shares_give_the_gradient_of_the_whole_batch(check_vma, dropout):
  step = compiled(check_vma, dropout)
  for counts in (EVEN, (6, 1, 0, 5), (0, 6, 6, 0)):
    close(step(params(), shared_out(counts), of(*counts)), expected(dropout))
  assert step._cache_size() == 1, "counts are data: nothing is compiled anew"
  hlo = step.lower(params(), shared_out(EVEN), of(*EVEN)).compile().as_text()
  assert len(re.findall(r" all-reduce(?:-start)?\(", hlo)) == 1, "they meet once"


@pytest.mark.parametrize("has_aux", [False, True])
def test_a_loss_without_weights_is_averaged_over_micro_batches(has_aux):
  def mean(params, micro_batch):
    loss, weight = loss_fn(params, micro_batch)
    return (loss / weight, {"tokens": weight}) if has_aux else loss / weight

  def step(params, micro_batches, counts):
    return jaxpace.accumulate(mean, params, micro_batches, counts, has_aux=has_aux, fetch=True,
                              weighted=False)

  x, y = examples()

  def whole(params):
    return sum(jnp.divide(*loss_fn(params, (x[i], y[i]))) for i in range(TOTAL)) / TOTAL

  found, grads = mapped(step)(params(), (x, y), of(6, 1, 0, 5))
  if has_aux:
    found, aux = found
    assert int(aux["tokens"]) == np.sum(y > 0)
  close((found, grads), jax.value_and_grad(whole)(params()))


@hypothesis.given(st.lists(st.integers(0, CAPACITY), min_size=RANKS - 1, max_size=RANKS - 1))
@hypothesis.settings(max_examples=quick.examples(30))
def test_dropout_is_the_same_whoever_runs_what(first):
  counts = (*first, TOTAL - sum(first))
  hypothesis.assume(0 <= counts[-1] <= CAPACITY)
  close(compiled(True, True)(params(), shared_out(counts), of(*counts)), expected(True))


def test_numbers_of_micro_batches_in_another_order():
  """Rank 0 runs those of odd number, rank 1 the others: `index` says so, and each gets its own
  key."""
  x, y = examples()
  order = np.concatenate([np.arange(1, TOTAL, 2), np.arange(0, TOTAL, 2)]).astype(np.int32)

  def step(params, micro_batches, count, index):
    return jaxpace.accumulate(loss_fn, params, micro_batches, count[0], key=jax.random.key(KEY),
                              index=index)

  run = mapped(step, (P(), P("data"), P("data"), P("data")), mesh=mesh_of(data=2))
  close(run(params(), (x[order], y[order]), of(6, 6), order), expected(True))


def test_under_pmap():
  counts = (1, 2, 6, 3)
  step = jax.pmap(lambda params, batch, counts: jaxpace.accumulate(
      loss_fn, params, batch, counts, "data"),
                  axis_name="data", in_axes=(None, 0, None), out_axes=None,
                  devices=jax.devices()[:RANKS])
  batch = jax.tree.map(lambda a: a.reshape(RANKS, CAPACITY, *a.shape[1:]), shared_out(counts))
  close(step(params(), batch, of(*counts)), expected())


def test_tensor_parallel_sums_in_the_loop_with_other_counts_in_each_data_group():
  def split_loss(params, micro_batch):
    x, y = micro_batch
    hidden = jnp.tanh(x @ params["w"])  # this rank's half of the columns
    return masked(jax.lax.psum(hidden @ params["v"], "model"), y)

  specs = {"w": P(None, "model"), "v": P("model")}
  run = mapped(lambda params, batch, counts: jaxpace.accumulate(split_loss, params, batch, counts),
               (specs, P("data"), P()), (P(), specs), mesh=mesh_of(data=2, model=2))
  for counts in ((6, 6), (9, 3), (2, 10)):
    close(run(params(), shared_out(counts, 10), of(*counts)), expected())


@pytest.mark.parametrize("explicit, split", [*quick.long((False, P())), (True, P("data"))])
def test_in_a_step_that_is_jitted_as_a_whole(explicit, split):
  """Tensor-parallel parameters stay so; those split over the data axis are gathered, and come back
  as they were."""
  kind = AxisType.Explicit if explicit else AxisType.Auto
  mesh = jax.make_mesh((RANKS,), ("data",), axis_types=(kind,), devices=jax.devices()[:RANKS])
  counts = (4, 0, 6, 2)
  with jax.set_mesh(mesh):
    placed = jax.device_put(params(), NamedSharding(mesh, split))
    batch = jax.device_put(shared_out(counts), NamedSharding(mesh, P("data")))
    run = jax.jit(lambda params, batch, counts: jaxpace.accumulate(loss_fn, params, batch, counts))
    loss, grads = run(placed, batch, of(*counts))
    if explicit:
      assert all(grads[name].sharding.is_equivalent_to(placed[name].sharding, 2) for name in placed)
  close((loss, grads), expected())


def test_sums_in_float32_and_in_the_parameters_type():
  half = params(jnp.bfloat16)
  whole = reference(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), half))
  exact = compiled()(half, shared_out((6, 1, 0, 5)), of(6, 1, 0, 5))
  assert {leaf.dtype.name for leaf in jax.tree.leaves(exact)} == {"float32"}
  rough = compiled(sums="parameters")(half, shared_out((6, 1, 0, 5)), of(6, 1, 0, 5))
  assert {leaf.dtype.name for leaf in jax.tree.leaves(rough[1])} == {"bfloat16"}

  def error(found):
    return max(float(np.abs(np.asarray(a, np.float32) - np.asarray(b)).max())
               for a, b in zip(jax.tree.leaves(found[1]), jax.tree.leaves(whole[1]), strict=True))

  # A bfloat16 has 8 bits: a backward pass in it, and the sum of a dozen.
  assert error(exact) < 2**-8 and error(rough) < 2**-6
  even = compiled()(half, shared_out(EVEN), of(*EVEN))
  close(exact, even, 3e-6)


def test_a_batch_without_weight_is_no_nan():
  x, y = shared_out(EVEN)
  loss, grads = compiled()(params(), (np.nan_to_num(x), np.zeros_like(y)), of(*EVEN))
  assert float(loss) == 0 and all((np.asarray(leaf) == 0).all() for leaf in jax.tree.leaves(grads))


@pytest.mark.long
def test_linen_and_remat_and_instrument_leave_the_bits_as_they_are():
  model = linen.Sequential([linen.Dense(WIDTH), jnp.tanh, linen.Dense(KINDS)])
  weights = model.init(jax.random.key(0), jnp.zeros((1, WIDTH)))

  @jax.checkpoint
  def loss(weights, micro_batch):
    x, y = micro_batch
    each = -jnp.take_along_axis(jax.nn.log_softmax(model.apply(weights, x)), y[:, None], 1)
    return jnp.sum(each), jnp.float32(each.size)

  def step(weights, batch, counts):
    loss_now, grads = jaxpace.accumulate(loss, weights, batch, counts)
    return jax.tree.map(lambda w, g: w - jnp.float32(0.1) * g, weights, grads), loss_now

  mesh = mesh_of(data=RANKS)
  paced, run, pace = instrumented(step, mesh, P(), P("data"), P(), check_vma=True)
  bare = mapped(step)
  one, other, even = weights, weights, weights
  for counts in ((6, 1, 0, 5), (2, 4, 3, 3), EVEN):
    one, loss_one = bare(one, shared_out(counts), of(*counts))
    pace, (other, loss_other) = run(pace, other, shared_out(counts), of(*counts))
    even, _ = bare(even, shared_out(EVEN), of(*EVEN))
  assert bits((one, loss_one)) == bits((other, loss_other)) != bits((weights, loss_one))
  close(one, even)
  plan = paced.plan
  assert len(plan.collectives) == 1 and not plan.unstamped and plan.share


# What is refused, before anything is compiled.

def refused(message, loss=loss_fn, counts=EVEN, batch=None, specs=(P(), P("data"), P()),
            check_vma=False, step=None, **settings):
  step = step or (lambda params, batch, counts: jaxpace.accumulate(loss, params, batch, counts,
                                                                   **settings))
  run = mapped(step, specs, check_vma=check_vma)
  with pytest.raises(ValueError, match=message):
    run.lower(params(), shared_out(EVEN) if batch is None else batch, of(*counts))


@pytest.mark.parametrize("check_vma", [False, True])
def test_a_collective_over_the_data_axis_in_the_loss(check_vma):
  def summed(params, micro_batch):
    loss, weight = loss_fn(params, micro_batch)
    with jax.named_scope("Norm_3"):
      return jax.lax.psum(loss, "data"), weight

  refused(r"collective over 'data': psum\S* in \S*Norm_3\S*\. It would run once a micro-batch",
          summed, check_vma=check_vma)


def test_a_collective_over_another_axis_along_which_counts_differ():
  def summed(params, micro_batch):
    loss, weight = loss_fn(params, micro_batch)
    return jax.lax.psum(loss, "fsdp"), weight

  def step(params, batch, count):
    return jaxpace.accumulate(summed, params, batch, count[0, 0])

  run = mapped(step, (P(), P("data"), P("data", "fsdp")), mesh=mesh_of(data=2, fsdp=2))
  with pytest.raises(ValueError, match="collective over 'fsdp'"):
    run.lower(params(), shared_out((6, 6)), np.ones((2, 2), np.int32))


def test_losses_without_weights_and_counts_that_do_not_fit():
  refused("loss_sum, weight_sum., and it returned one thing.*weighted=False where each micro-batch",
          lambda p, b: loss_fn(p, b)[0])
  refused("both single numbers", lambda p, b: (loss_fn(p, b)[0], b[1]))
  refused("one of them is None", lambda p, b: (loss_fn(p, b)[0], None))
  refused("one of them is 'mean'", lambda p, b: (loss_fn(p, b)[0], "mean"))
  refused("it returned a list, not a tuple", lambda p, b: [*loss_fn(p, b)])
  refused("is int32, which has no gradient", lambda p, b: (jnp.int32(1), loss_fn(p, b)[1]))
  refused("must be the name of the data axis", axis_name=())
  refused("has_aux=True", lambda p, b: (*loss_fn(p, b), jnp.float32(0)))
  refused("the loss must return .loss, aux.", lambda p, b: loss_fn(p, b)[0], has_aux=True,
          weighted=False)
  refused("must return the loss alone, and it returned 2 things", weighted=False)
  refused(r"counts of 3 ranks, and 4 along data.* another mesh", counts=(4, 4, 4))
  refused(r"counts of 1 ranks.*P\(\) in in_specs", specs=(P(), P("data"), P("data")))
  refused("the same axis in front", batch=(shared_out(EVEN)[0], np.ones((RANKS, ROWS), np.int32)))
  refused("must be 'float32' or 'parameters'", sums="bfloat16")
  with pytest.raises(ValueError, match="is not known where jaxpace.accumulate runs"):
    jax.jit(lambda p, b: jaxpace.accumulate(loss_fn, p, b, of(*EVEN)))(params(), shared_out(EVEN))
  with pytest.raises(ValueError, match="The mesh has no axis 'batch': its axes are 'data'"):
    jax.jit(lambda p, b: jaxpace.accumulate(loss_fn, p, b, of(*EVEN), "batch", mesh=mesh_of(
        data=RANKS)))(params(), shared_out(EVEN))
  refused(f"to run {CAPACITY + 1} micro-batches, and micro_batches has room",
          step=lambda p, b, _: jaxpace.accumulate(loss_fn, p, b, [CAPACITY + 1, 1, 2, 2]))
  refused(r"counts of all ranks, \[R\], as count, or index=",
          step=lambda p, b, _: jaxpace.accumulate(loss_fn, p, b, 2, key=jax.random.key(0)))


class Named:
  def __init__(self, array, axes):
    self.array, self.axes = array, axes
    if getattr(array, "ndim", axes) != axes:
      raise ValueError(f"There are not {axes} axes.")


jax.tree_util.register_pytree_node(
    Named, lambda one: ([one.array], one.axes), lambda axes, leaves: Named(*leaves, axes))


@pytest.mark.parametrize("whole", [False, True])
def test_arrays_that_keep_their_shape_beside_them_are_refused_in_words(whole):
  mesh = mesh_of(data=RANKS)
  batch = jax.tree.map(lambda leaf: Named(leaf, leaf.ndim), shared_out(EVEN))
  with pytest.raises(ValueError, match="such as haliax's, are made inside the loss. Give "):
    jax.jit(lambda p, b: jaxpace.accumulate(loss_fn, p, b, of(*EVEN), mesh=mesh, fetch=whole)
            )(params(), batch)


def test_counts_that_are_known_in_a_step_that_is_jitted_as_a_whole():
  mesh, x = mesh_of(data=RANKS), np.arange(8.0, dtype=np.float32)

  def loss(counts, **settings):
    return jax.jit(lambda w, x: jaxpace.accumulate(
        lambda w, x: (x * w, 1.0), w, x, counts, **{"mesh": mesh} | settings)[0])(jnp.float32(1), x)

  assert loss([5, 1, 1, 1], fetch=True) == loss(np.array([2, 2, 2, 2])) == 3.5
  with pytest.raises(ValueError, match="to run 3 micro-batches, and micro_batches has room for 2"):
    loss([3, 1, 2, 2])
  with pytest.raises(ValueError, match="to run 9 micro-batches, and micro_batches has room for 8"):
    loss([9, 0, 0, 0], fetch=True)
  for leaf, name in ((jnp.tanh, "PjitFunction"), (3, "int"), (np.int32(3), "int32")):
    with pytest.raises(ValueError, match=f"one of them is a {name}.*eqx.partition"):
      jaxpace.accumulate(loss_fn, {"w": 1.0, "other": leaf}, x, [2, 2, 2, 2], mesh=mesh)
  with jax.numpy_dtype_promotion("standard"):
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
  with pytest.raises(ValueError, match=r"nnx\.split\(model, nnx\.Param"):
    jaxpace.accumulate(loss_fn, model, x, [2, 2, 2, 2], mesh=mesh)
  with pytest.raises(ValueError, match="A jax.sharding.Mesh is needed here.*this is a str"):
    loss([2, 2, 2, 2], mesh="data")


def test_counts_beyond_the_capacity_show_in_the_loss():
  x, y = shared_out(EVEN)
  for counts in ((CAPACITY + 1, 1, 2, 2), (-1, 3, 4, 4)):
    loss, _ = compiled()(params(), (np.nan_to_num(x), y), of(*counts))
    assert np.isnan(float(loss)), counts


def test_shardings_over_the_data_axis_in_the_loss():
  mesh = mesh_of(data=2, model=2)

  def split(params, micro_batch):
    x = jax.lax.with_sharding_constraint(micro_batch[0], NamedSharding(mesh, P("data")))
    return loss_fn(params, (x, micro_batch[1]))

  run = jax.jit(lambda params, batch: jaxpace.accumulate(split, params, batch, of(6, 6), mesh=mesh))
  with pytest.raises(ValueError, match="asks for a sharding over 'data'"):
    run.lower(params(), shared_out((6, 6)))
