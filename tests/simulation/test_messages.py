"""Collectives message by message: against a reference that plays every message and shares no code
with the package."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpace.simulation import schedules, sharing
from jaxpace.simulation.fabric import Fabric
from tests.quick import examples
from tests.simulation import message_reference as reference

RATE = 12.5e9
LATENCIES = {"node_latency": 3e-6, "rack_latency": 8e-6, "spine_latency": 12e-6}


def fields(nodes, rack=0, uplink=0.0, per_node=1):
  return {"nodes": nodes, "per_node": per_node, "cards": per_node, "card_rate": RATE, "rack": rack,
          "uplink_rate": uplink, **LATENCIES}


def both(algorithm, size, fabric):
  """s by the package, and by the reference."""
  ranks = tuple(range(fabric["nodes"] * fabric["per_node"]))
  if algorithm == "hierarchical":
    sent = reference.hierarchical(ranks, size, fabric["per_node"])
  else:
    sent = getattr(reference, algorithm)(ranks, size)
  done = reference.play(reference.Fabric(**fabric),
                        [reference.Job(ranks, sent, [dict.fromkeys(ranks, 0.0)])])
  found = schedules.load(schedules.rounds(algorithm, ranks, size, fabric["per_node"]),
                         Fabric(**fabric))
  return found, max(done[0][0].values())


@pytest.mark.parametrize("algorithm, fabric, size", [
    ("ring", fields(13), 1e8), ("ring", fields(18, 6, 1.5 * RATE), 1e5),
    ("recursive_doubling", fields(8), 1e5), ("recursive_doubling", fields(12, 3, RATE), 1e8),
    ("halving_doubling", fields(16, 8, 2 * RATE), 1e8), ("halving_doubling", fields(13), 1e8)],
    ids=str)
def test_an_all_reduce_takes_what_playing_every_message_takes(algorithm, size, fabric):
  """Racks that are no power of two included: some ranks of a round cross the spine, and others
  needn't wait for them.
  """
  found, expected = both(algorithm, size, fabric)
  assert found.seconds == pytest.approx(expected, rel=1e-4)
  assert sum(piece.seconds for piece in found.stretches) == pytest.approx(found.seconds)


@pytest.mark.parametrize("fabric", [fields(8, per_node=4), fields(8, 4, 4 * RATE, 4)], ids=str)
def test_the_hierarchical_one_too(fabric):
  found, expected = both("hierarchical", 1e8, fabric)
  assert found.seconds == pytest.approx(expected, rel=1e-4)


@settings(max_examples=examples(20), deadline=None)
@given(rack=st.integers(2, 7), racks=st.integers(2, 4), over=st.sampled_from([1, 2, 4]),
       algorithm=st.sampled_from(["recursive_doubling", "halving_doubling"]))
def test_any_racks(rack, racks, over, algorithm):
  found, expected = both(algorithm, 1e7, fields(rack * racks, rack, rack * RATE / over))
  assert found.seconds == pytest.approx(expected, rel=1e-4)


def test_stretches_say_what_each_round_takes_of_the_trunk():
  """Recursive doubling of four ranks in each of two racks, half of whose cards the trunk can carry:
  only the last of three rounds crosses it, and fills it; the mean says half."""
  fabric = Fabric(nodes=8, per_node=1, card_rate=RATE, rack=4, uplink_rate=2 * RATE, rack_latency=0,
                  spine_latency=0)
  found = schedules.load(schedules.recursive_doubling(range(8), 1e8), fabric)
  trunk = fabric.names().index("uplink 0 of rack 0")
  assert [(round(piece.seconds * 1e3, 6), round(float(piece.usage[trunk]), 6),
           int(piece.flows[trunk]))
          for piece in found.stretches] == [(8, 0, 0), (8, 0, 0), (16, 1, 4)]
  assert found.usage[trunk] == pytest.approx(0.5)


def test_where_it_would_take_too_long_rounds_end_for_all_ranks_together(monkeypatch):
  fabric = fields(18, 6, 1.5 * RATE)
  exact, _ = both("halving_doubling", 1e8, fabric)
  monkeypatch.setattr(sharing, "_MOST_WORK", 100)
  coarse, _ = both("halving_doubling", 1e8, fabric)
  assert exact.seconds < coarse.seconds < 1.2 * exact.seconds
  # Either way the same bytes cross every link.
  np.testing.assert_allclose(coarse.usage * coarse.seconds, exact.usage * exact.seconds, rtol=1e-6)
