"""The measured effect of pacing, recomputed from recorded steps, against what the job was made
of."""

import dataclasses
import io
import json
import re

import numpy as np
import pytest
from rich.console import Console

from jaxpace.cli.main import main
from jaxpace.diagnose.diagnose import diagnose
from jaxpace.diagnose.diagnosis import to_json
from jaxpace.diagnose.pacing import measured, work_moved
from jaxpace.runs.reader import read_run
from jaxpace.show.terminal import render
from tests.coordination.test_guard import GUARDED, run, steps_of
from tests.coordination.test_trial import noisy
from tests.diagnose.traces import barrier, make_run
from tests.lib.said import numbers
from tests.quick import long
from tests.show.html.runs import with_columns
from tests.synthetic import synthetic_runs

STEPS = 1200


def recorded(effect, cv=0.05, steps=STEPS, ranks=3):
  """A guarded job, as a Run whose step times are the job's, and those times."""
  base, took = noisy(steps, effect, cv), []

  def times(step, delays):
    seconds = steps_of(base)(step, delays)
    took.append(seconds)
    return seconds

  applied, columns, _ = run(GUARDED, times)
  seconds = np.array(took[:-1])
  enter, leave = barrier(np.tile(np.rint(seconds * 1e7).astype(np.int64), (ranks, 1)), 10_000)
  made = make_run(enter, leave, delay=np.tile(applied[:, 0] * 1e9, (ranks, 1)))
  guard = {name: columns[name][:, 0].astype(np.float32) for name in columns if name != "slack"}
  return dataclasses.replace(made, guard=guard), applied[:, 0] > 0, seconds


def decided(path, columns):
  """A run of 300 steps read back, with more columns of decisions."""
  synthetic_runs.write(path,
                       synthetic_runs.SyntheticJob(ranks=2, steps=300, processes=2, noise=0.02))
  with_columns(path, "steps", {f"decision_{name}": np.asarray(values, np.float32)
                               for name, values in columns.items()})
  return read_run(path)


def told(run):
  """What the report says, as JSON and in words."""
  diagnosis, out = diagnose(run), io.StringIO()
  render(diagnosis, Console(width=120, file=out))
  return json.loads(json.dumps(to_json(diagnosis))), " ".join(out.getvalue().split())


@pytest.mark.parametrize("effect", [-0.1, *long(0.0)])
def test_the_effect_is_that_of_the_job(effect):
  made, _, _ = recorded(effect)
  found = measured(made)
  low, high = found.interval
  assert low < effect < high and high - low < 0.1
  assert found.effect == pytest.approx(effect, abs=0.02)
  assert found.pairs >= 10 and found.to_json()["blocks"] == 2 * found.pairs
  assert (high < 0) == (effect < 0)


def test_it_is_made_of_the_mean_steps_of_each_block_and_pair():
  """By plain loops, in float64, from the arm that really acted."""
  made, on, seconds = recorded(0.0, steps=700)
  pair, differences, off = made.guard["guard_pair"], [], []
  for number in range(1, int(np.nanmax(pair)) + 1):
    arms = [np.mean(seconds[(pair == number) & (on == arm)]) for arm in (True, False) if
            ((pair == number) & (on == arm)).any()]
    if len(arms) == 2:
      differences.append(arms[0] - arms[1])
      off.append(arms[1])
  found = measured(made)
  assert found.pairs == len(differences)
  assert found.effect == pytest.approx(np.mean(differences) / np.mean(off), abs=1e-5)
  assert (found.guard.effect == pytest.approx(
      found.effect,
      abs=5e-3)), "the guard's own leaves the unfinished pair out"


def test_nothing_is_claimed_where_no_guard_ran_or_nothing_was_compared():
  made, _, _ = recorded(0.0, steps=200)
  assert measured(dataclasses.replace(made, guard={})) is None
  few = measured(made)
  nothing = {**made.guard, "guard_pair": np.full(200, np.nan, np.float32)}
  none = measured(dataclasses.replace(made, guard=nothing))
  assert few.interval is None and few.guard.interval is None and few.sentence() != none.sentence()
  assert none.effect is None and none.pairs == 0
  document = to_json(diagnose(dataclasses.replace(made, guard={})))
  assert document["pacing"] == {"active_share": document["pacing"]["active_share"], "effect": None,
                                "effect_interval": None, "blocks": 0}


