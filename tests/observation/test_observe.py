"""An observed step gives the same bits as the bare one, and a timestamp around every collective."""

import collections
import logging

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpace
from jaxpace.core import ring_layout as layout
from jaxpace.core.observed import ObservedPlan
from jaxpace.observation.clocks import host_ring
from tests.observation import observed_steps as steps
from tests.quick import long

pytestmark = pytest.mark.optimized


@pytest.fixture(autouse=True)
def _promoting():
  # optax promotes.
  with jax.numpy_dtype_promotion("standard"):
    yield


def events_of(call):
  """What one call adds to the rings, by device buffer: (tag within the program, ns), oldest
    first."""
  jax.effects_barrier()
  ring = host_ring.current()
  before = ring.heads()
  jax.block_until_ready(call())
  after = ring.heads()
  found = []
  for buffer in range(ring.layout.buffers):
    places = [at % ring.layout.capacity for at in range(int(before[buffer]), int(after[buffer]))]
    events = ring.events[buffer][places]
    tags = events["tag"] & ((1 << 20) - 1)
    found.append([(int(tag), int(ns)) for tag, ns in zip(tags, events["ns"], strict=True)
                  if tag != layout.NUMBER])
  return found


def expected_events(program):
  """How often each tag is written in one step of one device."""
  wanted = collections.Counter({layout.START_TAG: 1, layout.END_TAG: 1})
  for one in program.collectives:
    assert one.iterations is not None
    for tag in (one.enter_tag, one.exit_tag):
      assert tag not in wanted
      wanted[tag] = one.iterations
  return wanted


@pytest.mark.parametrize("make", [
    steps.everything, *long(steps.data_parallel, lambda: steps.fsdp(remat=True))],
    ids=["everything", "data", "remat"])
def test_twenty_steps_have_the_same_bits_and_every_mark_is_there(make, caplog):
  step, args = make()
  state, rest = args[0], args[1:]
  bare, observed = jax.jit(step), jaxpace.observe(jax.jit(step))
  one, two = state, state
  for _ in range(20):
    one, said = bare(one, *rest)
    two, told = observed(two, *rest)
    jax.block_until_ready((said, told))
  assert steps.bits((one, said)) == steps.bits((two, told))
  assert not caplog.records
  first, program = observed.plan.programs[0], observed.plan.programs[-1]
  assert not first.bare and not program.notices and not program.unstamped
  events = events_of(lambda: observed(two, *rest))
  devices = len(program.ranks)
  for buffer in events[:devices]:
    assert collections.Counter(tag for tag, _ in buffer) == expected_events(program)
    assert len(buffer) == program.marks
    assert min(ns for tag, ns in buffer if tag == layout.START_TAG) == min(ns for _, ns in buffer)
    assert max(ns for tag, ns in buffer if tag == layout.END_TAG) == max(ns for _, ns in buffer)
  assert not any(events[devices:])
  assert sum(host_ring.executions(0, one.number) for one in observed.plan.programs) == 21
  assert msgspec.convert(observed.plan.to_json(), ObservedPlan) == observed.plan


def test_the_plan_says_kind_bytes_axes_groups_loop_and_line():
  step, args = steps.fsdp(remat=True)
  observed = jaxpace.observe(jax.jit(step))
  observed(*args)
  [program] = observed.plan.programs
  assert program.name in ("step", "fsdp")
  assert program.mesh_axes == {"data": 4} and program.ranks == (0, 1, 2, 3)
  gathers = [one for one in program.collectives if one.kind == "all-gather" and one.loops]
  assert [one.phase for one in gathers] == ["forward", "backward"]
  for one in gathers:
    assert one.axes == ("data",) and one.groups == ((0, 1, 2, 3),)
    assert one.bytes == steps.WIDTH * steps.WIDTH * 4 // 4
    assert one.dtypes == ("float32",)
    assert [loop.trips for loop in one.loops] == [steps.LAYERS]
    assert one.source is not None and one.source.startswith("tests/observation/observed_steps.py:")
    assert one.operation is not None and "while" in one.operation
  said = str(observed.plan)
  assert "all-gather" in said and "observed_steps.py:" in said and "data" in said
  assert "compiled in" in said and "adding timestamps took" in said


def test_donated_buffers_are_deleted_and_reused():
  step, args = steps.data_parallel()
  bare = jax.jit(step, donate_argnums=0)
  observed = jaxpace.observe(jax.jit(step, donate_argnums=0))
  copies = jax.tree.map(jnp.copy, args)
  wanted = bare(*copies)
  pointers = [leaf.addressable_shards[0].data.unsafe_buffer_pointer()
              for leaf in jax.tree.leaves(args[0])]
  found = observed(*args)
  assert all(leaf.is_deleted() for leaf in jax.tree.leaves(args[0]))
  assert not any(leaf.is_deleted() for leaf in args[1:])
  reused = [leaf.addressable_shards[0].data.unsafe_buffer_pointer()
            for leaf in jax.tree.leaves(found[0])]
  assert sorted(reused) == sorted(pointers)
  assert steps.bits(found) == steps.bits(wanted)
  one = bare.lower(*wanted[:1], *args[1:]).compile().memory_analysis()
  two = observed.lower(*wanted[:1], *args[1:]).compile().memory_analysis()
  assert two.alias_size_in_bytes == one.alias_size_in_bytes
  assert two.temp_size_in_bytes <= 1.1 * one.temp_size_in_bytes + 4096


