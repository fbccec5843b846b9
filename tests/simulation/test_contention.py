"""Jobs that meet on a trunk: contention is that of the rounds that are on the way, not of a
collective on the mean."""

import json

import pytest

from jaxpace.cli.main import main
from jaxpace.simulation import scenario
from jaxpace.simulation.settings import read
from tests.quick import long
from tests.simulation import message_reference as reference

RATE = 12.5e9
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


def test_messages_that_cross_nothing_shared_need_no_stretches():
  """A ring takes the same of the trunk throughout, and so does what is sent without touching it."""
  ring, doubling = (scenario.shares(list(read(config(name), lambda text: None).jobs))
                    for name in ("ring", "recursive_doubling"))
  assert ring.parts is None
  # Both rounds inside the racks are one stretch.
  assert doubling.parts.tolist() == [[0.5, 0.5]] * 2
