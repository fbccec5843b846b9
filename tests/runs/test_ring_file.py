"""The file of a ring, whole, cut short and made up."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpace.core import ring_layout
from jaxpace.core.observed import ObservedPlan, ObservedProgram
from jaxpace.core.plan import Collective, Loop, Untimed
from jaxpace.files.reading import UnreadableError
from jaxpace.observation.clocks import host_ring as execution
from jaxpace.observation.clocks.native import library
from jaxpace.record.ring.copier import RingCopier
from jaxpace.record.ring.executions import DeviceBuffer
from jaxpace.runs import ring_file
from jaxpace.runs.run import Process
from jaxpace.runs.rundir import RunIdentity


@pytest.fixture(scope="module")
def written(tmp_path_factory):
  assert execution.unavailable() == ""
  copier = RingCopier(tmp_path_factory.mktemp("ring"), RunIdentity("r1", 2, 0))
  copier.start()
  library.functions().jaxpace_mark_here(1, 5, 9, 40)
  copier.close()
  return copier.path


def test_a_file_comes_back_as_it_was_written(written):
  found, ring = ring_file.read_ring(written), execution.current()
  assert (found.run, found.attempt, found.closed) == ("r1", 2, True)
  assert found.heads.tolist() == ring.heads().tolist() and found.ranks.tolist() == ring.ranks
  tags, *_ = DeviceBuffer().take(found.events[1], lambda: int(found.heads[1]), final=True)
  assert len(tags) == 40 and set(tags.tolist()) == {5 << 20 | 9}, "and none from before"


@given(st.data())
def test_any_damage_is_read_in_bounds_or_refused_in_a_sentence(written, tmp_path_factory, data):
  whole = bytearray(written.read_bytes()[:ring_layout.PAGE + 3 * ring_layout.PAGE])
  for at, byte in data.draw(st.lists(st.tuples(st.integers(0, 600), st.integers(0, 255)),
                                     max_size=20)):
    whole[at] = byte
  del whole[data.draw(st.integers(0, len(whole))):]
  path = tmp_path_factory.mktemp("damage") / "0.ring"
  path.write_bytes(bytes(whole))
  try:
    found = ring_file.read_ring(path)
  except UnreadableError as error:
    assert str(error)
    return
  assert found.events.shape == (len(found.ranks), found.events.shape[1])
  for buffer in range(min(len(found.ranks), 4)):
    follower, head = DeviceBuffer(), int(found.heads[buffer])
    for _ in range(100):
      if follower.position >= head:
        break
      follower.take(found.events[buffer], lambda head=head: head, final=True)
    assert follower.position >= head or head > 0


@pytest.mark.parametrize("content", [b"", b"jaxpace", b"x" * 5000, ring_layout.MAGIC + bytes(5000)])
def test_what_is_no_ring_is_refused(tmp_path, content):
  path = tmp_path / "0.ring"
  path.write_bytes(content)
  with pytest.raises(UnreadableError, match="no ring of timestamps|damaged header"):
    ring_file.read_ring(path)


def test_a_header_that_promises_terabytes_takes_none(tmp_path):
  header = np.zeros((), ring_layout.HEADER)
  header["magic"], header["lanes"], header["capacity"] = ring_layout.MAGIC, 1024, 1 << 30
  path = tmp_path / "0.ring"
  path.write_bytes(header.tobytes().ljust(8192, b"\0"))
  with pytest.raises(UnreadableError, match="more than any ring"):
    ring_file.read_ring(path)


# Plans beside the rings: written as a whole, read whatever they are.

def plan():
  gather = Collective(
      0, "all-gather.1", "all-gather", 4096, 1, ("float32",), ("data",), "forward", 2,
      groups=((0, 1), (2, 3)), loops=(Loop("while.1", 4),), source="model.py:12",
      operation="jit(step)/dot_general")
  permute = Collective(
      1, "collective-permute.2", "collective-permute", None, 1, ("bfloat16",), (), "compute",
      4, pairs=((0, 1), (1, 0)), loops=(Loop("while.2", None),), conditional=True)
  return ObservedPlan((ObservedProgram(
      1, "train_step", (0, 1, 2, 3), {"data": 2, "tensor": 2}, (gather, permute),
      notices=("as it is",), unstamped=(Untimed("x", "psum", None, "why"),),
      bare_compile_s=1.5),))


def test_a_plan_comes_back_as_it_was(tmp_path):
  ring_file.write_plan(tmp_path, 3, "a run", 2, plan())
  assert ring_file.read_plan(tmp_path, 3) == ("a run", 2, plan())
  assert [path.name for path in (tmp_path / "marks").iterdir()] == ["3.plan.json"]
  ring_file.write_plan(tmp_path, 3, "a run", 2, ObservedPlan())
  assert ring_file.read_plan(tmp_path, 3)[-1] == ObservedPlan()


@pytest.mark.parametrize("own, run, known", [
    ([2, 3], "a run", [[0, 1], [2, 3]]),
    ([2, 3], "another run", [[0, 1]]), ([1], "a run", [[0, 1]])])
def test_groups_that_process_0_knows_nothing_of_are_found(tmp_path, own, run, known):
  ring_file.write_plan(tmp_path, 1, run, 0, plan())
  entry = {"name": "all-gather.1@3", "kind": "all-gather", "bytes": 4096, "groups": [[0, 1]]}
  other = {**entry, "bytes": 8}
  info = {"run": "a run", "plan": {"collectives": [entry, other]}}
  found = ring_file.with_all_groups(tmp_path, info, [Process(0, {"ranks": [0, 1]}),
                                                     Process(1, {"ranks": own})])
  assert found == {**info, "plan": {"collectives": [{**entry, "groups": known}, other]}}


def test_a_file_without_a_plan_is_refused(tmp_path):
  with pytest.raises(OSError):
    ring_file.read_plan(tmp_path, 0)
  (tmp_path / "marks").mkdir()
  for text in ("", "{", "[]", "{}", '{"plan": 1}', '{"plan": {}}', '{"plan": {"programs": [{}]}}'):
    ring_file.path_of(tmp_path, 0).write_text(text)
    with pytest.raises(UnreadableError):
      ring_file.read_plan(tmp_path, 0)


@pytest.mark.parametrize("path, value", [
    (("number",), -1), (("number",), 1 << 12), (("ranks",), ["0"]),
    (("collectives", 0, "groups"), [[-1]]), (("collectives", 0, "enter_tag"), 1 << 20),
    (("collectives", 0, "enter_tag"), -1),
    (("collectives", 0, "loops", 0, "trips"), -3), (("collectives", 0, "index"), None),
    (("collectives",), {}), (("mesh_axes",), []), (("ranks",), [1 << 24]),
    (("collectives", 0, "name"), "a" * 4097), (("collectives", 0, "bytes"), 1 << 62)])
def test_a_plan_that_is_damaged_anywhere_is_refused(tmp_path, path, value):
  ring_file.write_plan(tmp_path, 0, "a run", 0, plan())
  file = ring_file.path_of(tmp_path, 0)
  document = json.loads(file.read_text())
  at = document["plan"]["programs"][0]
  for key in path[:-1]:
    at = at[key]
  at[path[-1]] = value
  file.write_text(json.dumps(document))
  with pytest.raises(UnreadableError):
    ring_file.read_plan(tmp_path, 0)
