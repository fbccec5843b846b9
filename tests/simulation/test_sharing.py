"""Max-min fair shares: against water-filling in fractions, and by what defines them."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

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


def test_links_without_a_limit_hold_nobody():
  rates = max_min(np.array([[0, 1], [1, -1], [1, 1]]), np.array([4.0, np.inf]))
  assert rates.tolist() == [4.0, np.inf, np.inf]


@settings(max_examples=examples(100), deadline=None)
@given(seed=st.integers(0, 2**32 - 1), count=st.integers(1, 5), links=st.integers(1, 4))
def test_jobs_are_conserved_and_work_conserving(seed, count, links):
  rng = np.random.default_rng(seed)
  usage = np.where(rng.random((count, links)) < 0.7, rng.uniform(0.05, 1, (count, links)), 0)
  weights, sending = rng.uniform(0.1, 10, count), rng.random(count) < 0.8
  speed = np.asarray(jax.jit(progress)(*map(jnp.float32, (usage, weights)), jnp.asarray(sending)),
                     np.float64)
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
