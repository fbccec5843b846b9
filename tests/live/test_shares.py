"""What a process loads for a step, by its counts."""

import collections
import dataclasses
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpace
from tests.instrumentation.running import mesh_of

RANKS, TOTAL, CAPACITY, SIZE, EXAMPLES = 4, 8, 5, 2, 48
LOAD = {"mesh": None, "examples": EXAMPLES, "size": SIZE, "total_micro_batches": TOTAL,
        "capacity": CAPACITY, "seed": 2}


def loss_fn(w, micro_batch):
  # Which examples have been trained on, by their numbers.
  seen = jnp.zeros((EXAMPLES,), jnp.int32).at[micro_batch["number"]].add(1)
  return jnp.sum(micro_batch["x"] * w), jnp.float32(SIZE), seen


def share_of(counts, **settings):
  return jaxpace.shares(**LOAD | {"mesh": mesh_of(data=RANKS)} | settings).share(
      0, np.asarray(counts))


class Source:
  """As Grain has them: a length, and a record at each number."""

  def __len__(self):
    return EXAMPLES

  def __getitem__(self, number):
    return {"x": np.float32(number), "row": np.full(3, number, np.int32)}


def test_arrays_records_and_iterators_give_the_same():
  share = share_of([5, 1, 2, 0])
  arrays = {"x": np.arange(EXAMPLES, dtype=np.float32),
            "row": np.arange(EXAMPLES, dtype=np.int32)[:, None].repeat(3, 1)}
  drawn = iter([Source()[int(i)] for part in share.numbers for i in part.reshape(-1)])
  found = [share.take(arrays), share.take(Source()),
           share.take([Source()[i] for i in range(EXAMPLES)]), share.draw(drawn)]
  for tree in found:
    assert (tree["x"].shape == (RANKS * CAPACITY, SIZE)
            and tree["row"].shape == (RANKS * CAPACITY, SIZE, 3))
    for name, leaf in tree.items():
      np.testing.assert_array_equal(leaf, found[0][name])
  rows = found[0]["x"].reshape(RANKS, CAPACITY, SIZE)
  for rank, part in enumerate(share.numbers):
    assert rows[rank, :len(part)].tolist() == part.tolist() and not rows[rank, len(part):].any()
  with pytest.raises(StopIteration):
    next(drawn)
  counted = collections.Counter(int(i) for part in share.numbers for i in part.reshape(-1))
  assert len(counted) == TOTAL * SIZE and set(counted.values()) == {1}


