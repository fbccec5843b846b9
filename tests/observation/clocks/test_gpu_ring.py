"""Timestamps of GPUs without a GPU: the very kernels run on memory of the host, and their events
are read as in a job."""

import ctypes
import struct
import time
import types

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpace.core import ring_layout as layout
from jaxpace.observation.clocks import gpu_ring, kernels
from jaxpace.observation.clocks import host_ring as process_marks
from jaxpace.observation.clocks.native import cuda
from jaxpace.observation.clocks.native.cuda import DriverError
from jaxpace.record.ring.executions import DeviceBuffer
from tests.observation.clocks.emulated_gpu import Gpu, run
from tests.quick import examples

PROGRAM = 7
FARTHEST_NS = gpu_ring._FARTHEST_NS
FARTHEST_NS_EMULATED = 10**9


@pytest.fixture(autouse=True)
def slow_kernels(monkeypatch):
  """An emulated kernel takes as long as Python does: on a slow machine longer than a GPU may."""
  monkeypatch.setattr(gpu_ring, "_FARTHEST_NS", FARTHEST_NS_EMULATED)


def ring(buffers, capacity=64):
  where = layout.layout(buffers, capacity)
  _, blocks, events = layout.views(bytearray(where.size), where)
  return types.SimpleNamespace(blocks=blocks, events=events)


def mark(gpu, source, tag, buffer=0, program=PROGRAM):
  gpu.launch(kernels.start() if tag == layout.START_TAG else kernels.mark(),
             [source.buffers[buffer].block, *kernels.tagged(program, tag)])


def shift_of(source, buffer):
  """What a GPU's kernels add to its timer, as its block says."""
  return struct.unpack("<q", ctypes.string_at(source.buffers[buffer].block + 24, 8))[0]


def taken(views, buffer=0, follower=None):
  slots, follower = views.events[buffer], follower or DeviceBuffer()
  tags, times, _ = follower.take(slots, lambda: int(views.blocks["head"][buffer]))
  return [(int(tag) >> 20, int(tag) & 0xFFFFF, int(ns))
          for tag, ns in zip(tags, times, strict=True)]


def test_what_kernels_store_comes_into_the_ring_of_the_process_in_order_and_by_the_hosts_clock():
  gpus = [Gpu(off_ns=-1_700_000_000_000_000_000), Gpu(off_ns=12_345_678_901)]
  source, views = gpu_ring.Source(gpus), ring(2)
  for _ in range(2):
    before = time.monotonic_ns()
    for tag in (0, 2, 3, 1):
      mark(gpus[1], source, tag, buffer=1)
    after = time.monotonic_ns()
  source.pour(views.blocks, views.events)
  assert int(views.blocks["head"][0]) == 0, "what was tried is no mark"
  events = taken(views, 1)
  assert [tag for _, tag, _ in events] == [layout.NUMBER, 0, 2, 3, 1] * 2
  assert {program for program, _, _ in events} == {PROGRAM}
  assert ([ns for _, tag, ns in events if tag == layout.NUMBER]
          == [0, 1]), "executions that had started before"
  assert [source.started(1, program) for program in (PROGRAM, PROGRAM + 1)] == [2, 0]
  last = [ns for _, tag, ns in events[5:] if tag != layout.NUMBER]
  uncertain = FARTHEST_NS_EMULATED
  assert before - uncertain <= last[0] <= last[1] <= last[2] <= last[3] <= after + uncertain
  assert abs(shift_of(source, 1) - 12_345_678_901) <= uncertain


def put(gpu, source, tag, numbers, timed):
  """Writes numbers as an instrumented step does, by the very kernel's body."""
  words = np.array([[number >> 32, number & 0xFFFFFFFF] for number in numbers], np.uint32)
  chain = np.zeros(2, np.uint32)
  body = kernels.put(PROGRAM, tag, len(numbers), timed)
  run(".entry put(.param .u64 p0, .param .u64 p1, .param .u64 p2)\n{" + body + "}",
      [chain.ctypes.data, words.ctypes.data, source.buffers[0].block], gpu.timer)


