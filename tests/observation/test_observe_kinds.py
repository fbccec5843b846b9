"""Steps of every kind that is jitted keep their bits when they are observed, and have their
timestamps."""


import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.experimental import pallas as pl
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpace
from jaxpace.core import ring_layout as layout
from jaxpace.observation.clocks import host_ring
from tests.observation import observed_steps as steps
from tests.observation.test_observe import events_of

pytestmark = pytest.mark.optimized
RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def _promoting():
  with jax.numpy_dtype_promotion("standard"):
    yield


def arrays(mesh=None, rows=P("data"), weights=P()):
  mesh = mesh or steps.mesh_of(data=4)
  x = RNG.normal(size=(16, 8)).astype(np.float32)
  return (jax.device_put(np.eye(8, dtype=np.float32), NamedSharding(mesh, weights)),
          jax.device_put(x, NamedSharding(mesh, rows)))


def sgd(w, x):
  return w - 0.1 * jax.grad(lambda w: ((x @ w) ** 2).mean())(w), x.mean()


def same(bare, observed, w, *rest, calls=3):
  """Calls both, feeding their first results back; returns the observed programs."""
  one = two = w
  for _ in range(calls):
    wanted, found = bare(one, *rest), observed(two, *rest)
    jax.block_until_ready((wanted, found))
    assert steps.bits(wanted) == steps.bits(found)
    one, two = wanted[0], found[0]
  programs = observed.plan.programs
  assert programs and not any(one.bare or one.notices or one.unstamped for one in programs)
  jax.effects_barrier()
  assert calls == sum(host_ring.executions(0, one.number) for one in programs)
  return programs


def both(step, *args, calls=3, **options):
  return same(jax.jit(step, **options), jaxpace.observe(jax.jit(step, **options)), *args,
              calls=calls)


def found_in(programs):
  return {(one.kind, tuple(loop.trips for loop in one.loops), one.conditional)
          for program in programs for one in program.collectives}


def test_a_branch_and_what_chooses_it():
  def step(w, x):
    update = jax.lax.cond(x.sum() > 0, lambda: (x @ w).mean() * w, lambda: w * 2)
    return w - update, update.sum()
  found = found_in(both(step, *arrays()))
  assert ("all-reduce", (), False) in found and ("all-reduce", (), True) in found


def test_a_loop_whose_turns_nobody_knows():
  def step(w, x):
    def body(carry):
      turn, w = carry
      return turn + 1, w - 0.1 * (x @ w).mean(0)
    turns, w = jax.lax.while_loop(lambda c: (c[0] < 5) & (c[1].sum() > -1e6), body, (0, w))
    return w, turns
  programs = both(step, *arrays())
  assert ("all-reduce", (None,), False) in found_in(programs)
  assert programs[0].marks is None


def test_callbacks_of_the_user_are_called_as_often():
  seen = {"bare": [], "observed": []}

  def made(name):
    def host(value):
      seen[name].append(float(np.asarray(value)))
      return np.float32(value * 2)

    def step(w, x):
      shape = jax.ShapeDtypeStruct((), np.float32)
      jax.debug.callback(lambda m: seen[name].append(float(m)), x.mean())
      first = jax.pure_callback(host, shape, x.mean(), vmap_method="sequential")
      second = io_callback(host, shape, (x @ w).mean())
      return w - 0.1 * first - 0.01 * second, first
    return jax.jit(step)
  same(made("bare"), jaxpace.observe(made("observed")), *arrays())
  jax.effects_barrier()
  assert sorted(seen["bare"]) == sorted(seen["observed"]) and len(seen["bare"]) >= 9


def test_an_ordered_callback_leaves_the_step_as_it_was(caplog):
  seen = []

  def step(w, x):
    io_callback(lambda v: seen.append(float(v)), None, (x @ w).mean(), ordered=True)
    return sgd(w, x)
  w, x = arrays()
  observed = jaxpace.observe(jax.jit(step))
  assert steps.bits(observed(w, x)) == steps.bits(jax.jit(sgd)(w, x))
  jax.effects_barrier()
  assert len(seen) >= 1 and "ordered effect" in caplog.text
  assert not observed.runs


