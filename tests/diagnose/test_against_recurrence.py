"""Random jobs on random meshes: what a report says of them is what the recurrence says that is
played without their causes, and its parts agree with each other."""

import dataclasses
import math
import tempfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpace.diagnose.diagnose import diagnose
from jaxpace.diagnose.diagnosis import to_json
from jaxpace.diagnose.words.codes import Verdict
from jaxpace.diagnose.worth import parse
from jaxpace.runs.reader import read_run
from tests.quick import examples
from tests.synthetic.synthetic_groups import (
  Cause,
  Job,
  Place,
  gain,
  pipeline,
  play,
  rank_groups,
  write,
)

STEPS = 120
MOST_RANKS = 16


def report(job, *without):
  """What was played, and the report's JSON."""
  with tempfile.TemporaryDirectory() as path:
    played = write(f"{path}/run", job)
    return played, to_json(diagnose(read_run(f"{path}/run"), asked=[parse(w) for w in without]))


@st.composite
def meshes(draw):
  """Jobs of two or three axes, all of which collectives go along, in any order."""
  sizes = draw(st.lists(st.sampled_from([2, 2, 3, 4]), min_size=2, max_size=3).filter(
      lambda own: 4 <= math.prod(own) <= MOST_RANKS))
  mesh = dict(zip(("data", "fsdp", "tensor"), sizes, strict=False))
  more = draw(st.lists(st.sampled_from(sorted(mesh)), max_size=3))
  axes = draw(st.permutations([*mesh, *more]))
  places = tuple(rank_groups(mesh, axis, draw(st.sampled_from([5e-3, 15e-3, 30e-3])),
                         draw(st.sampled_from([1e-3, 4e-3]))) for axis in axes)
  return Job(mesh, places, steps=STEPS, noise=draw(st.sampled_from([1e-3, 0.01, 0.02])),
             missing=draw(st.sampled_from([0.0, 0.0, 0.05])), seed=draw(st.integers(0, 99)))


@st.composite
def pipelines(draw):
  """Even ones of two to four stages, as pairs or as groups."""
  stages, micro = draw(st.integers(2, 4)), draw(st.integers(2, 6))
  mesh, places = pipeline(stages, draw(st.integers(1, 2)), micro, [10e-3] * stages,
                          as_pairs=draw(st.booleans()) or stages == 2)
  return Job(mesh, places, steps=STEPS, noise=draw(st.sampled_from([1e-3, 0.01])),
             missing=draw(st.sampled_from([0.0, 0.0, 0.05])), seed=draw(st.integers(0, 99)))


def with_late(draw, job, number, place=True):
  """The job with some ranks late by three tenths of its step."""
  ranks = draw(st.lists(st.integers(0, job.ranks - 1), min_size=number, max_size=number,
                        unique=True))
  at = draw(st.integers(0, len(job.places) - 1)) if place else None
  late = Cause("late", 0.3 * play(job).step_time(), tuple(ranks), at)
  return dataclasses.replace(job, causes=(late,)), late


def agrees(document):
  """What holds of every report."""
  assert sum(document["shares"].values()) == pytest.approx(1, abs=1e-6)
  what_if = document["what_if"]
  for name in ("no_skew", "no_contention", "no_runtime_jitter", "without_late_ranks"):
    assert what_if.get(name) is None or what_if[name]["speedup"] >= 1
  assert all(one["speedup"] >= 1 for one in what_if["without_rank"].values())
  named = {rank for finding in document["findings"] for rank in finding["ranks"]
           if finding["mode"] == "persistent_straggler"}
  assert named == {row["rank"] for row in document["per_rank"] if row["late"]}


@settings(max_examples=examples(12))
@given(st.one_of(meshes(), pipelines()))
def test_a_healthy_job_names_nobody(job):
  played, document = report(job)
  agrees(document)
  assert document["verdict_code"] == Verdict.HEALTHY and not document["findings"]
  assert document["step_time"]["mean"] == pytest.approx(played.step_time(), rel=5e-3)


