"""How far a loop has come."""

import threading

import jax
import jax.numpy as jnp
import pytest

from jaxpace.hang import progress as stack
from jaxpace.hang.progress import LoopProgress


class Clock:
  now = 100.0

  def __call__(self):
    return self.now



@pytest.fixture
def clock():
  return Clock()


def step(progress, result):
  progress.enter()
  progress.leave(result)


def test_a_step_completes_when_a_result_is_there(clock, monkeypatch):
  progress = LoopProgress(clock)
  ready = {}
  monkeypatch.setattr("jaxpace.hang.progress._done",
                      lambda leaves: ready.get(leaves[0].shape, False))
  step(progress, jnp.zeros((1,)))
  step(progress, jnp.zeros((2,)))
  assert (progress.entered, progress.completed) == (2, 0)
  clock.now = 103.0
  ready[2,] = True  # the later one is there, so the one before is
  progress.look()
  assert progress.completed == 2 and progress.moved == 103.0


def test_real_results_and_donated_ones():
  progress = LoopProgress(Clock())
  step(progress, {"loss": jax.block_until_ready(jnp.zeros(()))})
  assert progress.completed == 1
  gone = jnp.zeros((3,))
  gone.delete()
  step(progress, gone)  # can't be asked: its call has returned, which is all that is known
  assert progress.completed == 2
  step(progress, None)
  assert progress.completed == 3


def test_a_call_that_raises_is_no_step():
  progress = LoopProgress(Clock())
  progress.enter()
  progress.fail()
  assert (progress.entered, progress.phase(None)) == (0, "")


def test_phases(clock, monkeypatch):
  progress = LoopProgress(clock)
  assert progress.phase(None) == ""
  progress.enter()
  assert progress.phase(None) == "step"
  progress.leave(None)
  assert progress.phase(None) == "between steps" and progress.phase("data") == "data"
  with progress.pause("evaluation", 10.0):
    assert progress.phase("data") == "evaluation"
  monkeypatch.setattr(progress, "compiling", lambda: True)
  assert progress.phase("data") == "compiling"


def test_a_pause_excuses_within_its_limit_and_starts_the_time_anew(clock):
  progress = LoopProgress(clock)
  with progress.pause("checkpoint", 10.0):
    clock.now += 9.0
    assert progress.excused()
    clock.now += 2.0
    assert not progress.excused()
  assert progress.moved == progress.excused_at == clock.now


def test_the_usual_step_leaves_pauses_out(clock):
  progress = LoopProgress(clock)
  for k in range(6):
    if k % 2:
      with progress.pause("evaluation", 100.0):
        clock.now += 50.0
        step(progress, None)
        clock.now += 50.0
    clock.now += 0.5
    step(progress, None)
  assert progress.usual() == 0.5 and set(progress._intervals) == {0.5}


def test_compiling_is_seen_in_the_stack_of_the_loops_thread():
  inside, go_on = threading.Event(), threading.Event()
  scope = {"inside": inside, "go_on": go_on}
  source = "def backend_compile():\n  inside.set()\n  go_on.wait(300)\n"
  exec(compile(source, "/site-packages/jax/_src/compiler.py", "exec"), scope)
  thread = threading.Thread(target=scope["backend_compile"])
  thread.start()
  inside.wait(300)
  assert stack.compiles(thread.ident)
  assert not stack.compiles(threading.get_ident())
  text = stack.of_thread(thread.ident, 120)
  assert len(text) <= 120 and text.startswith("...")
  go_on.set()
  thread.join()
  assert "ended" in stack.of_thread(thread.ident, 100)


def test_jax_compiles_where_its_frames_say_so():
  seen = []

  def body(x):  # runs while it is traced
    seen.append(stack.compiles(threading.get_ident()))
    return x + 1

  jax.jit(body)(jnp.zeros(()))
  assert seen == [True]
