"""The fault lab on an observed trainer under plain `jit`, on two and on four processes: how often
is the report right?

    chrt -r 5 python -m experiments.labs.fault_lab --make --config=configs/observed_lab.py --config.seed=1 --runs=runs/observed
    python -m experiments.labs.observed_processes --runs=runs/observed

Forty runs, ten of them healthy, made as those of the fault lab are (docs/how_sure.md): layers in a
scan, remat, parameters sharded over one axis and the batch over both, each process on a host of its
own where there are network namespaces.
"""  # noqa: E501

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from absl import app, flags

from experiments.labs.faults import judge, scores
from experiments.labs.faults.judge import Labelled
from experiments.labs.faults.scores import Found, Judged
from experiments.labs.faults.spec import STRAGGLER
from experiments.lib import measured
from jaxpace.diagnose.diagnose import diagnose
from jaxpace.diagnose.links import read_links
from jaxpace.diagnose.words.evidence import Evidence
from jaxpace.runs.reader import read_run


def judged(one: Labelled, layer: int | None) -> dict[str, Any]:
  """What the report says of a run, and whether that is right.

  Args:
    one: the run.
    layer: that its late rank is late in, None if in all or if nobody is.

  Returns:
    `right`: the injected mode is found, exactly the right ranks or hosts are named for it, and
      nobody else is for
    anything; of a healthy run, that nobody is blamed. `exact`: that no other mode is found either.
    `layer_named`: that the finding names the layer's iteration of the loop; None where there is
    none to name.
  """
  found = diagnose(read_run(one.path / "run"), links=read_links(one.path / "run"))
  findings = tuple(Found(f.mode, f.share, f.confidence, tuple(f.ranks), tuple(f.hosts))
                   for f in found.findings)
  run = dataclasses.replace(judge.blank(one), found=findings)
  late = [f for f in found.findings if f.mode == STRAGGLER]
  at = " ".join(s for f in late for s in f.evidence if getattr(s, "code", None) == Evidence.AT)
  modes = [f.mode for f in found.findings]
  return {"run": one.spec.name, "fault": one.spec.family, "cost": sum(f.cost for f in run.injected),
          "ranks": sorted({rank for f in run.injected for rank in f.ranks}), "layer": layer,
          "findings": [{"mode": f.mode, "share": f.share, "ranks": list(f.ranks),
                        "hosts": list(f.hosts)}
                       for f in found.findings],
          "right": right(run), "exact": right(run) and set(modes) == {f.mode for f in run.injected},
          "layer_named": None if layer is None else f"iteration {layer} of" in at,
          "at": at, "steps": found.selected.size,
          "step_ms": 1e3 * found.step_time.mean if found.step_time else None}


def right(run: Judged) -> bool:
  """Whether modes and blame are right."""
  if not run.injected:
    return not scores.wrongly_blamed(run)
  told = {f.mode for f in run.found}
  named = {fault.mode for fault in run.injected}
  return (named <= told and not scores.wrongly_blamed(run)
          and all(scores.blame(run, fault) is not False for fault in run.injected)
          and not any(f.ranks or f.hosts for f in run.found if f.mode not in named))


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
  """The counts."""
  healthy = [row for row in rows if row["fault"] == "healthy"]
  within = [row for row in rows if row["layer_named"] is not None]
  return {"done": len(rows), "right": sum(row["right"] for row in rows),
          "exact": sum(row["exact"] for row in rows), "healthy": len(healthy),
          "healthy_blamed": sum(not row["right"] for row in healthy),
          "healthy_with_findings": sum(bool(row["findings"]) for row in healthy),
          "in_a_layer": len(within), "named": sum(row["layer_named"] for row in within)}


def page(figures: Mapping[str, Any]) -> list[str]:
  """The figures in Markdown."""
  lines = measured.introduction("The fault lab on an observed trainer, on processes", dict(figures))
  if figures["note"]:
    lines += [figures["note"], ""]
  for seed, one in figures["seeds"].items():
    rows, said = one["runs"], one["summary"]
    lines += [
        f"## Seed {seed}", "",
        f"{said['done']} runs; mode and rank right in {said['right']}, no other mode told either "
        f"in {said['exact']}. {said['healthy']} were healthy: {said['healthy_blamed']} blamed a "
        f"rank or host, {said['healthy_with_findings']} had a finding. Of {said['in_a_layer']} "
        f"ranks late in one layer the layer was named for {said['named']}.", ""]
    lines += measured.table(
        ("run", "cost of the fault, %", "ranks", "layer", "findings", "right", "layer named",
         "step, ms"),
        [(row["run"], 100 * row["cost"] if row["fault"] != "healthy" else None,
          row["ranks"] or None, row["layer"], "; ".join(_said(f) for f in row["findings"])
          or "none", row["right"], row["layer_named"], row["step_ms"])
         for row in rows])
  return lines


def _said(finding: Mapping[str, Any]) -> str:
  whom = (f" ranks {finding['ranks']}" if finding["ranks"] else f" {finding['hosts']}"
          if finding["hosts"] else "")
  return f"{finding['mode']} {100 * finding['share']:.1f} %{whom}"


def _layer(one: Labelled) -> int | None:
  # JAX is needed for it alone.
  from experiments.labs.faults.observed import layer_of
  return layer_of(one.spec) if one.spec.family == "straggler" else None


def main(argv: list[str]) -> None:
  """Judges the runs."""
  if len(argv) > 1:
    raise app.UsageError(
        f"What is {argv[1]!r}? All arguments are flags: --runs=DIR, --only=2x1, ...")
  args = flags.FLAGS
  runs = [pathlib.Path(path).absolute() for path in args.runs]
  figures = {**measured.circumstances("experiments.labs.observed_processes"), "note": args.note,
             "seeds": {}}
  try:
    for path in runs:
      seed = json.loads((path / "plan.json").read_text())["config"]["seed"]
      rows = [judged(one, _layer(one)) for one in judge.labelled(path, args.only)]
      figures["seeds"][str(seed)] = {"summary": summary(rows), "runs": rows}
  except (OSError, ValueError) as error:
    sys.exit(f"observed_processes: {error}")
  for line in page(figures):
    print(line)
  measured.write(figures, page(figures), pathlib.Path(args.out))


if __name__ == "__main__":
  flags.DEFINE_list("runs", ["runs/observed"],
                    "Directory of the runs; several may be judged at once.")
  flags.DEFINE_list("only", [], "Only runs whose name holds one of these.")
  flags.DEFINE_string("note", "", "A sentence on the circumstances, for the page.")
  flags.DEFINE_string("out", "docs/measurements/observed_processes.json",
                      "Where the figures go; a table beside it.")
  app.run(main)
