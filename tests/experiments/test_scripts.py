"""The example programs as a user starts them, on four devices of one process."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest

from jaxpace.trace.reader import read_run
from tests.multiprocess import jobs


def start(example: str, *flags: str) -> subprocess.CompletedProcess[str]:
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
    done = start(example, f"--workdir={workdir}", f"--{switch}", "--config.log_every=1", *flags)
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
  done = start(example, f"--workdir={tmp_path}", "--nojaxpace", flag)
  assert done.returncode == 2
  assert sentence in done.stdout and "Traceback" not in done.stdout
