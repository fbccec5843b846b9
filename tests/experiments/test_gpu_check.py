"""The GPU checks as far as they can be tried without a GPU: every section on the CPU's clock, how a
trace is read, what becomes of sections that fail. No time is asserted: what a check measures here
is this machine's business."""

from __future__ import annotations

import pathlib
import subprocess
import sys
from typing import Any

import pytest

from experiments.labs import gpu_check
from experiments.labs.gpu import (
    delays,
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


def test_delays_are_as_long_as_asked_at_least_and_capped() -> None:
  bench = tiny()
  delays.run(bench)
  for sentence in ("a delay of 0 has", "no delay is shorter", "a delay of nan", "a delay of -inf",
                   "with a limit of 0"):
    assert passed(bench, sentence), sentence
  assert len(named(bench, "with a limit of 10 ms is 10 ms")) == 4


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


@pytest.mark.parametrize(("flag", "sentence"), [
    ("--only=stamp,dealy", "no section is called dealy; there are machine, stamp"),
    ("--out=gpu.txt", "must end in .json"),
    ("--limit_s=0", "must be positive"), ("--limit_s=nan", "must be positive"),
    ("--sections=stamp", "unrecognized")])
def test_a_bad_argument_is_a_sentence(flag: str, sentence: str,
                                      capsys: pytest.CaptureFixture[str]) -> None:
  with pytest.raises(SystemExit) as ended:
    gpu_check.main([flag])
  assert ended.value.code == 2 and sentence in capsys.readouterr().err


def test_a_section_that_crashes_leaves_what_it_had(tmp_path: pathlib.Path,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
  """Its process writes as it goes; here a process that writes one figure and is gone."""
  text = ("import json, os, sys; out = [a for a in sys.argv if a.startswith('--child=')][0][8:]; "
          "open(out, 'w').write(json.dumps({'figures': [1]})); os._exit(3)")
  real = subprocess.Popen
  monkeypatch.setattr(subprocess, "Popen",
                      lambda command, **rest: real([sys.executable, "-c", text, *command[3:]],
                                                   **rest))
  found = gpu_check.start("machine", gpu_check.arguments([]), str(tmp_path), 60.0)
  assert found == {"figures": [1], "error": "its process ended with status 3"}
  monkeypatch.setattr(subprocess, "Popen",
                      lambda command, **rest: real([sys.executable, "-c", "pass"], **rest))
  found = gpu_check.start("machine", gpu_check.arguments([]), str(tmp_path), 60.0)
  assert found == {"error": "its process left nothing"}
