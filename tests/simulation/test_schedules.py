"""All-reduces as messages: against the closed forms, against sums of what every rank must get, on
shared links."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpace.core.fields import SettingsError
from jaxpace.costs.alpha_beta import ALL_REDUCE, DOUBLING, HALVING, RING, TREE, seconds
from jaxpace.simulation import schedules
from jaxpace.simulation.fabric import NONE, Fabric
from tests.simulation.made import link_names

RATE, ALPHA, SIZE = 10e9, 5e-6, 64e6
ALGORITHMS = {"ring": RING, "recursive_doubling": DOUBLING, "halving_doubling": HALVING,
              "double_tree": TREE}


def closed(algorithm: str, ranks: int, size: float, alpha: float, beta: float) -> float:
  """The closed form; of the trees with what filling the pipeline takes."""
  took = seconds(ALL_REDUCE, ALGORITHMS[algorithm], ranks, size, alpha, beta)
  hops = ranks.bit_length() - 1
  return took + (schedules.filling(hops, alpha, took - 2 * hops * alpha)
                 if algorithm == "double_tree" else 0.0)



def flat(ranks: int, **more: object) -> Fabric:
  """A fabric on which no two messages of these algorithms share a link."""
  return Fabric(nodes=ranks, per_node=1, card_rate=RATE, rack_latency=ALPHA, **more)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("ranks", [2, 3, 8, 13, 64])
def test_an_all_reduce_takes_what_the_closed_form_says(algorithm, ranks):
  took = schedules.load(schedules.rounds(algorithm, range(ranks), SIZE, 1), flat(ranks)).seconds
  assert took == pytest.approx(closed(algorithm, ranks, SIZE, ALPHA, 1 / RATE), rel=1e-9)


@pytest.mark.parametrize("nodes", [1, 2, 5, 16])
def test_the_hierarchical_one_takes_what_the_closed_form_says(nodes):
  fabric = Fabric(nodes=nodes, per_node=4, node_rate=200e9, card_rate=RATE, cards=4,
                  node_latency=1e-6, rack_latency=ALPHA)
  took = schedules.load(schedules.hierarchical(range(4 * nodes), SIZE, 4), fabric).seconds
  assert took == pytest.approx(closed("ring", 4, SIZE, 1e-6, 1 / 200e9)
                               + closed("ring", nodes, SIZE / 4, ALPHA, 1 / RATE), rel=1e-9)


@given(ranks=st.integers(2, 70))
def test_every_rank_gets_every_ranks_share_by_doubling(ranks):
  """Plays recursive doubling with sets of contributions: whoever is sent something then knows what
  the sender knew."""
  knows = [{r} for r in range(ranks)]
  for part in schedules.recursive_doubling(range(ranks), 1.0):
    before = [set(k) for k in knows]
    for source, target in zip(part.sources, part.targets, strict=True):
      knows[target] |= before[source]
  assert all(k == set(range(ranks)) for k in knows)


@given(ranks=st.integers(2, 200))
def test_both_trees_reach_everyone_and_burden_no_port_twice(ranks):
  up, down = schedules.double_tree(range(ranks), 2.0)
  deepest = 0
  for tree in (slice(0, ranks - 1), slice(ranks - 1, None)):
    parent = dict(zip(up.sources[tree].tolist(), up.targets[tree].tolist(), strict=True))
    assert len(parent) == ranks - 1  # every rank but the root has one parent
    root = (set(range(ranks)) - set(parent)).pop()
    for rank in range(ranks):
      steps = 0
      while rank != root:
        rank, steps = parent[rank], steps + 1
      deepest = max(deepest, steps)
  assert up.hops == down.hops == deepest
  for part in (up, down):
    assert np.bincount(part.sources, minlength=ranks).max() <= 2
    assert np.bincount(part.targets, minlength=ranks).max() <= 2


def test_hashed_routes_collide_and_even_ones_do_not():
  settings = {"nodes": 32, "per_node": 1, "card_rate": RATE, "rack": 16, "uplinks": 16,
              "uplink_rate": RATE}
  halving = schedules.halving_doubling(range(32), SIZE)
  even = schedules.load(halving, Fabric(**settings)).seconds
  hashed = [schedules.load(halving, Fabric(**settings, routing="hash", seed=s)).seconds
            for s in range(5)]
  assert min(hashed) > 1.2 * even
  assert len(set(hashed)) > 1
  assert Fabric(**settings).oversubscription == 1


def test_what_is_used_is_what_is_sent():
  fabric = Fabric(nodes=4, per_node=2, card_rate=RATE, node_rate=4 * RATE, rack=2, uplink_rate=RATE)
  did = schedules.load(schedules.ring(range(8), SIZE), fabric)
  names = link_names(fabric)
  sent = 2 * 7 / 8 * SIZE  # by every rank, over its port or its card
  card = did.usage[names.index("out card 0 of node 1")]
  assert card == pytest.approx(sent / (RATE * did.seconds))
  assert (did.usage[names.index("out port of rank 0")]
          == pytest.approx(sent / (4 * RATE * did.seconds)))
  assert (did.usage <= 1 + 1e-12).all()


@given(nodes=st.integers(1, 12), per_node=st.sampled_from([1, 2, 4]), cards=st.sampled_from([1, 2]),
       rack=st.sampled_from([0, 1, 2, 3]), uplinks=st.integers(1, 3),
       routing=st.sampled_from(["even", "hash"]))
def test_paths_are_links_of_the_right_kind(nodes, per_node, cards, rack, uplinks, routing):
  if per_node % cards or (rack and nodes % rack and nodes > rack):
    return
  fabric = Fabric(nodes, per_node, cards=cards, rack=rack, uplinks=uplinks, uplink_rate=1e9,
                  routing=routing)
  names, ranks = link_names(fabric), fabric.ranks
  assert len(names) == len(fabric.capacities())
  pairs = [(s, t) for s in range(ranks) for t in range(ranks) if s != t]
  if not pairs:
    return
  sources, targets = np.array(pairs).T
  for (s, t), path in zip(pairs, fabric.paths(sources, targets), strict=True):
    said = [names[link] for link in path if link != NONE]
    if s // per_node == t // per_node:
      assert said == [f"out port of rank {s}", f"in port of rank {t}"]
      continue
    assert said[0] == f"out path of rank {s}" and said[-1] == f"in path of rank {t}"
    assert (said[1].endswith(f"of node {s // per_node}")
            and said[-2].endswith(f"of node {t // per_node}"))
    racks = (s // per_node // (rack or nodes), t // per_node // (rack or nodes))
    crossing = [] if racks[0] == racks[1] else said[2:4]
    assert ([x.split(" of ")[1] for x in crossing]
            == ([] if racks[0] == racks[1] else [f"rack {r}" for r in racks]))


@pytest.mark.parametrize(("settings", "said"), [
    ({"nodes": 0}, "nodes=0 must be a whole number, at least 1"),
    ({"nodes": 4, "card_rate": -1.0}, "card_rate=-1.0 must be bytes per second, above 0"),
    ({"nodes": 4, "card_rate": math.inf}, "card_rate=inf"),
    ({"nodes": 4, "per_node": 8, "cards": 3}, "cards=3 must divide per_node=8"),
    ({"nodes": 6, "rack": 4}, "rack=4 must divide nodes=6"),
    ({"nodes": 4, "routing": "best"}, "routing='best' must be one of even, hash"),
    ({"nodes": 1, "per_node": 4, "slow_paths": {4: 0.5}},
     "slow_paths names rank 4; the fabric has ranks 0 to 3"),
    ({"nodes": 1, "slow_paths": {0: 0}}, "disconnected"),
    ({"nodes": 1, "spine_latency": math.nan}, "spine_latency=nan")])
def test_what_is_no_fabric_is_refused(settings, said):
  with pytest.raises(SettingsError, match=said):
    Fabric(**settings)


def test_unknown_algorithms_and_odd_groups_are_refused():
  with pytest.raises(SettingsError, match="algorithm='tree' must be one of ring"):
    schedules.rounds("tree", range(4), 1.0, 1)
  with pytest.raises(SettingsError, match="group=3 must divide"):
    schedules.hierarchical(range(8), 1.0, 3)