def test_windows_and_restarts():
  made, _, _ = recorded(0.0)
  window = dataclasses.replace(made, window=(600, 900))
  assert 6 <= measured(window).pairs <= 10
  attempt = made.attempt.copy()
  attempt[:, 600:] = 1  # and pairs are counted from 0 again
  pair = made.guard["guard_pair"].copy()
  pair[600:] = pair[:600]
  collectives = tuple(dataclasses.replace(c, attempt=attempt) for c in made.collectives)
  restarted = dataclasses.replace(made, attempt=attempt, collectives=collectives,
                                  guard={**made.guard, "guard_pair": pair,
                                         "guard_on": np.concatenate(
                                             [made.guard["guard_on"][:600]] * 2)})
  half = measured(dataclasses.replace(made, window=(0, 600))).pairs
  assert measured(restarted).pairs == pytest.approx(2 * half, abs=2) and half > 10


def test_the_report_of_a_recorded_run(tmp_path):
  """Through the files: decision columns are read back, of the lowest rank that has them."""
  rng = np.random.default_rng(0)
  on = rng.random(150).repeat(2) < 0.5
  columns = {"guard_on": on,
             "guard_pair": np.where(np.arange(300) % 10 < 8, np.arange(300) // 10, np.nan),
             "effect": np.full(300, -0.02), "effect_low": np.full(300, -0.03),
             "effect_high": np.full(300, -0.01), "pairs": np.arange(300) // 10}
  back = decided(tmp_path / "run", columns)
  for name, values in columns.items():
    np.testing.assert_array_equal(back.guard[name], np.asarray(values, np.float32))
  document, text = told(back)
  pacing = document["pacing"]
  assert (abs(pacing["effect"]) < 0.02
          and pacing["effect_interval"][0] < 0 < pacing["effect_interval"][1])
  assert pacing["blocks"] > 40
  assert pacing["guard"] == {"on": bool(on[-1]), "effect": pytest.approx(-0.02), "pairs": 29,
                             "effect_interval": pytest.approx([-0.03, -0.01]), "ranks_alike": True}
  assert "Effect on the mean step:" in text and "95 % interval" in text


# What sharing work by speed did, read back from a recorded run, and said.

SHARED, EFFECT = "Work was shared", "Effect on the mean step:"
"""How what is said begins."""


def test_unguarded(tmp_path):
  document, text = told(decided(tmp_path / "run", {"work_uneven": np.arange(300) >= 75,
                                                   "work_gain": np.zeros(300)}))
  assert document["pacing"]["work"] == {"uneven_share": 0.75, "uneven_at_end": True,
                                        "guarded": False, "on": None, "effect": None,
                                        "effect_interval": None, "pairs": 0}
  assert numbers(text.partition(SHARED)[2])[0] == 75


def test_steps_that_are_not_detailed_count(tmp_path):
  """Such as those with even counts, which fetch nothing and so have fewer collectives."""
  back = decided(tmp_path / "run", {"work_uneven": np.arange(300) >= 75})
  back = dataclasses.replace(back, end_ns=np.zeros((len(back.attempt), 300), np.int64),
                             collectives=())
  assert work_moved(back.detailed(np.arange(75, 300))).uneven_share == 0.75
  windowed = dataclasses.replace(back.detailed(np.arange(75, 300)), window=(50, 100))
  assert work_moved(windowed).uneven_share == 0.5


def test_guarded(tmp_path):
  whole = np.ones(300)
  columns = {"work_uneven": np.arange(300) < 150, "work_on": 0 * whole,
             "work_effect": 0.1 * whole, "work_effect_low": 0.05 * whole,
             "work_effect_high": 0.15 * whole, "work_pairs": 12 * whole}
  document, text = told(decided(tmp_path / "run", columns))
  work = document["pacing"]["work"]
  assert (work["effect_interval"] == pytest.approx([0.05, 0.15]) and work["on"] is False
          and work["pairs"] == 12)
  main(["report", str(tmp_path / "run"), "--html", str(tmp_path / "page.html")])
  words = " ".join(re.sub("<[^>]*>", "", (tmp_path / "page.html").read_text()).split())
  # The share; the effect, its level and its ends.
  assert numbers(words.partition(SHARED)[2])[:5] == [50, 10, 95, 5, 15]
  assert numbers(text.partition(EFFECT)[2])[:5] == [10, 95, 5, 15, 12]


def test_none_where_no_work_is_shared(tmp_path):
  document, text = told(decided(tmp_path / "run", {}))
  assert "work" not in document["pacing"] and SHARED not in text
