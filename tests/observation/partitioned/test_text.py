"""Text of compiled programs in odd forms: tuples, comments, loops, branches, source tables."""

import pathlib

import pytest

from jaxpace.core.plan import Loop
from jaxpace.observation.partitioned import collectives, text

MODULE = (pathlib.Path(__file__).parent / "loops.hlo").read_text()


def test_collectives_are_found_where_they_run():
  found = collectives.found_in(MODULE, 4)
  assert [one.kind for one in found] == [
      "all-gather", "all-gather", "all-reduce", "collective-permute"]
  known, unknown, both, permute = found
  assert known.loops == (Loop("while.5", 32),)
  assert unknown.loops == (Loop("while.6", None),)
  assert known.groups == ((0, 2), (1, 3))
  assert (known.operands, known.dtypes, known.bytes) == (1, ("float32",), 128)
  assert known.operation == "jit(step)/jvp(a, (b))/while/body/dot_general"
  assert known.source == "model.py:120"
  assert both.groups == ((0, 1, 2, 3),)
  assert both.dtypes == ("bfloat16", "int8")
  assert both.bytes == 4 * 2 + 4
  assert permute.pairs == ((0, 1), (1, 0)) and permute.groups == ()
  assert permute.conditional and not known.conditional
  assert permute.source == "loss.py:9"


ASYNC = (pathlib.Path(__file__).parent / "pair.hlo").read_text()


def test_a_pair_of_start_and_done_is_one_collective():
  [one] = collectives.found_in(ASYNC, 4)
  assert (one.kind, one.name) == ("all-reduce", "start")


@pytest.mark.parametrize(("line", "wanted"), [
    ("%a = f32[2]{0} add(%b, %c)", ("a", "f32[2]{0}", "add", ("b", "c"), "")),
    ("ROOT a.1 = (f32[], s32[2]{0:T(128)}) tuple(b, /*index=1*/c), x={1,2}",
     ("a.1", "(f32[], s32[2]{0:T(128)})", "tuple", ("b", "c"), "x={1,2}")),
    ("%f = f32[] fusion(f32[2]{0} %x, s32[] %y), kind=kLoop, calls=%g",
     ("f", "f32[]", "fusion", ("x", "y"), "kind=kLoop, calls=%g")),
    ("%p = u32[] partition-id()", ("p", "u32[]", "partition-id", (), "")),
    ("no instruction", None), ("%x = ", None), ("= f32[] add(a)", None), ("%x = f32[]", None)])
def test_lines(line, wanted):
  found = text.instruction(line)
  assert (tuple(found) if found else None) == wanted


ELEMENTS = """
%body (param: (s32[], f32[4,2])) -> (s32[], f32[4,2]) {
  %param = (s32[], f32[4,2]{1,0}) parameter(0)
  %mark.1 = (f32[4,2]{1,0}) custom-call(%param#1), custom_call_target="__gpu$xla.gpu.ptx", backend_config={name = "jaxpace_mark_2"}
  %all-gather.1 = f32[4,4]{1,0} all-gather(%mark.1#0), channel_id=1, replica_groups=[1,2]<=[2], dimensions={1}
  %nested = ((f32[4,4]{1,0}, s32[]), f32[]) custom-call(%all-gather.1, %nowhere#1, %param#9), custom_call_target="other"
  %mark.2 = f32[4,4]{1,0} custom-call(%nested#0#0), custom_call_target="__gpu$xla.gpu.ptx", backend_config={name = "jaxpace_mark_3"}
  ROOT %tuple.1 = (s32[], f32[4,2]{1,0}) tuple(%param#0, %param#1)
}

ENTRY %main (a: (s32[], f32[4,2])) -> (s32[], f32[4,2]) {
  %a = (s32[], f32[4,2]{1,0}) parameter(0)
  ROOT %while.1 = (s32[], f32[4,2]{1,0}) while(%a), condition=%cond, body=%body
}
"""  # noqa: E501


def test_elements_of_tuples_named_where_they_are_used():
  [one] = collectives.found_in(ELEMENTS, 2)
  assert (one.operands, one.dtypes, one.bytes) == (1, ("float32",), 32)
  body = text.CompiledText(ELEMENTS).computations["body"]
  assert body["param#1"] == ("param#1", "f32[4,2]{1,0}", "get-tuple-element", ("param",), "index=1")
  assert body["nested#0"].shape == "(f32[4,4]{1,0}, s32[])"
  assert body["nested#0#0"].shape == "f32[4,4]{1,0}"
  assert body["param#9"].shape == "" and "nowhere#1" not in body
  # Each stands before its first use.
  names = list(body)
  assert names.index("param#1") < names.index("mark.1") < names.index("mark.1#0")


@pytest.mark.parametrize(("rest", "name", "wanted"), [
    ("a={1,2}, b=3", "a", "{1,2}"), ("a={1,2}, b=3", "b", "3"), ("ab=1, b=2", "b", "2"),
    ('m={op_name="x, b=4" id=2}, b=5', "m", '{op_name="x, b=4" id=2}'),
    ("g=mesh['a'=2], device_ids=([2]T(0)) {'a'}, d=1", "g",
     "mesh['a'=2], device_ids=([2]T(0)) {'a'}"),
    ("g=[2,2]<=[4]T(1,0), d=1", "g", "[2,2]<=[4]T(1,0)"), ("a=1", "c", None)])
def test_attributes(rest, name, wanted):
  assert text.Instruction("i", "f32[]", "op", (), rest).attribute(name) == wanted


@pytest.mark.parametrize("broken", ["", "HloModule x", "ENTRY %m () -> f32[] {\n", "}\n}\n{",
                                    "ENTRY %m (a: f32[]) -> f32[] {\n  %w = f32[] while(%w), "
                                    "body=%m\n}"])
def test_a_broken_text_has_no_collectives(broken):
  assert collectives.found_in(broken, 2) == []
