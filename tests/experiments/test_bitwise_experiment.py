"""The experiment that compares bits and collectives: that it sees differences, and one small case
of it."""

from __future__ import annotations

import pytest

from experiments.lib import hlo
from experiments.measure import bitwise_cases
from experiments.measure.bitwise_cases import LAYOUTS, Case, Result, Way

pytestmark = pytest.mark.optimized

_ALL_REDUCE = """
  %all-reduce.1 = (f32[40,6]{1,0}, /*index=1*/f32[]) all-reduce(%a, %b), channel_id=1, replica_groups={{0,1},{2,3}}, x=1
  %got = f32[] get-tuple-element(%all-reduce.1), index=1
"""  # noqa: E501


def test_collectives_of_a_program_text() -> None:
  text = _ALL_REDUCE + """
  %g = bf16[8]{0} all-gather(%x), channel_id=2, replica_groups=[1,4]<=[4], dimensions={0}
  %p = f32[3]{0} collective-permute(%y), source_target_pairs={{0,1},{1,0}}
"""
  assert hlo.collectives(text) == [
      ("all-gather", "[1,4]<=[4]", ("bf16[8]",)),
      ("all-reduce", "{{0,1},{2,3}}", ("f32[40,6]", "f32[]")),
      ("collective-permute", "{{0,1},{1,0}}", ("f32[3]",))]


@pytest.mark.parametrize(("old", "new", "added", "same_but_for"), [
    ("x=1", "x=2", (), 0),
    ("f32[])", "f32[], f32[4]{0})", ("f32[4]",), 1),
    ("f32[])", "f32[], f32[4]{0}, f32[4]{0})", ("f32[4]", "f32[4]"), 2),
    ("f32[40,6]", "bf16[40,6]", (), None),
    ("{{0,1},{2,3}}", "{{0,2},{1,3}}", (), None),
    ("all-reduce(", "reduce-scatter(", (), None),
    ("%got", "%more = f32[4]{0} all-reduce(%c), replica_groups={{0,1},{2,3}}\n  %got", (), None),
])
def test_changes_of_collectives_are_seen(old: str, new: str, added: tuple[str, ...],
                                         same_but_for: int | None) -> None:
  changes = hlo.compare(_ALL_REDUCE, _ALL_REDUCE.replace(old, new, 1))
  if same_but_for is None:
    assert not changes.same_but_for(10)
  else:
    assert changes.added == added and changes.same_but_for(same_but_for)
    assert same_but_for == 0 or not changes.same_but_for(same_but_for - 1)


def test_one_bit_in_one_leaf_is_a_difference() -> None:
  case = Case("mlp", "float32", "pmap", 2)
  bare = Result({"w": b"\0\1", "m": b"\2"}, "", False, True)
  assert bitwise_cases.compare(case, "x", bare, bare)["bits_equal"]
  other = bitwise_cases.compare(case, "x", bare, bare._replace(bits={"w": b"\0\0", "m": b"\2"}))
  assert not other["bits_equal"] and other["leaves"] == ["w"]
  assert (bitwise_cases.compare(case, "x", bare, bare._replace(bits={"w": b"\0\1"}))["leaves"]
          == ["m"])
  stuck = bare._replace(changed=False)
  assert not bitwise_cases.compare(case, "x", stuck,
                                   stuck)["bits_equal"], "a state that does not move proves nothing"


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_small_case(layout: str) -> None:
  rows = bitwise_cases.run(Case("digits", "bf16-params", layout, 2),
                           [Way("auto", True, True, True)], steps=6)
  assert [row["way"] for row in rows] == ["auto, shared, delays, recorded", bitwise_cases.NULL]
  assert (rows[0]["bits_equal"] and rows[0]["hlo_equal"] and rows[0]["shared"]
          and len(rows[0]["added"]) == 1)
  assert rows[0]["compared_leaves"] >= 8 and rows[0]["collectives"] >= 1
