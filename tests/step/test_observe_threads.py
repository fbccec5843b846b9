"""Threads that call one observed step at the same time, without a lock of their own."""

import threading

import jax
import pytest
from jax.sharding import PartitionSpec as P

import jaxpace
from jaxpace.execution import marks
from tests.step import observed_steps as steps
from tests.trace.recording import table

SECONDS = 120


@pytest.fixture
def held():
  """A step that has run once, other arguments for it, and a thread that has compiled it for these
  and stands still before it can say so: `go_on` lets it."""
  step, (params, x, y) = steps.data_parallel()
  few = steps.put(steps.mesh_of(data=4), steps.batch(8), (P("data"), P("data")))
  with jax.numpy_dtype_promotion("standard"):
    observed = jaxpace.observe(jax.jit(step))
    jax.block_until_ready(observed(params, x, y))
    jitted, here, go_on = observed.jitted, threading.Event(), threading.Event()

    def stands_still(*args):
      out = jax.block_until_ready(jitted(*args))
      if threading.current_thread() is thread:
        here.set()
        go_on.wait(SECONDS)
      return out

    def call():
      with jax.numpy_dtype_promotion("standard"):
        observed(params, *few)

    observed.jitted = stands_still
    thread = threading.Thread(target=call)
    thread.start()
    try:
      assert here.wait(SECONDS)
      yield observed, (params, x, y), (params, *few), go_on, thread
    finally:
      go_on.set()
      thread.join(SECONDS)


def counted(observed):
  """How often each program has begun on the first device, and the calls of all."""
  jax.effects_barrier()
  return [marks.executions(0, program.number) for program in observed.plan.programs], observed.calls


def test_what_another_thread_compiles_is_not_taken_for_ones_own(held):
  observed, known, _, go_on, thread = held
  for _ in range(2):
    observed(*known)
  go_on.set()
  thread.join(SECONDS)
  observed(*known)
  assert counted(observed) == ([4, 1], 5)


def test_arguments_that_another_thread_is_compiling_for_are_told_by_what_it_finds(held):
  observed, _, new, go_on, thread = held

  def call():
    with jax.numpy_dtype_promotion("standard"):
      observed(*new)

  other = threading.Thread(target=call)
  other.start()
  # It can't know yet which program it ran.
  other.join(0.3)
  go_on.set()
  for each in (thread, other):
    each.join(SECONDS)
    assert not each.is_alive()
  assert counted(observed) == ([1, 2], 3)


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
  assert observed.calls == 2 and len(observed.runs) == 2


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
  assert observed.calls == times * threads
  assert recorder.lost["lost_rows"] == 0
  found = [(row["step"], row["rank"]) for row in table(tmp_path)]
  assert found and len(set(found)) == len(found)