def test_every_collective_of_a_per_device_step_in_loops_too():
  mesh = steps.mesh_of(data=4)

  def local(w, x):
    def body(carry, _):
      total = jax.lax.psum((x @ carry).mean(), "data")
      return carry - 0.1 * total, jax.lax.all_gather(total, "data").sum()
    w, sums = jax.lax.scan(jax.checkpoint(body), w, None, length=4)
    scattered = jax.lax.psum_scatter(x.T @ x, "data", tiled=True)
    moved = jax.lax.ppermute(scattered, "data", [(i, (i + 1) % 4) for i in range(4)])
    crossed = jax.lax.all_to_all(x, "data", split_axis=1, concat_axis=0, tiled=True)
    return w + jax.lax.pmax(x.sum(), "data"), sums, moved, crossed
  step = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data")),
                       out_specs=(P(), P(), P("data"), P("data")), check_vma=False)
  programs = both(step, *arrays(mesh))
  assert found_in(programs) >= {
      ("all-reduce", (4,), False), ("all-gather", (4,), False), ("reduce-scatter", (), False),
      ("collective-permute", (), False), ("all-to-all", (), False), ("all-reduce", (), False)}
  [permute] = [one for one in programs[0].collectives if one.kind == "collective-permute"]
  assert sorted(permute.pairs) == [(0, 1), (1, 2), (2, 3), (3, 0)]
  assert permute.axes == ("data",) and permute.groups == ()


def test_pmap():
  def step(w, x):
    return w - 0.1 * jax.lax.psum((x @ w).mean(), "i"), 0.0
  w = np.stack([np.eye(8, dtype=np.float32)] * 4)
  x = RNG.normal(size=(4, 4, 8)).astype(np.float32)
  programs = same(jax.pmap(step, axis_name="i"), jaxpace.observe(jax.pmap(step, axis_name="i")),
                  w, x)
  assert ("all-reduce", (), False) in found_in(programs)


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_a_mesh_in_context(kind):
  mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,))
  with jax.set_mesh(mesh):
    both(sgd, jax.device_put(np.eye(8, dtype=np.float32), P()),
         jax.device_put(RNG.normal(size=(16, 8)).astype(np.float32), P("data")))


def test_kernels_and_custom_calls_of_others():
  mesh = steps.mesh_of(data=4)

  def kernel(x_ref, out_ref):
    out_ref[...] = x_ref[...] * 2

  def local(w, x):
    twice = pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
                           interpret=True)(x)
    return w - 0.1 * jax.lax.psum((twice @ w).mean(), "data"), 0.0
  both(jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=(P(), P()),
                     check_vma=False), *arrays(mesh))

  def step(w, x):
    square = x.T @ x + jnp.eye(8)
    ordered = jax.lax.top_k(jnp.sort(x.mean(0)), 2)[0]
    return w - 0.01 * jnp.linalg.cholesky(square) - ordered.sum(), jnp.linalg.eigvalsh(square)
  both(step, *arrays(mesh))


def test_types_of_every_kind():
  def step(w, x):
    b, h = x.astype(jnp.bfloat16), x.astype(jnp.float16)
    summed = (b @ w.astype(jnp.bfloat16)).mean(0).astype(jnp.float32)
    return (w - summed + h.mean(0).astype(jnp.float32),
            ((x > 1).any(0), (x + 1j * x).sum(0), (x > 0).astype(jnp.int8).sum(0)))
  dtypes = {dtype for program in both(step, *arrays())
            for one in program.collectives for dtype in one.dtypes}
  assert "float32" in dtypes and "complex64" in dtypes


def test_outputs_that_are_inputs_unused_inputs_and_keys():
  def step(w, x, unused, key):
    key, sub = jax.random.split(key)
    return w - (x @ w).mean() * jax.random.normal(sub, w.shape), x.sum(), x.sum(), key, w, 3, x
  both(step, *arrays(), jnp.ones(3), jax.random.key(0))


