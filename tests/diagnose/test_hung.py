"""Hangs that watchdogs found, in sentences."""

import dataclasses
import json

from jaxpace.diagnose.diagnose import diagnose
from jaxpace.diagnose.diagnosis import to_json
from jaxpace.diagnose.notes import hung
from jaxpace.diagnose.words.notes import Note
from jaxpace.runs.alarms import Late, LateProcess, read_events
from tests.diagnose.synthetic import run_of
from tests.lib.said import numbers
from tests.synthetic.synthetic_runs import SyntheticJob


def event(step, waited, *late, arrived=(0, 1)):
  return {"event": "late", "when_unix_ns": step, **Late(step, waited, late, arrived, 0).to_json()}


def test_a_hang_is_told_once_with_the_time_it_took():
  late = LateProcess(2, "outside", host="h2", phase="checkpoint", seconds=30.0)
  events = [event(812, 10.0, late), event(812, 30.0, late),
            {"event": "resumed", "when_unix_ns": 900, "process": 0, "seconds": 41.2}]
  ((over,), (still,)) = hung(events), hung(events[:2])
  assert over.code == still.code == Note.HUNG and "(h2)" in over
  assert numbers(over)[:3] == [812, 41, 2] and numbers(still)[:3] == [812, 30, 2]


def test_states_are_told_apart():
  states = [LateProcess(1, "absent"), LateProcess(1, "left"),
            LateProcess(1, "outside", phase="data"), LateProcess(1, "silent", phase="data")]
  told = {hung([event(1, 5.0, late)])[0] for late in states} | {hung([event(1, 5.0)])[0]}
  assert len(told) == 5 and sum("process 1" in sentence for sentence in told) == 4


def test_what_is_no_event_is_left_out_and_many_are_cut():
  assert hung([{}, {"event": "late"}, {"event": "resumed",
                                       "seconds": 3}, {"event": "late", "step": 2, "waited": "x"},
               {"event": "late", "step": 3, "waited": float("nan")}]) == []
  assert len(hung([event(step, 5.0) for step in range(20)])) == 11
  assert hung([{"event": "late", "step": 3, "waited": 1, "late": "?"}])


def test_they_reach_the_report(tmp_path):
  run, _ = run_of(SyntheticJob(ranks=4, steps=60, processes=2))
  (tmp_path / "watchdog").mkdir()
  line = {**event(30, 12.0, LateProcess(1, "outside", phase="data")), "run": run.id}
  (tmp_path / "watchdog" / "0.jsonl").write_text(json.dumps(line) + "\n"
                                                 + json.dumps({**line, "run": "other"}) + "\n")
  document = to_json(diagnose(dataclasses.replace(run), events=read_events(tmp_path, run.id)))
  assert document["note_codes"][-1] == Note.HUNG and numbers(document["notes"][-1]) == [30, 12, 1]
  assert len(document["hangs"]) == 1 and document["hangs"][0]["late"][0]["phase"] == "data"
  assert document["link_probe"] is None
