"""Where timestamps can't go in, or a comparison finds a difference: the step as it was, and a
sentence."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpace
from jaxpace.core.observed import ObservedPlan
from jaxpace.observation import comparing
from jaxpace.observation.clocks import host_ring
from jaxpace.observation.partitioned import compiling, thunks
from tests import quick
from tests.observation import observed_steps as steps
from tests.quick import long


def failing(wrong):
  def fails(*args):
    raise wrong
  return fails


@pytest.mark.parametrize("where, name, instead, said", [
    (compiling.Request, "serialized", failing(OSError("no space left on device")),
     "no space left on device"),
    (compiling.Request, "load", failing(RuntimeError("INTERNAL: no space left on device")),
     "no space left on device"),
    # A program of another compiler; one whose collectives have other names.
    (compiling.Request, "serialized", lambda request: b"nothing of the kind",
     "the compiler's program can't be read"),
    (compiling.Request, "serialized", lambda request: b"\2\10\1\12\0",
     "the compiler's program can't be read"),
    (thunks, "timestamped", lambda *given, put_in=thunks.timestamped: (put_in(*given)[0], {}),
     "none of its collectives is found"),
    (host_ring, "unavailable", lambda: "Marks are for the CPU, and this is a toaster.",
     "this is a toaster"),
    (host_ring, "MOST_PROGRAMS", 0, "observed programs")])
def test_where_timestamps_can_not_go_in_the_step_runs_as_it_was(monkeypatch, caplog, where, name,
                                                                instead, said):
  monkeypatch.setattr(where, name, instead)
  step, (params, x, y) = steps.data_parallel()
  bare, observed = jax.jit(step), jaxpace.observe(jax.jit(step))
  for _ in range(3):
    assert steps.bits(observed(params, x, y)) == steps.bits(bare(params, x, y))
  assert not observed.runs
  warnings = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
  assert len(warnings) == 1 and said in warnings[0]
  assert all(said in one.bare for one in observed.plan.programs)


def test_a_jax_that_compiles_in_another_way(monkeypatch, caplog):
  monkeypatch.setattr(compiling, "unavailable", lambda: "This jaxpace doesn't know jax 99.")
  monkeypatch.setattr(compiling, "_installed", False)
  step, args = steps.data_parallel()
  observed = jaxpace.observe(jax.jit(step))
  assert steps.bits(observed(*args)) == steps.bits(jax.jit(step)(*args))
  assert [record.message for record in caplog.records] == [
      "The step runs unmodified: This jaxpace doesn't know jax 99."]
  assert observed.plan == ObservedPlan()


@pytest.mark.parametrize("donate", [(0,), *long(((),))])
def test_the_first_batch_is_compared_bit_for_bit(donate):
  step, (params, x, y) = steps.fsdp()
  observed = jaxpace.observe(jax.jit(step, donate_argnums=donate), exact=True)
  bare = jax.jit(step)
  wanted = params
  for _ in range(3):
    wanted, _ = bare(wanted, x, y)
    params, _ = observed(params, x, y)
  assert steps.bits(params) == steps.bits(wanted)
  [number] = observed.runs
  assert host_ring.executions(0, number) == 3


@pytest.mark.parametrize("name, instead, said, ran", [
    ("differences", lambda bare, found: "With timestamps 1 of 4 differ.",
     "1 of 4 differ. So the step runs unmodified.", 1),
    ("copied", failing(MemoryError("no room for a copy")), "can't be compared: no room for a copy",
     0)])
def test_a_first_batch_that_differs_or_cannot_be_compared(monkeypatch, caplog, name, instead, said,
                                                          ran):
  monkeypatch.setattr(comparing, name, instead)
  step, args = steps.data_parallel()
  observed = jaxpace.observe(jax.jit(step), exact=True)
  for _ in range(2):
    assert steps.bits(observed(*args)) == steps.bits(jax.jit(step)(*args))
  assert said in caplog.text
  [program] = observed.plan.programs
  assert program.bare and host_ring.executions(0, program.number) == ran
  assert ran or not observed.runs


def test_comparing_says_where_and_by_how_much():
  one = [jnp.float32([1.0, 2.0]), jax.random.key(0), jnp.float32([np.nan])]
  same = [[one[0]], [jax.random.key_data(one[1])], [jnp.float32([np.nan])]]
  assert comparing.differences(one, same) == ""
  said = comparing.differences(one, [[jnp.float32([1.0, 2.5])], *same[1:]])
  assert "1 of 3" in said and "2.5e-01" in said and "results 0" in said
  other = [[jax.random.key_data(jax.random.key(1))]]
  assert "results 1" in comparing.differences(one, [same[0], *other, same[2]])
  assert "shape or type" in comparing.differences(one, [[jnp.ones(3)], *same[1:]])
  assert "gives 1 arrays, and 3" in comparing.differences(one, same[:1])


def test_what_python_compares_by_identity_is_no_obstacle():
  step, args = steps.data_parallel()
  jitted = jax.jit(lambda odd, *args: step(*args), static_argnums=0)
  observed, odd = jaxpace.observe(jitted, exact=True), object()
  for _ in range(2):
    assert steps.bits(observed(odd, *args)) == steps.bits(jitted(odd, *args))
  assert observed.runs


def test_once_compared_a_step_is_called_as_jax_calls_it(monkeypatch):
  monkeypatch.setattr(compiling, "_stand_ins", {})
  step, args = steps.data_parallel()
  wanted = steps.bits(jax.jit(step)(*args))
  for compiled in (lambda observed: observed, lambda observed: observed.lower(*args).compile()):
    observed = jaxpace.observe(jax.jit(step), exact=True)
    call = compiled(observed)
    for number in range(5):
      assert steps.bits(call(*args)) == wanted
      assert bool(compiling._stand_ins) == (number + 1 < comparing.FIRST)
    assert all(not one.bare for one in observed.plan.programs)


@pytest.mark.parametrize("other", [False, True])
def test_what_a_checked_step_changes_in_place_is_changed_once(monkeypatch, caplog, other):
  if other:
    monkeypatch.setattr(comparing, "differences", lambda bare, found: "They differ.")
  step, (params, x, y) = steps.data_parallel()

  def counting(calls, params, x, y):
    calls[...] += 1
    params["w"][...] *= 0.5
    return calls[...], step({**params, "w": params["w"][...]}, x, y)[1]

  everywhere = NamedSharding(steps.mesh_of(data=4), P())
  found = []
  for made in (jax.jit, lambda step: jaxpace.observe(jax.jit(step), exact=True)):
    calls = jax.new_ref(jax.device_put(jnp.int32(0), everywhere))
    # A copy: of an array that a `Ref` was made of JAX takes hold.
    held = {**params, "w": jax.new_ref(jnp.copy(params["w"]))}
    run = made(counting)
    found.append([steps.bits(run(calls, held, x, y)) for _ in range(3)]
                 + [steps.bits(held["w"][...])])
  assert found[0] == found[1]
  assert ("differ" in caplog.text) == other
  assert all(bool(one.bare) == other for one in run.plan.programs)


@pytest.fixture
def compilation_cache(tmp_path):
  """JAX's, of all programs, in a folder."""
  from jax.experimental.compilation_cache import compilation_cache
  kept = {name: getattr(jax.config, name) for name in (
      "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs",
      "jax_persistent_cache_min_entry_size_bytes")}
  compilation_cache.reset_cache()
  jax.config.update("jax_compilation_cache_dir", str(tmp_path))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
  jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
  yield tmp_path
  for name, value in kept.items():
    jax.config.update(name, value)
  compilation_cache.reset_cache()