def test_a_mesh_that_changes_between_calls():
  bare, observed = jax.jit(sgd), jaxpace.observe(jax.jit(sgd))
  whole = steps.mesh_of(a=2, b=4)
  for mesh, rows in [(None, P("data")), (whole, P(("a", "b"))), (whole, P("b", "a")),
                     (None, P("data"))]:
    args = arrays(mesh, rows)
    assert steps.bits(bare(*args)) == steps.bits(observed(*args))
  assert [tuple(one.mesh_axes) for one in observed.plan.programs] == [
      ("data",), ("a", "b"), ("a", "b")]
  assert [host_ring.executions(0, one.number) for one in observed.plan.programs] == [2, 1, 1]


def test_ranks_are_places_in_jax_devices_whatever_the_mesh_order():
  mesh = Mesh(np.array(jax.devices()[:4][::-1]).reshape(2, 2), ("a", "b"))
  programs = both(sgd, *arrays(mesh, P("a"), P("b")))
  assert programs[0].ranks == (3, 2, 1, 0)
  met = {one.kind: (one.axes, one.groups) for one in programs[0].collectives}
  assert met["all-gather"] == (("b",), ((3, 2), (1, 0)))
  assert met["all-reduce"][0] == ("a",)


def test_a_function_that_is_called_twice_has_a_mark_for_each():
  mesh = steps.mesh_of(data=4)

  @jax.jit
  def summed(v):
    return jax.lax.psum(v * 2, "data")

  def local(w, x):
    return w - 1e-3 * summed((x @ w).mean()) - 1e-3 * summed(jnp.sin(summed(x.sum()))), 0.0
  step = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=(P(), P()),
                       check_vma=False)
  programs = both(step, *arrays(mesh))
  tags = [tag for one in programs[0].collectives for tag in (one.enter_tag, one.exit_tag)]
  # The compiler joins two of the three, as it does without timestamps.
  assert len(tags) == len(set(tags)) == 4


def test_attention_weights_under_dropout_are_simplified_as_before(caplog):
  mesh = steps.mesh_of(data=4)
  x = jax.device_put(RNG.normal(size=(8, 4, 16, 16)).astype(np.float32),
                     NamedSharding(mesh, P("data")))
  w = jax.device_put(RNG.normal(size=(16, 16)).astype(np.float32), NamedSharding(mesh, P()))

  def step(w, x, key):
    def loss(w):
      weights = jax.nn.softmax(x @ w)
      kept = jax.random.bernoulli(key, 0.9, (1, 1, 16, 16)).astype(jnp.float32)
      return (((weights * (kept / 0.9)) @ x) ** 2).mean()
    return w - 0.1 * jax.grad(loss)(w), 0
  both(step, w, x, jax.random.key(0))
  assert not caplog.records


def test_collectives_that_wait_for_nothing_but_arguments_are_entered_after_the_start_mark():
  mesh = steps.mesh_of(data=4)
  whole, cut = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))

  def step(weights, x):
    # Nothing but arguments: all of them may run at once.
    gathered = [jax.lax.with_sharding_constraint(w, whole) for w in weights]
    for w in gathered:
      x = jnp.tanh(x @ w)
    return [jax.lax.with_sharding_constraint(0.9 * w, cut) for w in gathered], x.mean()

  w, x = arrays(mesh, weights=P("data"))
  weights = [w + i for i in range(6)]
  (program,) = both(step, weights, x)
  gathers = [one for one in program.collectives if one.kind == "all-gather"]
  assert len({one.enter_tag for one in gathers}) == 6
  observed = jaxpace.observe(jax.jit(step))
  jax.block_until_ready(observed(weights, x))
  for buffer in events_of(lambda: observed(weights, x))[:4]:
    assert buffer[0][0] == layout.START_TAG and buffer[-1][0] == layout.END_TAG
