"""Marks of running programs: which lane they go to, in what order, and what becomes of the ring."""

import errno
import os
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxpace.core import marks as layout
from jaxpace.execution import marks, native
from jaxpace.execution.native import library

PROGRAM = 4000


@pytest.fixture(autouse=True)
def ring():
  assert marks.unavailable() == ""
  return marks.current()


def events(ring, lane, after=0):
  """(tag, ns) of a lane's events of PROGRAM, oldest first."""
  found = []
  for index in range(after, int(ring.heads()[lane])):
    event = ring.events[lane, index % ring.layout.capacity]
    assert int(event["seq"]) == (index + 1) % 2**32
    if int(event["tag"]) >> 20 == PROGRAM:
      found.append((int(event["tag"]) & 0xFFFFF, int(event["ns"])))
  return found


def step(mesh):
  def each(x):
    began = native.start(PROGRAM)
    x, = native.mark([x], began, program=PROGRAM, tag=2)
    y = jax.lax.psum(x, "data")
    y, = native.mark([y], program=PROGRAM, tag=3)
    return native.mark([y], program=PROGRAM, tag=1)[0]
  return jax.jit(jax.shard_map(each, mesh=mesh, in_specs=P("data"), out_specs=P("data"),
                               check_vma=False))


def test_each_device_marks_in_its_own_lane_in_the_order_of_the_program(ring):
  mesh = jax.make_mesh((4,), ("data",), (AxisType.Auto,), devices=jax.devices()[:4])
  run, x = step(mesh), jnp.arange(16.0)
  before = ring.heads()
  first = [marks.executions(lane, PROGRAM) for lane in range(4)]
  for _ in range(3):
    began = time.monotonic_ns()
    y = jax.block_until_ready(run(x))
    ended = time.monotonic_ns()
  np.testing.assert_array_equal(y[:4], x.reshape(4, 4).sum(0))
  assert ring.ranks == list(range(jax.device_count()))
  assert (ring.heads() - before)[4:].sum() == 0
  for lane in range(4):
    found = events(ring, lane, int(before[lane]))
    assert [tag for tag, _ in found] == [layout.NUMBER, 0, 2, 3, 1] * 3
    assert [ns for tag, ns in found if tag == layout.NUMBER] == [first[lane] + k for k in range(3)]
    times = [ns for tag, ns in found[-4:]]
    assert began < times[0] and times == sorted(times) and times[-1] < ended
    assert marks.executions(lane, PROGRAM) == first[lane] + 3


def test_a_mark_waits_for_what_it_is_given(ring):
  before = int(ring.heads()[0])

  def program(x):
    began = native.start(PROGRAM)
    slow = native.delay(jnp.float32(0.02), 1.0, native.stamp(jnp.zeros(2, jnp.uint32), began))
    y, = native.mark([x], *slow, program=PROGRAM, tag=7)
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


def test_marks_move_to_a_file_and_back_and_again(tmp_path, ring):
  here = library.functions().jaxpace_mark_here
  for attempt in range(3):
    path = tmp_path / "0.ring"
    opened, why = marks.open_file(path, run="a run", attempt=attempt)
    assert why == "" and marks.current() is opened
    here(1, PROGRAM, 5, 10)
    here(1, PROGRAM, 0, 1)
    before = ring.heads()
    marks.close_file(opened)
    assert marks.current() is ring
    here(1, PROGRAM, 6, 1)
    assert (ring.heads() - before).tolist() == [0, 1] + [0] * (ring.layout.lanes - 2)
    data = path.read_bytes()
    views = layout.views(data, opened.layout)
    assert len(data) == opened.layout.size
    assert (views.header["magic"].item(), views.header["run"].item()) == (layout.MAGIC, b"a run")
    assert (int(views.header["attempt"]), int(views.header["closed"])) == (attempt, 1)
    assert (int(views.header["pid"]) == os.getpid()
            and int(views.header["lanes"]) == jax.local_device_count())
    assert views.blocks["head"].tolist() == [0, 12] + [0] * (ring.layout.lanes - 2)
    assert (views.events["tag"][1, :12] & 0xFFFFF).tolist() == [5] * 10 + [layout.NUMBER, 0]
    assert sorted(os.listdir(tmp_path)) == ["0.ring"]


def test_switching_under_way_loses_no_mark_and_touches_no_freed_memory(tmp_path, ring):
  here, before = library.functions().jaxpace_mark_here, int(ring.heads()[2])
  thread = threading.Thread(target=here, args=(2, PROGRAM, 9, 2_000_000))
  thread.start()
  counted = switched = 0
  while thread.is_alive():
    opened, why = marks.open_file(tmp_path / "0.ring")
    assert why == ""
    marks.close_file(opened)
    assert marks._quiet(ring.layout.lanes, 20)
    counted += int(opened.heads()[2])
    del opened
    switched += 1
  assert switched >= 2
  assert int(ring.heads()[2]) - before + counted == 2_000_000


