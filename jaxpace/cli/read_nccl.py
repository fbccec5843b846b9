"""`jaxpace read-nccl`: makes a run of what NCCL's Inspector plugin dumped."""

from __future__ import annotations

import argparse
import shlex
import sys

from jaxpace.cli import running
from jaxpace.core.words import write_plain
from jaxpace.files import UserError

EPILOG = """\
NCCL's Inspector writes a JSON object for each collective and rank, of any program. With NCCL_INSPECTOR_DUMP_VERBOSE=1
they hold the times of the kernels, of which a run is made.

examples:
  jaxpace read-nccl nccl-inspector-1234 --to runs/nccl
  jaxpace read-nccl host0.log host1.log --to runs/nccl --collectives-per-step 34
  jaxpace report runs/nccl
"""  # noqa: E501


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the arguments of `jaxpace read-nccl`."""
  parser.add_argument("dumps", metavar="DUMPS", nargs="+",
                      help="directories and files of all ranks' dumps")
  parser.add_argument("--to", metavar="RUN", required=True, help="run directory to write")
  parser.add_argument("--collectives-per-step", metavar="N",
                      type=running.number("the number of collectives", 1),
                      help="collectives of one rank in a step (default: as many as repeat)")


def run(args: argparse.Namespace) -> int:
  """Runs the command."""
  from jaxpace.core.words import plural
  from jaxpace.record.nccl_dumps import read_dumps
  from jaxpace.record.nccl_run import convert

  dumps = read_dumps(args.dumps)
  if dumps.unreadable and not dumps.records:
    raise UserError(f"nothing can be read: {dumps.unreadable[0]}.")
  write_plain(f"{plural(len(dumps.records), 'collective')} in {plural(dumps.files, 'file')}.",
              sys.stderr)
  try:
    made, said = convert(dumps, args.to, args.collectives_per_step)
  except OSError as error:
    raise UserError(f"{args.to} can't be written: {error.strerror or error}.") from error
  for sentence in said:
    write_plain(f"- {sentence}", sys.stdout)
  ranks, steps = made.size
  write_plain(f"{args.to}: {plural(ranks, 'rank')}, {plural(steps, 'step')} of "
              f"{plural(len(made.slots), 'collective')}. Next: jaxpace report "
              f"{shlex.quote(str(args.to))}",
              sys.stdout)
  return 0
