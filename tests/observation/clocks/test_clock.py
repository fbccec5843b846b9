"""What both clocks promise, inside real compiled programs."""

import time

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from jaxpace.core.varying import varying
from jaxpace.observation.clocks import gate, resolve_clock, words
from tests import quick
from tests.patience import patiently

pytestmark = pytest.mark.optimized

RANKS = 8


@pytest.fixture(params=["native", "callback"])
def clock(request):
  if request.param == "native" and resolve_clock().notice:
    pytest.skip(resolve_clock().notice)
  return resolve_clock(request.param)


def mesh():
  return jax.make_mesh((RANKS,), ("data",), axis_types=(AxisType.Auto,))


def ns(timestamps):
  return words.to_ns(np.asarray(timestamps))


def run(function, *arguments):
  """Runs twice: the first call's compilation must not be timed."""
  jax.block_until_ready(function(*arguments))
  return jax.block_until_ready(function(*arguments))


@pytest.mark.parametrize("size", [1, 10_000])
def test_a_stamp_comes_after_what_it_is_given(clock, size):
  @jax.jit
  def step(x):
    first = clock.timestamp(words.zero())
    _, slept = clock.delay(jnp.float32(20e-3), 0.1, first, x)
    late = gate(clock, slept, [x])[0]
    return first, clock.timestamp(first, x), clock.timestamp(first, x, late)

  first, prompt, second = map(ns, run(step, jnp.ones(size)))
  assert second - first >= 20e6
  assert prompt >= first


def test_a_stamp_waits_for_the_whole_array_not_one_element(clock):
  @jax.jit
  def step(x):
    first = clock.timestamp(words.zero())
    held, = gate(clock, first, [x])
    total = jnp.sum(jnp.sin(held), axis=1)  # one element alone would take a thousandth of the time
    return total, first, clock.timestamp(first, total)

  x = jnp.ones((2000, 2000))
  run(step, x)
  part = 0.0
  for _ in range(100):  # a busy machine may hold this thread up once the result is there
    start = time.monotonic_ns()
    _, first, second = jax.block_until_ready(step(x))
    part = max(part, (ns(second) - ns(first)) / (time.monotonic_ns() - start))
    if part > 0.1:
      break
  assert part > 0.1


def test_operands_of_every_dtype_and_rank(clock):
  dtypes = [jnp.bfloat16, jnp.float16, jnp.float32, jnp.int8, jnp.uint32, jnp.bool_, jnp.complex64]
  arrays = [jnp.ones(shape, dtype) for dtype in dtypes for shape in [(), (3,), (2, 3, 100), (0, 4)]]
  arrays += [jax.random.key(0), jax.random.split(jax.random.key(0), 100)]

  @jax.jit
  def step(*arrays):
    first = clock.timestamp(words.zero(), *arrays)
    return first, *clock.delay(jnp.float32(0.001), 0.1, first, *arrays)

  timestamps = ns(run(step, *arrays))
  assert timestamps[0] < timestamps[1] and timestamps[2] - timestamps[1] >= 999_999


def test_a_delay_begins_after_what_it_is_given(clock):
  @jax.jit
  def step(x):
    first, slept = clock.delay(jnp.float32(20e-3), 0.1, words.zero(), x)
    before, after = clock.delay(jnp.float32(0), 0.1, words.zero(), *gate(clock, slept, [x]))
    return first, before, after

  first, before, after = map(ns, run(step, jnp.ones(10_000)))
  assert before - first >= 20e6 - 1 and after == before


def test_a_delay_is_between_zero_and_its_limit(clock):
  step = jax.jit(lambda seconds: clock.delay(seconds, 50e-3, words.zero()))
  for seconds, lowest_ns, highest_ns in (
      (0.0, 0, 0), (-1.0, 0, 0), (np.nan, 0, 0), (-np.inf, 0, 0), (5e-3, 4_999_999, 900e9),
      (20e-3, 19_999_999, 900e9), (np.inf, 50_000_000, 900e9), (1000.0, 50_000_000, 900e9)):
    before, after = map(ns, step(jnp.float32(seconds)))
    assert lowest_ns <= after - before <= highest_ns, seconds


@pytest.mark.parametrize("limit", [-1.0, 61.0, float("nan"), float("inf"), "1", None])
def test_a_limit_that_is_no_delay_is_refused(clock, limit):
  with pytest.raises(ValueError, match="20 ms is 20e-3"):
    clock.delay(jnp.float32(0.0), limit, words.zero())


def _exchange(clock, previous, seconds, x):
  """One rank's step: a delay, its own work, a sum over the ranks with a timestamp at either end."""
  before, after = clock.delay(seconds, 0.5, previous, x)
  x = gate(clock, after, [x])[0]
  enter = clock.timestamp(after, x)
  total = jax.lax.psum(gate(clock, enter, [x])[0], "data")
  leave = clock.timestamp(enter, total)
  return jnp.stack([before, after, enter, leave]), total


def _check_exchange(timestamps, total):
  timestamps = ns(timestamps)
  delays = np.arange(RANKS) * 10e6
  assert (np.diff(timestamps, axis=1)[:, 1:] > 0).all()
  assert (timestamps[:, 1] - timestamps[:, 0] >= delays - 1).all()
  assert timestamps[:, 3].min() >= timestamps[:,
                                              2].max(), ("no rank leaves the sum before the last "
                                                    "has entered")
  np.testing.assert_array_equal(total, np.full((4,), RANKS, np.float32))


