"""`jaxpace bench`: measures collectives, and fits latency and bandwidth of every level of the
fabric."""

from __future__ import annotations

import argparse
import os
import socket
from typing import Any

from jaxpace.cli import running
from jaxpace.core.words import write_plain
from jaxpace.files import UserError
from jaxpace.hosts.launch import environment

_KINDS = ("all_reduce", "reduce_scatter", "all_gather", "shift")
_SIZES = "1K,4K,16K,64K,256K,1M,4M,16M"
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}

EPILOG = """\
Run it the way the job is run, on a quiet machine: alone, by `jaxpace run`, srun, mpirun. Every process takes part,
the first one prints and writes. Keep the file: `jaxpace report --floor` reads it.

With --links the links between hosts are measured by pairs, as `jaxpace.probe_links("runs/demo")` does between two steps
of a training program.

examples:
  jaxpace bench --json bench.json
  jaxpace bench --devices 8 --kinds all_reduce --sizes 4K,1M
  jaxpace run --nproc 4 -- jaxpace bench --json bench.json
  srun jaxpace bench --links --run runs/demo
"""  # noqa: E501


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the arguments of `jaxpace bench`."""
  running.add_json(parser, "the result")
  parser.add_argument("--sizes", type=running.listed(_bytes, "4K,1M"), metavar="A,B,...",
                      default=_SIZES,
                      help="bytes of the whole vector, with K, M or G for powers of 1,024 "
                           f"(default: {_SIZES})")
  parser.add_argument("--kinds", type=running.listed(_kind, ",".join(_KINDS)),
                      metavar="A,B,...", default=_KINDS,
                      help=f"collectives to measure (default: {','.join(_KINDS)})")
  parser.add_argument("--repeats", type=running.number("samples", 1, 4096), metavar="N", default=9,
                      help="samples per size, or messages per pair of hosts (default: 9)")
  parser.add_argument("--algorithm", choices=("ring", "tree", "doubling"), default="ring",
                      help="whose formula is fitted (default: ring)")
  parser.add_argument("--devices", type=running.number("devices", 1, 4096), metavar="N",
                      help="devices to make of each process's CPU")
  links = parser.add_argument_group("links between hosts")
  links.add_argument("--links", action="store_true",
                     help="measure the links between the job's hosts instead, and say which is "
                          "slow")
  links.add_argument("--run", metavar="DIR",
                     help="run directory to write links.json to (default: nowhere)")
  links.add_argument("--kib", type=int, default=1024, metavar="N",
                     help="KiB in a message (default: 1024)")
  links.add_argument("--seconds", type=float, default=60.0, metavar="S",
                     help="begin no new round after so long (default: 60)")


def run(args: argparse.Namespace) -> running.Answer | int:
  """Runs the command. Process 0 prints what was found."""
  # JAX and numpy are imported here: `jaxpace --help` needs neither.
  if args.devices:
    os.environ["XLA_FLAGS"] = environment.with_device_count(os.environ.get("XLA_FLAGS", ""),
                                                            args.devices)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
  import jax

  import jaxpace
  try:
    place = jaxpace.distributed.initialize()
    if args.links:
      from jaxpace.live.probe import probe_links
      links = probe_links(args.run, message_bytes=args.kib << 10, repeats=args.repeats,
                          seconds=args.seconds,
                          progress=None if place.index else args.progress.counting("Probing"))
      return 0 if place.index else running.Answer(
          lambda: write_plain(links.text()), links.to_json)
    devices = jax.devices()
  except (RuntimeError, TimeoutError, ValueError) as error:
    raise UserError(str(error).splitlines()[0]) from error
  if len(devices) < 2:
    raise UserError("there is one device, which has no other to exchange with. Start several "
                    "processes (`jaxpace run --nproc 2 -- jaxpace bench`, srun, mpirun), "
                    "or give --devices 8 to make 8 of this CPU.")
  document = _measure(args, devices, jax, first=place.index == 0)
  return 0 if place.index else running.Answer(lambda: write_plain(_text(document)),
                                              lambda: document)


def _measure(args: argparse.Namespace, devices: Any, jax: Any,
             first: bool) -> dict[str, Any]:
  from jaxpace.costs.bench import fit, host_of_processes, levels, measure, to_json

  hosts = host_of_processes(socket.gethostname())
  devices = sorted(devices, key=lambda d: (hosts[d.process_index], d.process_index, d.id))
  groups, notes = levels([d.process_index for d in devices], hosts)
  results = []
  for group in groups:
    by_kind = {}
    for kind in args.kinds:
      what = f"{group.level}, {len(group.members[0])} ranks, {kind}"
      say = args.progress.counting(what) if first else None
      try:
        measured = measure(kind, group, sorted(args.sizes), args.repeats, devices, say)
      except jax.errors.JaxRuntimeError as error:
        notes.append(
            f"{kind} at level '{group.level}' could not be measured: {str(error).splitlines()[0]}")
        continue
      found = fit(kind, args.algorithm, len(group.members[0]), measured)
      by_kind[kind] = found, measured
      if found.misfit > 0.5:
        notes.append(f"{kind} at level '{group.level}': the {args.algorithm} formula is off by "
                     f"{found.misfit:.0%} at one size; go by the points near the size you have.")
    results.append((group, by_kind))
  cores = os.cpu_count() or 1
  local = sum(d.process_index == devices[0].process_index for d in devices) * hosts.count(hosts[0])
  if devices[0].platform == "cpu" and local > cores:
    notes.append(
        f"{local} devices share {cores} cores of a host: they take turns, and that is in "
        "the figures.")
  facts = {"backend": devices[0].platform, "device": devices[0].device_kind, "jax": jax.__version__,
           "devices": len(devices), "processes": jax.process_count(), "hosts": len(set(hosts)),
           "algorithm": args.algorithm}
  return to_json(results, facts, notes)


def _text(document: dict[str, Any]) -> str:
  from jaxpace.core.words import plural
  lines = [f"{plural(document['devices'], document['backend'] + ' device')}, "
           f"{plural(document['processes'], 'process', 'processes')}, "
           f"{plural(document['hosts'], 'host')}; {document['algorithm']} formula", ""]
  for level in document["levels"]:
    lines.append(f"{level['level']}, {level['measured']} ranks"
                 + (f", {level['groups']} groups at once"
                    if level["groups"] > 1 else ""))
    lines.append(
        "                  latency α           90 %            1/β              90 %        "
        "worst fit")
    for kind, cost in level["collectives"].items():
      alpha, beta = cost["alpha"], cost["beta"]
      lines.append(f"  {kind:<14}{alpha['estimate'] * 1e6:10.2f} µs {alpha['low'] * 1e6:8.2f} to "
                   f"{alpha['high'] * 1e6:8.2f}  {_rate(beta['estimate']):>12} "
                   f"{_rate(beta['high']):>10} to {_rate(beta['low']):<10} {cost['misfit']:6.0%}")
    for kind, cost in level["collectives"].items():
      points = ", ".join(f"{_size(p['bytes'])} {p['seconds'] * 1e3:.3g} ms" for p in cost["points"])
      lines.append(f"  {kind}: {points}")
    lines.append("")
  return "\n".join([*lines, *(f"- {note}" for note in document["notes"])]).rstrip()


def _rate(beta: float) -> str:
  return f"{1e-9 / beta:.3g} GB/s" if beta > 0 else "unlimited"


def _size(size: int) -> str:
  for unit, scale in reversed(_UNITS.items()):
    if size >= scale:
      return f"{size / scale:.4g} {unit}iB"
  return f"{size} B"


def _bytes(text: str) -> int:
  """Parses a size.

  >>> _bytes("512"), _bytes("4K"), _bytes("1M")
  (512, 4096, 1048576)
  """
  unit = _UNITS.get(text[-1:].upper())
  number = text[:-1] if unit else text
  if not number.isdecimal() or not 0 < int(number) * (unit or 1) <= 2**34:
    raise argparse.ArgumentTypeError(f"{text!r} is not a size in bytes, of 16G at most")
  return int(number) * (unit or 1)


def _kind(text: str) -> str:
  if text not in _KINDS:
    raise argparse.ArgumentTypeError(f"{text!r} is not a collective of bench")
  return text
