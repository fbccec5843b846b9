"""Timestamps in compiled programs of GPUs: only calls come between what is there. The programs are
what XLA made of a step with an all-gather and a reduce-scatter in loops for four H200, in jaxlib
0.10 and 0.11."""

import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpace.core.ring_layout import FIRST_TAG, LAST_TAG
from jaxpace.observation.partitioned import collectives, gpu_thunks, wire
from jaxpace.observation.partitioned.wire import TimestampError

HERE = pathlib.Path(__file__).parent
PROGRAM = 7
ASYNC_START, ASYNC_DONE, CUSTOM_CALL = 57, 58, 30
COLLECTIVES = (38, 39, 40)


@pytest.fixture(params=["0.10.2", "0.11.2"])
def program(request):
  """(what `serialize()` returned, the collectives of the program that it was compiled from)."""
  data = (HERE / f"gpu_program_{request.param}.bin").read_bytes()
  module = wire.first(wire.inside(wire.read(executable(data)[0][-1]), 1), 1)
  return data, collectives.found_in(collectives.Program(module), 4)


def names(found):
  return {one.name for one in found}


def executable(data):
  """A program's records, the last with its thunks, and what is around them."""
  length, begin = wire.varint(data, 0)
  rest = data[begin + length:]
  if not gpu_thunks.is_records(rest):
    outer = wire.read(rest)
    return gpu_thunks.read_records(wire.first(outer, 1)), data[:begin + length], outer[1:]
  outer = gpu_thunks.read_records(rest)
  (inner,) = (each for each in outer if gpu_thunks.is_records(each))
  others = [each for each in outer if each != inner]
  return gpu_thunks.read_records(inner), data[:begin + length], others


def thunks(data):
  return wire.every(wire.read(executable(data)[0][-1]), 13)


def name_of(thunk):
  return wire.first(wire.read(wire.first(wire.read(thunk), 1)), 1).decode()


def is_mark(thunk):
  return name_of(thunk).startswith("jaxpace_mark.")


def lists_of(sequence):
  """A list of thunks and those in it, the outermost first."""
  yield sequence
  for thunk in sequence:
    parts = wire.read(thunk)
    for number, fields in ((6, (2,)), (7, (2, 3)), (ASYNC_START, (3,))):
      for inner in wire.every(parts, number):
        for field in fields:
          for each in wire.every(wire.read(inner), field):
            yield from lists_of(wire.every(wire.read(each), 1))


def without_marks(sequence):
  """The same thunks without marks, those in lists too, in the form of nested lists."""
  found = []
  for thunk in sequence:
    if is_mark(thunk):
      continue
    parts = []
    for field in wire.read(thunk):
      lists = {6: (2,), 7: (2, 3), ASYNC_START: (3,)}.get(field.number)
      if lists is None:
        parts.append(field)
        continue
      parts.append((field.number, [
          (one.number, without_marks(wire.every(wire.read(one.value), 1)))
          if one.number in lists else one for one in wire.read(field.value)]))
    found.append(parts)
  return found


def test_all_but_the_marks_is_as_it_was(program):
  data, found = program
  made, _ = gpu_thunks.timestamped(data, PROGRAM, names(found))
  before, after = executable(data), executable(made)
  assert before[1:] == after[1:]
  assert before[0][:-1] == after[0][:-1]
  assert without_marks(thunks(data)) == without_marks(thunks(made))
  kept = [[field for field in wire.read(each[0][-1]) if field.number != 13]
          for each in (before, after)]
  assert kept[0] == kept[1]