@pytest.mark.long
def test_jax_s_compilation_cache_keeps_both_apart(compilation_cache):
  step, args = steps.data_parallel()
  found = []
  for _ in range(2):
    observed = jaxpace.observe(jax.jit(step))
    found.append(steps.bits(observed(*args)))
    assert not observed.plan.programs[0].bare
    jax.clear_caches()
    before = host_ring.current().heads().tolist()
    found.append(steps.bits(jax.jit(step)(*args)))
    assert host_ring.current().heads().tolist() == before
    jax.clear_caches()
  assert len(set(map(tuple, found))) == 1
  assert any(compilation_cache.iterdir())


@pytest.mark.parametrize("seconds, starts", [(0.0, [1, 0, 0]), *long((60.0, [1, 1]))])
def test_a_step_is_compiled_once_and_with_jax_s_cache_never_again(
    compilation_cache, monkeypatch, seconds, starts):
  from jax._src import compiler  # noqa: TID251  # the public API has no such seam
  jax.config.update("jax_persistent_cache_min_compile_time_secs", seconds)
  compile_it, counted = compiler.backend_compile_and_load, []
  monkeypatch.setattr(compiler, "backend_compile_and_load",
                      lambda *given: counted.append(given) or compile_it(*given))
  step, args = steps.fsdp()
  wanted = steps.bits(jax.jit(lambda *args: step(*args))(*args))
  for times in starts:
    jax.clear_caches()
    quick.forget()
    observed, before = jaxpace.observe(jax.jit(step)), len(counted)
    assert steps.bits(observed(*args)) == wanted
    assert len(counted) - before == times
    assert not observed.plan.programs[0].bare
    [number] = observed.runs
    assert host_ring.executions(0, number) == 1


@pytest.mark.long
def test_operations_that_run_one_by_one_are_no_steps(caplog):
  step, args = steps.data_parallel()
  observed = jaxpace.observe(jax.jit(step))
  observed(*args)
  [number] = observed.runs
  before = host_ring.executions(0, number)
  with jax.disable_jit():
    for _ in range(2):
      observed(*args)
  assert host_ring.executions(0, number) == before and len(observed.plan.programs) == 1
  assert [record.message for record in caplog.records].count(
      "Steps run without timestamps and are not recorded while jax_disable_jit is on.") == 1
  jax.block_until_ready(observed(*args))
  assert host_ring.executions(0, number) == before + 1
