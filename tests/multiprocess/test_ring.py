"""Timestamps of a job of two processes: each in its own ring, the ranks those of the whole job."""

import json

from jaxpace.runs import ring_file
from tests.multiprocess import jobs
from tests.patience import patiently
from tests.record.recording import table

LATE = 0.5


@patiently(LATE=0.5)
def test_a_late_device_of_another_process_is_named_with_its_layer(tmp_path):
  facts = list(map(jobs.facts, jobs.pair("marks_worker.py", tmp_path, LATE, devices=2)))
  assert (facts[0]["devices"] != facts[1]["devices"]
          and all(each["lost"]["lost_rows"] == 0 for each in facts))
  rings = [ring_file.read_ring(tmp_path / "marks" / f"{process}.ring") for process in range(2)]
  assert [ring.ranks.tolist() for ring in rings] == [[0, 1], [2, 3]]
  info = json.loads((tmp_path / "run.json").read_text())
  assert info["settings"]["mesh"] == {"data": 4} and info["settings"]["axis"] == ["data"]
  rows = table(tmp_path)
  assert sorted((row["rank"], row["process"], row["step"]) for row in rows) == [
      (rank, rank // 2, step) for rank in range(4) for step in range(12)]
  arrival = {}
  for row in sorted(table(tmp_path, "collectives"), key=lambda row: (row["rank"], row["enter_ns"])):
    key = row["rank"], row["step"], row["collective"]
    before = arrival.get("exit", {}).get(row["rank"])
    arrival[key] = 0 if before is None else row["enter_ns"] - before
    arrival.setdefault("exit", {})[row["rank"]] = row["exit_ns"]
  at_7 = {key: ns for key, ns in arrival.items() if key != "exit" and key[1] == 7}
  assert max(at_7, key=at_7.get) == (2, 7, 1), "rank 2, the second turn of the loop"
  assert at_7[2, 7, 1] >= 1e9 * LATE
