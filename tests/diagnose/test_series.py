"""What the page draws, against plain loops over the same run and against the report it belongs
to."""

import dataclasses
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpace.diagnose import selected_steps
from jaxpace.diagnose import series as document
from jaxpace.diagnose.diagnose import diagnose
from jaxpace.diagnose.diagnosis import to_json
from jaxpace.diagnose.floor import SHARES
from jaxpace.diagnose.forecast import forecast
from jaxpace.diagnose.forecast_sample import take_sample
from jaxpace.diagnose.pacing import measured
from jaxpace.diagnose.series import distribution, skew_map, where
from jaxpace.runs.reader import read_run
from jaxpace.runs.run import MISSING
from tests.diagnose.traces import barrier, make_run
from tests.synthetic import synthetic_runs
from tests.synthetic.synthetic_faults import Fault
from tests.synthetic.synthetic_runs import SyntheticJob

JOB = SyntheticJob(ranks=6, steps=260, processes=3, hosts=2, noise=0.05, collectives=2,
                   late={4: 6e-3},
                   faults=(Fault("contention", 8e-3, begin=0.5),
                           Fault("pause", 30e-3, (1,), probability=0.1, mechanism="gc")))


@pytest.fixture(scope="module")
def diagnosis(tmp_path_factory):
  path = tmp_path_factory.mktemp("series") / "run"
  synthetic_runs.write(path, JOB)
  return diagnose(read_run(path))


@pytest.fixture(scope="module")
def whole(diagnosis):
  return document.series(diagnosis)


@pytest.fixture
def narrow(monkeypatch):
  """Few columns, so that each holds several steps; worked on in many parts, most of which are
  wholly known."""
  monkeypatch.setattr(selected_steps, "CELLS", 6 * 40)
  monkeypatch.setattr(document, "MOST_COLUMNS", 7)


def arrivals(run):
  """[R, K] by plain loops: busy time before all collectives of a step, the rank's own delay taken
  out; NaN unknown."""
  result = np.full(run.attempt.shape, np.nan)
  for rank in range(run.ranks):
    for k in range(1, len(run.steps)):
      timestamps = [(int(c.enter_ns[rank, k]), int(c.exit_ns[rank, k])) for c in run.collectives]
      before = int(run.collectives[-1].exit_ns[rank, k - 1])
      if MISSING in (before, *(t for pair in timestamps for t in pair)):
        continue
      total = 0
      for enter, leave in timestamps:
        total += enter - before
        before = leave
      delay = run.durations.get("delay_applied")
      result[rank, k] = total * 1e-9 - (float(delay[rank, k]) if delay is not None else 0.0)
  return result


