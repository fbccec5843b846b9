"""What a training job would take on hardware that you name: `python -m
experiments.cost_facts.plan`."""

from __future__ import annotations

import argparse
import math
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from experiments.cost_facts.planning.plan import Scaling, Setting

EPILOG = """\
The number of data-parallel replicas is swept over powers of two, up to --devices. With --examples each replica keeps
its share of the batch (weak scaling); with --global-examples the batch stays and is divided (strong scaling).

examples:
  python -m experiments.cost_facts.plan --parameters 10e9 --tensor 4 --device a100 --network ib-400 --devices 512
  python -m experiments.cost_facts.plan --parameters 175e9 --layers 96 --tensor 8 --pipeline 8 --micro-batches 32 \\
    --examples 32 --devices 4096
  python -m experiments.cost_facts.plan --facts
"""  # noqa: E501


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the program's arguments."""
  from experiments.cost_facts.planning.catalogue import DEVICES, NETWORKS
  parser.description = ("Says what a step would take, how it scales and what it is spent on, from "
                        "sizes and data sheets.")
  parser.epilog = EPILOG
  parser.formatter_class = argparse.RawDescriptionHelpFormatter
  model = parser.add_argument_group("model")
  model.add_argument("--parameters", type=float, default=10e9, help="such as 10e9 (default)")
  model.add_argument("--layers", type=int, help="left out: of a usual shape")
  model.add_argument("--hidden", type=int, help="width; left out: of a usual shape")
  model.add_argument("--sequence", type=int, default=2048,
                     help="tokens of an example (default: 2048)")
  model.add_argument("--precision", default="bf16", choices=("fp32", "bf16", "fp16"))
  batch = parser.add_mutually_exclusive_group()
  batch.add_argument("--examples", type=float, help="of each replica and step (default: 1)")
  batch.add_argument("--global-examples", type=float, help="of all replicas together")
  division = parser.add_argument_group("division")
  division.add_argument("--devices", type=int, default=512, help="most devices (default: 512)")
  division.add_argument("--tensor", type=int, default=1, help="tensor-parallel degree")
  division.add_argument("--pipeline", type=int, default=1, help="pipeline stages")
  division.add_argument("--micro-batches", type=int, default=1, help="of a replica's step")
  hardware = parser.add_argument_group("hardware")
  hardware.add_argument("--device", default="a100", choices=tuple(DEVICES))
  hardware.add_argument("--network", choices=tuple(NETWORKS),
                        help="default: ib-400, and ici for tpu-v4")
  hardware.add_argument("--per-node", type=int,
                        help="devices of a node (default: the device's usual number)")
  hardware.add_argument("--sustained", type=float, default=0.5,
                        help="share of the peak that compute reaches (default: 0.5)")
  hardware.add_argument("--achieved", type=float, default=0.9,
                        help="share of the links' rate that collectives reach (default: 0.9)")
  hardware.add_argument("--overlap", type=float, default=0.5,
                        help="share of the backward pass behind which gradients are sent "
                             "(default: 0.5)")
  hardware.add_argument("--jitter", type=float, default=0.02,
                        help="deviation of a device's compute, as a share of it (default: 0.02)")
  parser.add_argument("--facts", action="store_true",
                      help="work out the figures of a much-cited text on communication, and say "
                           "where it is off")
  parser.add_argument("--json", metavar="FILE",
                      help="also write the plan as JSON; '-' writes it to standard output and "
                           "nothing else")


def run(args: argparse.Namespace) -> int:
  """Runs the command.

  Returns:
    Exit status: 0, or 2 where the settings make no job or the JSON file can't be written.
  """
  from experiments.cost_facts.planning import plan
  from jaxpace.reporting.json_file import UnwritableError, check_target, deliver
  try:
    if args.json:
      check_target(args.json)
    if args.facts:
      text, document = _facts()
    else:
      setting, replicas = _setting(args)
      scaling = plan.scale(setting, replicas)
      text, document = _text(setting, scaling), _document(setting, scaling)
    wrong = deliver(lambda: print(text, flush=True), lambda: document, args.json)
  except (plan.PlanError, UnwritableError) as error:
    wrong = str(error)
  if wrong:
    print(f"experiments.cost_facts.plan: {wrong}", file=sys.stderr)
    return 2
  return 0


