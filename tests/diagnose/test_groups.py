"""Runs in whose collectives not all ranks meet: who waits for whom, who is blamed, what it would be
worth."""

import json

import numpy as np
import pytest

from jaxpace.__main__ import main
from jaxpace.diagnose.follower import Follower
from jaxpace.diagnose.words.codes import Verdict
from jaxpace.diagnose.words.notes import Note
from tests.diagnose.synthetic import report
from tests.synthetic.synthetic_groups import timestamps, write_timestamps

STEPS = 240
TWO = {"mesh": {"replica": 2, "data": 2}, "axis": ["data"]}
_ROWS = [[0, 1], [2, 3]]
_COLUMNS = [[0, 2], [1, 3]]


def noisy(busy, seed=0, noise=0.01):
  """[C, R, K] of [C, R] seconds."""
  busy = np.repeat(np.asarray(busy, float)[..., None], STEPS, axis=-1)
  return busy * (1 + noise * np.random.default_rng(seed).standard_normal(busy.shape))


def told_of(path, busy, transfers, *arguments, groups=None, sources=None, **told):
  """The report on ranks that wait for those of their group, or for their source."""
  write_timestamps(path / "run", *timestamps(busy, transfers, groups, sources), **told)
  return report(path / "run", *arguments)


@pytest.mark.parametrize("told", ["mesh", "groups", "index_groups"])
def test_two_groups_that_never_meet_do_not_wait_for_each_other(tmp_path, told):
  """10 and 15 ms of compute, 2 ms of transfer each."""
  document = told_of(tmp_path, noisy([[10e-3, 10e-3, 15e-3, 15e-3]], noise=0), [2e-3],
                     groups=[_ROWS], settings=TWO if told == "mesh" else None,
                     collectives=None if told == "mesh" else [{told: _ROWS}])
  step = document["step_time"]["mean"]
  assert step == pytest.approx(14.5e-3, rel=1e-6)  # mean over ranks of 12 and 17 ms
  assert document["shares"]["transfer"] * step == pytest.approx(2e-3, rel=1e-6)
  assert document["shares"]["skew"] == pytest.approx(0, abs=1e-9)
  assert not document["findings"] and document["verdict_code"] == Verdict.HEALTHY
  assert document["what_if"]["no_skew"]["speedup"] == pytest.approx(1, abs=1e-6)
  assert not any(row["late"] for row in document["per_rank"])
  assert [row["lateness"] for row in document["per_rank"]] == pytest.approx([0] * 4, abs=1e-9)
  assert ([row["shares"]["transfer"] * row["step_time"] for row in document["per_rank"]]
          == pytest.approx([2e-3] * 4))
  assert Note.GROUPS_APART in document["note_codes"]
  assert document["collectives"][0]["groups"] == 2


def test_the_late_rank_of_one_group_is_named_and_the_other_group_is_not(tmp_path):
  document = told_of(tmp_path, noisy([[10e-3, 10e-3, 15e-3, 20e-3]]), [2e-3], "--without", "rank:3",
                     "--without", "skew", "--without", "host:host0", groups=[_ROWS], settings=TWO)
  (finding,) = document["findings"]
  assert finding["mode"] == "persistent_straggler" and finding["ranks"] == [3]
  lateness = [row["lateness"] for row in document["per_rank"]]
  assert lateness == pytest.approx([0, 0, 0, 5e-3], abs=1e-4)
  # Its own group alone waits for it: one of four ranks, 5 ms; without it two of four take 5 ms
  # less.
  assert finding["share"] * document["step_time"]["mean"] == pytest.approx(5e-3 / 4, rel=0.03)
  alone = document["what_if"]["without_rank"]["3"]["step_time"]
  assert document["step_time"]["mean"] - alone == pytest.approx(5e-3 / 2, rel=0.03)
  asked = {a["without"]: a["step_time"] for a in document["what_if"]["asked"]}
  assert asked["rank:3"] == pytest.approx(alone)
  assert document["step_time"]["mean"] - asked["skew"] == pytest.approx(
      document["shares"]["skew"] * document["step_time"]["mean"], rel=1e-3)
  assert document["step_time"]["mean"] - asked["host:host0"] < 1e-4


