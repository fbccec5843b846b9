"""Whether the report of an observed step blames whom it should, in made-up jobs whose truth is
known.

Jobs on meshes of data, fsdp and tensor axes, with 2 to 16 layers and up to 80 collectives a step;
one step in a few is written in full. Healthy ones vary by chance, some with heavy tails, and their
layers differ on all ranks alike; the others have one fault each, of every mode of the taxonomy.

    python -m experiments.measure.observed_blame           # about three minutes on one core
"""

from __future__ import annotations

import collections
import dataclasses
import pathlib
import tempfile
from typing import Any, NamedTuple

import numpy as np
from absl import app, flags

from experiments.lib import measured
from jaxpace.diagnosis.codes import Evidence
from jaxpace.diagnosis.diagnose import diagnose
from jaxpace.diagnosis.diagnosis import Diagnosis
from jaxpace.diagnosis.findings import AMPLIFICATION, CONTENTION, JITTER, LOCALITY, PERSISTENT
from jaxpace.hosts.locality.types import Device, Gpu, Locality, Nic
from jaxpace.testing.made_up_observed import LayerFault, ObservedJob, write
from jaxpace.trace.reader import read_run

MESHES = ((4, 1, 1), (1, 4, 1), (2, 2, 1), (1, 2, 2), (2, 2, 2), (1, 4, 2), (4, 2, 2), (8, 1, 1))
FAULTS = ("late in a forward layer", "late in a backward layer", "late in all layers",
          "late from a step on", "work that varies", "late by turns", "pauses",
          "slow axis for a while", "slow transfers at times", "ranks in a bad place")
_STEPS = 400


class Case(NamedTuple):
  """A made-up job, and what should be said of it."""

  job: ObservedJob
  fault: str  # "" for a healthy one
  modes: frozenset[str]  # any of which is right
  ranks: tuple[int, ...]
  at: str  # name of the collective and turn that should be named; "" for none
  far: tuple[int, ...] = ()  # ranks whose GPU is far from its NIC


