"""Max-min fair shares: against water-filling in fractions, and by what defines them."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpace.simulation.fabric import Fabric
from jaxpace.simulation.sharing import max_min, progress
from tests.quick import examples


def exactly(paths: np.ndarray, capacities: np.ndarray) -> list[Fraction]:
  """Water-filling in fractions: pours into every flow as much at once as the next link to be full
  still takes, and stops the flows that cross it."""
  crossing = counts(paths, len(capacities)).astype(int)
  rates, open_flows = [Fraction(0)] * len(paths), set(range(len(paths)))
  while open_flows:
    room = []
    for link, capacity in enumerate(capacities.tolist()):
      wanted = sum(int(crossing[flow, link]) for flow in open_flows)
      if wanted:
        left = (Fraction(capacity) - sum(int(crossing[flow, link]) * rate
                                         for flow, rate in enumerate(rates)))
        room.append((left / wanted, link))
    least = min(room)[0]
    for flow in open_flows:
      rates[flow] += least
    full = {link for more, link in room if more == least}
    open_flows -= {flow for flow in open_flows if any(crossing[flow, link] for link in full)}
  return rates


def random_fabric(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
  """Up to 8 flows over up to 6 links of whole-numbered capacities."""
  flows, links = rng.integers(1, 9), rng.integers(1, 7)
  paths = np.where(rng.random((flows, 3)) < 0.75, rng.integers(0, links, (flows, 3)), -1)
  paths[:, 0] = rng.integers(0, links, flows)  # every flow crosses one at least
  return paths, rng.integers(1, 20, links).astype(float)


def counts(paths: np.ndarray, links: int) -> np.ndarray:
  crossing = np.zeros((len(paths), links))
  for flow, path in enumerate(paths):
    for link in path[path >= 0]:
      crossing[flow, link] += 1
  return crossing


def test_shares_are_exact_on_a_thousand_fabrics():
  rng = np.random.default_rng(0)
  for _ in range(examples(1000)):
    paths, capacities = random_fabric(rng)
    np.testing.assert_allclose(max_min(paths, capacities),
                               [float(rate) for rate in exactly(paths, capacities)], rtol=1e-12)


@pytest.mark.parametrize("routing", ["even", "hash"])
def test_shares_on_described_fabrics_are_exact(routing):
  """Messages at random between ranks of random fabrics: nodes, cards, racks, uplinks, slow
  paths."""
  rng = np.random.default_rng(1)
  for seed in range(100):
    racks, rack, per_node = (int(rng.integers(1, 4)), int(rng.integers(1, 4)),
                             int(rng.choice([2, 4])))
    fabric = Fabric(racks * rack, per_node, node_rate=64.0, card_rate=float(rng.integers(4, 20)),
                    cards=int(rng.choice([1, 2])), rack=rack, uplinks=int(rng.integers(1, 4)),
                    uplink_rate=float(rng.integers(1, 20)), routing=routing, seed=seed,
                    slow_paths={0: 0.5})
    pairs = np.array([rng.choice(fabric.ranks, 2, replace=False) for _ in range(12)])
    paths, capacities = fabric.paths(*pairs.T), fabric.capacities()
    limited = np.isfinite(capacities)
    shown = np.where((paths >= 0) & limited[paths], paths, -1)
    expected = [float(rate) for rate in exactly(shown, np.where(limited, capacities, 1.0))]
    np.testing.assert_allclose(max_min(paths, capacities), expected, rtol=1e-12)


@given(seed=st.integers(0, 2**32 - 1))
def test_no_link_is_overfull_and_every_flow_has_a_bottleneck(seed):
  """What defines max-min fairness: every flow crosses a full link on which no other flow has
  more."""
  paths, capacities = random_fabric(np.random.default_rng(seed))
  rates = max_min(paths, capacities)
  crossing = counts(paths, len(capacities))
  load = crossing.T @ rates
  assert (load <= capacities * (1 + 1e-9)).all()
  for flow, rate in enumerate(rates):
    own = np.flatnonzero(crossing[flow])
    assert any(load[link] >= capacities[link] * (1 - 1e-9)
               and rate >= rates[crossing[:, link] > 0].max() * (1 - 1e-9)
               for link in own)


def test_links_without_a_limit_hold_nobody():
  rates = max_min(np.array([[0, 1], [1, -1], [1, 1]]), np.array([4.0, np.inf]))
  assert rates.tolist() == [4.0, np.inf, np.inf]


def speeds(usage, weights=None, sending=None):
  usage = jnp.asarray(usage, jnp.float32)
  count = usage.shape[0]
  weights = jnp.ones(count, jnp.float32) if weights is None else jnp.asarray(weights, jnp.float32)
  sending = jnp.ones(count, bool) if sending is None else jnp.asarray(sending)
  return np.asarray(jax.jit(progress)(usage, weights, sending), np.float64)


@pytest.mark.parametrize(("usage", "weights", "sending", "expected"), [
    ([[1.0], [1.0]], None, None, [0.5, 0.5]),
    ([[1.0], [0.5]], None, None, [2 / 3, 2 / 3]),
    # the second is at full speed with a quarter of the link
    ([[1.0], [0.25]], [1, 4], None, [0.75, 1.0]),
    ([[1.0], [1.0]], [1, 3], None, [0.25, 0.75]),
    ([[1.0], [1.0]], None, [True, False], [1.0, 0.0]),
    ([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0]], None, None, [0.5, 0.5, 0.5]),
    ([[0.4], [0.4]], None, None, [1.0, 1.0]),  # room for both
    ([[0.0], [1.0]], None, None, [1.0, 1.0])])
def test_jobs_share_by_weight(usage, weights, sending, expected):
  np.testing.assert_allclose(speeds(usage, weights, sending), expected, rtol=1e-5)


@settings(max_examples=examples(100), deadline=None)
@given(seed=st.integers(0, 2**32 - 1), count=st.integers(1, 5), links=st.integers(1, 4))
def test_jobs_are_conserved_and_work_conserving(seed, count, links):
  rng = np.random.default_rng(seed)
  usage = np.where(rng.random((count, links)) < 0.7, rng.uniform(0.05, 1, (count, links)), 0)
  weights, sending = rng.uniform(0.1, 10, count), rng.random(count) < 0.8
  speed = speeds(usage, weights, sending)
  load = speed @ usage
  assert (load <= 1 + 1e-4).all() and (speed >= 0).all() and (speed <= 1 + 1e-6).all()
  assert (speed[~sending] == 0).all()
  for job in np.flatnonzero(sending):
    full = (usage[job] > 0) & (load >= 1 - 1e-4)
    if speed[job] >= 1 - 1e-5:
      continue
    # Else it is on a full link on which nobody has more for its weight.
    level = np.where(sending, speed / weights, 0)
    assert any(level[job] >= level[usage[:, link] > 0].max() * (1 - 1e-4)
               for link in np.flatnonzero(full))