@settings(max_examples=examples(24))
@given(st.data(), st.one_of(meshes(), meshes(), pipelines()))
def test_a_late_rank_is_named_with_what_it_costs(data, job):
  job, late = with_late(data.draw, job, 1, place=not any(p.pairs or p.index_groups
                                                         for p in job.places))
  (rank,) = late.ranks
  played, document = report(job)
  agrees(document)
  finding = document["findings"][0]
  assert finding["mode"] == "persistent_straggler" and finding["ranks"] == [rank]
  assert document["verdict"].startswith(f"Look at rank {rank} ")
  alone = document["what_if"]["without_rank"][str(rank)]["speedup"]
  assert alone == pytest.approx(gain(job, late), rel=0.015)
  assert f"{alone:.2f} times as fast" in document["verdict"]
  # Beyond what all wait if each has its part of the lateness: longer work, longer bubbles.
  even = Cause("late", late.seconds / job.ranks, tuple(range(job.ranks)))
  shared = play(dataclasses.replace(job, causes=(even,)))
  waited = (played.waited() - shared.waited()) / played.step_time()
  assert finding["share"] == pytest.approx(waited, rel=0.25, abs=0.01)


@settings(max_examples=examples(12))
@given(st.data(), st.one_of(meshes(), pipelines()).filter(lambda job: job.ranks > 2))
def test_more_taken_out_gains_no_less(data, job):
  job, late = with_late(data.draw, job, 2, place=False)
  one, other = late.ranks
  asked = report(job, f"rank:{one}", f"rank:{one},rank:{other}", f"rank:{one},rank:{other},jitter",
                 f"rank:{one},skew")[1]
  agrees(asked)
  first, both, more, even = (answer["speedup"] for answer in asked["what_if"]["asked"])
  assert 1 <= first <= both + 1e-9 and both <= more + 1e-3 and first <= even + 1e-3


@settings(max_examples=examples(9))
@given(st.data(), st.one_of(meshes(), pipelines()))
def test_pauses_of_one_rank_are_its_own_and_worth_what_they_cost(data, job):
  rank = data.draw(st.integers(0, job.ranks - 1))
  pause = Cause("pause", play(job).step_time(), (rank,), every=8)
  job = dataclasses.replace(job, causes=(pause,), missing=0.0)
  document = report(job, "pauses")[1]
  agrees(document)
  finding = document["findings"][0]
  assert finding["mode"] == "runtime_jitter" and finding["ranks"] == [rank]
  assert finding["share"] == pytest.approx(1 - 1 / gain(job, pause), abs=0.02)
  assert document["what_if"]["asked"][0]["speedup"] == pytest.approx(gain(job, pause), rel=0.015)


@settings(max_examples=examples(9))
@given(st.data(), meshes())
def test_a_crowded_axis_is_no_ranks_fault_and_worth_what_it_costs(data, job):
  axis = data.draw(st.sampled_from(sorted(job.mesh)))
  crowded = Cause("contention", 0.3 * play(job).step_time(), axis=axis, begin=0.5)
  job = dataclasses.replace(job, causes=(crowded,))
  played, document = report(job)
  agrees(document)
  (finding,) = document["findings"]
  assert finding["mode"] == "fabric_contention" and not finding["ranks"]
  truth = played.step_time(1) / play(job, [crowded]).step_time(1)
  assert document["what_if"]["no_contention"]["speedup"] == pytest.approx(truth, rel=0.02)


@pytest.mark.parametrize("late", [(3,), (2, 3)])
def test_a_pause_of_all_ranks_excuses_none_whose_gap_is_longer_in_every_step(late):
  everyone = (0, 1, 2, 3)
  job = Job({"data": 4}, (Place("data", (everyone,), dict.fromkeys(everyone, 2e-3), 1e-3),),
            steps=60, noise=0.01, causes=(Cause("pause", 15e-3, late),
                                          Cause("pause", 0.8, everyone, begin=0.5, end=0.515)))
  document = report(job)[1]
  assert [each["ranks"] for each in document["findings"] if each["ranks"]] == [list(late)]
