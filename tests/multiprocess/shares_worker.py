"""A process of a job whose work is shared by what the ring showed of its ranks' speeds: every form
of a step, or one job that is cut."""

import json
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import time

import jax

PROCESSES, INDEX = int(os.environ["PROCESSES"]), int(os.environ["INDEX"])
if PROCESSES > 1:
  jax.config.update("jax_cpu_collectives_implementation", "gloo")
  jax.distributed.initialize(os.environ["ADDRESS"], PROCESSES, INDEX)

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import jaxpace  # noqa: E402
from jaxpace.live import gathered  # noqa: E402
from tests.live import shared_forms  # noqa: E402

TOTAL, CAPACITY, SIZE, EXAMPLES = 8, 5, 2, 48
EVEN = [TOTAL // PROCESSES] * PROCESSES


def update(observation, state):
  """The slowest gives one micro-batch to the quickest, by all that is known to the last bit."""
  busy = observation.arrivals
  known = jnp.all(busy > 0)
  less, more = jnp.argmax(busy), jnp.argmin(busy)
  moved = state[0].at[less].add(-1).at[more].add(1)
  can = known & (state[0][less] > 1) & (state[0][more] < CAPACITY) & (less != more)
  counts = jnp.where(can, moved, state[0])
  return counts, (counts, state[1] + jnp.where(known, busy, 0))


def loss_fn(w, micro_batch):
  seen = jnp.zeros((EXAMPLES,), jnp.int32).at[micro_batch["number"]].add(1)
  return jnp.sum(micro_batch["x"] * w), jnp.float32(SIZE), seen


def happens(event):
  """What befalls process 1."""
  if event == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
  subprocess.Popen(["sh", "-c", f"sleep 1; kill -CONT {os.getpid()}"])
  os.kill(os.getpid(), signal.SIGSTOP)


def cut(kept, end, event, at):
  """Trains from the last checkpoint to step `end`; to process 1 something happens at a step."""
  mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
  even = jnp.full(mesh.size, TOTAL // mesh.size, jnp.int32)
  balancer = jaxpace.Balancer(lambda ranks: (even, jnp.zeros(ranks, jnp.float32)), update, TOTAL)
  source = {"x": np.arange(EXAMPLES, dtype=np.float32),
            "number": np.arange(EXAMPLES, dtype=np.int32)}
  feed = jaxpace.shares(mesh, examples=EXAMPLES, size=SIZE, total_micro_batches=TOTAL,
                        capacity=CAPACITY, balancer=balancer)

  def train(w, batch, counts):
    (_, seen), grads = jaxpace.accumulate(loss_fn, w, batch, counts, has_aux=True, mesh=mesh)
    return w - grads, seen

  step, w, ran, trained = (jaxpace.observe(jax.jit(train)), jnp.float32(0), [],
                           np.zeros(EXAMPLES, int))
  if kept.exists():
    w, trained, state = pickle.loads(kept.read_bytes())
    feed.restore(state)
  for number in range(int(feed.state().step), end):
    if INDEX == 1 and number == at:
      happens(event)
    share = feed.next(step)
    w, seen = step(jnp.float32(w), share.batch(source), share.counts)
    ran.append(share.counts.tolist())
    trained += np.asarray(seen)
    if number % 10 == 9 and INDEX == 0:
      written = kept.with_suffix(".new")
      written.write_bytes(pickle.dumps((float(w), trained, tuple(feed.state()))))
      written.rename(kept)
  state = feed.state()
  return {"counts": ran, "trained": trained.tolist(), "ran": state.ran.tolist(),
          "busy": state.balancer[1].view(np.uint32).tolist()}


def late_once():
  """Process 1 comes too late for the first new counts."""
  agree, times = gathered.Gathered.agree, iter([8.0] * INDEX)

  def agrees(*args):
    time.sleep(next(times, 0))
    return agree(*args)

  gathered.Gathered.agree = agrees


ANSWERS = {"differs": [[3, 5], [5, 3]], "fails": [[3, 5], EVEN], "alone": [[3, 5], EVEN],
           "late": [[3, 5], [3, 5]]}
"""What balancers answer from step 24 on, by process."""


def erring(how):
  """Trains with a feed that process 1 uses wrongly: returns the counts that were run."""
  if how == "never":
    gathered._WAITS = (0.5, 0.5)
  if how == "late":
    late_once()
  mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
  batch = jax.make_array_from_process_local_data(
      jax.NamedSharding(mesh, jax.P("data")), np.ones((TOTAL // PROCESSES, SIZE), np.float32))

  def train(w, batch, counts):
    loss, grads = jaxpace.accumulate(lambda w, x: jnp.mean((x - w) ** 2), w, batch, counts,
                                     mesh=mesh, fetch=True, weighted=False)
    return w - 0.1 * grads, loss

  step, w, ran = jaxpace.observe(jax.jit(train)), jnp.float32(0), []
  balancer = None
  if how in ANSWERS:
    # One program on both, as of hosts that compute differently.
    def answer(number):
      if number < 24:
        return np.array(EVEN, np.int32)
      if how == "fails" and INDEX == 1:
        raise OSError("the table of speeds is gone")
      return np.array(ANSWERS[how][INDEX], np.int32)

    balancer = jaxpace.Balancer(lambda ranks: jnp.int32(0), lambda seen, state: (
        jax.pure_callback(answer, seen.counts, seen.step), state), TOTAL)
  feed = jaxpace.shares(mesh, total_micro_batches=TOTAL, balancer=balancer)
  if how == "restored" and INDEX == 1:
    feed.restore(feed.state()._replace(step=3))
  if how == "uneven" and INDEX == 1:
    feed.restore(feed.state()._replace(counts=np.array([5, 3])))
  for number in range(24 if balancer is None else 80):
    if how == "twice" and INDEX == 1 and number == 5:
      feed.next(step)
    counts = EVEN if how == "never" and INDEX == 1 else feed.next(step).counts
    w, loss = step(w, batch, np.asarray(counts, np.int32))
    ran.append(np.asarray(counts).tolist())
    jax.block_until_ready(loss)
  return ran


try:
  found = ({name: shared_forms.check(name) for name in shared_forms.FORMS}
           if sys.argv[1] == "forms" else erring(sys.argv[2]) if sys.argv[1] == "erring" else
           cut(pathlib.Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4], int(sys.argv[5])))
except Exception as error:
  print(f"ENDED {type(error).__name__}: {error}", flush=True)
  # Without the barrier at which a process waits for those that are gone.
  os._exit(3)
print("FACTS " + json.dumps(found))