def test_each_group_has_a_floor_of_its_own(tmp_path):
  """Contended intermittently: each group's transfers are quick in one half of the run, the mean
  never is."""
  arrivals, size = noisy([[10e-3] * 4], noise=0), STEPS // 2
  parts = []
  for contended in ((0, 1), (2, 3)):
    slow = [timestamps(arrivals[:, :2, :size], [6e-3 if 0 in contended else 2e-3]),
            timestamps(arrivals[:, 2:, :size], [2e-3 if 0 in contended else 6e-3])]
    parts.append([np.concatenate([s[i] for s in slow], axis=1) for i in range(2)])
  ends = parts[0][1][:, :, -1:]
  enter, leave = (np.concatenate([parts[0][i], parts[1][i] + ends], axis=2) for i in range(2))
  write_timestamps(tmp_path / "run", enter, leave, settings=TWO)
  document = report(tmp_path / "run")
  assert (document["shares"]["contention"] * document["step_time"]["mean"]
          == pytest.approx(2e-3, rel=0.05))


@pytest.mark.parametrize("back, ranks", [(False, 16), (True, 4)])
def test_a_chain_is_judged_along_the_chain(tmp_path, back, ranks):
  """Each rank waits for its source: the 20 ms of rank 2 reach all those behind it, and it alone is
  to blame."""
  sources = [ranks - 1 if back else -1, *range(ranks - 1)]
  busy = noisy([[10e-3, 10e-3, 30e-3, *[10e-3] * (ranks - 3)]])
  document = told_of(tmp_path, busy, [1e-3], sources=sources, collectives=[
      {"name": "ppermute", "primitives": ["ppermute"],
       "pairs": [[s, t] for t, s in enumerate(sources) if s >= 0]}])
  (finding,) = document["findings"]
  assert finding["mode"] == "persistent_straggler" and finding["ranks"] == [2]
  assert document["verdict_code"] == Verdict.PERSISTENT
  assert document["per_rank"][2]["lateness"] == pytest.approx(20e-3, rel=0.02)
  assert document["collectives"][0]["kind"] == "point_to_point"
  assert {Note.POINT_TO_POINT, Note.BUBBLES} <= {*document["note_codes"]}


def test_groups_that_keep_step_without_meeting_are_told_as_stages(tmp_path):
  """Two stages' data-parallel groups: the shorter stage waits for the other one inside its compute
  or transfer."""
  document = told_of(tmp_path, noisy([[10e-3, 10e-3, 15e-3, 15e-3]], noise=0), [2e-3],
                     settings={"mesh": {"stage": 2, "data": 2}, "axis": ["data"]})
  assert document["what_if"]["stages"]
  assert {Note.STAGES, Note.BUBBLES} <= {*document["note_codes"]}


def test_late_entry_stamps_are_said_once_and_no_ranks_by_turns_are_blamed(tmp_path):
  """A pipeline whose transfers begin before their entry timestamps: what is recorded there says
  nothing of who is late."""
  random = np.random.default_rng(3)
  slots = 10
  busy = np.full((slots, 4, STEPS), 3e-3) + random.exponential(1e-3, (slots, 4, STEPS))
  notices = [f"Collective {c} can start before its entry stamp, which may then be late: none of "
             "its operands can be held back without a risk to the last bits of the results."
             for c in range(slots)]
  document = told_of(tmp_path, busy, [1e-5] * slots, plan={"notices": notices}, collectives=[
      {"name": "ppermute", "primitives": ["ppermute"], "pairs": [[0, 1], [1, 2], [2, 3]],
       "may_begin_early": True}] * slots)
  assert not document["findings"] and document["what_if"]["no_skew"] is None
  assert document["verdict_code"] == Verdict.UNTOLD
  assert document["note_codes"].count(Note.PLAN_NOTICE) == 1


def test_transfers_of_which_nobody_knows_whose_they_are_blame_no_ranks_by_turns(tmp_path):
  busy = np.random.default_rng(4).gamma(4, 3e-3, (1, 4, STEPS))
  document = told_of(tmp_path, busy, [1e-3], sources=[-1, 0, 1, 2],
                     collectives=[{"name": "send", "primitives": ["send", "recv"]}])
  assert not document["findings"]
  assert document["verdict_code"] == Verdict.UNTOLD
  assert document["collectives"][0]["kind"] == "point_to_point"


