"""Comparisons against Welch's t of scipy, against what was changed, and as a user of CI meets
them."""

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from jaxpace.cli.main import main
from jaxpace.diagnose.compare import (
  Change,
  _verdict,
  change,
  change_of_ratio,
  compare,
  from_blocks,
  series,
)
from jaxpace.diagnose.diagnose import diagnose
from jaxpace.diagnose.floor import SHARES
from jaxpace.diagnose.words.codes import ChangeCode, codes
from jaxpace.diagnose.words.notes import Note
from jaxpace.runs.loops import Loop
from jaxpace.runs.run import RunError
from tests.diagnose.synthetic import run_of
from tests.lib.said import numbers, only
from tests.synthetic import synthetic_runs
from tests.synthetic.synthetic_faults import Fault
from tests.synthetic.synthetic_runs import SyntheticJob


@given(st.integers(2, 40), st.integers(2, 40), st.integers(0, 10**6), st.floats(0.1, 10))
def test_the_interval_is_welchs(m, n, seed, scale):
  random = np.random.default_rng(seed)
  a, b = random.normal(1, 1, m), random.normal(1.5, scale, n)
  found = from_blocks(a, b)
  expected = stats.ttest_ind(b, a, equal_var=False).confidence_interval(0.95)
  assert (found.low, found.high) == pytest.approx((expected.low, expected.high))
  assert found.sure == (stats.ttest_ind(b, a, equal_var=False).pvalue < 0.05)
  several = from_blocks(a, b, tests=5)
  expected = stats.ttest_ind(b, a, equal_var=False).confidence_interval(0.99)
  assert (several.low, several.high) == pytest.approx((expected.low, expected.high))