def _setting(args: argparse.Namespace) -> tuple[Setting, list[int]]:
  from experiments.cost_facts.planning import model
  from experiments.cost_facts.planning.catalogue import DEVICES, NETWORKS
  from experiments.cost_facts.planning.plan import PlanError, Setting
  for name, least in (("parameters", 1e3), ("layers", 1), ("hidden", 1), ("sequence", 1),
                      ("devices", 1), ("examples", 1e-6), ("global_examples", 1e-6)):
    value = getattr(args, name)
    if value is not None and not least <= value <= 1e15:
      raise PlanError(f"{name}={value!r} must be a number from {least:g} to 1e15.")
  for name in ("tensor", "pipeline"):
    if not 1 <= getattr(args, name) <= 10**9:
      raise PlanError(f"{name}={getattr(args, name)} must be a whole number from 1 to {10**9:,}.")
  split = args.tensor * args.pipeline
  if args.devices < split:
    raise PlanError(
        f"devices={args.devices} must be at least tensor x pipeline = {split}: one replica.")
  device = DEVICES[args.device]
  network = NETWORKS[args.network or ("ici" if args.device == "tpu-v4" else "ib-400")]
  examples = args.examples if args.examples is not None or args.global_examples is not None else 1.0
  setting = Setting(
      model.shaped(args.parameters, args.layers, args.hidden, args.sequence), device, network,
      per_node=args.per_node if args.per_node is not None else device.per_node, tensor=args.tensor,
      pipeline=args.pipeline, examples=examples, global_examples=args.global_examples,
      micro_batches=args.micro_batches, precision=args.precision, sustained=args.sustained,
      achieved=args.achieved, overlap=args.overlap, jitter=args.jitter)
  most = args.devices // split
  replicas = [2**k for k in range(most.bit_length())]
  return setting, replicas if replicas[-1] == most else [*replicas, most]


def _text(setting: Setting, scaling: Scaling) -> str:
  from experiments.cost_facts.planning.plan import CAUSES, GAINS
  model, device = setting.model, setting.device
  first = scaling.steps[0]
  lines = [
      f"{_count(model.parameters)} parameters, {model.layers} layers of width {model.hidden:,}, "
      f"{model.sequence:,} tokens an example, {setting.precision}",
      f"{device.name} ({device.peak / 1e12:,.0f} TFLOP/s, {setting.sustained:.0%} of it "
      f"sustained), nodes of {setting.per_node} on {device.link} ({device.link_rate / 1e9:,.0f} "
      f"GB/s), {setting.network.name} ({setting.network.rate / 1e9:,.1f} GB/s a device)",
      f"a replica is {setting.tensor} (tensor) x {setting.pipeline} (pipeline) devices; "
      f"parameters, gradients and optimiser take {first.memory / 1e9:,.1f} GB on each of "
      f"{device.memory / 1e9:,.0f} GB", "",
      f"{'devices':>8}{'step':>13}{'tokens/s':>13}{'efficiency':>12}  "
      + "".join(f"{cause:>10}" for cause in CAUSES)]
  for step, efficiency in zip(scaling.steps, scaling.efficiency, strict=True):
    parts = "".join(f"{step.parts[cause] / step.seconds:>10.1%}" for cause in CAUSES)
    lines.append(f"{step.devices:>8,}{step.seconds * 1e3:>10,.1f} "
                 f"ms{step.tokens_per_second:>13,.0f}{efficiency:>12.1%}  {parts}")
  last = scaling.steps[-1]
  worst = max((cause for cause in CAUSES if cause != "compute"),
              key=lambda cause: last.parts[cause])
  behind = (f"; {last.hidden * 1e3:,.1f} ms of gradient traffic hide behind the backward pass."
            if last.hidden else ".")
  lines += ["", f"At {last.devices:,} devices the largest cause of lost time is {worst}, "
                f"{last.parts[worst] / last.seconds:.1%} of the step{behind}"]
  if scaling.knee is not None:
    lines.append(f"The knee is at {scaling.knee:,} devices: doubling them brings less than "
                 f"{GAINS:g} times the throughput.")
  elif len(scaling.steps) > 1:
    lines.append(f"No knee up to {last.devices:,} devices: every doubling brings at least "
                 f"{GAINS:g} times the throughput.")
  if not first.fits:
    lines.append(f"It does not fit: {first.memory / 1e9:,.1f} GB on a device of "
                 f"{device.memory / 1e9:,.0f} GB, activations not counted. "
                 f"{_divided(setting, first.memory)}hard the optimiser over replicas.")
  lines += ["",
            "Data sheets and assumptions, not measurements: what is sustained, achieved, "
            "overlapped is up to you.", f"  {device.name}: {device.source}",
            f"  {setting.network.name}: {setting.network.source}"]
  return "\n".join(lines)


