"""What is read from a config, and every mistake named by its field."""

import copy
import re

import jax.numpy as jnp
import numpy as np
import pytest

from configs import simulate
from jaxpace.cli.pacer_expression import make
from jaxpace.simulation import noise, scenario, sharing
from jaxpace.simulation.settings import SettingsError, read
from tests.multiprocess.jobs import ROOT

GOOD = {
    "steps": 50, "seed": 3, "max_delay": 0.1,
    "fabric": {"nodes": 4, "per_node": 2, "card_rate": 10e9, "cards": 1, "rack": 2, "uplinks": 1,
               "uplink_rate": 10e9},
    "jobs": {
        "a": {"nodes": [0, 2], "forward": 5e-3, "backward": 10e-3, "gradient_bytes": 8e6,
              "buckets": 2, "noise": {"normal": {"deviation": 0.02},
                                      "late": {"kind": "slow", "ranks": [1], "extra": 0.5}},
              "traffic": {"begins": 0.01, "length": 10, "load": 0.5},
              "pacer": "pace_early_ranks(window=8)",
              "failures": {"mtbf": 1e6, "every": 10, "checkpoint": 1, "restart": 10}},
        "b": {"nodes": [1, 3]}}}


def changed(path, value):
  config = copy.deepcopy(GOOD)
  place = config
  *keys, last = path.split(".")
  for key in keys:
    place = place[key]
  if value is KeyError:
    del place[last]
  else:
    place[last] = value
  return config


def test_a_config_becomes_a_scenario():
  made = read(GOOD, make)
  a, b = made.jobs
  assert (made.steps, made.seed, made.shared, made.fabric.oversubscription) == (50, 3, True, 2.0)
  assert a.shape[:3] == (4, 2, True) == b.shape[:3] and a.nodes == (0, 2)
  normal, late = a.job.noise
  assert isinstance(normal, noise.Normal) and late.extra.tolist() == [0, 0.5, 0, 0]
  assert a.failures.rate == 2 / 1e6 and a.pacer is not None and b.pacer is None
  # A ring of 4 ranks on 2 nodes: 2 * 3 rounds of a quarter, over cards that are the slowest link.
  assert float(b.job.transfers[0]) == pytest.approx(6 * (12e-6 + 25e6 / 10e9), rel=1e-5)
  assert (len(a.job.transfers) == 2
          and float(a.job.transfers[0]) == pytest.approx(6 * (12e-6 + 1e6 / 10e9), rel=1e-5))


@pytest.mark.parametrize(("path", "value", "said"), [
    ("steps", -5, "steps=-5 must be a whole number from 2"),
    ("speed", 1, "speed is no field; there are fabric, jobs"),
    ("jobs", {}, "jobs is empty"),
    ("fabric.nodes", KeyError, "fabric.nodes is missing"),
    ("fabric.card_rate", -1e9, "fabric.card_rate=-1000000000.0 must be bytes per second"),
    ("fabric.slow_paths", {"0": 0}, "disconnected"),
    ("jobs.a.nodes", [0, 4], "jobs.a.nodes=4 must be a whole number from 0 to 3"),
    ("jobs.b.nodes", [2, 3], "jobs.b.nodes names node 2, which job a has"),
    ("jobs.a.forward", -1e-3, "jobs.a.forward=-0.001 must be a number from 0 to 3600: seconds"),
    ("jobs.a.forward", "20ms", "jobs.a.forward='20ms'"),
    ("jobs.a.buckets", 0, "jobs.a.buckets=0"),
    ("jobs.a.algorithm", "star", "jobs.a.algorithm='star' must be one of ring"),
    ("jobs.a.overlap", 1, "jobs.a.overlap=1 must be True or False"),
    ("jobs.a.noise.normal", {"sigma": 0.1},
     "jobs.a.noise.normal.sigma is no field; there are deviation"),
    ("jobs.a.noise.normal", {}, "jobs.a.noise.normal.deviation is missing"),
    ("jobs.a.noise.normal", {"deviation": -1},
     "jobs.a.noise.normal.deviation=-1 must be a number from 0 to 10"),
    ("jobs.a.noise.odd", {"kind": "red"}, "jobs.a.noise.odd.kind='red' must be one of normal"),
    ("jobs.a.noise.late", {"kind": "slow", "ranks": [9], "extra": 1}, "jobs.a.noise.late.ranks=9"),
    ("jobs.a.noise.h", {"kind": "heavy", "scale": 1, "tail": 1.0},
     "tail=1.0 must be a number from 1.01"),
    ("jobs.a.noise.s", {"kind": "schedule", "every": 0, "seconds": 1},
     "every=0 must be a whole number"),
    ("jobs.a.traffic", {"begins": 0.1, "length": 3, "load": 1.0}, "jobs.a.traffic.load=1.0"),
    ("jobs.a.pacer", "pace_late_ranks()", "jobs.a.pacer: "),
    ("jobs.a.failures", {"every": 3}, "jobs.a.failures.mtbf is missing"),
    ("jobs.a b", {}, "jobs has a job called 'a b'")])