@pytest.mark.parametrize(("manual_step", "check_vma"), [
    (True, True), *quick.long((True, False), (False, True), (False, False))],
    ids=["jit-True", "jit-False", "eager-True", "eager-False"])
def test_under_shard_map_each_of_eight_devices_delays_by_its_own_amount(
    clock, check_vma, manual_step):
  P = PartitionSpec

  def step(previous, seconds, x):
    timestamps, total = _exchange(clock, previous[0], seconds[0], x[0])
    return timestamps[None], total

  step = jax.shard_map(
      step, mesh=mesh(), in_specs=(P("data"), P("data"), P("data")), out_specs=(P("data"), P()),
      check_vma=check_vma)
  step = jax.jit(step) if manual_step else step
  seconds = jnp.arange(RANKS, dtype=jnp.float32) * jnp.float32(10e-3)
  _check_exchange(*run(step, jnp.zeros((RANKS, 2), jnp.uint32), seconds, jnp.ones((RANKS, 4))))


def test_under_pmap_each_of_eight_devices_delays_by_its_own_amount(clock):
  step = jax.pmap(lambda *arguments: _exchange(clock, *arguments), axis_name="data")
  seconds = jnp.arange(RANKS, dtype=jnp.float32) * jnp.float32(10e-3)
  timestamps, total = run(step, jnp.zeros((RANKS, 2), jnp.uint32), seconds, jnp.ones((RANKS, 4)))
  _check_exchange(timestamps, total[0])


@pytest.mark.parametrize("check_vma", [True, False])
def test_replicated_and_varying_operands_mix(clock, check_vma):
  P = PartitionSpec

  def step(previous, shared, own):
    first = clock.timestamp(previous, shared)  # nothing here varies over the ranks
    second = clock.timestamp(first, shared, own)
    (kept,) = gate(clock, second, [shared])
    assert (varying(first) == varying(second) == varying(kept)
            == frozenset()), "what is held keeps its type"
    return jnp.stack([first, second])[None]

  step = jax.jit(jax.shard_map(
      step, mesh=mesh(), in_specs=(P(), P(), P("data")), out_specs=P("data"), check_vma=check_vma))
  timestamps = ns(run(step, words.zero(), jnp.ones(3), jnp.ones(RANKS)))
  assert timestamps.shape == (RANKS, 2) and (timestamps[:, 1] > timestamps[:, 0]).all()


def test_stamps_leave_donation_as_it_is(clock):
  def step(state, timestamp):
    timestamp = clock.timestamp(timestamp, state)
    return gate(clock, timestamp, [state])[0] + jnp.float32(1), timestamp

  step = jax.jit(step, donate_argnums=(0, 1))
  state, timestamp = jnp.zeros(1000), words.zero()
  for _ in range(5):
    old = state
    state, timestamp = step(state, timestamp)
  np.testing.assert_array_equal(np.asarray(state), np.full(1000, 5, np.float32))
  assert old.is_deleted()


def test_holding_back_changes_no_value(clock):
  every = [jnp.asarray(np.arange(12).reshape(3, 4) % 5, dtype)
           for dtype in (jnp.float32, jnp.bfloat16, jnp.int32, jnp.bool_, jnp.complex64)]
  held = jax.jit(lambda timestamp: gate(clock, timestamp, every))(jnp.array([3, 0xFFFFFFFF],
                                                                            jnp.uint32))
  chex.assert_trees_all_equal(list(held), every)


def test_what_is_held_back_is_opaque_to_the_compiler(clock):
  """Else it would be fused with what stands around it, and results would differ in their last
  bits."""
  def step(timestamp, x):
    (held,) = gate(clock, timestamp, [x * x])
    return held + x

  # Whatever options the tests are compiled with: what is asked is whether the fusion there would be
  # is held off. Newer compilers have no other emitters, and no option that says so.
  fused = {name: True for name in quick.known() if name == "xla_cpu_use_fusion_emitters"}
  text = jax.jit(step).lower(words.zero(), jnp.ones(100)).compile(fused).as_text()
  kernels = text.split("\n\n")
  assert (any(" multiply(" in kernel for kernel in kernels)
          and any(" add(" in kernel for kernel in kernels))
  assert not any(" multiply(" in kernel and " add(" in kernel for kernel in kernels)


DELAYED = 0.2


@patiently(DELAYED=0.2)
def test_dispatch_does_not_wait_for_the_native_clock():
  if resolve_clock().notice:
    pytest.skip(resolve_clock().notice)
  clock = resolve_clock("native")

  @jax.jit
  def step(seconds, w):
    _, after = clock.delay(seconds, 10.0, words.zero())
    # work enough that XLA does not run the program in the caller's thread
    return gate(clock, after, [w])[0] @ w

  w = jnp.ones((300, 300))
  seconds = jnp.float32(DELAYED)
  run(step, seconds, w)
  start = time.monotonic()
  result = step(seconds, w)
  dispatched = time.monotonic() - start
  result.block_until_ready()
  assert time.monotonic() - start >= DELAYED
  assert dispatched < DELAYED / 2
