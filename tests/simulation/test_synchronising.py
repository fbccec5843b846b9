"""Synchronisation strategies in `jaxpace simulate`: times against closed forms, and what recorded
runs of them hold."""

import math

import numpy as np
import pytest

from jaxpace.cli.main import main
from jaxpace.core.fields import SettingsError
from jaxpace.costs.alpha_beta import coefficients
from jaxpace.simulation import scenario
from tests.simulation.made import COMPUTE, JOB, play, read, record

RANKS, RATE, ALPHA = 8, 1e10, 8e-6
PAUSES = {"stop": {"kind": "pauses", "probability": 0.02, "seconds": 20e-3}}
BUSY = 31.5e-3  # compute, update and gap


def transfer(size, messages=14.0, share=1.75):
  assert ((messages, share) == coefficients("all_reduce", "ring", RANKS)
          or size < JOB["gradient_bytes"])
  return messages * ALPHA + share * size / RATE


def within_4_sigma(values, expected):
  values = np.asarray(values, np.float64)
  assert (abs(values.mean() - expected) < 4 * values.std() / math.sqrt(len(values))), (
      values.mean(), expected)


def test_local_steps_meet_once_a_round(tmp_path):
  """H means and the largest of N sums of H normals, sigma E_N sqrt(H); one exchange; noise anew in
  each step."""
  changes = {"strategy": {"kind": "local_steps", "every": 10},
             "noise": {"normal": {"deviation": 0.05}}}
  steps, run = record(tmp_path, changes, steps=4000)
  assert len(steps.step_time) == len(run.steps) == 400
  within_4_sigma(steps.step_time,
                 10 * BUSY + 0.05 * COMPUTE * 1.4236 * math.sqrt(10) + transfer(5e7))
  np.testing.assert_allclose(run.durations["update"], 10e-3, rtol=1e-5)
  assert "a round of 10 steps" in run.plan["notices"][0]


