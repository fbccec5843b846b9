"""Slow transfers in synthetic jobs: what they cost, and what is no crowded fabric beside a late
rank."""

import dataclasses
import types

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpace.costs.fabric_file import ALL_REDUCE, RING, Cost, Estimate, Level, MeasuredFabric
from jaxpace.diagnose import floor
from jaxpace.diagnose.diagnose import add, count, diagnose
from jaxpace.diagnose.floor import find_floor, running_minimum
from jaxpace.diagnose.words.codes import Verdict, codes
from jaxpace.diagnose.words.evidence import Evidence
from jaxpace.diagnose.words.notes import Note
from tests.diagnose.synthetic import run_of
from tests.diagnose.test_findings import job
from tests.diagnose.test_tcp import sampled
from tests.diagnose.traces import known, with_bytes
from tests.lib.said import numbers, only
from tests.synthetic.synthetic_faults import Fault
from tests.synthetic.synthetic_runs import SyntheticJob

BURSTS = (Fault("contention", 9e-3, probability=0.2), Fault("contention", 22e-3, probability=0.2))


def cost(truth) -> float:
  """Seconds that faults added to the transfers, as a share of the step."""
  return float(truth.extra.transfer.mean() / (np.diff(truth.exit[-1], axis=1).mean() * 1e-9))


@pytest.mark.parametrize("hosts", [False, True])
def test_slow_steps_now_and_then_cost_their_mean(hosts):
  """Of 9, 22 and 31 ms: the mean of their logarithms would be 1.2 points of the step less."""
  run, truth = run_of(job(*BURSTS, steps=600, host_columns=hosts))
  (finding,) = diagnose(run).findings
  assert finding.mode == Verdict.CONTENTION and finding.evidence[0].code == Evidence.TWO_KINDS
  assert finding.share == pytest.approx(cost(truth), abs=0.006)


@pytest.mark.parametrize("switches", [0, 8])
def test_transfers_between_two_hosts_that_vary_are_the_fabric_s_unless_processors_are_crowded(
    switches):
  run, _ = run_of(SyntheticJob(ranks=4, steps=400, processes=2, hosts=2, noise=0.01, transfer=1e-3,
                            transfer_noise=10.0, host_columns=True))
  columns = {**run.host_causes.columns,
             "nivcsw": np.full_like(run.host_causes.columns["nivcsw"], switches)}
  run = dataclasses.replace(run, host_causes=dataclasses.replace(run.host_causes, columns=columns))
  assert [f.mode for f in diagnose(run).findings] == ([] if switches else [Verdict.CONTENTION])


def test_slow_steps_beside_a_late_rank_are_its_own_where_no_connections_tell():
  late = Fault("compute", 6e-3, (5,))
  both = diagnose(run_of(job(*BURSTS, late, steps=600))[0]).findings
  assert {f.mode for f in both} == {Verdict.CONTENTION, Verdict.PERSISTENT}
  (finding,) = diagnose(run_of(job(*BURSTS, late, steps=600, host_columns=False))[0]).findings
  assert (finding.mode, finding.ranks) == (Verdict.PERSISTENT, (5,))
  assert Evidence.SLOW_AS_WELL in codes(finding.evidence)


def test_a_rank_that_is_late_by_a_little_since_transfers_are_slow_is_late_because_of_them():
  crowded, little = Fault("contention", 15e-3, begin=0.5), Fault("compute", 1.5e-3, (5,), begin=0.5)
  run, truth = run_of(job(crowded, little))
  def queued(process, at):
    return 0.3e-3 if at < 0.5 else 3e-3
  (finding,) = diagnose(sampled(run, queued)).findings
  assert (finding.mode, finding.ranks) == (Verdict.CONTENTION, ())
  assert finding.share == pytest.approx(cost(truth), abs=0.02)
  assert "host2" in only(finding.evidence, Evidence.LATE_AS_WELL)
  # Where no data queue on the way, or nobody knows, it is the host that is slow.
  for other in (run, sampled(run, lambda process, at: 0.3e-3)):
    (finding,) = diagnose(other).findings
    assert (finding.mode, finding.ranks) == (Verdict.PERSISTENT, (5,))
  # As much as a quarter of the contention is no little.
  alike = run_of(job(Fault("contention", 4e-3,
                           begin=0.5), Fault("compute", 4e-3, (5,), begin=0.5)))[0]
  assert [f.mode for f in diagnose(sampled(alike, queued)).findings] == [Verdict.PERSISTENT]


