"""The measured counterpart of Table 1: its sums, on figures made up; and that it runs."""

import gc
import json
import subprocess
import sys
import time

import jax.numpy as jnp
import numpy as np
import pytest

import jaxpace
from experiments.lib import measured
from experiments.paper import document, emulated, emulated_worker
from experiments.paper.emulated_worker import AGAIN, ARMS, BOTH, HOUSEKEEPING, OFF, PACERS, Setup
from tests.multiprocess import jobs

SETUP = Setup(work_ms=30, jitter=0.03, late=0.1, pause_ms=60, every=10, churn=2000, seconds=1)
EXTRA = {OFF: 20, AGAIN: 20, PACERS: 20, HOUSEKEEPING: 10, BOTH: 0}


def processes(count, rounds=6):
  """What processes would have found: 40 ms, and one full collection in each block of ten steps."""
  blocks = [{"arm": arm, "round": k, "fulls": 1,
             "times": [1e-3 * (40 + EXTRA[arm] + (-1)**n) for n in range(SETUP.every)]}
            for k in range(rounds) for arm in ARMS]
  return [blocks,
          *([{**{name: block[name] for name in ("arm", "round", "fulls")}} for block in blocks]
            for _ in range(count - 1))]


def test_arms_are_compared_and_pauses_with_the_closed_form():
  run = emulated.judge(processes(4), SETUP)
  assert run["processes"] == 4 and run["rounds"] == 6
  middle, low, high = run["arms"][BOTH]["throughput"]
  assert low <= middle <= high and middle == pytest.approx(60 / 40)
  assert run["arms"][OFF]["throughput"] == [1, 1, 1]
  assert run["arms"][HOUSEKEEPING]["cv_ratio"][0] == pytest.approx(60 / 50, rel=1e-3)
  oracle = run["oracle"]
  assert oracle["chance"] == pytest.approx(0.1) and oracle["aligned_ms"] == pytest.approx(6)
  assert (oracle["alone_ms"] == pytest.approx(60 * (1 - 0.9**4))
          and oracle["measured_ms"] == pytest.approx(10))


def test_the_page_and_the_papers_page_hold_it(tmp_path):
  runs = [emulated.judge(processes(count), SETUP) for count in (2, 4)]
  figures = (measured.circumstances("experiments.paper.emulated")
             | {"setup": SETUP._asdict(), "runs": runs})
  page = "\n".join(emulated.tables(figures))
  assert "| 4 | 6 | 60 |" in page and "+50.0 %" in page and "| 2 | 0.017 |" in page
  path, none = tmp_path / "emulated.json", tmp_path / "none.json"
  path.write_text(json.dumps(figures))
  text = ("before\n<!-- emulated -->\nold\n<!-- end -->\nbetween\n<!-- sentence -->\n<!-- end "
          "-->\nafter")
  filled = document.filled(text, none, path)
  assert ("old" not in filled and "+50.0 %" in filled and filled.startswith("before\n")
          and filled.endswith("\nafter"))
  assert "Not run yet: `python -m experiments.paper.table1`." in filled
  assert document.filled(filled, none, path) == filled
  with pytest.raises(ValueError, match="'what'"):
    document.filled("<!-- what -->\n<!-- end -->", none, path)


def test_pacers_are_obeyed_in_their_blocks_only():
  every = 4
  always = jaxpace.Pacer(lambda ranks: (),
                         lambda seen, state: (jaxpace.Decision(jnp.float32(1), {}), state))
  update = emulated_worker.gated(always, every).update
  order = emulated_worker.order()
  assert (sorted(order[:5]) == sorted(ARMS)
          and len(set(map(tuple, np.reshape(order, (-1, 5)).tolist()))) > 10)
  nan = jnp.full((2,), jnp.nan)

  def obeyed(step):  # the delay is applied in the step after
    seen = jaxpace.Observation(step=jnp.int32(step - 1), rank=jnp.int32(0), arrivals=nan,
                               delays=nan, waits=nan, step_time=jnp.float32(0),
                               job_step_time=jnp.float32(0), job_transfers=nan)
    return float(update(seen, ())[0].delay) > 0

  begin, long = emulated_worker.WARM_UP, every + emulated_worker.SETTLE
  assert not obeyed(begin - 1)
  for k in (0, 1, 2, 3, 7):
    on = order[k] in (PACERS, BOTH)
    assert obeyed(begin + k * long) == obeyed(begin + (k + 1) * long - 1) == on


def test_a_full_collection_is_made_longer_and_no_other():
  sleep = emulated_worker.pausing(0.05)
  gc.callbacks.append(sleep)
  try:
    begin = time.perf_counter()
    gc.collect(0)
    gc.collect(1)
    young = time.perf_counter() - begin
    gc.collect()
    assert time.perf_counter() - begin >= young + 0.05
  finally:
    gc.callbacks.remove(sleep)


@pytest.mark.long
def test_it_runs_on_real_processes(tmp_path):
  out = tmp_path / "emulated.json"
  done = subprocess.run(
      [sys.executable, "-m", "experiments.paper.emulated", "--processes=2", "--seconds=0.1",
       "--every=6", "--work_ms=1", "--pause_ms=2", "--churn=12000", f"--out={out}"],
      cwd=jobs.ROOT, env=jobs.clean_environment(), text=True, stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT, timeout=240)
  assert done.returncode == 0, done.stdout
  [run] = json.loads(out.read_text())["runs"]
  assert run["rounds"] >= 3 and run["oracle"]["chance"] > 0
  assert all(np.isfinite(run["arms"][arm]["throughput"]).all() for arm in ARMS)
  assert "| 2 |" in out.with_suffix(".md").read_text()