def test_an_instrumented_steps_stamps_come_by_the_hosts_clock_and_its_numbers_as_they_are():
  gpu = Gpu(off_ns=5_000_000_000)
  source, views = gpu_ring.Source([gpu]), ring(1)
  shift = shift_of(source, 0)
  for execution in range(2):
    put(gpu, source, layout.START_TAG, [10**12], timed=True)
    put(gpu, source, layout.STEP_VALUE, [7 + execution, 2**40 + 3], timed=False)
    put(gpu, source, layout.END_TAG, [2 * 10**12], timed=True)
  source.pour(views.blocks, views.events)
  assert taken(views) == [(PROGRAM, tag, ns) for execution in range(2) for tag, ns in (
      (layout.NUMBER, execution), (0, 10**12 + shift), (layout.STEP_VALUE, 7 + execution),
      (layout.STEP_VALUE + 1, 2**40 + 3), (1, 2 * 10**12 + shift))]


def test_an_event_that_is_not_there_yet_is_waited_for():
  gpu = Gpu()
  source, views = gpu_ring.Source([gpu]), ring(1)
  for tag in (2, 3, 4):
    mark(gpu, source, tag)
  # The second kernel has counted its place and not stored its event.
  slot = source.buffers[0].events[source._read[0] + 1:source._read[0] + 2]
  event = slot.copy()
  slot["seq"] = 0
  source.pour(views.blocks, views.events)
  assert [tag for _, tag, _ in taken(views)] == [2]
  slot[:] = event
  source.pour(views.blocks, views.events)
  assert [tag for _, tag, _ in taken(views)] == [2, 3, 4]


def test_an_event_that_comes_while_it_is_read_is_read_the_next_time():
  class Written(np.ndarray):
    """Events whose first is stored between two readings of it."""

    def __getitem__(self, places):
      found = np.asarray(self)[places]
      if self.late:
        found["seq"][0], self.late = 0, False
      return found

  events = np.zeros(64, layout.EVENT)
  events["seq"][:3], events["tag"][:3] = (1, 2, 3), (2, 3, 4)
  written = events.view(Written)
  written.late = True
  assert gpu_ring._new(written, 0)[0] == 0, "nothing was written over"
  lost, new = gpu_ring._new(written, 0)
  assert lost == 0 and np.asarray(new)["tag"].tolist() == [2, 3, 4]


@pytest.mark.long
@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.integers(0, 150), min_size=1, max_size=8))
def test_nothing_is_read_twice_or_out_of_order_and_what_is_lost_is_counted(lots):
  clock = iter(range(1, 10**6))
  gpu = Gpu(timer=time.monotonic_ns)
  source, views = gpu_ring.Source([gpu], capacity=64), ring(1, 64)
  gpu.timer = lambda: next(clock)
  follower, seen, written = DeviceBuffer(patience=0), [], 0
  for lot in lots:
    for _ in range(lot):
      written += 1
      mark(gpu, source, 2 + written % 1000)
    source.pour(views.blocks, views.events)
    for _ in range(4):
      seen += taken(views, follower=follower)
  assert int(views.blocks["head"][0]) == written
  numbers = [tag - 2 for _, tag, _ in seen]
  times = [ns for _, _, ns in seen]
  assert times == sorted(set(times))
  assert follower.position == written, "each event is read or lost"
  if lots[-1]:
    assert numbers[-1] == written % 1000, "the newest is there"
  if max(lots) <= 64:
    assert len(seen) == written


def test_events_beyond_the_largest_number_are_read_like_all_others():
  gpu = Gpu()
  source, views = gpu_ring.Source([gpu], capacity=64), ring(1, 64)
  source._read[0] = first = 2**32 - 100
  ctypes.memmove(source.buffers[0].counters, first.to_bytes(8, "little"), 8)
  before = np.arange(first - 64, first)
  source.buffers[0].events["seq"][before % 64] = before + 1
  follower, seen = DeviceBuffer(), []
  for tag in range(2, 202):
    mark(gpu, source, tag)
    source.pour(views.blocks, views.events)
    seen += taken(views, follower=follower)
  assert [tag for _, tag, _ in seen] == list(range(2, 202))