@pytest.mark.parametrize("guard", ["allow", "log", "disallow", "disallow_explicit"])
@pytest.mark.parametrize("shape", [(4,), (4, 2), (1, 4), (1,)])
@pytest.mark.parametrize("backwards", [False, True])
def test_batches_are_laid_out_as_jax_lays_out_what_a_process_has(guard, shape, backwards):
  devices = np.array(jax.devices()[:np.prod(shape)]).reshape(shape)
  mesh = jax.sharding.Mesh(devices[::-1] if backwards else devices, ("data", "model")[:len(shape)])
  share = jaxpace.shares(mesh, examples=64, size=2, total_micro_batches=8, capacity=8).share(
      0, np.full(shape[0], 8 // shape[0]))
  local = {"x": np.arange(shape[0] * 16 * 3.0).reshape(-1, 2, 3),
           "flat": np.arange(shape[0] * 5), "none": np.ones((0, 2), np.float16)}
  expected = jax.make_array_from_process_local_data(share.sharding, local)
  with jax.transfer_guard(guard):
    placed = share.put(local)
  for name, array in placed.items():
    assert array.sharding == expected[name].sharding and array.dtype == expected[name].dtype
    for one, other in zip(array.addressable_shards, expected[name].addressable_shards, strict=True):
      assert one.device == other.device and np.array_equal(one.data, other.data)


def test_what_has_no_part_for_each_rank_is_not_laid_out():
  share = jaxpace.shares(**LOAD | {"mesh": mesh_of(data=RANKS)}).share(0, np.full(RANKS, 2))
  for leaf in (np.ones(6), np.float32(1)):
    with pytest.raises(ValueError, match="this process loads for 4 ranks"):
      share.put({"x": leaf})


def test_the_order_of_examples_cannot_be_written_to():
  share = jaxpace.shares(**LOAD | {"mesh": mesh_of(data=RANKS)}).share(0, np.full(RANKS, 2))
  with pytest.raises(ValueError, match="read-only"):
    share.numbers[0][:] = 0


def test_a_process_with_nothing_to_run():
  one = dataclasses.replace(share_of([8, 0, 0, 0], capacity=8), ranks=(1,),
                            numbers=(np.zeros((0, SIZE), int),))
  for source in (Source(),
                 {"x": np.zeros(EXAMPLES, np.float32), "row": np.zeros((EXAMPLES, 3), np.int32)}):
    empty = one.take(source)
    assert (empty["x"].shape == (8, SIZE) and empty["row"].shape == (8, SIZE, 3)
            and empty["row"].dtype == np.int32)
  with pytest.raises(ValueError, match="Let every rank have one: share_by_speed"):
    one.draw(iter([]))


def test_sources_that_lack_examples():
  share = share_of([2, 2, 2, 2])
  examples = [np.zeros(3)] * (TOTAL * SIZE - 1)
  with pytest.raises(StopIteration, match="ended within step 0: .* take 16 examples"):
    share.draw(iter(examples))
  with pytest.raises(TypeError, match="this list begins anew each time: give it one iterator"):
    share.draw(examples)
  for source in (examples[:1], {"x": np.zeros(EXAMPLES), "scale": 2.0}, None):
    with pytest.raises(IndexError, match=f"a {type(source).__name__}, gives no example"):
      share.take(source)


def test_a_feed_is_not_pickled_but_its_state_is():
  feed = jaxpace.shares(**LOAD | {"mesh": mesh_of(data=RANKS)})
  with pytest.raises(TypeError, match="a checkpoint holds feed.state"):
    pickle.dumps({"params": 1, "feed": feed})
  assert pickle.loads(pickle.dumps(feed.state())).counts.tolist() == [2, 2, 2, 2]


def test_what_is_refused():
  with pytest.raises(ValueError, match="capacity=1 is too small: 4 ranks have room for 4"):
    jaxpace.shares(**LOAD | {"mesh": mesh_of(data=RANKS), "capacity": 1})
  with pytest.raises(ValueError, match="The counts are of 2 ranks, and the mesh has 4"):
    share_of([4, 4])
  with pytest.raises(ValueError, match="A rank is to run 8 micro-batches, and capacity=5"):
    share_of([8, 0, 0, 0])
  with pytest.raises(ValueError, match="axis_name=None must be the name of the data axis"):
    jaxpace.shares(**LOAD | {"mesh": mesh_of(data=RANKS), "axis_name": None})
  with pytest.raises(ValueError, match="total_micro_batches=3 is too few: each of the 4 ranks"):
    jaxpace.shares(mesh_of(data=RANKS), total_micro_batches=3)
  with pytest.raises(ValueError, match="The mesh has no axis 'batch'"):
    jaxpace.shares(**LOAD | {"mesh": mesh_of(data=RANKS), "axis_name": "batch"})
  mesh = mesh_of(data=2)
  feed = jaxpace.shares(**LOAD | {"mesh": mesh})
  pace = jaxpace.instrument(lambda w: jax.lax.psum(w, "data"), "data").init(mesh)
  for other, named in ((3, "This is 3"), (loss_fn, "This is <function"), (pace, "a pace state: ")):
    with pytest.raises(ValueError, match=f"feed.next takes the observed step.*{named}"):
      feed.next(other)
  with pytest.raises(ValueError, match="Give jaxpace.shares both examples"):
    jaxpace.shares(mesh, total_micro_batches=TOTAL, examples=EXAMPLES)
  assert jaxpace.shares(mesh, total_micro_batches=TOTAL).capacity == TOTAL
  assert jaxpace.shares(**LOAD | {"mesh": mesh_of(data=RANKS), "capacity": None}).capacity == 4


@pytest.mark.parametrize("refused", [
    lambda: jaxpace.share_by_speed(total_micro_batches=8, capacity=16),
    lambda: jaxpace.shares(**LOAD | {"mesh": mesh_of(data=2), "total_micro_batches": 8,
                                     "capacity": 16})])
def test_a_rank_s_number_given_for_the_job_s_is_called_so(refused):
  with pytest.raises(ValueError, match="capacity=16 must be a whole number from 1 to 8, the "
                     "total_micro_batches of all ranks of the job together"):
    refused()
