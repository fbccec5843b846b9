"""Runs with every file that a job can leave in its directory, and what commands are given beside
them: for others to damage."""

from __future__ import annotations

import json
import pathlib
import time

from jaxpace.runs import ring_file
from tests.hang.machine import Machine, collective, program
from tests.record.nccl.dumps import Job, batches
from tests.synthetic import synthetic_groups, synthetic_runs
from tests.synthetic.synthetic_faults import Fault
from tests.synthetic.synthetic_observed import observed

JOB = synthetic_runs.SyntheticJob(ranks=4, steps=140, processes=2, noise=0.02, host_columns=True,
                             sample_steps=5, faults=(Fault("compute", 8e-3, (1,)),
                                                     Fault("contention", 5e-3, begin=0.5)))


def write_sound(path: pathlib.Path) -> None:
  """A run with every file that a job can leave in its directory."""
  synthetic_runs.write(path, JOB)
  info = json.loads((path / "run.json").read_text())
  plan = info.get("plan") or {}
  plan |= {"axis": "data", "ranks": 4, "clock": "native", "share": True, "carrier": 0,
           "overflow": 0, "marks": [{"kind": "start", "segment": "gap", "collective": None},
                                    {"kind": "enter", "segment": "forward", "collective": 0}],
           "unstamped": [{"name": "psum", "primitive": "psum", "bytes": 8,
                          "reason": "inside scan"}],
           "notices": ["one", "two"], "decisions": ["delay"]}
  info |= {"plan": plan, "processes": 2, "devices": 4, "config": {"lr": 0.1, "layers": [1, 2]},
           "attempts": [{"attempt": 0, "started_unix_ns": 1, "processes": 2, "devices": 4}],
           "settings": {"axis": ["data"], "mesh": {"data": 4}, "max_delay": 0.02, "slots": 16,
                        "pacer": None}}
  (path / "run.json").write_text(json.dumps(info))
  for folder in ("locality", "watchdog"):
    (path / folder).mkdir()
  late = {"process": 1, "state": "outside", "host": "host1", "pid": 7, "last_step": 3,
          "phase": "data", "seconds": 4.0, "stack": "File x"}
  for process in range(2):
    (path / "locality" / f"{process}.json").write_text(json.dumps({
        "run": info["run"], "schema": 1, "hostname": f"host{process}", "memory_bytes": 2**34,
        "cpu": {"model": "a", "online": "0-3", "allowed": "0-3", "sockets": ["0-3"]},
        "numa": [{"node": 0, "cpus": "0-3", "memory_bytes": 2**34}],
        "nics": [{"name": "eth0", "rate_gbps": 100.0}]}))
    (path / "watchdog" / f"{process}.jsonl").write_text("\n".join(json.dumps(event) for event in (
        {"event": "late", "run": info["run"], "when_unix_ns": 10**18, "step": 4, "waited": 5.0,
         "late": [late], "arrived": [0], "process": process},
        {"event": "resumed", "run": info["run"], "when_unix_ns": 10**18 + 1, "seconds": 7.0,
         "process": process})))
  (path / "links.json").write_text(json.dumps({
      "schema": 1, "when_unix_ns": 10**18, "message_bytes": 1024, "taken_seconds": 1.0,
      "hosts": ["a", "b", "c"], "seconds": [[None, 1e-3, 1e-3], [1e-3, None, 5e-3],
                                            [1e-3, 5e-3, None]], "culprits": [], "cannot_tell": "",
      "median_seconds": [[None, 1e-3, 1e-3], [1e-3, None, 5e-3], [1e-3, 5e-3, None]]}))
  (path / "control.json").write_text(
      json.dumps({"enabled": True, "max_delay": 0.01, "ranks": "0-3"}))
  (path / "control.applied.jsonl").write_text(
      json.dumps({"step": 3, "unix_ns": 1, "settings": {"enabled": True}}) + "\n")


def write_observed(path: pathlib.Path) -> None:
  """A run of an observed step whose job hangs: its rings are open."""
  late = synthetic_groups.Cause("late", 8e-3, (1,), layer=1)
  synthetic_groups.write(path, observed(layers=2, steps=60, noise=0.02, every=3, causes=(late,)),
                         run="observed")
  of = program([collective(0, [(0, 1, 2, 3)])], 4)
  machine = Machine(of, 4, 9, stop={3: (5, 0)})
  for process in range(2):
    info = json.loads((path / "process" / f"{process}.json").read_text())
    (path / "process" / f"{process}.json").write_text(json.dumps(info | {"closed_cleanly": False}))
    machine.write(path / "marks" / f"{process}.ring", [2 * process, 2 * process + 1],
                  process=process, run="observed", alive=60.0, wall=time.time_ns() - 90 * 10**9)
    ring_file.write_plan(path, process, "observed", 0, machine.plan)


def write_inputs(path: pathlib.Path) -> None:
  """What others write and commands read: a fabric, dumps of NCCL."""
  path.mkdir()
  (path / "fabric.json").write_text(json.dumps({"levels": [
      {"level": "host", "ranks": 4, "alpha": 3e-6, "beta": 5e-12, "algorithm": "ring"}]}))
  job = Job(steps=30)
  job.write(path / "nccl")
  (path / "nccl" / "b-pid103.log").write_text("\n".join(batches(job.lines[3])) + "\n")