def late(run):
  """[R, K] arrival after the lower median rank of those known, by plain loops."""
  arrival = arrivals(run)
  for k in range(arrival.shape[1]):
    known = sorted(x for x in arrival[:, k] if not math.isnan(x))
    if known:
      arrival[:, k] -= known[(len(known) - 1) // 2]
  return arrival


@given(st.integers(1, 400), st.integers(1, 60), st.data())
def test_columns_hold_every_counted_step_once_and_are_even(size, most, data):
  mask = np.array(data.draw(st.lists(st.booleans(), min_size=size, max_size=size)))
  if not mask.any():
    return
  run = make_run(*barrier(np.full((2, size), 1000), 10), steps=np.arange(size) * 3)
  selected = diagnose(run).selected._replace(mask=mask)
  made = selected.divided(most)
  steps, (first, last) = run.steps[mask], made.spans(run)
  assert made.blocks == min(len(steps), most) and made.number.sum() == len(steps)
  assert made.number.max() - made.number.min() <= 1
  begin = 0
  values = np.sin(np.arange(size))
  means = made.means(values)
  for i, number in enumerate(made.number.tolist()):
    own = np.flatnonzero(mask)[begin:begin + number]
    assert (first[i], last[i]) == (steps[begin], steps[begin + number - 1])
    assert means[i] == pytest.approx(values[own].mean())
    begin += number


def test_over_time_adds_up_to_the_report(diagnosis, narrow):
  found, report = document.over_time(diagnosis), to_json(diagnosis)
  number, mean = (np.array(x) for x in (found["columns"]["number"], found["step_time"]["mean"]))
  assert len(number) == 7 and number.sum() == report["steps_counted"]
  assert np.average(mean, weights=number) == pytest.approx(report["step_time"]["mean"])
  for name in SHARES:
    share = np.array(found["shares"][name])
    assert (np.average(share, weights=number * mean)
            == pytest.approx(report["shares"][name], abs=1e-12))
  assert np.sum([found["shares"][name] for name in SHARES], axis=0) == pytest.approx(1)
  steps = diagnosis.totals.per_step["step"][diagnosis.selected.mask]
  assert (min(found["step_time"]["low"]) == steps.min()
          and max(found["step_time"]["high"]) == steps.max())
  contention = found["shares"]["contention"]
  assert max(contention[:3]) < 0.02 < min(contention[4:]), "the second half is contended"


def test_the_map_is_what_plain_loops_find(diagnosis, narrow):
  found, expected = skew_map(diagnosis), late(diagnosis.run)
  column = diagnosis.selected.divided(7).block
  mean, most = np.array(found["mean"]) * found["unit"], np.array(found["most"]) * found["unit"]
  assert mean.shape == most.shape == (6, 7)
  for i in range(7):
    own = expected[:, column == i]
    np.testing.assert_allclose(mean[:, i], np.nanmean(own, axis=1), atol=found["unit"] * 0.51)
    np.testing.assert_allclose(most[:, i], np.nanmax(own, axis=1), atol=found["unit"] * 0.51)
  assert mean[4].min() > 4e-3, "rank 4 is 6 ms late"
  assert most[1].max() > 20e-3 and np.abs(np.delete(mean, (1, 4), axis=0)).max() < 2e-3


def test_short_runs_have_a_column_for_every_step(diagnosis):
  found, expected = skew_map(diagnosis), late(diagnosis.run)
  assert found["most"] is None and set(found["columns"]["number"]) == {1}
  at = np.searchsorted(diagnosis.run.steps, found["columns"]["first"])
  np.testing.assert_allclose(np.array(found["mean"]) * found["unit"], expected[:, at],
                             atol=found["unit"] * 0.51)


def test_what_was_not_recorded_is_null(monkeypatch):
  """A rank that misses steps, delays that are no lateness, and ranks that share rows."""
  busy = np.full((5, 60), 10_000_000)
  busy[3] += 4_000_000
  enter, leave = barrier(busy, 1_000_000)
  enter[:, 1, 20:40] = leave[:, 1, 20:40] = MISSING
  delay = np.zeros((5, 60))
  delay[0] = 2_000_000
  run = make_run(enter, leave, delay=delay)
  found = skew_map(diagnose(run))
  unit = found["unit"]
  by_step = dict(zip(found["columns"]["first"], zip(*found["mean"], strict=True), strict=True))
  assert (by_step[30][1] is None and by_step[20][1] is None and by_step[40][1] is None
          and by_step[50][1] is not None)
  # Rank 0's delay is taken out: it was ready 2 ms before it came.
  assert by_step[50][0] * unit == pytest.approx(-2e-3, abs=unit)
  assert [by_step[k][3] * unit for k in (30, 50)] == pytest.approx([4e-3, 4e-3], abs=unit)
  monkeypatch.setattr(document, "MOST_ROWS", 2)
  grouped = skew_map(diagnose(run))
  assert grouped["rows"] == {"first": [0, 3], "last": [2, 4]}
  rows = np.array([[x if x is not None else -10**9 for x in row] for row in found["mean"]])
  assert (grouped["mean"][1] == rows[3:].max(axis=0).tolist()
          and grouped["mean"][0] == rows[:3].max(axis=0).tolist())


def test_nobody_is_compared_where_there_is_one_rank_or_no_collective():
  run = make_run(*barrier(np.full((1, 60), 1000), 10))
  assert skew_map(diagnose(run)) is None
  whole = document.series(diagnose(run))
  assert whole["skew"] is None and whole["forecast"]["silent"] and whole["over_time"]


def test_the_distribution_holds_every_step(diagnosis, whole):
  found, times = whole["distribution"], diagnosis.totals.per_step["step"]
  steps = times[diagnosis.selected.mask]
  edges = np.array(found["edges"])
  assert sum(found["steps"]) + found["beyond"] == len(steps)
  for i in (0, 3, len(edges) - 2):
    assert (found["steps"][i] == pytest.approx(((steps >= edges[i]) & (steps < edges[i + 1])).sum(),
                                               abs=1))
  assert found["beyond"] == (steps > edges[-1] * (1 + 1e-6)).sum()
  for share, seconds in zip(found["tail"]["share"], found["tail"]["step_time"], strict=True):
    assert (steps > seconds * (1 + 1e-6)).mean() <= share + 1e-9
    assert (steps >= seconds * (1 - 1e-6)).mean() >= share - 1e-9
  order = sorted(range(len(times)), key=lambda k: -times[k] if diagnosis.selected.mask[k] else 0)
  assert [row["step"] for row in found["longest"]] == diagnosis.run.steps[order[:20]].tolist()
  assert ([row["last_rank"] for row in found["longest"]]
          == diagnosis.totals.last_rank[order[:20]].tolist())
  assert all(sum(row["shares"].values()) == pytest.approx(1, abs=1e-5) for row in found["longest"])
  assert max(found["longest"][0]["shares"], key=found["longest"][0]["shares"].get) in (
      "compute", "runtime")


def test_a_long_tail_is_counted_beyond_the_histogram():
  busy = np.full((3, 900), 10_000_000)
  busy[:, ::2] += 100_000
  busy[0, 500] = 900_000_000
  found = distribution(diagnose(make_run(*barrier(busy, 1_000_000))))
  assert (found["beyond"] >= 1 and found["edges"][-1] < 0.02
          and found["longest_step"] == pytest.approx(0.901, rel=1e-3))


def test_steps_that_differ_by_rounding_alone_have_a_histogram():
  turn = (np.arange(5)[:, None] + np.arange(60)) % 5
  apart = np.array([0, 100_001, 300_010, 200_003, 5])[turn]
  leave = (15_000_000 * np.arange(60) + apart)[None]
  found = distribution(diagnose(make_run(leave - 1_000_000, leave)))
  assert sum(found["steps"]) == 59 and not found["beyond"]
  assert np.all(np.diff(found["edges"]) > 0)


def test_where_a_finding_cost_adds_up_to_its_share(diagnosis, whole):
  found, report = whole["where"], to_json(diagnosis)
  number = np.array(found["blocks"]["number"])
  assert (number.sum() == report["steps_counted"]
          and len(found["findings"]) == len(report["findings"]) >= 3)
  for place, finding in zip(found["findings"], report["findings"], strict=True):
    cost = np.average(place["cost"], weights=number)
    if finding["mode"] in ("persistent_straggler", "fabric_contention"):
      assert cost == pytest.approx(finding["share"] * report["step_time"]["mean"], rel=0.05)
    assert place["first_step"] <= place["last_step"]
    if finding["mode"] == "fabric_contention":
      assert abs(place["first_step"] - 130) <= 6 and place["last_step"] == report["last_step"]
      assert place["costliest"] is None, "it costs the same all the while"


def test_the_costliest_stretch_is_found():
  busy = np.full((4, 400), 10_000_000)
  busy[1, 100:300] += 5_000_000
  busy[1, 200:225] += 25_000_000  # too few steps for a stretch of its own
  found = where(diagnose(make_run(*barrier(busy, 1_000_000))))["findings"][0]
  assert found["costliest"] is not None
  assert (abs(found["costliest"]["first_step"] - 200) <= 5
          and abs(found["costliest"]["last_step"] - 224) <= 5)


def guarded(size=600):
  """A run with blocks of 10 steps with pacing and without, 20 a pair, of which those with it are 1
  ms quicker."""
  rng = np.random.default_rng(0)
  pair = np.arange(size) // 20
  on = (np.arange(size) // 10 % 2 == 0) ^ (rng.random(size // 20 + 1)[pair] < 0.5)
  busy = np.tile(20_000_000 - 1_000_000 * on + rng.integers(0, 2_000_000, size), (2, 1))
  guard = {"guard_on": on.astype(np.float32),
           "guard_pair": np.where(pair > 0, pair, np.nan).astype(np.float32)}
  return dataclasses.replace(make_run(*barrier(busy, 1_000_000)), guard=guard), on, pair


def test_blocks_of_pacing_lead_to_the_effect_of_the_report(monkeypatch):
  run, on, pair = guarded()
  found, report = document.blocks(run), measured(run)
  assert (found["effect"]["effect"][-1] == report.effect
          and found["effect"]["pairs"][-1] == report.pairs == 29)
  assert (found["effect"]["low"][-1], found["effect"]["high"][-1]) == report.interval
  assert report.effect == pytest.approx(-1 / 22, abs=0.005), "1 ms of 22 ms"
  assert found["effect"]["low"][0] is None, "one pair tells nothing"
  for i, state in enumerate(found["blocks"]):
    inside = slice(state["first_step"], state["last_step"] + 1)
    assert (on[inside] == state["on"]).all()
    assert not i or on[state["first_step"] - 1] != state["on"]
  assert sum(state["last_step"] - state["first_step"] + 1 for state in found["blocks"]) == len(on)
  times = np.full(len(on), np.nan)
  times[1:] = np.diff(run.collectives[0].exit_ns[0]) * 1e-9
  expected = [[times[(pair == p) & (on == arm)].mean() for p in range(1, 30)]
              for arm in (True, False)]
  np.testing.assert_allclose([found["pairs"]["on"], found["pairs"]["off"]], expected)
  assert found["pairs"]["first_step"] == list(range(20, 600, 20))
  monkeypatch.setattr(document, "MOST_COLUMNS", 10)
  few = document.blocks(run)
  assert (few["blocks"] is None and len(few["pairs"]["on"]) == 10
          and sum(few["pairs"]["number"]) == 29)
  assert (np.average(few["pairs"]["on"], weights=few["pairs"]["number"])
          == pytest.approx(np.mean(expected[0])))


def test_no_guard_no_blocks():
  run, _, pair = guarded(200)
  assert document.blocks(dataclasses.replace(run, guard={})) is None
  nothing = dataclasses.replace(run,
                                guard={**run.guard, "guard_pair": np.full(200, np.nan, np.float32)})
  assert (document.blocks(nothing)["pairs"] == {"first_step": [], "last_step": [], "number": [],
                                              "on": [], "off": []})


@pytest.mark.long
def test_the_outlook_is_the_forecast(diagnosis, monkeypatch):
  run = diagnosis.run
  found = document.outlook(run)
  told = forecast(take_sample(run), [point["ranks"] for point in found["forecasts"]])
  assert ([point["ranks"] for point in found["forecasts"]] == [12, 24, 48, 96, 192, 384]
          and not found["newest"])
  for point, own in zip(found["forecasts"], told.points, strict=True):
    assert point["silent"] == own.silent
    assert point["step_time"] is None or point["step_time"]["estimate"] == own.step_time.estimate
  monkeypatch.setattr(document, "CELLS", 120 * 12)
  newest = document.outlook(run)
  assert newest["newest"] and newest["steps"] == 120
  assert newest["recorded"]["step_time"] == pytest.approx(
      diagnosis.totals.per_step["step"][-120:].mean()), "the newest steps count"


def test_everything_is_plain_and_bounded(whole):
  text = json.dumps(whole, allow_nan=False)
  assert (set(whole) == {"over_time", "skew", "distribution", "where", "pacing", "places",
                         "forecast"})
  assert json.loads(text) == whole and len(text) < 100_000


def test_a_run_without_a_counted_step_has_no_series():
  found = document.series(diagnose(make_run(*barrier(np.full((2, 1), 1000), 10))))
  assert found["over_time"] is found["skew"] is found["distribution"] is found["where"] is None
  assert found["forecast"]["silent"] and found["places"]["hosts"]