def test_noise_remembers_over_the_steps_of_a_round():
  """A schedule of pauses counts steps, not rounds: every 25 steps is every second or third round of
  10."""
  steps = play({"strategy": {"kind": "local_steps", "every": 10}, "noise": {
      "stop": {"kind": "schedule", "every": 25, "seconds": 1.0, "aligned": True}}}, steps=1000)
  assert np.flatnonzero(steps.step_time > 1).tolist() == [k // 10 for k in range(24, 1000, 25)]


def test_backup_ends_with_the_first_ranks(tmp_path):
  """mu (H_N - H_{N - k}) for k of N exponentials; who comes later has no entry, and did no more
  than there was time."""
  changes = {"strategy": {"kind": "backup", "wait_for": 6}, "noise": {
      "exponential": {"mean": 0.2}, "normal": {"deviation": 0.0},
      "stop": {**PAUSES["stop"], "seconds": 1.0}}}
  steps, run = record(tmp_path, changes, steps=1500)
  assert (np.isfinite(steps.enter).sum(axis=1) == 6).all()
  quiet = (steps.gap < 0.1).all(axis=1)
  harmonic = [sum(1 / i for i in range(1, n + 1)) for n in (8, 2)]
  within_4_sigma(steps.step_time[quiet],
                 BUSY + 0.2 * COMPUTE * (harmonic[0] - harmonic[1]) + transfer(5e7))
  late = ~np.isfinite(steps.enter[..., 0])
  spent = steps.compute + steps.gap + 1e-3
  assert (spent <= steps.step_time[:, None] * (1 + 1e-5)).all() and late.mean() == 0.25
  # they came after the sixth
  assert (spent >= steps.step_time[:, None] - transfer(5e7) - 1e-6)[late].all()
  assert (run.collectives[0].enter_ns < 0).mean() == pytest.approx(0.25)
  assert "wait for 6 of 8" in run.plan["notices"][0]


@pytest.mark.parametrize(("strategy", "wire", "messages", "share", "coded"), [
    ({"kind": "compressed", "codec": "fp16"}, 2.5e7, 14, 1.75, 2 * 5e7),
    ({"kind": "compressed", "codec": "int8"}, 1.25e7 + 32, 14, 1.75, 4 * 5e7),
    ({"kind": "compressed", "codec": "int8", "passes": 0}, 1.25e7 + 32, 14, 1.75, 0),
    # All ranks get what each has kept, with its positions; decoding adds up seven of them.
    ({"kind": "compressed", "codec": "top_k", "keep": 0.01}, 1e6, 7, 7.0, 8 * 5e7 + 7 * 1e6)])
def test_compressed_gradients_take_less_of_the_fabric_and_some_compute(
    strategy, wire, messages, share, coded):
  steps = play({"strategy": strategy, "codec_rate": 1e11, "noise": {"normal": {"deviation": 0.0}}},
               steps=5)
  np.testing.assert_allclose(steps.transfers, transfer(wire, messages, share), rtol=1e-5)
  np.testing.assert_allclose(steps.step_time, BUSY + coded / 1e11 + transfer(wire, messages, share),
                             rtol=1e-5)


def test_bounded_staleness_is_the_recursion_rank_by_rank(tmp_path):
  """f[r, k] = max(f[r, k - 1], max over q of f[q, k - 1 - s]) + w[r, k] + C, in a plain loop."""
  changes = {"strategy": {"kind": "bounded_staleness", "staleness": 2}, "noise": {
      "heavy": {"scale": 0.3, "tail": 1.5}, "stop": {**PAUSES["stop"], "cause": "gc"}}}
  own, run = record(tmp_path, changes, steps=300)
  work = own.compute.astype(np.float64) + own.gap + 1e-3
  done = np.zeros((300, RANKS))
  for k in range(300):
    start = done[k - 1] if k else np.zeros(RANKS)
    if k >= 3:
      start = np.maximum(start, done[k - 3].max())
    np.testing.assert_allclose(own.begin[k], start, rtol=1e-4)
    done[k] = start + work[k] + transfer(5e7)
  np.testing.assert_allclose(own.end[:-1], own.begin[1:])
  assert not run.collectives and run.ranks == RANKS
  # On each rank's own clock, what is not work is sending and waiting.
  rest = (own.end - own.begin - work).T
  np.testing.assert_allclose(run.durations["sync"], rest, atol=1e-6)
  assert "sync_ns" in run.plan["notices"][0]
  assert np.nanmax(run.host_causes.columns["gc"]) == pytest.approx(20e-3)


def test_a_parameter_server_serves_one_after_the_other(tmp_path):
  """Once it is the bottleneck, a gradient of 200 MB every 20 ms, whatever ranks do; each rank has
  its own steps."""
  late = {"late": {"kind": "slow", "ranks": [3], "extra": 3.0}}
  own, run = record(tmp_path, {
      "strategy": {"kind": "parameter_server"}, "noise": late, "gradient_bytes": 2e8}, steps=200)
  assert own.taken.sum() == 200 * RANKS and own.taken[3] == own.taken.min() < 0.9 * own.taken.max()
  ends = np.sort(own.end[own.known()])
  np.testing.assert_allclose(np.diff(ends[100:]), 20e-3, rtol=1e-3)
  for rank in range(RANKS):
    assert (run.attempt[rank] >= 0).sum() == own.taken[rank]
  spare = play({"strategy": {"kind": "parameter_server", "servers": 64}}, steps=200)
  alone = BUSY + 2 * (ALPHA + 5e7 / RATE) - 5e7 / RATE + 5e7 / RATE / 64
  within_4_sigma(spare.lengths(), alone)


@pytest.mark.parametrize("strategy", ["bounded_staleness", "parameter_server"])
def test_summaries_of_ranks_that_go_their_own_ways(strategy):
  made, _ = read({"strategy": strategy, "noise": {"normal": {"deviation": 0.0}}}, steps=50)
  adding = scenario.Adding()
  for part in scenario.run(made):
    adding.add(part.steps)
  found = adding.summary(made.jobs[0], 0)
  assert found.mean == pytest.approx(found.alone, rel=0.4) and found.earliness >= -1e-6
  if strategy == "bounded_staleness":
    assert found.mean == pytest.approx(BUSY + transfer(5e7), rel=1e-4) == found.alone


@pytest.mark.parametrize(("changes", "said"), [
    ({"strategy": {"kind": "magic"}},
     r"jobs\.a\.strategy\.kind='magic' must be one of synchronous"),
    ({"strategy": 3}, r"jobs\.a\.strategy=3 must be a dict with a kind"),
    ({"strategy": {"kind": "backup", "wait_for": 9}},
     r"strategy\.wait_for=9 must be .* 1 to 8 \(there are 8 ranks\)"),
    ({"strategy": {"kind": "local_steps", "every": 0}},
     r"strategy\.every=0 must be a whole number from 1"),
    ({"strategy": {"kind": "local_steps", "every": 300}},
     r"steps=400 must be two rounds at least of .*every=300"),
    ({"strategy": {"kind": "backup", "wait_for": 3}, "pacer": "pace_early_ranks()"},
     "a pacer needs steps in"),
    ({"strategy": "parameter_server", "failures": {"mtbf": 1, "every": 1}},
     "failures must be left out"),
    ({"strategy": "bounded_staleness", "polling": 0.1}, "polling must be left out"),
    ({"codec_rate": 0}, r"codec_rate=0 must be a number from 1e\+06"),
    ({"processes": "host"}, "processes='host' must be one of node, rank"),
    ({"far": -1}, "far=-1 must be a number from 0"),
    ({"noise": {"pauses": {"probability": 0.1, "seconds": 1, "cause": "rain"}}},
     "cause='rain' must be one of"),
    ({"noise": {"normal": {"deviation": 0.1, "cause": "gc"}}}, "cause is no field")])
def test_mistakes_are_named(changes, said):
  with pytest.raises(SettingsError, match=said):
    read(changes)


def test_own_ways_over_shared_links_are_refused():
  from jaxpace.cli import pacer_expression
  from jaxpace.simulation import settings
  jobs = {"a": {"nodes": [0, 2], "strategy": "parameter_server"}, "b": {"nodes": [1, 3]}}
  config = {"fabric": {"nodes": 4, "per_node": 1, "rack": 2, "uplink_rate": 1e9}, "jobs": jobs}
  with pytest.raises(SettingsError, match="links shared with job b is not simulated"):
    settings.read(config, pacer_expression.make)
  assert settings.read({**config, "shared_fabric": False},
                       pacer_expression.make).jobs[0].alone is not None


def test_a_job_of_local_steps_shares_the_fabric_with_another(capsys):
  """Both end after as many steps: one has 20 rounds of 10, the other 200 steps."""
  from jaxpace.cli import pacer_expression
  from jaxpace.simulation import settings
  fabric = {"nodes": 4, "per_node": 1, "card_rate": 1e10, "rack": 2, "uplink_rate": 1e10}
  made = settings.read({"steps": 200, "fabric": fabric, "jobs": {
      "a": {**JOB, "nodes": [0, 2], "strategy": {"kind": "local_steps", "every": 10}},
      "b": {**JOB, "nodes": [1, 3]}}},
                       pacer_expression.make)
  counts = {part.job: len(part.steps.step_time) for part in scenario.run(made)}
  assert counts == {0: 20, 1: 200}


def test_reports_say_what_is_not_defined(tmp_path, capsys):
  record(tmp_path / "own", {"strategy": "parameter_server"}, steps=60)
  assert main(["report", str(tmp_path / "own")]) == 0
  assert "ranks don't meet" in " ".join(capsys.readouterr().out.split())
  for command, *more in (["report", "--without", "rank:1"],
                         ["replay", "--pacer", "pace_early_ranks()"],
                         ["forecast", "--ranks", "16"]):
    assert main([command, str(tmp_path / "own"), *more]) == 2
    assert "collective" in capsys.readouterr().err
