"""Each example before and after jaxpace: few lines differ, and the documentation shows those very
lines."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
from typing import Any

import pytest

import jaxpace
from experiments.examples import demo, start
from jaxpace.runs.reader import read_run
from tests.multiprocess import jobs

ROOT = pathlib.Path(__file__).parents[2]
MOST_LINES = 5


def difference(example: str, patch: str = "paced") -> list[str]:
  """Returns the lines of a patch, without its header."""
  folder = ROOT / "experiments" / "examples" / example
  return (folder / f"{patch}.patch").read_text().splitlines()[2:]


@pytest.mark.parametrize("example", ["digits", "chars"])
@pytest.mark.parametrize("patch", ["paced", "observed"])
def test_a_patch_makes_a_script_that_names_jaxpace(example: str, patch: str) -> None:
  folder = ROOT / "experiments" / "examples" / example
  assert start.script(folder, patch).jaxpace is jaxpace
  assert not hasattr(start.script(folder), "jaxpace")


def test_a_patch_that_does_not_fit_is_refused() -> None:
  assert start.patched("a\nb\nc\n", "--- x\n+++ x\n@@ -2 +2,2 @@\n-b\n+B\n+b\n") == "a\nB\nb\nc\n"
  with pytest.raises(ValueError, match="does not fit line 2"):
    start.patched("a\nc\n", "--- x\n+++ x\n@@ -2 +2 @@\n-b\n+B\n")


@pytest.mark.parametrize("example", ["digits", "chars"])
def test_at_most_five_lines_change(example: str) -> None:
  lines = difference(example)
  added = [line for line in lines if line.startswith("+")]
  removed = [line for line in lines if line.startswith("-")]
  assert 0 < len(added) <= MOST_LINES
  assert len(removed) <= len(added)
  assert not any(";" in line for line in added), "five lines, not five times two"


@pytest.mark.parametrize("example", ["digits", "chars"])
def test_the_plain_script_knows_nothing_of_jaxpace(example: str) -> None:
  assert "jaxpace" not in (ROOT / "experiments" / "examples" / example / "train.py").read_text()


@pytest.mark.parametrize("example", ["digits", "chars"])
def test_the_documentation_shows_the_diff(example: str) -> None:
  page = "docs/how_to/existing_flax.md"
  shown = (ROOT / page).read_text()
  changed = "\n".join(line for line in difference(example) if not line.startswith("@@"))
  assert changed in shown, f"{page} is out of date; the diff of {example} is:\n{changed}"


@pytest.mark.parametrize("example", ["digits", "chars"])
def test_to_observe_a_step_three_lines_change(example: str) -> None:
  lines = [line for line in difference(example, "observed") if not line.startswith("@@")]
  assert sum(line.startswith("+") for line in lines) == 3
  assert sum(line.startswith("-") for line in lines) == 2
  for page in ("README.md", "docs/observe.md", "docs/how_to/existing_flax.md"):
    assert "\n".join(lines) in (ROOT / page).read_text()


def launched(example: str, *flags: str) -> subprocess.CompletedProcess[str]:
  environment = jobs.clean_environment(XLA_FLAGS="--xla_force_host_platform_device_count=4")
  program = f"experiments.examples.{example}.main"
  return subprocess.run([sys.executable, "-m", program, *flags], cwd=jobs.ROOT, env=environment,
                        text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300)


@pytest.mark.long
@pytest.mark.parametrize(("example", "flags"), [
    ("digits", ["--config.steps=3", "--config.batch_size=64"]),
    ("chars", ["--config.steps=3", "--config.batch_size=8", "--config.width=16",
               "--config.blocks=1"]),
])
def test_results_with_jaxpace_are_those_without_it(tmp_path: pathlib.Path, example: str,
                                                   flags: list[str]) -> None:
  results = []
  for switch in ("jaxpace", "nojaxpace", "observe"):
    workdir = tmp_path / switch
    done = launched(example, f"--workdir={workdir}", f"--{switch}", "--config.log_every=1", *flags)
    assert done.returncode == 0, done.stdout
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("step ")]
    losses = [words[words.index("loss") + 1] for words in lines]
    assert len(losses) >= 3, done.stdout
    results.append((json.loads((workdir / "result.json").read_text()), losses))
  assert results[0] == results[1] == results[2]
  assert not (tmp_path / "nojaxpace" / "run.json").exists()
  for switch in ("jaxpace", "observe"):
    run = read_run(tmp_path / switch)
    assert run.ranks == 4 and len(run.collectives) >= 1


@pytest.mark.long
@pytest.mark.parametrize(("example", "flag", "sentence"), [
    ("digits", "--config.batch_size=7", "batch_size 7 does not divide among 4 devices"),
    ("chars", "--text=missing.txt", "The text missing.txt cannot be read"),
])
def test_a_slip_is_a_sentence(tmp_path: pathlib.Path, example: str, flag: str,
                              sentence: str) -> None:
  done = launched(example, f"--workdir={tmp_path}", "--nojaxpace", flag)
  assert done.returncode == 2
  assert sentence in done.stdout and "Traceback" not in done.stdout


def report(late: dict[int, float], mode: str = demo.STRAGGLER) -> dict[str, Any]:
  rows = [{"rank": rank, "lateness": late.get(rank, 1e-4 * rank)} for rank in range(4)]
  findings = [{"mode": mode, "ranks": sorted(late)}] if late else []
  return {"findings": findings, "per_rank": rows, "step_time": {"mean": 0.030}}


def test_the_late_rank_named_is_right() -> None:
  line, wrong = demo.judge(report({2: 0.0147}), 0.97, 2, 0.015, 0.95)
  assert line == "late: injected: rank 2, 15.0 ms; found: rank 2, 14.7 ms"
  assert not wrong


def test_another_rank_named_or_none_is_wrong() -> None:
  for late in ({1: 0.0147}, {}, {1: 0.02, 2: 0.015}):
    _, wrong = demo.judge(report(late), 0.97, 2, 0.015, 0.95)
    assert len(wrong) == 1 and "rank 2 was made late" in wrong[0]


def test_a_healthy_job_must_be_called_healthy() -> None:
  line, wrong = demo.judge(report({}), 0.97, None, 0.0, 0.95)
  assert line == "late: injected: nobody; found: nobody" and not wrong
  assert "finds rank 3 late by 33%" in demo.judge(report({3: 0.01}), 0.97, None, 0.0, 0.95)[1][0]
  line, wrong = demo.judge(report({3: 0.002}), 0.97, None, 0.0, 0.95)
  assert line.endswith("found: rank 3, 2.0 ms") and not wrong, ("told, but no alarm: processes "
                                                                "take turns at the cores")