@given(st.integers(20, 60), st.integers(0, 10**6), st.floats(0.01, 100))
def test_no_step_becomes_shorter_by_more_than_itself(size, seed, factor):
  """A run with a pause of a hundred steps, beside one without: Welch's interval of the difference
  reached below -100 %."""
  random = np.random.default_rng(seed)
  a, b = random.exponential(1, size), factor * random.exponential(1, size)
  a[size // 2] += 100
  found, back = change_of_ratio(a, b), change_of_ratio(b, a)
  assert -1 < found.relative[1] < found.relative[0] < found.relative[2]
  # of B to A it is the other way round
  assert (1 + found.relative[1]) * (1 + back.relative[2]) == pytest.approx(1)
  assert found.sure == back.sure and found.blocks == back.blocks[::-1]


def test_the_interval_of_a_small_change_is_that_of_the_difference():
  random = np.random.default_rng(0)
  a, b = random.normal(50, 1, 1000), random.normal(50.5, 1, 1000)
  ratio, difference = change_of_ratio(a, b), change(a, b)
  assert ratio.relative == pytest.approx(difference.relative, abs=1e-4)
  assert ratio.difference == difference.difference


def noisy(keep, size, random):
  values = random.normal(size=size)
  for k in range(1, size):
    values[k] += keep * values[k - 1]
  return 50 + values * np.sqrt(1 - keep**2)


@pytest.mark.parametrize("keep", [0.0, 0.9])
def test_equal_runs_are_seldom_told_apart_even_where_noise_remembers(keep):
  """95 % intervals over 300 pairs; steps taken as independent would fail every second pair at
  0.9."""
  random = np.random.default_rng(1)
  sure = sum(change_of_ratio(noisy(keep, 1000, random), noisy(keep, 1000, random)).sure
             for _ in range(300))
  assert sure <= 0.09 * 300


def recorded(job):
  return diagnose(run_of(job)[0])


JOB = SyntheticJob(ranks=4, steps=400, noise=0.1)


@pytest.mark.parametrize(("fault", "share", "seconds"), [
    ({"late": {2: 8e-3}}, "skew", None), ({"transfer": 5e-3}, "transfer", 3e-3),
    ({"forward": 14e-3}, "compute", 4e-3), ({"gap": 4.5e-3}, "runtime", 4e-3)])
def test_what_changed_is_found_in_its_share(fault, share, seconds):
  found = compare(recorded(JOB), recorded(dataclasses.replace(JOB, seed=1, **fault)))
  assert found.step_time.sure and found.verdict.code == ChangeCode.SLOWER and share in found.verdict
  assert (sum(found.shares[name].difference for name in SHARES)
          == pytest.approx(found.step_time.difference, abs=1e-9))
  top = max(found.shares, key=lambda name: found.shares[name].difference)
  assert top == share and found.shares[share].sure
  if seconds:
    assert found.shares[share].difference == pytest.approx(seconds, abs=3e-4)
  if share == "skew":
    assert found.changed_ranks == [2]
    assert found.ranks[2].difference == pytest.approx(8e-3, abs=5e-4)
    assert 2 in numbers(found.verdict) and "persistent_straggler" in found.new
    back = compare(found.b, found.a)
    assert back.verdict.code == ChangeCode.FASTER and "persistent_straggler" in back.gone


def test_shares_of_every_step_add_up():
  parts = series(recorded(dataclasses.replace(
      JOB, faults=(Fault("pause", 20e-3, probability=0.05),), delays={1: 2e-3})))
  np.testing.assert_allclose(sum(parts[name] for name in SHARES), parts["step"], atol=1e-9)


def test_fail_above_needs_more_than_the_limit_and_more_than_chance():
  a = recorded(JOB)
  assert not compare(a, recorded(dataclasses.replace(JOB, seed=1)), 0.03).failed
  slower = recorded(dataclasses.replace(JOB, seed=1, forward=12e-3))
  assert compare(a, slower, 0.03).failed and not compare(a, slower, 0.10).failed
  shaky = dataclasses.replace(JOB, steps=40, faults=(Fault("pause", 60e-3, probability=0.05),),
                              noise=0.3)
  worse = [compare(recorded(shaky),
                   recorded(dataclasses.replace(shaky, seed=s, forward=12e-3)), 0.03)
           for s in range(1, 30)]
  unsure = [c for c in worse if c.step_time.difference > 0.03 * c.step_time.a
            and not c.step_time.sure]
  assert unsure and not any(c.failed for c in unsure)
  assert {c.verdict.code for c in unsure} == {ChangeCode.NONE}


def test_runs_of_different_kinds_are_compared_with_words():
  a = recorded(JOB)
  b = recorded(dataclasses.replace(JOB, ranks=6, steps=90, collectives=2, hosts=1))
  found = compare(a, b)
  assert found.ranks == {} and Note.HOSTS_DIFFER in codes(found.notes)
  for code, of_a, of_b in ((Note.RANKS_DIFFER, 4, 6), (Note.STEPS_DIFFER, 399, 89),
                           (Note.COLLECTIVES_DIFFER, 1, 2)):
    assert numbers(only(found.notes, code))[:2] == [of_a, of_b]
  with pytest.raises(RunError, match="needs 20 in both"):
    compare(a, recorded(dataclasses.replace(JOB, steps=15)))


@pytest.mark.parametrize("part, said", [
    (0.6, "most of it compute (+0.60 ms)"), (0.2, "+0.20 ms of it surely in compute")])
def test_a_share_is_most_of_the_change_where_it_holds_half_of_it(part, said):
  def by(ms):
    return Change(0.01, 0.01 + ms * 1e-3, ms * 1e-3, ms * 0.9e-3, ms * 1.1e-3, (50, 50))

  found = compare(*(recorded(dataclasses.replace(JOB, steps=100)) for _ in range(2)))
  verdict = _verdict(found._replace(step_time=by(1.0), shares={"compute": by(part)}, ranks={}))
  assert verdict.code == ChangeCode.SLOWER and f"), {said}." in verdict


def call(*arguments):
  return main(["compare", *map(str, arguments)])


@pytest.mark.parametrize("programs, differ", [
    ((["pretrain"], ["train"]), True), ((["train"], ["train"]), False), ((None, ["train"]), False),
    ((["critic", "actor"], ["actor", "critic"]), False),
    ((["fit (train.py:3)"], ["fit"]), False)])
def test_steps_of_different_programs_are_said_to_be(programs, differ):
  runs = [run_of(dataclasses.replace(JOB, steps=100))[0] for _ in programs]
  for run, names in zip(runs, programs, strict=True):
    run.info["settings"] = {"step": {"programs": names} if names else None}
  found = compare(*(diagnose(run) for run in runs))
  assert [note for note in codes(found.notes) if note == "programs_differ"] == (
      ["programs_differ"] if differ else [])


def test_of_a_run_of_several_loops_it_is_said_which_is_compared():
  run, other = (run_of(dataclasses.replace(JOB, steps=100))[0] for _ in range(2))
  loops = (Loop(("fit",), ((91, 190),), seconds=2.0),
           Loop(("pretrain",), ((0, 9), (50, 89)), seconds=1.0))
  run = dataclasses.replace(run, loops=loops)
  notes = {note.code: note for note in compare(diagnose(other), diagnose(run)).notes}
  assert notes["one_loop"] == (
      "B ran in several loops, one after the other: this compares that of fit, not pretrain "
      "(`--steps-b 50:90`).")
  assert "one_loop" not in codes(compare(diagnose(other), diagnose(other)).notes)


def test_the_command_its_exit_status_and_json(tmp_path, capsys):
  for name, job in (("a", JOB), ("b", dataclasses.replace(JOB, seed=1, late={2: 8e-3}))):
    synthetic_runs.write(tmp_path / name, dataclasses.replace(job, steps=200))
  info = json.loads((tmp_path / "b" / "run.json").read_text())
  (tmp_path / "b" / "run.json").write_text(
      json.dumps({**info, "config": {"batch": 64}, "clock": "native"}))
  target = tmp_path / "compare.json"
  assert call(tmp_path / "a", tmp_path / "b", "--json", target) == 0
  text = capsys.readouterr().out
  assert ("skew" in text and "config.batch none → 64" in " ".join(text.split())
          and "native clock" in text)
  # A pipe shows no bold.
  assert "step *" in text and "pacing *" not in text and "*: surely changed" in text
  document = json.loads(target.read_text())
  assert document["failed"] is False and document["fail_above"] is None
  assert [r["rank"] for r in document["ranks"] if r["notable"]] == [2]
  assert document["step_time"]["relative"]["difference"] == pytest.approx(
      document["step_time"]["difference"] / document["step_time"]["a"])
  assert call(tmp_path / "a", tmp_path / "b", "--fail-above", "3%") == 1
  assert call(tmp_path / "b", tmp_path / "a", "--fail-above", "3%") == 0
  assert call(tmp_path / "a", tmp_path / "a", "--fail-above", "0%", "--json", target) == 0
  assert Note.SAME_RUN in json.loads(target.read_text())["note_codes"]
  assert call(tmp_path / "a", tmp_path / "a", "--steps-a", ":100", "--steps-b", "100:") == 0
  capsys.readouterr()
  assert call(tmp_path / "a", tmp_path / "nowhere") == 2
  captured = capsys.readouterr()
  assert captured.err.startswith("jaxpace compare: There is no run at") and not captured.out


@pytest.mark.parametrize("text", ["3", "x%", "-1%", "nan%", "3%5"])
def test_a_limit_that_is_no_share_is_refused(text):
  assert call("a", "b", "--fail-above", text) == 2
