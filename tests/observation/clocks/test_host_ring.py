"""Timestamps of running programs: which device buffer they go to, and in what order."""

import os
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxpace.core import ring_layout as layout
from jaxpace.observation.clocks import host_ring, native
from jaxpace.observation.clocks.native import library
from tests import marks

PROGRAM = host_ring.next_program()


@pytest.fixture(autouse=True)
def ring():
  assert host_ring.unavailable() == ""
  return host_ring.current()


def events(ring, buffer, after=0):
  """(tag, ns) of a device buffer's events of PROGRAM, oldest first."""
  found = []
  for index in range(after, int(ring.heads()[buffer])):
    event = ring.events[buffer, index % ring.layout.capacity]
    assert int(event["seq"]) == (index + 1) % 2**32
    if int(event["tag"]) >> 20 == PROGRAM:
      found.append((int(event["tag"]) & 0xFFFFF, int(event["ns"])))
  return found


def step(mesh):
  def each(x):
    began = marks.start(PROGRAM)
    x, = marks.mark([x], began, program=PROGRAM, tag=2)
    y = jax.lax.psum(x, "data")
    y, = marks.mark([y], program=PROGRAM, tag=3)
    return marks.mark([y], program=PROGRAM, tag=1)[0]
  return jax.jit(jax.shard_map(each, mesh=mesh, in_specs=P("data"), out_specs=P("data"),
                               check_vma=False))


def test_each_device_marks_in_its_own_lane_in_the_order_of_the_program(ring):
  mesh = jax.make_mesh((4,), ("data",), (AxisType.Auto,), devices=jax.devices()[:4])
  run, x = step(mesh), jnp.arange(16.0)
  before = ring.heads()
  first = [host_ring.executions(buffer, PROGRAM) for buffer in range(4)]
  for _ in range(3):
    began = time.monotonic_ns()
    y = jax.block_until_ready(run(x))
    ended = time.monotonic_ns()
  np.testing.assert_array_equal(y[:4], x.reshape(4, 4).sum(0))
  assert ring.ranks == list(range(jax.device_count()))
  assert (ring.heads() - before)[4:].sum() == 0
  for buffer in range(4):
    found = events(ring, buffer, int(before[buffer]))
    assert [tag for tag, _ in found] == [layout.NUMBER, 0, 2, 3, 1] * 3
    assert [ns for tag,
            ns in found if tag == layout.NUMBER] == [first[buffer] + k for k in range(3)]
    times = [ns for tag, ns in found[-4:]]
    assert began < times[0] and times == sorted(times) and times[-1] < ended
    assert host_ring.executions(buffer, PROGRAM) == first[buffer] + 3


def test_a_mark_waits_for_what_it_is_given(ring):
  before = int(ring.heads()[0])

  def program(x):
    began = marks.start(PROGRAM)
    slow = native.delay(jnp.float32(0.02), 1.0, native.timestamp(jnp.zeros(2, jnp.uint32), began))
    y, = marks.mark([x], *slow, program=PROGRAM, tag=7)
    return y * 2

  assert jax.jit(program)(jnp.float32(3)) == 6
  found = dict(events(ring, 0, before))
  assert found[7] - found[0] >= 20e6


def test_threads_of_one_lane_lose_nothing(ring):
  before = int(ring.heads()[0])
  threads = [threading.Thread(target=library.functions().jaxpace_mark_here,
                              args=(0, PROGRAM, tag, 5000))
             for tag in range(10, 14)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  tags = [tag for tag, _ in events(ring, 0, before)]
  assert {tag: tags.count(tag) for tag in range(10, 14)} == dict.fromkeys(range(10, 14), 5000)


def test_a_forked_child_marks_nowhere(ring):
  before = int(ring.heads()[0])
  child = os.fork()
  if child == 0:
    library.functions().jaxpace_mark_here(0, PROGRAM, 5, 3)
    os._exit(host_ring._current is not None)
  _, status = os.waitpid(child, 0)
  assert status == 0
  assert int(ring.heads()[0]) == before
  library.functions().jaxpace_mark_here(0, PROGRAM, 5, 3)
  assert int(ring.heads()[0]) == before + 3


def test_marks_of_devices_that_nobody_named_go_nowhere(ring):
  before = ring.heads().tolist()
  library.functions().jaxpace_mark_here(layout.MOST_BUFFERS, PROGRAM, 5, 2)
  library.functions().jaxpace_mark_here(ring.layout.buffers, PROGRAM, 5, 1)
  assert ring.heads().tolist() == before
