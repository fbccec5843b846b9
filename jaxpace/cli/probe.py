"""`jaxpace probe`: measures the links of the job that it is started in. The work is done in
`jaxpace.live.probe`."""

from __future__ import annotations

import argparse
import sys

from jaxpace.reporting.refusal import refuse

EPILOG = """\
Start it as you start the training, on the same hosts, in all processes:
  jaxpace run --nproc 4 -- jaxpace probe --run runs/demo
  srun jaxpace probe --run runs/demo
Inside a training program, between two steps: jaxpace.probe_links("runs/demo").
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the arguments of `jaxpace probe`."""
  parser.epilog = EPILOG
  parser.add_argument("--run", metavar="DIR",
                      help="run directory to write links.json to (default: nowhere)")
  parser.add_argument("--kib", type=int, default=1024, metavar="N",
                      help="KiB in a message (default: 1024)")
  parser.add_argument("--repeats", type=int, default=10, metavar="N",
                      help="messages a pair; the quickest counts (default: 10)")
  parser.add_argument("--seconds", type=float, default=60.0, metavar="S",
                      help="begin no new round after so long (default: 60)")


def run(args: argparse.Namespace) -> int:
  """Runs `jaxpace probe`. Process 0 prints what was found.

  Returns:
    0; 2 for a slip in the arguments or where there is nothing to probe.
  """
  import jax

  from jaxpace.hosts import distributed
  from jaxpace.live.probe.links import probe_links

  try:
    distributed.initialize()
    first = jax.process_index() == 0

    def progress(done: int, rounds: int) -> None:
      if first and sys.stderr.isatty():
        print(f"\r  round {done} of {rounds}", end="\n" if done == rounds else "", file=sys.stderr,
              flush=True)

    links = probe_links(args.run, message_bytes=args.kib << 10, repeats=args.repeats,
                        seconds=args.seconds, progress=progress)
  except (RuntimeError, TimeoutError, ValueError) as error:
    return refuse("probe", str(error).splitlines()[0])
  if first:
    print(links.text())
  return 0
