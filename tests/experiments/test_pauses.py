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
         "frozen": 1e-3, "in-slack": 4e-3}


def process(rounds=6):
  """What a process would have found: a pause of 50 ms in 2 of 20 steps."""
  blocks = [{"stage": stage, "round": turn, "arm": arm, "step": BASE + EXTRA[arm], "steps": STEPS,
             "fulls": FULLS, "full_seconds": FULLS * PAUSE}
            for stage, arms in pauses_worker.STAGES.items() for turn in range(rounds)
            for arm in arms]
  modes = (["alone"] * EVERY * 2 + ["frozen"] * EVERY * 2) * 10
  times = [18e-3 if mode == "alone" else 11e-3 for mode in modes]
  return {"blocks": blocks, "auto": {"modes": modes, "times": times, "found": {"chosen": "frozen"}}}


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
  assert ("one late" in found["stages"]
          and "one late" not in pauses.judge([process()] * 2, EVERY)["stages"])


def test_auto_is_judged_by_its_own_periods_left_alone():
  found = pauses.judge_auto([process(), process()], EVERY)
  assert found["shares"] == {"alone": pytest.approx(18 / 38), "frozen": pytest.approx(20 / 38)}
  assert found["ratio"][0] == pytest.approx((18 * 18 + 20 * 11) / 38 / 18)
  assert found["ratio"][1] < found["ratio"][0] < found["ratio"][2] and found["shown_within_limit"]


def test_auto_by_blocks_that_took_turns_is_the_mean_over_its_modes():
  found = pauses.judge([process() for _ in range(2)], EVERY)["auto"]["paired"]
  assert found["ratio"] == pytest.approx([(18 * 18 + 20 * 11) / 38 / 18] * 3, rel=1e-4)
  assert found["again"] == [1, 1, 1] and found["over_limit"] == "no"
  shifted = process()["blocks"]
  for block in shifted:
    block["step"] *= 1.02 if block["arm"] == "frozen" else 1.0
  assert (pauses.paired(shifted, {"alone": 0.0, "in-slack": 1.0})["ratio"]
          == pytest.approx([15 / 18] * 3, rel=1e-4))
  assert (pauses.paired(shifted, {"frozen": 1.0})["ratio"]
          == pytest.approx([1.02 * 11 / 18] * 3, rel=1e-4))
  for block in shifted:
    block["step"] *= 1 + 0.1 * (block["arm"] == "alone again") * (block["round"] % 2)
  assert pauses.paired(shifted, {"alone": 1.0})["over_limit"] == "no"  # itself against itself
  apart = pauses.paired(shifted, {"aligned": 0.5, "alone": 0.5})
  assert apart["over_limit"] == "no" and apart["rounds_needed"] > 300


def test_processes_in_different_modes_are_an_error():
  one, other = process(), process()
  other["auto"]["modes"][30] = "aligned"
  with pytest.raises(RuntimeError, match="same steps"):
    pauses.judge_auto([one, other], EVERY)


def test_the_page_holds_every_stage_that_was_run():
  setup = pauses_worker.Setup(1000, 100, EVERY, 3.0, False, 30.0, 1.0, 1.0)._asdict()
  runs = [pauses.judge([process() for _ in range(count)], EVERY) for count in (2, 4)]
  page = "\n".join(pauses.tables(measured.circumstances("experiments.measure.pauses")
                                 | {"setup": setup, "runs": runs}))
  for words in ("## Balanced", "## One late", "## No heap", "| 4 | in-slack |",
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
       "--auto_seconds=0.1", "--every=8", "--heap=2000", "--churn=2000", f"--out={out}"],
      cwd=jobs.ROOT, env=jobs.clean_environment(), text=True, stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT, timeout=240)
  assert done.returncode == 0, done.stdout
  [run] = json.loads(out.read_text())["runs"]
  assert run["stages"]["balanced"]["rounds"] == 3
  assert np.isfinite(run["stages"]["no heap"]["arms"]["frozen"]["ratio"]).all()
  assert "## Auto" in out.with_suffix(".md").read_text()