def test_a_slow_link_costs_no_more_than_transfers_take_beyond_a_known_floor():
  slow = job(Fault("contention", 3e-3, (6, 7)))
  run = with_bytes(run_of(slow)[0], 4096)
  (estimated,) = diagnose(run).findings
  # connections of the others are busy for 2.2 ms per step: by those it would cost 3 ms
  floor = 2.8e-3
  diagnosis = diagnose(run, fabric=known(floor / 14))  # 2 (P - 1) α on a ring of 8
  (finding,) = diagnosis.findings
  assert finding.hosts == estimated.hosts == ("host3",)
  assert estimated.share == pytest.approx(3e-3 / diagnosis.step_time.mean, abs=0.002)
  assert finding.share == pytest.approx((5.2e-3 - floor) / diagnosis.step_time.mean, abs=0.002)


# The floor of a transfer.

@pytest.mark.parametrize("freaks", [[100], [100, 101]])
def test_freak_readings_do_not_pull_it_down(freaks):
  transfer = np.full((1, 400), 2e-3)
  transfer[0, freaks] = 0.0
  floor = running_minimum(transfer)
  assert floor.floor[0] == 2e-3
  assert floor.contention.sum() == 0.0


def test_contention_is_what_exceeds_the_quiet_transfer_and_a_short_quiet_spell_is_believed():
  transfer = np.stack([np.full(400, 2e-3), np.full(400, 1e-3), np.full(400, 5e-3)])
  transfer[0, 100:200] += 6e-3
  transfer[2, 60:80] = 2e-3
  floor = running_minimum(transfer)
  np.testing.assert_allclose(floor.floor, [2e-3, 1e-3, 2e-3])
  assert floor.contention.sum(axis=-1) == pytest.approx([0.6, 0.0, 3e-3 * 380])


@given(st.lists(st.one_of(st.floats(0, 1), st.just(float("nan"))), min_size=1, max_size=80))
def test_transfer_is_split_exactly_and_never_negatively(values):
  transfer = np.array([values])
  floor = running_minimum(transfer)
  np.testing.assert_allclose(floor.quiet + floor.contention, transfer, atol=1e-15)
  assert not (floor.contention < 0).any()
  assert not (floor.quiet < 0).any()


@pytest.mark.parametrize("plan, joined",
                         [({"ranks": 2}, 2), ({}, 4), ({"ranks": 0}, 4), ({"ranks": "2"}, 4)])
def test_a_known_fabric_is_asked_for_the_ranks_that_a_collective_joins(plan, joined):
  """On a data x model mesh of four devices the sums join two."""
  run = with_bytes(run_of(SyntheticJob(ranks=4, steps=40))[0], 4096)
  costs = {count: Cost(Estimate(count * 1e-9, 0, 0), Estimate(0.0, 0.0, 0.0), RING)
           for count in (2, 4)}
  fabric = MeasuredFabric(tuple(Level({ALL_REDUCE: cost}, str(count), count)
                                for count, cost in costs.items()),
                          "made up")
  run.info["plan"] = {**(run.info.get("plan") or {}), **plan}
  seconds = costs[joined].seconds(ALL_REDUCE, joined, 4096)
  totals = add(run, count(run)).totals
  totals.group_transfer[:] = 1.0
  floor = find_floor(run, fabric, totals)
  np.testing.assert_allclose(floor.floor, seconds)
  # What the run itself has had is believed before a fabric that says it can't be.
  totals.group_transfer[:] = seconds / 2
  quicker = find_floor(run, fabric, totals)
  np.testing.assert_allclose(quicker.floor, seconds / 2)


def test_the_note_on_a_floor_that_says_nothing_counts_the_ranks_that_were_asked_for():
  run = with_bytes(run_of(SyntheticJob(ranks=4, steps=200))[0], 4096)
  run.info["plan"] = {**(run.info.get("plan") or {}), "ranks": 2}
  one = MeasuredFabric((Level({}, "one", 1),), "made up")
  assert numbers(only(diagnose(run, fabric=one).notes, Note.FABRIC_UNUSED)) == [2]
  used = diagnose(run, fabric=known(1e-5, ranks=2))
  assert used.floor.known and Note.FABRIC_UNUSED not in codes(used.notes)


def test_a_collective_without_any_transfer_has_no_mean_and_no_warning():
  totals = types.SimpleNamespace(collective_of=np.array([0, 0, 1]), slow=np.full((3, 4), 8.0))
  own = types.SimpleNamespace(floor=np.array([1.0, 3.0, np.nan]),
                              contention=np.array([[1.0] * 4, [1.0] * 4, [np.nan] * 4]))
  quiet, contended = floor._slow(totals, own)
  # 1 above the mean of 2; what is slow at a step's end is waited for in the next, too.
  np.testing.assert_allclose(contended[:, 1:], [[8.0] * 3, [8.0 * 2 / 3] * 3, [0.0] * 3])
  np.testing.assert_allclose(quiet + contended, 8.0)