def test_the_timeline_does_not_let_a_group_wait_for_another_one(tmp_path, capsys):
  enter, leave = timestamps(noisy([[10e-3, 10e-3, 15e-3, 20e-3]]), [2e-3], [_ROWS])
  write_timestamps(tmp_path / "run", enter, leave, settings=TWO)
  target = tmp_path / "timeline.json"
  assert main(["report", str(tmp_path / "run"), "--chrome", str(target)]) == 0
  assert "Groups of ranks that never meet" in " ".join(capsys.readouterr().err.split())
  events = json.loads(target.read_text())
  events = events["traceEvents"] if isinstance(events, dict) else events
  names = {event["args"]["name"]: event["tid"] for event in events
           if event.get("name") == "thread_name" and "rank" in event["args"]["name"]}
  late = [event for event in events if event.get("name") == "wait for rank 3"
          and event.get("dur", 0) > 1000]
  assert late and {event["tid"] for event in late} == {names["rank 2"]}


@pytest.mark.parametrize("command, option", [
    ("report", ["--forecast", "8"]), ("replay", ["--pacer", "pace_early_ranks()"])])
def test_what_needs_ranks_that_all_meet_takes_such_or_says_that_there_are_none(
    tmp_path, capsys, command, option):
  busy = noisy([[10e-3, 10e-3, 15e-3, 20e-3], [5e-3] * 4])
  for other, status in ((_ROWS, 0), (_COLUMNS, 2)):
    path, groups = tmp_path / str(status), [_ROWS, other]
    write_timestamps(path, *timestamps(busy, [1e-3, 2e-3], groups),
                     collectives=[{"groups": own} for own in groups])
    assert main([command, str(path), *option]) == status
    said = capsys.readouterr()
    assert ("groups of several kinds" in " ".join(said.err.split()) if status else
            "2 groups of ranks that never meet: the first" in " ".join(said.out.split()))


def test_groups_that_never_meet_are_accounted_for_as_jobs_of_their_own(tmp_path):
  random = np.random.default_rng(5)
  busy_of = [random.gamma(20, base / 20, (2, ranks, STEPS))
             for base, ranks in ((8e-3, 3), (12e-3, 2))]
  single = [timestamps(arrivals, [1e-3, 2e-3]) for arrivals in busy_of]
  documents = []
  for at, (enter, leave) in enumerate(single):
    write_timestamps(tmp_path / f"{at}", enter, leave)
    documents.append(report(tmp_path / f"{at}"))
  enter, leave = (np.concatenate([one[i] for one in single], axis=1) for i in range(2))
  write_timestamps(tmp_path / "both", enter, leave,
                   collectives=[{"groups": [[0, 1, 2], [3, 4]]}] * 2)
  both = report(tmp_path / "both")
  alone = [row for document in documents for row in document["per_rank"]]
  for row, own in zip(both["per_rank"], alone, strict=True):
    assert row["step_time"] == pytest.approx(own["step_time"])
    assert row["lateness"] == pytest.approx(own["lateness"], abs=1e-9)
    assert row["waiting"] == pytest.approx(own["waiting"])
    assert row["last_share"] == pytest.approx(own["last_share"])
    assert row["shares"] == pytest.approx(own["shares"], abs=1e-6)
  for name, share in both["shares"].items():
    seconds = [document["shares"][name] * document["step_time"]["mean"] for document in documents]
    assert (share * both["step_time"]["mean"]
            == pytest.approx((3 * seconds[0] + 2 * seconds[1]) / 5, abs=1e-9))
  gains = [document["step_time"]["mean"] - document["what_if"]["no_skew"]["step_time"]
           for document in documents]
  assert both["step_time"]["mean"] - both["what_if"]["no_skew"]["step_time"] == pytest.approx(
      (3 * gains[0] + 2 * gains[1]) / 5)


# The live view of runs in whose collectives not all ranks meet, or whose timestamps don't tell.

def test_groups_that_never_meet_are_not_compared_live(tmp_path):
  """One of them becomes slower half way, both of its ranks alike: nobody waits for anybody."""
  busy = noisy([[10e-3, 10e-3, 15e-3, 15e-3]])
  busy[:, 2:, STEPS // 2:] += 10e-3
  write_timestamps(tmp_path / "run", *timestamps(busy, [2e-3], [_ROWS]), settings=TWO)
  look = Follower(tmp_path / "run").poll(0.0, 0.0)
  assert not look.alerts
  assert max(abs(rank.lateness) for rank in look.numbers.late) < 0.5e-3
  shares = look.numbers.shares
  assert sum(shares.values()) == pytest.approx(1, abs=1e-6)
  assert (shares["skew"] < 0.02
          and shares["transfer"] * look.numbers.step_time.mean == pytest.approx(2e-3, rel=0.05))