@pytest.mark.parametrize("number, said", [(errno.ENOSPC, "disk or quota full"),
                                          (errno.EDQUOT, "disk or quota full"),
                                          (errno.EIO, "can't be made")])
def test_a_full_disk_leaves_marks_in_memory(tmp_path, ring, monkeypatch, number, said):
  def full(*_):
    raise OSError(number, os.strerror(number))
  monkeypatch.setattr(marks.os, "posix_fallocate", full)
  opened, why = marks.open_file(tmp_path / "0.ring")
  assert opened is ring is marks.current() and said in why
  assert os.listdir(tmp_path) == []
  marks.close_file(opened)
  assert marks.current() is ring


@pytest.fixture
def on_a_server(monkeypatch):
  monkeypatch.setattr(marks, "_file_system", lambda _: "nfs4")


def test_on_a_file_system_of_the_network_the_file_has_what_was_synced(tmp_path, ring, on_a_server):
  here, path = library.functions().jaxpace_mark_here, tmp_path / "0.ring"
  opened, why = marks.open_file(path, run="r")
  assert why == "" and marks.current() is opened
  capacity = opened.layout.capacity

  def in_file():
    views = layout.views(path.read_bytes(), opened.layout)
    return views.blocks["head"].tolist(), views.events

  for lane, count in ((0, 10), (1, capacity - 3), (0, 5), (1, 20), (1, capacity + 7), (0, 0)):
    here(lane, PROGRAM, 7, count)
    opened.sync()
    heads, found = in_file()
    assert heads == opened.heads().tolist()
    np.testing.assert_array_equal(found, opened.events)
  here(0, PROGRAM, 7, 3)
  marks.close_file(opened)
  heads, found = in_file()
  assert heads[0] == 18 and (found["seq"][0, :18] == np.arange(1, 19)).all()
  assert layout.views(path.read_bytes(), opened.layout).header["closed"] == 1
  assert opened._file is None and marks.current() is ring


def test_a_server_that_takes_no_more_leaves_the_marks_in_memory(tmp_path, ring, on_a_server,
                                                                monkeypatch):
  opened, _ = marks.open_file(tmp_path / "0.ring")
  def gone(*_):
    raise OSError(errno.ESTALE, "Stale file handle")
  library.functions().jaxpace_mark_here(0, PROGRAM, 7, 4)
  monkeypatch.setattr(marks.os, "pwrite", gone)
  opened.sync()
  monkeypatch.undo()
  library.functions().jaxpace_mark_here(0, PROGRAM, 7, 4)
  opened.sync()
  assert int(opened.heads()[0]) == 8 and opened._file is None
  marks.close_file(opened)


def test_the_file_system_of_a_folder_is_that_of_its_longest_mount(tmp_path):
  assert marks._file_system(tmp_path) != ""
  assert marks._file_system(marks.pathlib.Path("/proc/self")) == "proc"


def test_a_folder_that_is_missing_leaves_marks_in_memory(tmp_path, ring):
  opened, why = marks.open_file(tmp_path / "none" / "0.ring")
  assert opened is ring and "No such file" in why


def test_a_link_in_the_place_of_the_file_is_replaced_not_followed(tmp_path, ring):
  other = tmp_path / "other"
  other.write_text("mine")
  (tmp_path / "0.ring").symlink_to(other)
  opened, why = marks.open_file(tmp_path / "0.ring")
  marks.close_file(opened)
  assert why == "" and other.read_text() == "mine" and not (tmp_path / "0.ring").is_symlink()


def test_a_forked_child_marks_nowhere(tmp_path, ring):
  opened, _ = marks.open_file(tmp_path / "0.ring")
  child = os.fork()
  if child == 0:
    library.functions().jaxpace_mark_here(0, PROGRAM, 5, 3)
    os._exit(marks._current is not None)
  _, status = os.waitpid(child, 0)
  assert status == 0
  assert int(opened.heads()[0]) == 0
  library.functions().jaxpace_mark_here(0, PROGRAM, 5, 3)
  assert int(opened.heads()[0]) == 3
  marks.close_file(opened)


def test_marks_of_devices_that_nobody_named_are_counted(ring):
  before = library.functions().jaxpace_unheard()
  library.functions().jaxpace_mark_here(layout.MOST_LANES, PROGRAM, 5, 2)
  library.functions().jaxpace_mark_here(ring.layout.lanes, PROGRAM, 5, 1)
  assert library.functions().jaxpace_unheard() == before + 3


def test_where_the_library_is_missing_a_sentence_says_so(monkeypatch):
  monkeypatch.setattr(library, "unavailable", lambda: "The native clock is not part of it.")
  assert marks.unavailable() == "The native clock is not part of it."
