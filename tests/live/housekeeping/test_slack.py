"""What is read of the pace state: against earliness known in advance."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpace
from jaxpace.live.housekeeping.slack import SlackReader

LATE = np.array([0.010, 0.018, 0.012, 0.020], np.float32)


def pace(arrivals, delays=None, count=None, rank=0):
  """One process's part, as under shard_map: one device, every rank's arrivals."""
  arrivals = jnp.asarray(arrivals, jnp.float32)[None]
  delays = jnp.zeros_like(arrivals) if delays is None else jnp.asarray(delays, jnp.float32)[None]
  numbers = jnp.full((1 if count is None else count,), rank, jnp.int32)
  return types.SimpleNamespace(arrivals=arrivals, delays=delays, rank=numbers)


def feed(reader, states):
  for state in states:
    reader.see(state)
    if reader._copy is not None:
      reader._copy.block_until_ready()


def test_own_earliness_is_that_of_the_latest_own_rank():
  reader = SlackReader(1, ranks=[0, 2])
  feed(reader, [pace(LATE)] * 12)
  assert reader.own() == pytest.approx(0.008) and reader.largest() == pytest.approx(0.010)


def test_delays_count_as_late():
  reader = SlackReader(1, ranks=[0])
  feed(reader, [pace(LATE, delays=[0.004, 0, 0, 0])] * 12)
  assert reader.own() == pytest.approx(0.006)


def test_it_is_the_slack_of_nine_steps_of_ten():
  reader = SlackReader(1, ranks=[0])
  often = [pace(LATE)] * 14 + [pace([0.020, 0.0, 0.0, 0.0])] * 3
  feed(reader, often)
  assert reader.own() < 0.005


@pytest.mark.parametrize("arrivals", [[0.01, np.nan], [np.nan, np.nan], [0.01, np.inf]])
def test_unshared_arrivals_tell_nothing(arrivals):
  reader = SlackReader(1, ranks=[0])
  feed(reader, [pace(arrivals)] * 20)
  assert reader.own() is None and reader.largest() is None


def test_nothing_is_said_before_enough_steps():
  reader = SlackReader(1, ranks=[0])
  feed(reader, [pace(LATE)] * 5)
  assert reader.own() is None


def test_a_copy_under_way_is_not_waited_for():
  class Never:
    def is_ready(self):
      return False

  reader = SlackReader(1, ranks=[0])
  reader._copy = Never()
  feed_once = pace(LATE)
  for _ in range(3):
    reader.see(feed_once)
  assert isinstance(reader._copy, Never)


def test_copies_are_made_at_the_interval_only():
  reader = SlackReader(5, ranks=[0])
  made = 0
  for _ in range(20):
    reader.see(pace(LATE))
    if reader._copy is not None:
      reader._copy.block_until_ready()
      made += 1
      reader.see(pace(LATE))  # takes it
  assert 3 <= made <= 8


def test_with_other_mesh_axes_the_own_ranks_are_not_guessed():
  reader = SlackReader(1)
  ranks = jax.device_count() + 3
  feed(reader, [pace(np.arange(ranks), count=2 * ranks)] * 12)
  assert reader.own() is None and reader.largest() == ranks - 1


def test_of_a_real_step_over_all_devices_and_donated():
  mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
  spec, P = jaxpace.spec(mesh), jax.P
  paced = jaxpace.instrument(lambda x: jax.lax.pmean(x * jnp.float32(0.5), "data"), "data",
                             share=True)
  step = jax.jit(jax.shard_map(paced, mesh=mesh, in_specs=(spec, P()), out_specs=(spec, P()),
                               check_vma=False),
                 donate_argnums=0)
  state, x = paced.init(mesh), jnp.ones((8,), jnp.float32)
  reader, seen = SlackReader(1), []
  for _ in range(14):
    state, x = step(state, x)
    reader.see(state)
    arrivals = np.asarray(state.arrivals)[0]
    seen.append(arrivals.max() - arrivals)
    jax.block_until_ready(state)
  assert list(reader._own) == list(range(jax.device_count()))
  assert reader.own() == pytest.approx(0, abs=1e-9)  # some own rank is always the last
  assert 0 <= reader.largest() <= np.nanmax(np.stack(seen[1:]))