def case_of(number: int, faulty: bool) -> Case:
  """The job of a number: its mesh, layers and noise are drawn."""
  random = np.random.default_rng((number, int(faulty)))
  data, fsdp, tensor = MESHES[number % len(MESHES)]
  ranks = data * fsdp * tensor
  layers = int(random.choice((2, 4, 8, 16)))
  kind = str(random.choice(("normal", "exponential", "heavy")))
  # The more collectives and the heavier the tails, the more chance alone makes ranks wait.
  noise = float(random.uniform(0.005, 0.02)) * (0.5 if kind == "heavy" else 1.0)
  job = ObservedJob(
      data=data, fsdp=fsdp, tensor=tensor, layers=layers, steps=_STEPS, processes=min(4, ranks),
      hosts=min(4, ranks), noise=noise, noise_kind=kind, uneven=float(random.uniform(0, 0.5)),
      transfer_noise=0.05, norm=bool(random.random() < 0.7) or data * fsdp * tensor == data,
      every=int(random.choice((1, 2, 4))), seed=number)
  if not faulty:
    return Case(job, "", frozenset(), (), "")
  name = FAULTS[number // len(MESHES) % len(FAULTS)]
  step = job.forward + job.backward + job.transfer
  rank, layer = int(random.integers(ranks)), int(random.integers(layers))
  amount = float(random.uniform(0.06, 0.2)) * step
  modes, blamed, at, far = {PERSISTENT}, (rank,), "", ()
  if name.startswith("late in a"):
    phase = "backward" if "backward" in name or fsdp * tensor == 1 else "forward"
    whole = "all layers" in name
    fault = LayerFault("late", amount, blamed, layer=None if whole else layer, phase=phase)
    at = "" if whole else str(layer if phase == "forward" else layers - 1 - layer)
  elif name == "late from a step on":
    fault = LayerFault("late", amount, blamed, layer=layer, begin=0.4)
  elif name == "work that varies":
    fault, modes, blamed = LayerFault("jitter", 1.5 * amount), {AMPLIFICATION}, ()
  elif name == "late by turns":
    fault, modes, blamed = LayerFault("rotating", 1.5 * amount, layer=layer), {AMPLIFICATION}, ()
  elif name == "pauses":
    fault, modes, blamed = LayerFault("pause", step, probability=0.06), {JITTER}, ()
  elif name == "slow axis for a while":
    axis = next(axis for axis, size in (("fsdp", fsdp), ("data", data), ("tensor", tensor))
                if size > 1)
    modes, blamed = {CONTENTION}, ()
    fault = LayerFault("contention", amount + 0.05 * step, axis=axis, begin=0.2, end=0.8)
  elif name == "slow transfers at times":
    fault, modes, blamed = (LayerFault("contention", 2.5 * job.transfer, probability=0.4, period=5),
                            {CONTENTION}, ())
  else:
    far = tuple(range(0, ranks, 2)) if ranks > 4 else (rank,)
    fault, modes, blamed = LayerFault("late", amount, far), {LOCALITY}, far
  return Case(dataclasses.replace(job, faults=(fault,)), name, frozenset(modes), tuple(blamed),
              at, far)


def places(job: ObservedJob, far: tuple[int, ...]) -> tuple[Locality, ...]:
  """Where each process runs: a GPU a rank, on the other socket than its NIC for the ranks of
  `far`."""
  found = []
  for process, ranks in enumerate(np.array_split(np.arange(job.ranks), job.processes)):
    gpus = tuple(Gpu(pci=f"0000:{slot:02x}:00.0", numa_node=0, nic=f"mlx5_{slot}")
                 for slot in range(len(ranks)))
    nics = tuple(Nic(name=f"mlx5_{slot}", kind="infiniband", numa_node=int(rank in far), up=True,
                     rate_gbps=400.0)
                 for slot, rank in enumerate(ranks.tolist()))
    found.append(Locality(process=process, hostname=f"host{process}", gpus=gpus, nics=nics,
                          devices=tuple(Device(gpu=gpu.pci) for gpu in gpus)))
  return tuple(found)


def report_on(case: Case) -> Diagnosis:
  """Writes the job's run, reads it and diagnoses it."""
  with tempfile.TemporaryDirectory() as folder:
    write(folder, case.job)
    run = read_run(folder)
  return diagnose(dataclasses.replace(run, locality=places(case.job, case.far)) if case.far
                  else run)


def judge(case: Case, found: Diagnosis) -> dict[str, Any]:
  """What was said, and whether it is right."""
  first = found.findings[0] if found.findings else None
  blamed = sorted({rank for finding in found.findings for rank in finding.ranks})
  said = {"fault": case.fault, "mesh": [case.job.data, case.job.fsdp, case.job.tensor],
          "layers": case.job.layers, "noise": case.job.noise_kind, "every": case.job.every,
          "norm": case.job.norm, "collectives": len(found.run.collectives),
          "modes": [finding.mode for finding in found.findings], "ranks": blamed,
          "expected_ranks": list(case.ranks),
          "share_sum": sum(found.shares.values()) if found.shares else None}
  if not case.fault:
    return said | {"right": not blamed, "no_finding": first is None}
  at = [str(s) for finding in found.findings for s in finding.evidence
        if getattr(s, "code", None) == Evidence.AT]
  right = first is not None and first.mode in case.modes and set(blamed) == set(case.ranks)
  return (said | {"right": right,
                  "named": any(f"turn {case.at} of" in s for s in at) if case.at else None})


def main(argv: list[str]) -> None:
  """Makes the jobs up, and writes what was said of them."""
  del argv
  figures: dict[str, Any] = measured.circumstances("experiments.measure.observed_blame")
  rows = []
  for faulty, number in ((False, FLAGS.healthy), (True, FLAGS.faulty)):
    say = measured.progress("faulty" if faulty else "healthy", number)
    for i in range(number):
      case = case_of(FLAGS.first + i, faulty)
      rows.append({"number": FLAGS.first + i, **judge(case, report_on(case))})
      say(i + 1)
  figures["jobs"] = rows
  healthy, struck = ([row for row in rows if bool(row["fault"]) == wanted]
                     for wanted in (False, True))
  named = [row["named"] for row in struck if row["named"] is not None]
  figures |= {
      "healthy": len(healthy), "healthy_blaming_nobody": sum(row["right"] for row in healthy),
      "healthy_without_finding": sum(row["no_finding"] for row in healthy),
      "faulty": len(struck), "right": sum(row["right"] for row in struck),
      "right_share": sum(row["right"] for row in struck) / max(1, len(struck)),
      "layer_to_name": len(named), "layer_named": sum(named),
      "worst_share_sum": max(abs(row["share_sum"] - 1)
                             for row in rows if row["share_sum"] is not None)}
  print(tables(figures))
  if FLAGS.out:
    measured.write(figures, tables(figures).splitlines(), pathlib.Path(FLAGS.out))


def tables(figures: dict[str, Any]) -> str:
  """The figures in Markdown."""
  lines = measured.introduction("Blame in observed steps, in made-up jobs", figures)
  lines += [f"{figures['healthy']} healthy jobs: {figures['healthy_blaming_nobody']} blame nobody, "
            f"{figures['healthy_without_finding']} have no finding at all. {figures['faulty']} "
            "with a fault: the first finding's mode and the ranks blamed are right in "
            f"{figures['right']} ({100 * figures['right_share']:.1f} %); of "
            f"{figures['layer_to_name']} whose fault is in one layer the evidence names it in "
            f"{figures['layer_named']}. Shares sum to 1 within {figures['worst_share_sum']:.1e}.",
            "", "| fault | jobs | right | layer named | wrong: number, modes, ranks said |",
            "|---|---|---|---|---|"]
  by_fault: dict[str, list[dict[str, Any]]] = collections.defaultdict(list)
  for row in figures["jobs"]:
    by_fault[row["fault"] or "none"].append(row)
  for fault, rows in by_fault.items():
    named = [row["named"] for row in rows if row.get("named") is not None]
    wrong = "; ".join(f"{row['number']}: {', '.join(row['modes']) or 'nothing'} {row['ranks']}"
                      for row in rows if not row["right"])
    lines.append(f"| {fault} | {len(rows)} | {sum(row['right'] for row in rows)} | "
                 f"{f'{sum(named)} of {len(named)}' if named else ''} | {wrong} |")
  return "\n".join(lines) + "\n"


FLAGS = flags.FLAGS

if __name__ == "__main__":
  flags.DEFINE_integer("healthy", 40, "Healthy jobs.")
  flags.DEFINE_integer("faulty", 160, "Jobs with a fault.")
  flags.DEFINE_integer("first", 0, "Number of the first job of each kind.")
  flags.DEFINE_string("out", "docs/measurements/observed_blame.json",
                      "Where the figures go; a table beside it.")
  app.run(main)
