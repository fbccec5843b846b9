"""Work shared by speed in jobs of several processes: any form of a step, and a job that is cut."""

import pytest

from tests.multiprocess import jobs

pytestmark = pytest.mark.long
EVEN = [2, 2, 2, 2]


def start(processes, devices, *arguments):
  """Runs a job; returns each process's exit status and output."""
  place = {"ADDRESS": f"127.0.0.1:{jobs.free_high_port()}", "PROCESSES": str(processes)}
  return jobs.finish([jobs.start("shares_worker.py", *arguments, devices=devices,
                                 INDEX=str(index), **place) for index in range(processes)], 480)


def facts(done):
  assert [status for status, _ in done] == [0] * len(done), done
  one, *others = (jobs.facts(output) for _, output in done)
  assert all(other == one for other in others), "the same on all processes, to the last bit"
  return one


def test_any_form_of_a_step_on_four_processes():
  facts(start(4, 1, "forms"))


@pytest.mark.parametrize(("how", "at"), [("twice", "at 10, the others at 9"),
                                         ("restored", "at 12, the others at 9")])
def test_a_process_at_another_step_ends_the_job_with_a_sentence(how, at):
  for status, output in start(2, 1, "erring", how):
    assert status == 3 and f"not at one step: process 1 {at}" in output, output


def test_counts_that_one_process_alone_restored_are_refused_before_the_first_step():
  found = start(2, 1, "erring", "uneven")
  assert all(status for status, _ in found)
  assert any("begin with different counts: process" in output for _, output in found), found


@pytest.mark.parametrize("how", ["differs", "fails", "alone"])
def test_counts_that_one_process_alone_decides_on_are_run_by_none(how):
  """Where only one fetched the batch its step would never end; nor would an exchange that only one
  thinks due."""
  found = start(2, 1, "erring", how)
  assert facts(found) == [[4, 4]] * 80
  failed = ["The balancer failed in another process", "The balancer failed at step"]
  for (_, output), said in zip(found, failed if how == "fails" else
                               ["decided on different counts before step"] * 2, strict=True):
    assert output.count(said) == 1 and "ran different counts" not in output, output


def test_counts_that_one_process_is_late_for_are_run_a_little_later():
  found = start(2, 1, "erring", "late")
  ran = facts(found)
  at = ran.index([3, 5])
  assert at >= 44 and ran == [[4, 4]] * at + [[3, 5]] * (80 - at), "two exchanges later, for good"
  assert all("decided on different" not in output for _, output in found), found


def test_a_process_without_a_feed_is_named_and_work_stays_even():
  found = start(2, 1, "erring", "never")
  assert facts(found) == [[4, 4]] * 24
  assert "process 1 did not come. Does every process call feed.next(step)" in found[0][1]


def test_every_example_once_an_epoch_through_three_cuts(tmp_path):
  """Killed at step 26, stopped for a second at 34, and on half of the ranks from 50 to 60: sixteen
  examples a step, 48 in an epoch."""
  kept = tmp_path / "kept"
  killed = start(4, 1, "cut", kept, 1000, "killed", 26)
  assert killed[1][0] == -9 and all(status for status, _ in killed), killed
  assert any("ENDED" in output for _, output in killed), "as without jaxpace"
  first = facts(start(2, 2, "cut", kept, 50, "stopped", 34))
  assert len(first["counts"]) == 30, "from the checkpoint after step 19"
  fewer = facts(start(1, 2, "cut", kept, 60, "nothing", -1))
  assert fewer["counts"][:8] == [[4, 4]] * 8 and len(fewer["counts"]) == 10
  last = facts(start(2, 2, "cut", kept, 90, "nothing", -1))
  assert last["counts"][:16] == [EVEN] * 16 and last["counts"][-1] != EVEN
  assert last["trained"] == [30] * 48