def _divided(setting: Setting, memory: float) -> str:
  """What would make it fit and leave a fifth free, as the beginning of a sentence that goes on with
  another way."""
  needed = memory / (0.8 * setting.device.memory)
  tensor, pipeline = setting.tensor * 2 ** max(0, math.ceil(math.log2(needed))), setting.pipeline
  options = f"--tensor {tensor}"
  if tensor > setting.per_node:
    tensor = setting.per_node
    pipeline *= 2 ** max(0, math.ceil(math.log2(needed * setting.tensor / tensor)))
    options = f"--tensor {tensor} --pipeline {pipeline}"
  return "S" if pipeline > setting.model.layers else f"It would with {options}; or s"


def _count(number: float) -> str:
  """A number as people say it, three digits: 10 billion, 1.3 billion, 350 million."""
  for size, word in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
    if float(f"{number:.3g}") >= size:
      return f"{float(f'{number / size:.3g}'):,g} {word}"
  return f"{number:,.0f}"


def _document(setting: Setting, scaling: Scaling) -> dict[str, Any]:
  return {
      "schema": 1, "model": setting.model._asdict(), "device": setting.device._asdict(),
      "network": setting.network._asdict(), "per_node": setting.per_node, "tensor": setting.tensor,
      "pipeline": setting.pipeline, "micro_batches": setting.micro_batches,
      "precision": setting.precision, "examples": setting.examples,
      "global_examples": setting.global_examples, "sustained": setting.sustained,
      "achieved": setting.achieved, "overlap": setting.overlap, "jitter": setting.jitter,
      "knee": scaling.knee, "steps": [{"devices": s.devices, "step_time": s.seconds,
                                       "tokens_per_second": s.tokens_per_second, "efficiency": e,
                                       "shares": {cause: part / s.seconds
                                                  for cause, part in s.parts.items()},
                                       "hidden": s.hidden, "state_bytes": s.memory, "fits": s.fits}
                                      for s, e in zip(scaling.steps, scaling.efficiency,
                                                      strict=True)]}


def _facts() -> tuple[str, dict[str, Any]]:
  from experiments.cost_facts.planning.facts import facts
  worked_out, lines = facts(), []
  for fact in worked_out:
    low, high = (_figure(value, fact.unit) for value in fact.said)
    said = low if low == high else f"{low} to {high}" if high != "inf" else f"at least {low}"
    lines += [f"{'agrees' if fact.agrees else 'DEPARTS':<8} {fact.about}: said {said}, found "
              f"{_figure(fact.found, fact.unit)}", f"{'':9}{fact.how}"]
    if fact.note:
      lines.append(f"{'':9}Note: {fact.note}.")
  return "\n".join(lines), {"schema": 1, "facts": [
      {"about": f.about, "said": [None if v == float("inf") else v for v in f.said],
       "found": f.found, "unit": f.unit, "how": f.how, "note": f.note, "agrees": f.agrees}
      for f in worked_out]}


def _figure(value: float, unit: str) -> str:
  if value == float("inf"):
    return "inf"
  if unit == "s":
    return f"{value * 1e3:,.3g} ms" if value < 0.1 else f"{value:,.3g} s"
  if unit.startswith("B"):
    return f"{value / 1e9:,.4g} G{unit}"
  return f"{value:,.3g} {unit}".strip()


def main(argv: list[str] | None = None) -> int:
  """Runs the program; returns its exit status."""
  parser = argparse.ArgumentParser(prog="python -m experiments.cost_facts.plan")
  add_arguments(parser)
  return run(parser.parse_args(argv))


if __name__ == "__main__":
  sys.exit(main())