def test_mistakes_are_named_by_their_field(path, value, said):
  with pytest.raises(SettingsError) as error:
    read(changed(path, value), make)
  assert said in str(error.value)


def test_more_than_can_be_recorded_is_refused():
  config = changed("fabric.nodes", 4096)
  config["fabric"]["rack"] = 0
  config["steps"] = 1_000_000
  del config["jobs"]["b"]
  config["jobs"]["a"] = {}
  with pytest.raises(SettingsError, match="rows of job a; at most"):
    read(config, make)


def test_jobs_that_share_no_link_do_not_wait_for_each_other():
  apart = copy.deepcopy(GOOD)
  apart["jobs"]["a"]["nodes"], apart["jobs"]["b"]["nodes"] = [0, 1], [2, 3]
  assert scenario._together(read(apart, make)) == [[0], [1]]
  assert scenario._together(read(GOOD, make)) == [[0, 1]]
  assert scenario._together(read(changed("shared_fabric", False), make)) == [[0], [1]]


def test_where_jobs_compete_each_of_their_messages_gets_the_same():
  """A ring of one message each way across the racks, beside one of two: as max-min sharing of all
  messages has it."""
  config = {
      "steps": 4, "fabric": {"nodes": 8, "per_node": 1, "card_rate": 7.5e9, "rack": 4,
                             "uplink_rate": 10e9, "node_latency": 0.0, "rack_latency": 0.0,
                             "spine_latency": 0.0},
      "jobs": {"a": {"nodes": [0, 4]}, "b": {"nodes": [1, 5, 2, 6]}}}
  made = read(config, make)
  shares = scenario.shares(list(made.jobs))
  speed = np.asarray(sharing.progress(*map(jnp.asarray,
                                           (shares.usage[:, 0], shares.weights[:, 0],
                                            np.ones(2, bool)))))
  capacities = made.fabric.capacities()
  messages = [made.fabric.paths(np.array(job.nodes), np.roll(job.nodes, -1)) for job in made.jobs]
  together = sharing.max_min(np.concatenate(messages), capacities)
  expected = [together[own].min() / sharing.max_min(paths, capacities).min()
              for own, paths in zip((slice(0, 2), slice(2, 6)), messages, strict=True)]
  np.testing.assert_allclose(expected, [4 / 9, 2 / 3], rtol=1e-9)
  np.testing.assert_allclose(speed, expected, rtol=1e-5)


# The page on simulation: its fields exist, and its pacers are made.

PAGE = ROOT / "docs" / "simulate.md"


def test_every_component_is_named_on_the_page_and_in_the_config():
  said, config = PAGE.read_text(), (ROOT / "configs" / "simulate.py").read_text()
  for name in noise.COMPONENTS:
    assert f"`{name}`" in said
    assert f'"{name}"' in config or f"{name}(" in config
  assert read(simulate.get_config().to_dict(), make).steps == 2000


def test_every_expression_in_the_table_makes_a_pacer():
  table = re.findall(r"^\| `([a-z_]+\(.*?)` \|", PAGE.read_text(), re.MULTILINE)
  assert len(table) == 3
  for expression in table:
    make(expression)
