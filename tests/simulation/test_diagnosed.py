"""Diagnosis of simulated runs gives back what was put in: mode, share, ranks and cause, mild and
severe; or nothing."""

import numpy as np
import pytest

from jaxpace.diagnose.words.codes import Verdict
from tests.quick import long
from tests.simulation.made import diagnosed, play


def mean(steps, found):
  """Mean step of those that the diagnosis counts: it leaves the warm-up out."""
  return float(np.mean(steps.step_time[found.selected.mask], dtype=np.float64))


def only(found, mode):
  assert [f.mode for f in found.findings] == [mode]
  return found.findings[0]


@pytest.mark.parametrize(("noise", "seed"), [
    ({"exponential": {"mean": 0.02}}, 4), ({"common": {"deviation": 0.05, "steps": 30}}, 6),
    *long(({}, 1), ({"normal": {"deviation": 0.002}}, 3),
          ({"heavy": {"scale": 0.02, "tail": 3}}, 5),
          ({"pauses": {"probability": 0.001, "seconds": 20e-3, "cause": "gc"}}, 7))])
def test_a_healthy_job_is_called_healthy(tmp_path, noise, seed):
  _, found = diagnosed(tmp_path, {"noise": noise}, seed=seed, floor=True)
  assert found.findings == () and found.verdict.code == Verdict.HEALTHY
  assert sum(found.shares.values()) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(("load", "floor"), [(0.5, True), (0.8, False)])
def test_traffic_of_others(tmp_path, load, floor):
  """What transfers take longer than on the quiet fabric: on all hosts' links alike."""
  steps, found = diagnosed(tmp_path, {"traffic": {"begins": 0.01, "length": 100, "load": load}},
                           floor=floor)
  finding = only(found, "fabric_contention")
  longer = (steps.transfers - steps.transfers.min())[found.selected.mask]
  # A stretch is found to a few steps at either end.
  assert finding.share == pytest.approx(float(np.mean(longer)) / mean(steps, found), rel=0.03)
  assert finding.causes == ("trunk",) and finding.ranks == ()


@pytest.mark.parametrize(("probability", "seconds", "cause"), [
    (0.01, 20e-3, "gc"), (0.05, 50e-3, ""), *long((0.003, 0.3, "data"))])
def test_pauses(tmp_path, probability, seconds, cause):
  """What they cost: the same run with them and without. Their cause is named where the hosts'
  columns show it."""
  with_them = {"noise": {"stop": {"kind": "pauses", "probability": probability, "seconds": seconds,
                                  "cause": cause}}}
  steps, found = diagnosed(tmp_path, with_them)
  without = play({"noise": {"stop": {**with_them["noise"]["stop"], "probability": 0.0}}})
  finding = only(found, "runtime_jitter")
  assert finding.share == pytest.approx(1 - mean(without, found) / mean(steps, found), abs=8e-3)
  assert finding.causes == ((cause,) if cause else ())


def test_pauses_of_one_process_name_it(tmp_path):
  """A node's ranks are one process: a pause with a cause strikes them together, and the host's
  columns say which."""
  noise = {"stop": {"kind": "pauses", "probability": 0.03, "seconds": 50e-3, "cause": "gc"}}
  steps, found = diagnosed(tmp_path, {"noise": noise}, {"nodes": 4, "per_node": 2})
  struck = steps.caused["gc"] > 0
  assert (struck[:, 0::2] == struck[:, 1::2]).all() and 0.01 < struck.mean() < 0.06
  np.testing.assert_allclose(found.run.host_causes.columns["gc"], steps.caused["gc"][:, ::2].T,
                             atol=2e-9)
  assert only(found, "runtime_jitter").causes == ("gc",)


def test_a_slow_path_is_a_matter_of_locality(tmp_path):
  """All ranks' messages wait for the one whose path is slow: that host's connections are
  busiest."""
  steps, found = diagnosed(tmp_path, {}, {"slow_paths": {2: 0.4}}, floor=True)
  finding = only(found, "locality")
  assert finding.ranks == (2,) and {"far_nic", "slow_host"} <= set(finding.causes)
  assert finding.share == pytest.approx(1 - mean(play(), found) / mean(steps, found), abs=0.01)
  assert (found.floor.known
          and found.floor.floor.sum() == pytest.approx(14 * (8e-6 + 5e7 / 8 / 1e10), rel=1e-6))


def test_one_slow_card_of_a_host_with_several_is_found(tmp_path):
  """One process a node, four cards each, a hierarchical all-reduce: the process is named for the
  one rank behind it."""
  fabric = {"nodes": 4, "per_node": 4, "cards": 4, "card_rate": 5e9}
  job = {"algorithm": "hierarchical", "gradient_bytes": 2e8}
  steps, found = diagnosed(tmp_path, job, {**fabric, "slow_paths": {3: 0.3}}, floor=True)
  finding = only(found, "locality")
  assert finding.ranks == (3,) and {"far_nic", "slow_host"} <= set(finding.causes)
  assert (finding.share == pytest.approx(1 - mean(play(job, fabric), found) / mean(steps, found),
                                         abs=0.02))
