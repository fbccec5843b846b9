"""What a recorded run shows of the housekeeper's pauses."""

import time

import jaxpace
from jaxpace.live.housekeeping.keeper import MODES
from jaxpace.trace.reader import read_run
from tests.trace import fake_step as fake
from tests.trace.recording import table


def test_collections_and_checkpoints_are_in_the_trace_at_their_steps(tmp_path):
  mesh = fake.mesh()
  step, pace = fake.make_step(mesh), fake.init(mesh, 16)
  heap = [[i] for i in range(300_000)]  # what was there before a test is kept out of collections
  with jaxpace.Recorder(tmp_path, fake.FakePaced()) as recorder, jaxpace.Housekeeper(
      every=10, mode="aligned", warmup=0) as keeper:
    keeper.add(lambda: time.sleep(0.002), every=15, name="checkpoint")
    keeper.add(lambda: time.sleep(0.003), every=25)
    for _ in range(30):
      pace = step(pace)
      keeper.step()
      recorder.record(pace, **keeper.columns())
  rows = {row["step"]: row for row in table(tmp_path) if row["rank"] == 0}
  saved = [k for k, row in rows.items() if row["checkpoint_ns"] and row["checkpoint_ns"] >= 2e6]
  assert (saved == [14, 29]
          and [k for k, row in rows.items() if row["host_pauses_ns"] >= 3e6] == [24])
  assert {row["host_housekeeping"] for row in rows.values()} == {MODES.index("aligned")}
  usual = sorted(row["gc_ns"] for row in rows.values())[len(rows) // 2]
  # a whole heap against nothing or a few
  assert all(rows[k]["gc_ns"] > 10 * max(usual, 100_000) for k in (9, 19, 29))
  assert heap
  run = read_run(tmp_path)
  assert not run.problems and "checkpoint" in run.host_causes.columns
