"""Synthetic jobs as runs in memory, and what their step time was really spent on; reports of runs
on disk."""

import dataclasses
import json

import numpy as np
import pytest

from jaxpace.__main__ import main
from jaxpace.diagnose.diagnose import add, count, who
from jaxpace.diagnose.modes.inputs import EvidenceInputs
from jaxpace.runs.dense import HOST_COLUMNS
from jaxpace.runs.run import HostCauses, HostSamples, Run
from tests.diagnose.traces import make_run
from tests.synthetic.synthetic_runs import SyntheticJob, _host_columns, _host_samples, simulate


def run_of(job: SyntheticJob):
  """The run and its truth. Every rank reads a clock of its own."""
  truth = simulate(job)
  origin = (np.arange(job.ranks) * 7 * 10**14)[:, None]
  groups = np.array_split(np.arange(job.ranks), job.processes)
  process = np.repeat(np.arange(job.processes), [len(g) for g in groups])
  hosts = [f"host{p * job.hosts // job.processes}" for p in range(job.processes)]
  run = make_run(truth.enter + origin, truth.exit + origin, gap=truth.gap.astype(float),
                 delay=truth.delay.astype(float), processes=process, hosts=hosts,
                 phases={"forward": truth.forward.astype(float),
                         "backward": truth.backward.astype(float)})
  if job.host_columns:
    rows = [_host_columns(truth, ranks) for ranks in groups]
    causes = {name.removesuffix("_ns"): np.stack(
        [row.get(name, np.zeros(job.steps)) for row in rows]).astype(np.float32)
              * (1 if name == "nivcsw" else 1e-9)
              for name in sorted(set().union(*rows))}
    samples = [_host_samples(job, truth, ranks, p, 0, int(origin[ranks[0], 0]))
               for p, ranks in enumerate(groups)]
    columns = {name: np.concatenate([s.get(name, np.full(len(s["time_ns"]), np.nan))
                                     for s in samples]).astype(float)
               for name in HOST_COLUMNS}
    run = dataclasses.replace(
        run, host_causes=HostCauses(np.arange(job.processes), causes),
        host_samples=HostSamples(*(np.concatenate([s[n] for s in samples])
                                   for n in ("process", "attempt", "time_ns")),
                                 columns))
  return run, truth


def case_of(run: Run) -> EvidenceInputs:
  """What failure modes are looked for in."""
  return who(add(run, count(run)))


def true_shares(truth, quiet: float) -> dict[str, float]:
  """Shares by the definition, one rank, step and collective at a time, from what the ranks really
  did; `quiet` are seconds of all transfers of a step on a quiet fabric."""
  slots, ranks, steps = truth.busy.shape
  spent = dict.fromkeys(("compute", "skew", "transfer", "contention", "runtime", "pacing"), 0.0)
  for k in range(1, steps):
    for r in range(ranks):
      own = truth.gap[r, k], truth.delay[r, k]
      spent["runtime"] += own[0]
      spent["pacing"] += own[1]
      spent["compute"] += sum(truth.busy[c, r, k] for c in range(slots)) - sum(own)
      for c in range(slots):
        last = max(range(ranks), key=lambda x: truth.busy[c, x, k])
        early = truth.busy[c, last, k] - truth.busy[c, r, k]
        if c or not early:
          spent["skew"] += early
          continue
        more = {"runtime": truth.gap[last, k] - truth.gap[r, k],
                "pacing": truth.delay[last, k] - truth.delay[r, k]}
        more["skew"] = early - sum(more.values())
        total = sum(max(x, 0) for x in more.values())
        for name, x in more.items():
          spent[name] += early * max(x, 0) / total
    transfer = truth.transfer[:, k].sum()
    spent["transfer"] += ranks * min(transfer, quiet * 1e9)
    spent["contention"] += ranks * max(transfer - quiet * 1e9, 0)
  whole = sum(spent.values())
  return {name: value / whole for name, value in spent.items()}


def report(path, *arguments):
  """The JSON report of a run directory, by the command; its shares add up."""
  target = path.parent / f"{path.name}.json"
  assert main(["report", str(path), "--json", str(target), *arguments]) == 0
  document = json.loads(target.read_text())
  for shares in (document["shares"], *(row["shares"] for row in document["per_rank"]),
                 *document["per_host"].values()):
    assert shares is None or sum(shares.values()) == pytest.approx(1, abs=1e-6)
  return document


def evaluating(processes, steps):
  """A healthy run of two processes, of which some run an evaluation of 60 ms before some steps."""
  run, _ = run_of(SyntheticJob(ranks=4, steps=400, processes=2, noise=0.01))
  ran = np.zeros((2, 400), np.float32)
  ran[np.ix_(processes, steps)] = 60e-3
  by_rank = np.repeat(ran, 2, axis=0)
  later = np.cumsum((1e9 * ran.max(axis=0)).astype(np.int64))
  gap, one = run.durations["gap"] + by_rank, run.collectives[0]
  enter = one.enter_ns + later - (1e9 * (ran.max(axis=0) - by_rank)).astype(np.int64)
  return dataclasses.replace(
      run, durations={**run.durations, "gap": gap},
      collectives=(dataclasses.replace(one, enter_ns=enter, exit_ns=one.exit_ns + later),),
      info={**run.info, "settings": {"step": {"beside": ["evaluate"]}}},
      host_causes=HostCauses(np.arange(2), {"others": ran}))