def test_a_gpu_whose_kernels_write_nothing_is_told(monkeypatch):
  monkeypatch.setattr(gpu_ring, "_LONGEST_S", 0.05)
  gpu = Gpu()
  gpu.launch = lambda loaded, addresses: None
  with pytest.raises(DriverError, match="wrote nothing within"):
    gpu_ring.Source([gpu])


def test_a_gpu_whose_clock_cannot_be_told_is_refused(monkeypatch):
  monkeypatch.setattr(gpu_ring, "_FARTHEST_NS", FARTHEST_NS)
  gpu = Gpu()
  run = gpu.launch
  gpu.launch = lambda loaded, addresses: (time.sleep(0.001), run(loaded, addresses))
  with pytest.raises(DriverError, match="ms to write to the host's memory"):
    gpu_ring.Source([gpu])


class Library:
  """Stands for the driver's own library: says yes to all but one function."""

  def __init__(self, wrong=None):
    self.wrong, self.called = wrong, []

  def __getattr__(self, name):
    def function(*arguments):
      if name == "cuGetErrorString":
        arguments[1]._obj.value = b"out of memory"
        return 0
      self.called.append(name)
      return 2 if name == self.wrong else 0
    return function


def test_what_the_driver_says_is_told(monkeypatch):
  monkeypatch.setattr(ctypes, "CDLL", lambda name: Library("cuMemHostAlloc"))
  driver = cuda.Driver()
  with pytest.raises(DriverError, match="cuMemHostAlloc of NVIDIA's driver said: out of memory"):
    cuda.DriverGpu(driver, 0).host_memory(4096)
  # The context that was there before is there again.
  assert (driver.library.called[-3:] == ["cuCtxPushCurrent_v2", "cuMemHostAlloc",
                                         "cuCtxPopCurrent_v2"])


def test_times_survive_the_words_they_are_stored_in():
  for shift in (-1_763_000_000_123_456_789, 0, 2**62):
    gpu = Gpu(timer=lambda: 1_763_000_000_987_654_321)
    buffer = gpu_ring._buffer(gpu, 64)
    gpu.upload(buffer.block, gpu_ring.block_of(buffer, shift))
    gpu.launch(kernels.mark(), [buffer.block, *kernels.tagged(1, 5)])
    assert (int(buffer.events["ns"][0])
            == np.int64((1_763_000_000_987_654_321 + shift + 2**63) % 2**64 - 2**63))


@pytest.mark.parametrize(("platform", "said"), [
    ("cpu", ""), ("tpu", "no timestamps for tpu"), ("gpu", ""), ("cuda", "")])
def test_which_devices_have_marks(platform, said):
  reason = process_marks._unfit(platform)
  assert said in reason if said else reason == ""
  assert ("ProfiledRecorder" in reason) == (platform == "tpu")


def test_profiles_are_no_way_out_where_gpus_have_no_marks(monkeypatch):
  """They can't be read there."""
  monkeypatch.setattr(process_marks.stream, "unavailable", lambda: "No driver.")
  assert process_marks._unfit("gpu") == "No driver."


def test_gpus_without_a_driver_leave_the_step_as_it_was(monkeypatch):
  monkeypatch.setattr(process_marks, "_no_source", None)

  def none():
    raise DriverError("NVIDIA's driver is not there")
  monkeypatch.setattr(cuda, "Driver", none)
  assert "driver is not there" in process_marks.unwritable("stream")


def test_whoever_reads_the_ring_of_the_process_finds_what_a_gpu_wrote(monkeypatch):
  gpu = Gpu()
  source = gpu_ring.Source([gpu])
  ring_now = process_marks.current()
  before = int(ring_now.heads()[0])
  monkeypatch.setattr(process_marks, "_source", source)
  for tag in (layout.START_TAG, 3):
    mark(gpu, source, tag)
  assert process_marks.executions(0, PROGRAM) == 1
  after = process_marks.current()
  # The start is two events, of which the first counts.
  assert after is ring_now and int(after.heads()[0]) == before + 3
  event = after.events[0, (before + 2) % after.layout.capacity]
  assert int(event["tag"]) == PROGRAM << 20 | 3
