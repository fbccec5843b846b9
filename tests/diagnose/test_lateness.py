"""Who is named late, who is not, and what it is said to cost."""

import itertools

import numpy as np
import pytest
from scipy import stats

from jaxpace.diagnose.diagnose import diagnose
from jaxpace.diagnose.episodes import student_cdf
from jaxpace.diagnose.modes import jitter
from jaxpace.diagnose.words.codes import Verdict
from jaxpace.diagnose.words.evidence import Evidence
from jaxpace.diagnose.words.names import percent
from jaxpace.diagnose.words.notes import Note
from tests.diagnose.synthetic import case_of, run_of
from tests.diagnose.traces import barrier, make_run
from tests.lib.said import numbers, only
from tests.quick import examples
from tests.synthetic.synthetic_faults import Fault
from tests.synthetic.synthetic_runs import SyntheticJob

MS = 1_000_000


def diagnose_busy(busy, **kwargs):
  return diagnose(make_run(*barrier(busy, 2 * MS), **kwargs))


def noise(ranks, steps, mean=20.0, deviation=0.4, seed=0):
  return np.random.default_rng(seed).normal(mean * MS, deviation * MS,
                                            (ranks, steps)).clip(MS).astype(np.int64)


def modes(diagnosis):
  return [f.mode for f in diagnosis.findings]


def test_shares_of_the_findings_are_the_two_parts_of_earliness():
  busy = noise(8, 400, deviation=5.0)
  busy[3] += 4 * MS
  diagnosis = diagnose_busy(busy)
  share = {f.mode: f.share for f in diagnosis.findings}
  arrivals, step = busy[:, 1:] * 1e-9, diagnosis.step_time.mean
  persistent = arrivals.mean(axis=1).max() - arrivals.mean()
  assert share[Verdict.PERSISTENT] == pytest.approx(persistent / step)
  assert (share[Verdict.AMPLIFICATION]
          == pytest.approx((arrivals.max(axis=0).mean() - arrivals.mean(axis=1).max()) / step))


def test_downstream_victim_is_not_blamed():
  """Rank 2 leaves every collective 14 ms after the others, so it enters the next one last: rank 1
  is the slow one."""
  busy = noise(4, 300)
  busy[1] += 6 * MS
  run = make_run(*barrier(busy, 2 * MS, offset=np.array([0, 0, 14 * MS, 0])))
  entry = run.collectives[0].enter_ns
  assert (entry.argmax(axis=0) == 2).mean() > 0.9  # what entry against a common exit would blame
  diagnosis = diagnose(run)
  assert diagnosis.findings[0].ranks == (1,)
  assert abs(diagnosis.lateness.mean[2]) < 0.2e-3


def test_wandering_noise_names_no_rank():
  """Autocorrelated over 20 steps: a test that took steps for independent would name somebody."""
  random = np.random.default_rng(3)
  walk = np.zeros((16, 600))
  for k in range(1, 600):
    walk[:, k] = 0.95 * walk[:, k - 1] + random.normal(0, 0.5, 16)
  diagnosis = diagnose_busy(((20 + walk).clip(1) * MS).astype(np.int64))
  assert Verdict.PERSISTENT not in modes(diagnosis)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_a_stop_of_five_seconds_is_told_as_five(ranks):
  """Of three ranks two waited 5 s: "waited 3,333 ms" was the mean over all."""
  busy = noise(ranks, 400, deviation=0.0)
  busy[1, 250] += 5000 * MS
  diagnosis = diagnose_busy(busy)
  assert diagnosis.findings == () and diagnosis.verdict.code == Verdict.UNNAMED_WAITING
  told = numbers(only(diagnosis.notes, Note.ONE_OFF))
  share = 100 * (5 * (ranks - 1) / ranks) / (400 * 0.022 + 5)
  assert told[:3] == [250, 5000, 1] and told[-1] == pytest.approx(share, abs=0.2)


@pytest.mark.parametrize("length", [40, 120])
def test_late_for_a_stretch_of_the_run_is_named_with_its_steps(length):
  busy = noise(4, 400, deviation=0.1)
  busy[2, 100:100 + length] += 20 * MS
  (finding,) = diagnose_busy(busy).findings
  assert (finding.mode, finding.ranks) == (Verdict.PERSISTENT, (2,))
  assert finding.first_step in range(98, 103)
  assert finding.last_step in range(97 + length, 102 + length)
  assert finding.evidence[0].code == Evidence.LATE
  assert {finding.first_step, finding.last_step} <= set(numbers(finding.evidence[0]))


@pytest.mark.parametrize("began", [200, 203, 206])
def test_a_change_is_dated_where_it_began_though_the_rank_stands_still_soon_after(began):
  busy = noise(2, 400, deviation=0.05)
  busy[1, began:] += 8 * MS
  busy[1, [201, 211, 212]] += 25 * MS
  (finding,) = diagnose_busy(busy).findings
  assert finding.ranks == (1,) and finding.first_step == began


def test_a_rank_that_is_late_and_becomes_much_later_is_dated_where_it_does():
  busy = noise(4, 400, deviation=0.1)
  busy[1] += MS
  busy[1, 250:] += 8 * MS
  (finding,) = diagnose_busy(busy).findings
  assert finding.ranks == (1,) and finding.first_step in range(249, 252)
  said = numbers(only(finding.evidence, Evidence.LATE))
  assert said[2:6] == [1, pytest.approx(1, abs=0.1), 249, pytest.approx(9, abs=0.1)]


