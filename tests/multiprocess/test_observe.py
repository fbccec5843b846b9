"""Two gloo processes observe the same step: the same bits, the same plan, the same decision."""

import pytest

from tests.multiprocess import jobs


def facts_of(worker, *arguments):
  """What each of two processes of two devices found."""
  return list(map(jobs.facts, jobs.pair(worker, *arguments, devices=2)))


@pytest.mark.long
def test_two_processes_put_the_same_timestamps_in_or_none():
  facts = facts_of("observe_worker.py")
  for one in facts:
    bare, marked, refused = one["bits"]
    assert bare == marked == refused
    assert one["counted"] == [10, 10]
    assert one["runs"] == [1, 0]
    assert one["bare"][0] == ""
    kinds = {kind: (axes, groups) for kind, axes, groups, loops in one["collectives"]
             if loops == [3]}
    assert kinds["all-gather"] == (["fsdp"], [[0, 1], [2, 3]])
  assert facts[0]["plan"] == facts[1]["plan"]
  assert "another process of this job runs it unmodified" in facts[0]["bare"][1]
  assert "no space left" in facts[1]["bare"][1]


@pytest.mark.long
def test_collectives_of_a_loop_stay_behind_those_before_it(tmp_path):
  pair = jobs.pair("collectives_worker.py", tmp_path / "run", devices=1)
  assert list(map(jobs.facts, pair)) == 2 * [{"same": True, "found": True}]


@pytest.mark.long
def test_two_processes_observe_whatever_is_set(tmp_path):
  for facts in facts_of("observe_settings_worker.py", tmp_path, "settings"):
    for name, (same, bare, lost) in facts.items():
      assert same, name
      assert bare == ([] if name == "no jit" else [""]), (name, bare)
      assert lost["lost_rows"] == 0 and lost["stopped"] is None, (name, lost)


@pytest.mark.long
def test_what_fails_in_one_process_leaves_training_as_it_is_in_both(tmp_path):
  first, second = facts_of("observe_settings_worker.py", tmp_path, "failures")
  assert len(first) == len(second) == 11
  for name in first:
    assert first[name][0] and second[name][0], name
    # Where one runs the step unmodified, both do.
    marked = name in ("nothing", "ring", "record", "collect")
    wanted = [not marked]
    assert [bool(bare) for bare in first[name][1]] == wanted, (name, first[name])
    assert name == "observe" or [bool(bare) for bare in second[name][1]] == wanted, name
