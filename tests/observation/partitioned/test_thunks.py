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
from jaxpace.observation.partitioned.wire import TimestampError
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


def visit(sequence):
  """A list of thunks as names, kinds and fields, with the lists in them, and what else than memory
  keeps them in order: places."""
  here = []
  for thunk in wire.every(wire.read(sequence), 1):
    parts = wire.read(thunk)
    inner = [visit(one) for number, place in thunks._LISTS
             for each in wire.every(parts, number) for one in wire.every(wire.read(each), place)]
    here.append((wire.first(wire.read(wire.first(parts, 2)), 1).decode(),
                 wire.first(parts, 1).decode(), parts, inner))
  return here, [wire.numbers(wire.read(one), 1) for one in wire.every(wire.read(sequence), 2)]


def is_ours(name):
  return name.startswith("jaxpace_")


def lists_of(data):
  """Every list of thunks of a program, outermost last: (name, kind, thunk's fields) each. What
  timestamps have put into lists of their own is back in its place."""
  found = []

  def flat(here):
    for name, kind, parts, inner in here:
      if is_ours(name) and inner:
        yield from flat(inner[0][0])
      else:
        for one, _ in inner:
          found.append(list(flat(one)))
        yield name, kind, parts

  outermost = list(flat(visit(wire.first(read(data), 6))[0]))
  return [*found, outermost]


def own_lists(data):
  """Lists as XLA will run them, without those that timestamps were put into: names, and places of
  what keeps them in order."""
  found = []

  def walk(here, users):
    for *_, inner in here:
      for one, places in inner:
        walk(one, places)
    if not any(name.startswith("jaxpace_mark") for name, *_ in here):
      found.append(([name.removeprefix("jaxpace_call.") for name, *_ in here], users))

  walk(*visit(wire.first(read(data), 6)))
  return found


def test_all_but_the_marks_is_as_it_was(in_loops):
  made, _ = thunks.timestamped(in_loops, 7)
  before, after = lists_of(in_loops), lists_of(made)
  assert len(before) == len(after) > 3
  for bare, marked in zip(before, after, strict=True):
    assert [one[:2] for one in marked if not is_ours(one[0])] == [one[:2] for one in bare]
  # What is neither memory, a list of thunks nor has one in it is the same, byte for byte.
  rest = [[(field.number, field.value) for field in read(data) if field.number not in (2, 6)]
          for data in (in_loops, made)]
  assert rest[0] == rest[1]
  old, new = ([numbered(piece) for piece in wire.every(wire.read(wire.first(read(data), 2)), 3)]
              for data in (in_loops, made))
  [(was, grown)] = [pair for pair in zip(old, new, strict=True) if pair[0] != pair[1]]
  assert was | {2: None} == grown | {2: None} and 0 < grown[2] - was[2] <= 128
  assert not any(was.get(kind) for kind in (3, 5, 7, 11, 12))


def numbered(message):
  return {field.number: field.value for field in wire.read(message)}


def test_a_program_without_temporary_memory_can_be_written_again():
  mesh = jax.make_mesh((4,), ("data",), (AxisType.Auto,), devices=jax.devices()[:4])
  x = jax.device_put(np.ones(8, np.float32), NamedSharding(mesh, P("data")))
  step = jax.shard_map(lambda x: jax.lax.psum(x, "data"), mesh=mesh, in_specs=P("data"),
                       out_specs=P())
  bare = compiled(step, x)
  assert not temporary(bare)
  observed = jaxpace.observe(jax.jit(step)).lower(x).compile()
  again = observed.runtime_executable().serialize()
  assert len(temporary(again)) == 1
  np.testing.assert_array_equal(observed(x), [4, 4])


def temporary(data):
  pieces = [numbered(piece) for piece in wire.every(wire.read(wire.first(read(data), 2)), 3)]
  return [piece for piece in pieces if not any(piece.get(kind) for kind in (3, 5, 7, 11, 12))]


def test_lists_have_as_many_thunks_as_before_in_the_same_order(in_loops):
  made, _ = thunks.timestamped(in_loops, 7)
  assert own_lists(made) == own_lists(in_loops)
  assert sum(len(places) for _, users in own_lists(made) for places in users) >= 3


def collectives_of(data):
  """The list that each collective is in: thunks, and what keeps it in order."""
  found = []

  def walk(here, users):
    for _, kind, _, inner in here:
      if kind == "collective":
        found.append((here, users))
      for one in inner:
        walk(*one)

  walk(*visit(wire.first(read(data), 6)))
  return found


def test_every_collective_stands_between_its_marks(in_loops):
  made, enter_tags = thunks.timestamped(in_loops, 7)
  tags = {tag for each in enter_tags.values() for tag in each}
  found = collectives_of(made)
  assert len(found) == len(tags) >= 3
  for ((enter, *_), (name, kind, *_), (leave, *_)), users in found:
    tag = int(enter.removeprefix("jaxpace_mark."))
    assert kind == "collective" and tag in enter_tags[name]
    assert leave == f"jaxpace_mark.{tag + 1}"
    assert users == [[1]]
  names = [name for name, *_ in lists_of(made)[-1]]
  assert names[0] == "jaxpace_mark.0" and names[-1] == "jaxpace_mark.1"


def memory_of(parts):
  """(pieces of memory read, pieces written) by a call."""
  buffers = wire.read(wire.first(wire.read(wire.first(parts, 16)), 4))
  return wire.every(buffers, 1), wire.every(buffers, 2)


def test_memory_keeps_marks_in_order_with_each_other_and_their_collectives(in_loops):
  collectives = {name for [_, (name, *_), *_], _ in collectives_of(thunks.timestamped(
      in_loops, 7)[0])}
  for only in (None, set(), collectives, set(sorted(collectives)[:1])):
    made, _ = thunks.timestamped(in_loops, 7, only or (), ends=only is None)
    tokens = []
    for (enter, (name, _, parts, _), *leave), _ in collectives_of(made):
      buffers = wire.read(wire.first(wire.read(wire.first(parts, 18)), 2))
      result = wire.every(buffers, 2)[:1]
      read_first, (token, *written) = memory_of(enter[2])
      assert (read_first, written) == ([], result)
      assert bool(leave) == (only is None or name in only)
      assert [memory_of(one[2]) for one in leave] == [(result, [])] * len(leave)
      assert b"{mark = %d" % ((7 if leave else 0) << 32) in wire.first(enter[2], 16) or leave
      tokens.append(token)
    outermost = lists_of(made)[-1]
    if only is None:
      tokens += [memory_of(one[2])[1][0] for one in (outermost[0], outermost[-1])]
    assert len(set(tokens)) == 1 and len(tokens) >= 3


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