def test_shapes_and_static_arguments_are_programs_of_their_own():
  step, (params, x, y) = steps.data_parallel()

  def scaled(params, x, y, scale=1.0, *, twice=False):
    new, value = step(params, x, y)
    return new, value * scale * (2 if twice else 1)

  jitted = jax.jit(scaled, static_argnums=3, static_argnames="twice")
  observed = jaxpace.observe(jitted)
  few = steps.put(steps.mesh_of(data=4), steps.batch(8), (P("data"), P("data")))
  calls = [((params, x, y), {}), ((params, *few), {}), ((params, x, y, 3.0), {}),
           ((params, x, y), {"twice": True}), ((params, x, y), {}), ((params, *few), {})]
  for args, kwargs in calls:
    assert steps.bits(observed(*args, **kwargs)) == steps.bits(jitted(*args, **kwargs))
  numbers = [program.number for program in observed.plan.programs]
  assert len(numbers) == len(set(numbers)) == 4
  assert [host_ring.executions(0, number) for number in numbers] == [2, 2, 1, 1]


def test_numpy_scalars_weak_types_and_keys():
  mesh = steps.mesh_of(data=4)

  @jax.jit
  def step(key, x, scale):
    noise = jax.random.normal(key, x.shape)
    return jax.random.fold_in(key, 1), (x * scale + noise).sum()

  observed = jaxpace.observe(step)
  x = jax.device_put(np.ones((8, 3), np.float32), NamedSharding(mesh, P("data")))
  for scale in (2.0, np.float32(2.0), jnp.float32(3.0)):
    key = jax.random.key(3)
    wanted, found = step(key, x, scale), observed(key, x, scale)
    assert found[0].dtype == wanted[0].dtype
    assert steps.bits(found) == steps.bits(wanted)


def test_attributes_of_the_jitted_function_are_handed_on():
  step, args = steps.data_parallel()
  jitted = jax.jit(step)
  observed = jaxpace.observe(jitted)
  assert observed.__wrapped__ is jitted.__wrapped__
  assert observed.eval_shape(*args) == jitted.eval_shape(*args)
  assert observed.trace(*args).jaxpr.eqns
  observed(*args)
  observed.clear_cache()
  observed(*args)
  with pytest.raises(AttributeError):
    observed.nothing_of_the_kind  # noqa: B018


def test_compiled_ahead_of_time():
  step, args = steps.fsdp()
  jitted = jax.jit(step)
  observed = jaxpace.observe(jitted)
  lowered = observed.lower(*args)
  assert "stablehlo" in lowered.as_text()
  compiled = lowered.compile()
  assert steps.bits(compiled(*args)) == steps.bits(jitted.lower(*args).compile()(*args))
  [program] = observed.plan.programs
  assert host_ring.executions(0, program.number) == 1 and observed.runs == {program.number}
  assert compiled.cost_analysis() is not None


@pytest.mark.parametrize(("given", "said"), [
    (lambda step, args: step, "takes a jitted function"),
    (lambda step, args: jax.jit(step).lower(*args), "lowered already"),
    (lambda step, args: jax.jit(step).lower(*args).compile(), "compiled already"),
    (lambda step, args: jaxpace.observe(jax.jit(step)), "observed already"),
    (lambda step, args: 3, "takes a jitted function")])
def test_what_is_no_jitted_function_is_refused(given, said):
  step, args = steps.data_parallel()
  with pytest.raises(TypeError, match=said):
    jaxpace.observe(given(step, args))


def test_a_step_on_one_device_or_without_collectives_runs_as_it_was(caplog):
  observed = jaxpace.observe(jax.jit(lambda x: x * 2))
  assert observed(jnp.ones(4)).sum() == 8
  assert "on one device" in caplog.text
  [program] = observed.plan.programs
  assert program.bare and program.marks == 0 and not observed.runs
  caplog.clear()
  caplog.set_level(logging.INFO, "jaxpace")
  x = jax.device_put(np.ones(4, np.float32), NamedSharding(steps.mesh_of(data=4), P("data")))
  observed = jaxpace.observe(jax.jit(lambda x: x * 3))
  assert observed(x).sum() == 12
  assert "no collectives" in caplog.text
  assert "no collectives" in str(observed.plan)


def test_an_error_of_the_step_is_the_step_s(caplog):
  step, (params, x, y) = steps.data_parallel()

  def wrong(params, x, y):
    return step(params, x @ params["v"], y)
  with pytest.raises(TypeError, match="dot_general"):
    jaxpace.observe(jax.jit(wrong))(params, x, y)
  observed = jaxpace.observe(jax.jit(step))
  with pytest.raises(TypeError):
    observed(params)
  assert steps.bits(observed(params, x, y)) == steps.bits(jax.jit(step)(params, x, y))


def test_programs_are_numbered_one_after_another():
  step, args = steps.data_parallel()

  def with_small_programs(*args):
    # Compiled on one device while the step is traced: no number is theirs.
    with jax.ensure_compile_time_eval():
      scale = jnp.sin(jnp.float32(len(jax.devices()) + 0.25)) ** 2
    params, loss = step(*args)
    return params, loss * scale

  observed = jaxpace.observe(jax.jit(with_small_programs))
  observed(*args)
  halved = jax.tree.map(lambda leaf: leaf[:len(leaf) // 2], args[1:])
  observed(args[0], *jax.device_put(halved, jax.tree.map(lambda leaf: leaf.sharding, args[1:])))
  first, second = (one.number for one in observed.plan.programs)
  assert second == first + 1
