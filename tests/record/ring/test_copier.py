"""The file that a ring is copied to, whatever others do to it meanwhile."""

import errno
import os
import shutil

import numpy as np
import pytest

from jaxpace.observation.clocks import host_ring
from jaxpace.observation.clocks.native import library
from jaxpace.record.ring import copier
from jaxpace.record.ring.executions import DeviceBuffer
from jaxpace.runs import ring_file
from jaxpace.runs.rundir import RunIdentity

PROGRAM, TAG = host_ring.next_program(), 7
EVENT = PROGRAM << 20 | TAG


def mark(buffer, count):
  library.functions().jaxpace_mark_here(buffer, PROGRAM, TAG, count)


@pytest.fixture
def copied(tmp_path):
  """A ring that has been copied once; its thread does not run, so that each copy is the test's."""
  assert host_ring.unavailable() == ""
  made = copier.RingCopier(tmp_path, RunIdentity("r", 3, 0))
  mark(0, 10)
  assert made.copy()
  yield made
  made._thread.start()
  made.close()


def marked(path, buffer=0):
  """How many events of this test a device buffer of the file holds, in order and without a hole."""
  found = ring_file.read_ring(path)
  follower = DeviceBuffer()
  tags, *_ = follower.take(found.events[buffer], lambda: int(found.heads[buffer]), final=True)
  assert follower.position == int(found.heads[buffer])
  assert set(tags.tolist()) <= {EVENT}
  return len(tags)


def test_the_file_has_what_was_marked_since_it_was_begun(copied):
  ring, path = host_ring.current(), copied.path
  capacity, counts = ring.layout.capacity, {0: 10, 1: 0}
  for buffer, count in ((1, 20), (0, 5), (1, capacity - 3), (0, 0), (1, capacity + 7)):
    mark(buffer, count)
    counts[buffer] += count
    assert copied.copy()
    assert [marked(path, k) for k in counts] == [min(n, capacity) for n in counts.values()]
    found = ring_file.read_ring(path)
    assert found.heads.tolist() == ring.heads().tolist() and found.events.shape[1] == capacity
  np.testing.assert_array_equal(found.events[1], ring.events[1])
  assert (found.run, found.attempt, found.closed) == ("r", 3, False)
  assert ring_file.header(path)["pid"] == os.getpid()
  assert path.stat().st_size == ring.layout.size and os.listdir(path.parent) == ["0.ring"]


def replaced_by_a_link(path, other):
  path.unlink()
  path.symlink_to(other)


def replaced_by_another(path, other):
  shutil.copyfile(other, other.with_name("second"))
  os.replace(other.with_name("second"), path)


DAMAGES = {
    "emptied": lambda path, _: os.truncate(path, 0),
    "cut": lambda path, _: os.truncate(path, 8192),
    "lengthened": lambda path, _: os.truncate(path, path.stat().st_size + 4096),
    "copied over": lambda path, other: shutil.copyfile(other, path),
    "written over": lambda path, _: path.write_bytes(b"x" * path.stat().st_size),
    "taken away": lambda path, _: path.unlink(),
    "replaced by a link": replaced_by_a_link,
    "replaced by another": replaced_by_another,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_whatever_is_done_to_it_the_next_copy_has_all_that_the_ring_holds(copied, tmp_path, damage,
                                                                          caplog):
  other = tmp_path / "other"
  shutil.copyfile(copied.path, other)
  before = other.read_bytes()
  expected = 10
  for _ in range(2):
    damage(copied.path, other)
    for _ in range(2):
      mark(0, 10)
      expected += 10
      assert copied.copy() and marked(copied.path) == expected
  assert other.read_bytes() == before, "a link is not followed"
  assert not copied.path.is_symlink() and "made anew" in caplog.text


@pytest.mark.parametrize("pid, set_back", [(1, 0), (1, 3600), (None, 0)],
                         ids=["", "the clock was set back", "in a container, each is number 1"])
def test_a_later_start_of_the_process_keeps_the_file(copied, tmp_path, monkeypatch, pid, set_back):
  with monkeypatch.context() as patch:
    if pid:
      patch.setattr(copier.os, "getpid", lambda: pid)
    wall = copier.time.time_ns
    patch.setattr(copier.time, "time_ns", lambda: wall() - set_back * 10 ** 9)
    later = copier.RingCopier(tmp_path, RunIdentity("r", 4, 0))
  assert later.copy()
  mark(0, 10)
  # The process that was given up goes on to mark.
  assert copied.copy() and copied._stop.is_set()
  assert ring_file.read_ring(copied.path).attempt == 4 and later.copy()
  os.close(later._file)


@pytest.mark.parametrize("number, said", [(errno.ENOSPC, "disk or quota full"),
                                          (errno.EDQUOT, "disk or quota full"),
                                          (errno.EIO, "can't be written")])
def test_a_disk_that_takes_nothing_is_told_once_and_tried_again(copied, monkeypatch, caplog, number,
                                                                said):
  def full(*_):
    raise OSError(number, os.strerror(number))
  os.truncate(copied.path, 0)
  with monkeypatch.context() as patch:
    patch.setattr(copier.os, "posix_fallocate", full)
    assert not copied.copy() and not copied.copy()
  assert [said in record.message for record in caplog.records] == [True]
  assert os.listdir(copied.path.parent) == ["0.ring"]
  mark(0, 10)
  assert copied.copy() and marked(copied.path) == 20


def test_a_write_that_is_cut_short_is_gone_on_with(copied, monkeypatch):
  write = os.pwrite
  monkeypatch.setattr(copier.os, "pwrite", lambda file, data, at: write(file, data[:100], at))
  mark(0, 1000)
  assert copied.copy() and marked(copied.path) == 1010


def test_a_folder_that_is_gone_ends_nothing(copied, caplog):
  shutil.rmtree(copied.path.parent)
  mark(0, 10)
  assert not copied.copy() and "moved or deleted" in caplog.text


def test_what_is_marked_last_is_in_the_file_once_it_is_closed(tmp_path):
  assert host_ring.unavailable() == ""
  made = copier.RingCopier(tmp_path, RunIdentity("r", 0, 0))
  made.start()
  assert not ring_file.read_ring(made.path).closed
  mark(1, 30)
  made.close()
  assert ring_file.read_ring(made.path).closed and marked(made.path, 1) == 30
