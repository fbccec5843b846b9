"""The script of docs/five_minutes.md, word for word, as a reader would start it: two processes,
then the report."""

import json
import os
import subprocess
import sys

import pytest

from tests.docs.blocks import written
from tests.multiprocess import jobs

PAGE = "docs/five_minutes.md"


@pytest.fixture(scope="module")
def shown():
  script, loop = (block.text for block in written("python") if block.page == PAGE)
  return script, loop


@pytest.fixture(scope="module")
def report(shown, tmp_path_factory):
  """The script with the second loop in the place of the first, run, and what the report says of
  it."""
  script, loop = shown
  folder = tmp_path_factory.mktemp("five")
  head, with_line, tail = script.partition("with jaxpace.recorded")
  assert with_line and tail.count("\n  for ") == 1
  (folder / "train.py").write_text(head + loop + tail[tail.index("\nprint("):])
  environment = jobs.clean_environment(PYTHONPATH=str(jobs.ROOT), PATH=os.environ["PATH"])
  command = [sys.executable, "-m", "jaxpace"]
  run = subprocess.run([*command, "run", "--nproc", "2", "--", sys.executable,
                       "train.py"], cwd=folder, text=True, env=environment, capture_output=True,
                       check=False, timeout=300)
  assert run.returncode == 0 and "loss 0." in run.stdout, run.stdout + run.stderr
  said = subprocess.run([*command, "report", "runs/first", "--json", "-"], cwd=folder, text=True,
                        env=environment, capture_output=True, check=True, timeout=600)
  return json.loads(said.stdout)


@pytest.mark.long
def test_the_loop_of_the_first_script_is_that_of_the_second_without_the_name(shown):
  script, loop = shown
  compile(script, PAGE, "exec")
  compile(loop, PAGE, "exec")
  for line in ("with jaxpace.recorded", "batch = jax.tree.map",
               "weights, loss = recorded_step(weights, batch)"):
    assert line in script and line in loop
  assert [f"# {n}" in script for n in range(1, 4)] == [True, True, False]


@pytest.mark.long
def test_the_slow_loader_is_found_and_called_data(report):
  first, second = report["per_rank"]
  assert (report["ranks"], report["processes"], report["steps"]) == (2, 2, 300)
  assert second["lateness"] > first["lateness"] == 0 and second["runtime"] > first["runtime"]
  # On a machine that other programs fill, the wait for a processor may hide that it is late for
  # good.
  late = [finding for finding in report["findings"] if finding["ranks"] == [1]]
  assert all("data" in finding["causes"] for finding in late)
  assert late or any("processors" in note for note in report["notes"])