def test_every_collective_of_the_text_stands_between_its_marks_on_its_own_stream(program):
  data, found = program
  made, tags = gpu_thunks.timestamped(data, PROGRAM, names(found))
  assert [one.kind for one in found] == ["all-gather", "all-reduce", "all-reduce",
                                          "reduce-scatter"]
  seen = {}
  for sequence in lists_of(thunks(made)):
    for place, thunk in enumerate(sequence):
      if {field.number for field in wire.read(thunk)} & set(COLLECTIVES):
        before, after = name_of(sequence[place - 1]), name_of(sequence[place + 1])
        seen[int(before.removeprefix("jaxpace_mark."))] = int(after.removeprefix("jaxpace_mark."))
  assert sorted(seen) == [FIRST_TAG, FIRST_TAG + 2, FIRST_TAG + 4, FIRST_TAG + 6]
  assert all(leave == enter + 1 for enter, leave in seen.items())
  assert sorted(tag for each in tags.values() for tag in each) == sorted(seen)
  # What runs beside computation is marked on its own stream alone.
  starts = [thunk for sequence in lists_of(thunks(made)) for thunk in sequence
            if wire.every(wire.read(thunk), ASYNC_START) and name_of(thunk) in names(found)]
  assert len(starts) == 2
  for thunk in starts:
    inside = wire.every(wire.read(wire.first(wire.read(wire.first(
        wire.read(thunk), ASYNC_START)), 3)), 1)
    assert [is_mark(each) for each in inside] == [True, False, True]


def test_start_and_end_enclose_the_program(program):
  data, found = program
  marked = thunks(gpu_thunks.timestamped(data, PROGRAM, names(found))[0])
  assert name_of(marked[0]) == "jaxpace_mark.0" and name_of(marked[-1]) == "jaxpace_mark.1"


def test_a_mark_is_a_call_of_the_handler_with_its_program_and_tag(program):
  data, found = program
  ids = set()
  for sequence in lists_of(thunks(gpu_thunks.timestamped(data, PROGRAM, names(found))[0])):
    for thunk in filter(is_mark, sequence):
      parts = wire.read(thunk)
      ids.add(wire.numbers(wire.read(wire.first(parts, 1)), 3)[0])
      call = wire.read(wire.first(parts, CUSTOM_CALL))
      assert wire.first(call, 1) == b"jaxpace_mark" and wire.numbers(call, 5) == [4]
      assert not wire.every(call, 2) and not wire.every(call, 3), "it touches no memory"
      (entry,) = wire.every(wire.read(wire.first(call, 6)), 1)
      key, value = wire.first(wire.read(entry), 1), wire.first(wire.read(entry), 2)
      scalar = wire.first(wire.read(value), 1)
      tag = int(name_of(thunk).removeprefix("jaxpace_mark."))
      assert key == b"mark" and wire.numbers(wire.read(scalar), 5) == [PROGRAM << 32 | tag]
  assert len(ids) == 10


def test_a_collective_whose_thunk_has_another_name_is_found_by_its_kind(program):
  data, found = program
  others = names(found) - {"reduce-scatter-start"}
  _, tags = gpu_thunks.timestamped(data, PROGRAM, others)
  assert set(tags) == others | {gpu_thunks.unnamed("reduce-scatter")}


def test_only_some_collectives_are_marked_within_another_program_of_timestamps(program):
  data, found = program
  made, tags = gpu_thunks.timestamped(data, PROGRAM, {"all-gather-start"}, 40, ends=False)
  assert tags == {"all-gather-start": [40]}
  marks = [name_of(thunk) for sequence in lists_of(thunks(made))
           for thunk in filter(is_mark, sequence)]
  assert marks == ["jaxpace_mark.40", "jaxpace_mark.41"]
  assert without_marks(thunks(data)) == without_marks(thunks(made))


def test_more_collectives_than_tags_are_refused(program):
  data, found = program
  with pytest.raises(TimestampError, match="more collectives than tags"):
    gpu_thunks.timestamped(data, PROGRAM, names(found), LAST_TAG - 2)


@given(st.binary(max_size=80))
def test_bytes_of_anything_are_refused_in_a_sentence(data):
  with pytest.raises(TimestampError):
    gpu_thunks.timestamped(data, PROGRAM, ())


@pytest.mark.long
@given(st.data())
def test_a_program_that_is_cut_short_is_refused_in_a_sentence(data):
  whole = (HERE / "gpu_program_0.11.2.bin").read_bytes()
  cut = data.draw(st.integers(0, len(whole) - 1))
  with pytest.raises(TimestampError):
    gpu_thunks.timestamped(whole[:cut], PROGRAM, ())