@pytest.mark.parametrize("seed", range(examples(12)))
def test_chance_among_many_ranks_and_few_steps_names_nobody(seed):
  assert Verdict.PERSISTENT not in modes(diagnose_busy(noise(64, 25, deviation=3.0, seed=seed)))


def test_lateness_below_the_effect_is_no_finding():
  busy = np.full((4, 400), 20 * MS)
  busy[1] += 44 * MS // 100 - MS // 50
  assert diagnose_busy(busy).findings == ()
  busy[1] += MS // 10
  assert modes(diagnose_busy(busy)) == [Verdict.PERSISTENT]


def test_lateness_is_by_undelayed_arrival():
  """Pacing holds the early ranks back until just before the late one: it is still the late one."""
  busy, delay = np.full((4, 100), 20 * MS), np.zeros((4, 100))
  busy[3] += 10 * MS
  busy[:3] += 9 * MS
  delay[:3] = 9 * MS
  diagnosis = diagnose_busy(busy, delay=delay)
  assert diagnosis.findings[0].ranks == (3,)
  assert diagnosis.lateness.mean[3] == pytest.approx(10e-3, abs=1e-8)
  assert diagnosis.shares["skew"] == pytest.approx(0.75 * 1 / 32, abs=1e-6)
  assert diagnosis.shares["pacing"] == pytest.approx(0.75 * 9 / 32, abs=1e-6)
  assert diagnosis.without_rank[3].step_time == pytest.approx(22e-3, abs=1e-8)


def test_lateness_is_after_the_mean_of_the_typical_ranks():
  """Of these eight the third and fourth, 40 µs apart."""
  after = np.array([-60, -40, -20, 20, 40, 60, 80, 5000])
  lateness = diagnose_busy(np.tile(20 * MS + 1000 * after[:, None], 200)).lateness
  assert lateness.mean == pytest.approx(1e-6 * after, abs=1e-8)
  assert [(e.rank, e.lateness) for e in lateness.episodes] == [(7, pytest.approx(5e-3, abs=1e-8))]


def test_a_whole_late_host_is_named():
  busy = noise(8, 200)
  busy[[2, 3]] += 5 * MS
  diagnosis = diagnose_busy(busy, processes=[0, 0, 1, 1, 2, 2, 3, 3], hosts=["a", "b", "c", "d"])
  finding = diagnosis.findings[0]
  assert finding.hosts == ("b",)
  assert any(sentence.code == Evidence.WHOLE_HOST and " b " in sentence
             for sentence in finding.evidence)


def test_too_few_steps_carry_no_finding():
  busy = np.full((4, 15), 20 * MS)
  busy[1] += 20 * MS
  diagnosis = diagnose_busy(busy)
  assert diagnosis.findings == ()
  assert diagnosis.verdict.code == Verdict.TOO_FEW_STEPS


def test_students_t():
  for n in range(1, 32):
    for t in (-4.0, -0.3, 0.0, 1.5, 6.0):
      assert student_cdf(t, n) == pytest.approx(stats.t.cdf(t, n), abs=1e-12)


def test_half_of_the_ranks_are_found_although_the_hosts_stood_still_once():
  random = np.random.default_rng(4)
  busy = (20e6 * (1 + random.normal(0, 0.02, (4, 300)))).astype(np.int64)
  busy[2:, 150:] += 4_000_000
  whole = diagnose_busy(busy).findings[0]
  busy[0, 200] += 600_000_000
  busy[2, 230] += 500_000_000
  found = diagnose_busy(busy).findings[0]
  assert sorted(found.ranks) == sorted(whole.ranks) == [2, 3]
  assert found.first_step == pytest.approx(150, abs=3)
  assert found.confidence >= 0.99


# Intermittent waiting: how rare it is, and who pauses when few pauses were seen.

@pytest.mark.parametrize("struck",
                         [(2, 5), (2, 2, 5), (2, 2, 2, 5), (2, 2, 2, 2, 5), (2, 2, 2, 6, 7)])
def test_a_process_is_named_if_chance_would_not_give_any_one_so_many_pauses(struck):
  """Chance by counting all ways in which eight processes can have these pauses."""
  pauses = [Fault("pause", 0.1, (2 * process, 2 * process + 1), begin=(60 + 20 * i) / 300,
                  end=(61 + 20 * i) / 300, mechanism="gc") for i, process in enumerate(struck)]
  run, _ = run_of(SyntheticJob(ranks=16, steps=300, processes=8, hosts=8, noise=0.02,
                            host_columns=True, faults=tuple(pauses)))
  most = struck.count(2)
  ways = itertools.product(range(8), repeat=len(struck))
  chance = np.mean([max(way.count(process) for process in set(way)) >= most for way in ways])
  case = case_of(run)
  found = jitter.who_pauses(case, jitter._beyond_usual(case)[0], jitter.standing_out(case))
  assert found == ([4, 5] if chance < 0.01 else [])


@pytest.mark.parametrize("fault", [Fault("rotating", 8e-3), Fault("jitter", 6e-3)])
def test_the_worst_tenth_of_the_steps_holds_what_is_said(fault):
  run, truth = run_of(SyntheticJob(ranks=8, steps=300, processes=4, noise=0.02, faults=(fault,)))
  found = diagnose(run)
  (finding,) = (f for f in found.findings if f.mode == Verdict.AMPLIFICATION)
  waited = np.sort((truth.busy[0].max(axis=0) - truth.busy[0].mean(axis=0))[found.selected.mask])
  worst = waited[-(len(waited) // 10):].sum() / waited.sum()
  assert percent(worst) in only(finding.evidence, Evidence.WORST_TENTH)
