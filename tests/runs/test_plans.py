"""Plans beside the rings: written as a whole, read whatever they are."""

import json

import pytest

from jaxpace.core.observed import ObservedPlan, ObservedProgram
from jaxpace.core.plan import Collective, Loop, Untimed
from jaxpace.files.reading import UnreadableError
from jaxpace.runs import ring_file


def plan():
  gather = Collective(
      0, "all-gather.1", "all-gather", 4096, 1, ("float32",), ("data",), "forward", (2,), (3,),
      groups=((0, 1), (2, 3)), loops=(Loop("while.1", 4),), source="model.py:12",
      operation="jit(step)/dot_general")
  permute = Collective(
      1, "collective-permute.2", "collective-permute", None, 1, ("bfloat16",), (), "compute",
      (4, 6), (5, 7), pairs=((0, 1), (1, 0)), loops=(Loop("while.2", None),), conditional=True)
  return ObservedPlan((ObservedProgram(
      1, "train_step", (0, 1, 2, 3), {"data": 2, "tensor": 2}, (gather, permute),
      notices=("as it is",), unstamped=(Untimed("x", "psum", None, "why"),),
      bare_compile_s=1.5),))


def test_a_plan_comes_back_as_it_was(tmp_path):
  ring_file.write_plan(tmp_path, 3, "a run", 2, plan())
  assert ring_file.read_plan(tmp_path, 3) == ("a run", 2, 3, plan())
  assert [path.name for path in (tmp_path / "marks").iterdir()] == ["3.plan.json"]
  ring_file.write_plan(tmp_path, 3, "a run", 2, ObservedPlan())
  assert ring_file.read_plan(tmp_path, 3).plan == ObservedPlan()


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
    (("collectives", 0, "groups"), [[-1]]), (("collectives", 0, "enter_tags"), [1 << 20]),
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
