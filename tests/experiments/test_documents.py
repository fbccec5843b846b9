"""Documents of different length in the character example: each is trained on once, whoever has it,
and even loads."""

import functools
import itertools

import chex
import jax
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxpace
from experiments.examples.chars import data, documents
from experiments.examples.chars.model import Transformer

CONTEXT, RANKS, EACH = 16, 4, 3


def speeches():
  return documents.split(data.load(data.DEFAULT_TEXT, CONTEXT)[0])


def characters(batch):
  """Pairs of a character and the next one that are trained on, of all ranks, sorted."""
  pairs = []
  for rank, count in enumerate(batch.counts):
    part = slice(rank * len(batch.windows) // RANKS, rank * len(batch.windows) // RANKS + count)
    rows, weights = batch.windows[part], batch.weights[part] > 0
    pairs += zip(rows[:, :-1][weights].tolist(), rows[:, 1:][weights].tolist(), strict=True)
  return sorted(pairs)


def test_every_character_is_trained_on_once_whoever_has_its_document():
  drawn, balanced = (documents.batches(speeches(), CONTEXT, RANKS, EACH, 5, even)
                     for even in (False, True))
  better = 0
  for one, other in itertools.islice(zip(drawn, balanced, strict=True), 20):
    assert characters(one) == characters(other)
    assert one.counts.sum() == other.counts.sum() and other.counts.max() <= one.counts.max()
    better += int(other.counts.max() < one.counts.max())
  assert better >= 15


@pytest.mark.long
def test_the_loss_is_that_of_the_same_documents_however_they_are_shared_out():
  mesh = jax.make_mesh((RANKS,), ("data",), axis_types=(AxisType.Auto,),
                       devices=jax.devices()[:RANKS])
  graphdef, params = nnx.split(Transformer(data.VOCABULARY, CONTEXT, 16, 2, 1, rngs=nnx.Rngs(0)),
                               nnx.Param)
  loss_fn = functools.partial(documents.loss_fn, graphdef)

  def step(params, windows, weights, counts):
    return jaxpace.accumulate(loss_fn, params, (windows, weights), counts, "data")

  run = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data"), P("data"), P()),
                              out_specs=P()))
  drawn, balanced = (next(documents.batches(speeches(), CONTEXT, RANKS, EACH, 1, even))
                     for even in (False, True))
  (loss, grads), (other, others) = (run(params, *batch) for batch in (drawn, balanced))
  assert float(loss) == pytest.approx(float(other), rel=1e-5)
  chex.assert_trees_all_close(grads, others, rtol=1e-3, atol=1e-6)
