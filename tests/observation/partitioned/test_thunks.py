"""Timestamps in compiled programs of CPUs: only calls come between what is there, in their
  order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpace
from jaxpace.observation.partitioned import thunks, wire
from jaxpace.observation.partitioned.collectives import TimestampError
from tests.observation import observed_steps as steps


def compiled(step, *args):
  return jax.jit(step).lower(*args).compile().runtime_executable().serialize()


@pytest.fixture(scope="module")
def in_loops():
  """A step with collectives in loops, one in a branch, and one after another."""
  mesh = jax.make_mesh((4,), ("data",), (AxisType.Auto,), devices=jax.devices()[:4])

  def step(w, x):
    def body(h, layer):
      return jnp.tanh(h @ jax.lax.with_sharding_constraint(layer, NamedSharding(mesh, P()))), None
    h, _ = jax.lax.scan(body, x, w)
    total = h.sum()
    return jax.lax.cond(total > 0, lambda: (h * 2).mean(), lambda: h.min() + total)

  w = jax.device_put(np.ones((3, 8, 8), np.float32), NamedSharding(mesh, P(None, "data")))
  x = jax.device_put(np.ones((8, 8), np.float32), NamedSharding(mesh, P("data")))
  return compiled(step, w, x)


def read(data):
  length, begin = wire.varint(data, 0)
  return wire.read(wire.first(wire.read(data[begin + length:]), 1))


def inner_lists(parts):
  return [one for number, lists in thunks._LISTS.items() for inner in wire.every(parts, number)
          for each in lists for one in wire.every(wire.read(inner), each)]


def lists_of(data, whole=True):
  """Every list of thunks of a program, outermost last: (name, kind, thunk's fields) each, and the
  names of what is kept in order by more than memory. Where a list was cut into calls of its parts,
  the whole of it, or each part."""
  found = []

  def visit(sequence):
    here, users = [], [[] for _ in wire.every(wire.read(sequence), 2)]
    for thunk in wire.every(wire.read(sequence), 1):
      parts = wire.read(thunk)
      name = wire.first(wire.read(wire.first(parts, 2)), 1).decode()
      inner = [visit(one) for one in inner_lists(parts)]
      if whole and name.startswith("jaxpace_call."):
        here += inner[0][0]
        users = [sum(each, []) for each in zip(users, inner[0][1], strict=True)
                 ] if users else inner[0][1]
      else:
        found.extend(inner)
        here.append((name, wire.first(parts, 1).decode(), parts))
    for names, one in zip(users, wire.every(wire.read(sequence), 2), strict=False):
      names += [here[place][0] for place in wire.numbers(wire.read(one), 1)]
    return here, users

  outermost = visit(wire.first(read(data), 6))
  return [*found, outermost]


def test_all_but_the_marks_is_as_it_was(in_loops):
  made, _ = thunks.timestamped(in_loops, 7)
  before, after = lists_of(in_loops), lists_of(made)
  assert len(before) == len(after) > 3
  for (bare, _), (marked, _) in zip(before, after, strict=True):
    assert [one[:2] for one in marked if not one[0].startswith("jaxpace_mark.")] == [
        one[:2] for one in bare]
  # What is neither a list of thunks nor has one in it is the same, byte for byte.
  rest = [[(field.number, field.value) for field in read(data) if field.number != 6]
          for data in (in_loops, made)]
  assert rest[0] == rest[1]


def test_every_collective_stands_between_its_marks(in_loops):
  made, enter_tags = thunks.timestamped(in_loops, 7)
  tags = {tag for each in enter_tags.values() for tag in each}
  found = 0
  for marked, _ in lists_of(made):
    names = [name for name, *_ in marked]
    for place, (name, kind, _) in enumerate(marked):
      if kind == "collective":
        tag = int(names[place - 1].removeprefix("jaxpace_mark."))
        assert tag in enter_tags[name]
        assert names[place + 1] == f"jaxpace_mark.{tag + 1}"
        found += 1
  assert found == len(tags) >= 3
  names = [name for name, *_ in lists_of(made)[-1][0]]
  assert names[0] == "jaxpace_mark.0" and names[-1] == "jaxpace_mark.1"


def test_what_is_kept_in_order_by_more_than_memory_keeps_its_places(in_loops):
  before, after = lists_of(in_loops), lists_of(thunks.timestamped(in_loops, 7)[0])
  assert [users for _, users in after] == [users for _, users in before]
  assert sum(len(names) for _, users in before for names in users) >= 3


def test_a_list_short_enough_to_run_in_order_stays_so(in_loops):
  made = thunks.timestamped(in_loops, 7)[0]
  short = [len(here) for here, _ in lists_of(in_loops)]
  assert min(short) < 8
  grown = [len(here) > 8 for here, _ in lists_of(made)]
  assert any(long and bare <= 8 for long, bare in zip(grown, short, strict=True))
  parts = [len(here) for here, _ in lists_of(made, whole=False)]
  assert sum(one > 8 for one in parts) == sum(one > 8 for one in short)


def numbered(message):
  return {field.number: field.value for field in wire.read(message)}


def memory_of(parts):
  """(pieces of memory read, pieces written) by a call."""
  buffers = wire.read(wire.first(wire.read(wire.first(parts, 16)), 4))
  return wire.every(buffers, 1), wire.every(buffers, 2)


def test_the_first_and_the_last_mark_touch_all_memory_that_is_written(in_loops):
  marked, _ = lists_of(thunks.timestamped(in_loops, 7)[0])[-1]
  sizes = []
  for _, _, parts in (marked[0], marked[-1]):
    taken, given = memory_of(parts)
    assert taken == given and taken
    sizes.append({numbered(wire.first(wire.read(one), 2)).get(3, 0) for one in given})
  # Whatever a thunk writes lies in one of them.
  pieces = {}
  for piece in wire.every(wire.read(wire.first(read(in_loops), 2)), 3):
    fields = numbered(piece)
    pieces[fields.get(1, 0)] = fields
  written = {index for index, fields in pieces.items()
             if not any(fields.get(kind) for kind in (3, 11, 12)) and not (
                 fields.get(5) and not fields.get(7))}
  assert sizes == [written, written]


def test_marks_hand_on_what_they_stand_beside(in_loops):
  for marked, _ in lists_of(thunks.timestamped(in_loops, 7)[0]):
    for place, (_, kind, parts) in enumerate(marked):
      if kind != "collective":
        continue
      buffers = wire.read(wire.first(wire.read(wire.first(parts, 18)), 2))
      sources, destinations = wire.every(buffers, 1), wire.every(buffers, 2)
      taken, given = memory_of(marked[place - 1][2])
      assert (taken[:len(sources)], given) == (sources, sources[:1])
      assert memory_of(marked[place + 1][2]) == (destinations, destinations)


def collectives_in_order(data):
  """Collectives as they run: (list, operands' fields, the call before)."""
  found = []

  def visit(sequence, of):
    before = None
    for thunk in wire.every(wire.read(sequence), 1):
      parts = wire.read(thunk)
      if wire.first(parts, 1) == b"collective":
        found.append((of, wire.read(wire.first(wire.read(wire.first(parts, 18)), 2)), before))
      in_call = wire.first(wire.read(wire.first(parts, 2)), 1).startswith(b"jaxpace_call.")
      for one in inner_lists(parts):
        visit(one, of if in_call else one)
      before = parts

  visit(wire.first(read(data), 6), "outer")
  return found


def test_collectives_of_different_lists_keep_their_order(in_loops):
  # XLA keeps it by more than memory, and loses that when it loads a program.
  names = {name for name, kind, _ in sum((here for here, _ in lists_of(in_loops)), [])
           if kind == "collective"}
  for only in (None, set(), names):
    order = collectives_in_order(thunks.timestamped(in_loops, 7, only)[0])
    between = 0
    for (of, one, _), (where, two, call) in zip(order, order[1:], strict=False):
      taken, given = memory_of(call) if where != of or only != set() else ([], [])
      assert not given or given == wire.every(two, 1)[:1]
      assert where == of or wire.every(one, 2)[0] in taken
      between += where != of
    assert between >= 2


@given(st.binary(max_size=40))
def test_bytes_of_anything_are_refused_in_a_sentence(data):
  with pytest.raises(TimestampError):
    thunks.timestamped(data, 1)


@given(st.lists(st.tuples(st.integers(1, 2**29 - 1), st.one_of(
    st.integers(0, 2**64 - 1), st.binary(max_size=20)))))
def test_messages_come_back_as_they_were(fields):
  message = wire.written([wire.whole(number, value) if isinstance(value, int)
                          else wire.text(number, value) for number, value in fields])
  assert [(one.number, one.value) for one in wire.read(message)] == fields
  assert wire.written(wire.read(message)) == message


def test_a_program_that_has_run_is_marked_all_the_same():
  # Once they have run, some sorts can't be written.
  mesh = steps.mesh_of(data=4)
  x = jax.device_put(np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32),
                     NamedSharding(mesh, P("data")))

  def step(x):
    return jax.lax.top_k(jnp.sort(x.mean(0)), 2)[0]
  wanted = jax.jit(step)(x)
  observed = jaxpace.observe(jax.jit(step))
  np.testing.assert_array_equal(observed(x), wanted)
  assert not observed.plan.programs[0].bare
