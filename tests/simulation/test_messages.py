"""Collectives message by message: against a reference that plays every message and shares no code
with the package."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpace.cli.main import main
from jaxpace.simulation import scenario, schedules, sharing
from jaxpace.simulation.fabric import Fabric
from jaxpace.simulation.settings import read
from tests.quick import examples, long
from tests.simulation import message_reference as reference
from tests.simulation.made import link_names

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
    ("halving_doubling", fields(16, 8, 2 * RATE), 1e8), ("halving_doubling", fields(13), 1e8),
    ("hierarchical", fields(8, per_node=4), 1e8),
    ("hierarchical", fields(8, 4, 4 * RATE, 4), 1e8)], ids=str)
def test_an_all_reduce_takes_what_playing_every_message_takes(algorithm, size, fabric):
  """Racks that are no power of two included: some ranks of a round cross the spine, and others
  needn't wait for them.
  """
  found, expected = both(algorithm, size, fabric)
  assert found.seconds == pytest.approx(expected, rel=1e-4)
  assert sum(piece.seconds for piece in found.stretches) == pytest.approx(found.seconds)


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
  trunk = link_names(fabric).index("uplink 0 of rack 0")
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


# Jobs that meet on a trunk: contention is that of the rounds that are on the way, not of a
# collective on the mean.

HALVES = [(0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15)]
"""Nodes of two jobs, each with four in both racks of eight."""


def config(algorithm, over=4, compute=(10e-3, 10e-3), size=(1e8, 1e8), latency=0.0, steps=12):
  return {"steps": steps, "fabric": {"nodes": 16, "per_node": 1, "card_rate": RATE, "rack": 8,
                                     "uplink_rate": 8 * RATE / over, "rack_latency": latency,
                                     "spine_latency": latency},
          "jobs": {name: {"nodes": list(nodes), "forward": seconds, "backward": 0.0, "update": 0.0,
                          "gap": 0.0, "gradient_bytes": sent, "algorithm": algorithm,
                          "overlap": False}
                   for name, nodes, seconds, sent in zip("ab", HALVES, compute, size, strict=True)}}


def simulated(tmp_path, capsys, given):
  file = tmp_path / "config.json"
  file.write_text(json.dumps(given))
  assert main(["simulate", str(file), "--json", "-"]) == 0
  return json.loads(capsys.readouterr().out)["jobs"]


def test_a_trunk_that_one_round_fills_is_full(tmp_path, capsys):
  """By hand: 10 ms of compute, two rounds of 8 ms inside the racks, then 8 messages over a trunk of
  two cards' rate, 4 x 8 ms: 58. Alone, 4 messages take 2 x 8 ms: 42."""
  both = simulated(tmp_path, capsys, config("recursive_doubling"))
  for job in both.values():
    assert job["mean"] == pytest.approx(58e-3, rel=1e-5)
    assert job["alone"] == pytest.approx(42e-3, rel=1e-5)
  apart = simulated(tmp_path, capsys, {**config("recursive_doubling"), "shared_fabric": False})
  assert apart["a"]["mean"] == pytest.approx(42e-3, rel=1e-5)


@pytest.mark.parametrize(("algorithm", "more", "within"), [
    ("ring", {"over": 8, "compute": (10e-3, 25e-3)}, 2e-3),
    ("recursive_doubling", {"size": (1e8, 5e7)}, 2e-3),
    ("halving_doubling", {"over": 8, "size": (1e8, 5e7)}, 2e-3),
    *long(("ring", {"size": (1e8, 5e7)}, 2e-3), ("halving_doubling", {}, 2e-3),
          ("recursive_doubling", {"compute": (10e-3, 25e-3)}, 2e-3))])
def test_two_jobs_take_what_playing_every_message_takes(algorithm, more, within):
  given = config(algorithm, latency=8e-6, **more)
  jobs = []
  for job in given["jobs"].values():
    ranks = tuple(job["nodes"])
    sent = getattr(reference, algorithm)(ranks, job["gradient_bytes"])
    jobs.append(reference.Job(ranks, sent, [dict.fromkeys(ranks, job["forward"])] * 24))
  played = reference.play(reference.Fabric(**given["fabric"]), jobs)
  expected = [max(own[9].values()) / 10 for own in played]
  for job, steps in scenario.run(read(given, lambda text: None)):
    assert steps.step_time[:10].mean() == pytest.approx(expected[job], rel=within)


def test_the_mean_step_leaves_out_what_passes_before_a_job_starts(tmp_path, capsys):
  given = config("recursive_doubling", steps=40)
  given["jobs"]["b"]["start"] = 17e-3
  apart = simulated(tmp_path, capsys, {**given, "shared_fabric": False})
  # 10 ms of compute and two rounds of 8 ms inside the racks: the trunk is never taken by both.
  assert apart["b"]["mean"] == pytest.approx(42e-3, rel=1e-5)
  both = simulated(tmp_path, capsys, given)
  assert [job["mean"] for job in both.values()] == pytest.approx([42e-3, 42e-3], rel=1e-5)
