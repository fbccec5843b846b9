"""Two gloo processes observe the same step: the same bits, the same plan, the same decision."""

import pathlib

import pytest

from tests.multiprocess import jobs

WORKER = pathlib.Path(__file__).with_name("observe_worker.py")


@pytest.mark.long
def test_two_processes_put_the_same_marks_in_or_none():
  address = f"127.0.0.1:{jobs.free_high_port()}"
  found = jobs.run(WORKER, [
      jobs.clean_environment(ADDRESS=address, INDEX=str(index),
                             XLA_FLAGS="--xla_force_host_platform_device_count=2")
      for index in range(2)])
  assert [status for status, _ in found] == [0, 0], found
  facts = [jobs.facts(output) for _, output in found]
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


def outputs_of(worker, folder):
  """What two processes of two devices each print."""
  address = f"127.0.0.1:{jobs.free_high_port()}"
  found = jobs.run(WORKER.with_name(worker), [
      jobs.clean_environment(ADDRESS=address, INDEX=str(index), RUN=str(folder),
                             XLA_FLAGS="--xla_force_host_platform_device_count=2")
      for index in range(2)])
  assert [status for status, _ in found] == [0, 0], found
  return [output for _, output in found]


@pytest.mark.long
def test_two_processes_observe_whatever_is_set(tmp_path):
  for output in outputs_of("observe_context_worker.py", tmp_path):
    for name, (same, bare, lost) in jobs.facts(output).items():
      assert same, name
      assert bare == ([] if name == "no jit" else [""]), (name, bare)
      assert lost["lost_rows"] == 0 and lost["stopped"] is None, (name, lost)


@pytest.mark.long
def test_what_fails_in_one_process_leaves_training_as_it_is_in_both(tmp_path):
  outputs = outputs_of("observe_failures_worker.py", tmp_path)
  first, second = (jobs.facts(output) for output in outputs)
  assert len(first) == len(second) == 11
  for name in first:
    assert first[name][0] and second[name][0], name
    # Where one runs the step unmodified, both do.
    marked = name in ("nothing", "ring", "record", "collect")
    wanted = [] if name == "compare" else [not marked]
    assert [bool(bare) for bare in first[name][1]] == wanted, (name, first[name])
    assert name == "observe" or [bool(bare) for bare in second[name][1]] == wanted, name
