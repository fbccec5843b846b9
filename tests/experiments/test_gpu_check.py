"""The GPU checks as far as they can be tried without a GPU: every section on the CPU's clock, how a
trace is read, what becomes of sections that fail. No time is asserted: what a check measures here
is this machine's business."""

from __future__ import annotations

import pathlib
import subprocess
import sys
from typing import Any

import pytest

from experiments.labs.gpu import (
    injected,
    steps,
    transformer,
    whole_loop,
)
from experiments.labs.gpu.bench import Bench
from tests.multiprocess import jobs


def tiny() -> Bench:
  return Bench("cpu", "native", "tiny", 10.0)


def named(bench: Bench, part: str) -> list[dict[str, Any]]:
  return [one for one in (*bench.checks, *bench.figures) if part in one["name"]]


def passed(bench: Bench, part: str) -> bool:
  found = [one["passed"] for one in bench.checks if part in one["name"]]
  assert found, f"no check is called {part}"
  return all(found)


# Sections, on the CPU.


@pytest.mark.long
def test_what_is_injected_is_read_off_the_stamps() -> None:
  bench = tiny()
  injected.run(bench)
  for where, name in (("before the collective", "arrival"),
                      ("before the collective", "start to enter"), ("after it", "exit to end"),
                      ("after it", "arrival of the next")):
    found = named(bench, f"injected {where}, in `{name}`")
    assert [one["limit"].split(" ")[0] for one in found] == ["2000", "5000"]
    assert all(float(one["value"].split(" ")[0]) > 0.8 * float(one["limit"].split(" ")[0])
               for one in found)
  assert passed(bench, "what the pacer asked for is what the ring says")


@pytest.mark.long
def test_arms_take_turns_and_the_recorder_records() -> None:
  bench = tiny()
  steps.run(bench, "2ms")
  assert (set(bench.raw["seconds_a_step"]) == {"bare", "bare again", "stamped", "callback",
                                               "recorded"})
  assert {check["limit"] for check in bench.checks} == {"<= 1"} and len(bench.checks) == 2
  assert (transformer.SIZES.keys() >= steps.LIMITS.keys()
          and steps.LIMITS == {"20ms": 0.2, "2ms": 1.0})


@pytest.mark.long
def test_the_loop_is_on_the_device_and_a_callback_would_be_seen() -> None:
  bench = tiny()
  whole_loop.run(bench)
  failed = [check["name"] for check in bench.checks if not check["passed"]]
  assert not failed
  assert len(named(bench, "control: host callbacks are seen")) == 2


# The program.


@pytest.mark.long
def test_without_a_gpu_one_line_says_so_and_the_status_is_0(tmp_path: pathlib.Path) -> None:
  done = subprocess.run([sys.executable, str(jobs.ROOT / "experiments/labs/gpu_check.py"),
                         f"--out={tmp_path / 'gpu.json'}"],
                        cwd=tmp_path, env=jobs.clean_environment(JAX_PLATFORMS="cpu"), text=True,
                        capture_output=True, timeout=300)
  assert done.returncode == 0, done.stderr
  assert done.stdout.splitlines()[-1].startswith(
      "No GPU is visible to JAX, so nothing was checked: ")
  assert not list(tmp_path.iterdir()), "nothing is claimed"
