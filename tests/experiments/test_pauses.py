"""The experiment on pauses: its sums, on figures made up; and that it runs."""

import gc
import json
import subprocess
import sys

import numpy as np
import pytest

from experiments.lib import measured
from experiments.measure import pauses, pauses_worker
from tests.multiprocess import jobs

EVERY, STEPS = 10, 20
BASE, PAUSE, FULLS = 10e-3, 50e-3, 2
EXTRA = {pauses_worker.OFF: 0.0, "alone": 8e-3, "alone again": 8e-3, "aligned": 5e-3,
         "frozen": 1e-3}


def process(rounds=6):
  """What a process would have found: a pause of 50 ms in 2 of 20 steps."""
  blocks = [{"stage": stage, "round": turn, "arm": arm, "step": BASE + EXTRA[arm], "steps": STEPS,
             "fulls": FULLS, "full_seconds": FULLS * PAUSE}
            for stage, arms in pauses_worker.STAGES.items() for turn in range(rounds)
            for arm in arms]
  return {"blocks": blocks}


def test_the_oracle_and_the_ratios():
  found = pauses.judge([process() for _ in range(4)], EVERY)
  oracle = found["oracle"]
  assert oracle["pause_ms"] == pytest.approx(50) and oracle["chance"] == pytest.approx(0.1)
  assert oracle["alone_predicted_ms"] == pytest.approx(50 * (1 - 0.9**4))
  assert oracle["aligned_predicted_ms"] == pytest.approx(5)
  assert (oracle["alone_measured_ms"] == pytest.approx(8)
          and oracle["aligned_measured_ms"] == pytest.approx(5))
  assert (found["stages"]["balanced"]["arms"]["frozen"]["ratio"]
          == pytest.approx([11 / 18] * 3, rel=1e-4))


def test_the_page_holds_every_stage_that_was_run():
  setup = pauses_worker.Setup(1000, 100, EVERY, 3.0, False, 1.0)._asdict()
  runs = [pauses.judge([process() for _ in range(count)], EVERY) for count in (2, 4)]
  page = "\n".join(pauses.tables(measured.circumstances("experiments.measure.pauses")
                                 | {"setup": setup, "runs": runs}))
  for words in ("## Balanced", "## No heap", "| 4 | aligned |",
                "| 2 | frozen | 11 | -38.9 % "):
    assert words in page


@pytest.mark.long
@pytest.mark.usefixtures("usual_collector")
def test_the_heap_keeps_its_size_and_ages_into_full_collections():
  heap, fulls = pauses_worker.Heap(20_000, 4000, seed=1), pauses_worker.Fulls()
  gc.collect()
  before, count = len(gc.get_objects()), fulls.count
  for _ in range(300):
    heap.replace()
  assert fulls.count > count  # by the interpreter itself
  assert len(gc.get_objects()) == pytest.approx(before, abs=5000)
  gc.callbacks.remove(fulls._see)


@pytest.mark.long
def test_it_runs_on_real_processes(tmp_path):
  out = tmp_path / "pauses.json"
  done = subprocess.run(
      [sys.executable, "-m", "experiments.measure.pauses", "--processes=2", "--block_seconds=0.1",
       "--every=8", "--heap=2000", "--churn=2000", f"--out={out}"],
      cwd=jobs.ROOT, env=jobs.clean_environment(), text=True, stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT, timeout=240)
  assert done.returncode == 0, done.stdout
  [run] = json.loads(out.read_text())["runs"]
  assert run["stages"]["balanced"]["rounds"] == 3
  assert np.isfinite(run["stages"]["no heap"]["arms"]["frozen"]["ratio"]).all()
