"""Measures `jaxpace report` on a large synthetic run: wall time and peak memory, interpreter start
included.

    python -m experiments.measure.report_speed

writes the run, times the command in a process of its own, and writes the numbers.
"""

from __future__ import annotations

import pathlib
import shutil
import tempfile

from absl import app, flags

from experiments.lib import child
from jaxpace.testing import made_up_runs
from jaxpace.testing.made_up_faults import Fault

_RANKS = flags.DEFINE_integer("ranks", 64, "Ranks of the synthetic run.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 100_000, "Steps of the synthetic run.", lower_bound=2)
_PROCESSES = flags.DEFINE_integer("processes", 8, "Processes of the synthetic run.", lower_bound=1)
_REPEATS = flags.DEFINE_integer("repeats", 5, "Times the report is made.", lower_bound=1)
_CORES = flags.DEFINE_integer("cores", 2, "Cores the report may use.", lower_bound=1)
_KEEP = flags.DEFINE_string("keep", None,
                            "Write the run here and keep it; default is a temporary directory.")
_OUTPUT = flags.DEFINE_string("output", "docs/measurements/report_speed.json",
                              "Where the numbers go.")
_TARGET = {"seconds": 15.0, "gibibytes": 2.0}

FAULTS = (Fault("pause", 30e-3, (0,), probability=0.1, mechanism="gc"),
          Fault("contention", 5e-3, begin=0.5))
"""Beside one late rank: so that the report has findings to make, with the hosts' columns and
samples read for them."""


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"Unknown arguments: {' '.join(argv[1:])}")
  directory = pathlib.Path(_KEEP.value or tempfile.mkdtemp(prefix="report-speed-"))
  late = min(17, _RANKS.value - 1)
  try:
    job = made_up_runs.MadeUpJob(ranks=_RANKS.value, steps=_STEPS.value, processes=_PROCESSES.value,
                                 hosts=_PROCESSES.value,
                        noise=0.05, late={late: 5e-3}, host_columns=True, faults=FAULTS)
    print(f"Writing {job.ranks} ranks x {job.steps:,} steps to {directory} ...", flush=True)
    made_up_runs.write(directory, job,
                       progress=lambda done, total: print(f"  process {done} of {total}",
                                                          flush=True))
    size = sum(f.stat().st_size for f in directory.rglob("*.parquet")) / 2**20
    runs, report = child.reports(directory, _REPEATS.value, _CORES.value)
    wrong = late not in [r for f in report["findings"] for r in f["ranks"]]
    result = {
        **child.circumstances("experiments.measure.report_speed",
                              (_RANKS, _STEPS, _PROCESSES, _REPEATS, _CORES),
                              "jaxpace report RUN --json FILE in a new process, interpreter "
                              "start included"),
        "rows": {"steps": job.ranks * job.steps,
                 "collectives": job.ranks * job.steps * job.collectives},
        "run_mib": round(size, 1), "cores": _CORES.value, "target": _TARGET,
        **child.summary(runs),
        "late_rank_named": not wrong,
        "findings": [finding["mode"] for finding in report["findings"]],
        "share_sum": sum(report["shares"].values())}
    result["within_target"] = (result["wall_s"]["worst"] <= _TARGET["seconds"]
                               and result["peak_gib"]["worst"] <= _TARGET["gibibytes"])
    child.write(result, _OUTPUT.value)
  finally:
    if not _KEEP.value:
      shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
  app.run(main)
