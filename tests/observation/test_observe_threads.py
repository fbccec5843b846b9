"""Threads that call one observed step at the same time, without a lock of their own."""

import threading

import jax
import pytest
from jax.sharding import PartitionSpec as P

import jaxpace
from jaxpace.observation.clocks import host_ring
from tests.observation import observed_steps as steps
from tests.record.recording import table

SECONDS = 120


def test_a_step_that_raises_while_it_is_compiled_leaves_nothing_behind():
  step, args = steps.data_parallel()
  observed = jaxpace.observe(jax.jit(step), different="raise")
  jitted = observed.jitted

  def interrupted(*args):
    jitted(*args)
    raise KeyboardInterrupt

  with jax.numpy_dtype_promotion("standard"):
    observed.jitted = interrupted
    with pytest.raises(KeyboardInterrupt):
      observed(*args)
    observed.jitted = jitted
    # Of the call that raised JAX knows no result, and the next one compiles nothing.
    observed(*args)
    few = steps.put(steps.mesh_of(data=4), steps.batch(8), (P("data"), P("data")))
    observed(args[0], *few)
  assert len(observed.runs) == 2


def test_steps_of_several_threads_are_each_recorded_once(tmp_path):
  step, args = steps.data_parallel()
  observed = jaxpace.observe(jax.jit(step))
  times, threads = 15, 3
  turn = threading.Lock()

  def loop():
    with jax.numpy_dtype_promotion("standard"):
      for _ in range(times):
        # Two programs on few cores may each wait for a device that the other has.
        with turn:
          jax.block_until_ready(observed(*args))
        recorder.record()

  with jaxpace.Recorder(tmp_path, observed) as recorder:
    running = [threading.Thread(target=loop) for _ in range(threads)]
    for thread in running:
      thread.start()
    for thread in running:
      thread.join(SECONDS)
      assert not thread.is_alive()
  [number] = observed.runs
  assert host_ring.executions(0, number) == times * threads
  assert recorder.lost["lost_rows"] == 0
  found = [(row["step"], row["rank"]) for row in table(tmp_path)]
  assert found and len(set(found)) == len(found)
