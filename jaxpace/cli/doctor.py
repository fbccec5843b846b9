"""`jaxpace doctor`: what a process runs on here, or ran on in a recorded run, and what is wrong
with it."""

from __future__ import annotations

import argparse
import os
import pathlib
from typing import TYPE_CHECKING, Any

from jaxpace.cli import running
from jaxpace.files import UserError
from jaxpace.show.console import make_console

if TYPE_CHECKING:
  from rich.console import Console
  from rich.tree import Tree

  from jaxpace.hosts.locality.job import Concern
  from jaxpace.hosts.locality.outline import Outline
  from jaxpace.hosts.locality.types import Locality

EPILOG = """\
Without RUN it looks at this machine, as a process started like this one sees it: start it the way the job is started
(same container, same binding). With RUN it shows where the processes of a recorded run ran, and compares their hosts.

examples:
  jaxpace doctor
  jaxpace doctor runs/demo --strict
  jaxpace doctor --json doctor.json
"""  # noqa: E501


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the arguments of `jaxpace doctor`."""
  parser.add_argument("run", metavar="RUN", nargs="?",
                      help="run directory (default: look at this machine)")
  running.add_json(parser, "it")
  parser.add_argument("--root", metavar="DIR", default="/",
                      help="folder that holds a copy of another machine's /sys and /proc "
                           "(default: /)")
  parser.add_argument("--devices", action="store_true",
                      help="also ask JAX for this machine's devices; this starts its backend")
  parser.add_argument("--strict", action="store_true",
                      help="exit with status 1 if there is any warning")


def run(args: argparse.Namespace) -> running.Answer:
  """Runs the command; status 1 with --strict where there is a warning."""
  from jaxpace.files.plain import to_plain
  from jaxpace.hosts.locality.job import WARNING, job_concerns

  places, problems = _look(args)
  concerns = job_concerns(places)
  return running.Answer(
      lambda: render(places, concerns, problems, make_console(), args.run),
      lambda: to_plain({"schema": 1, "processes": places, "concerns": concerns,
                        "problems": problems}),
      int(args.strict and any(concern.level == WARNING for concern in concerns)))


def _look(args: argparse.Namespace) -> tuple[list[Locality], list[str]]:
  from jaxpace.hosts.locality.job import FOLDER, read_places
  from jaxpace.hosts.locality.read import read_locality
  from jaxpace.runs import rundir
  from jaxpace.runs.reader import check_directory

  if args.run is not None:
    if args.devices or args.root != "/":
      raise UserError("--root and --devices look at a machine; with RUN only what was recorded is "
                      "shown. Leave RUN or them out.")
    directory = pathlib.Path(args.run)
    check_directory(directory)
    info = rundir.read_json(directory / rundir.RUN_FILE) or {}
    places, problems = read_places(directory, info.get("run"))
    if not places:
      raise UserError(f"{args.run} does not say where its processes ran: it has no readable "
                      f"{' '.join([f'{FOLDER}/*.json.', *problems])}")
    return places, [*problems, *_away(directory, info, places)]
  if not os.path.isdir(args.root):
    raise UserError(f"--root {args.root} is not a directory.")
  devices = _devices() if args.devices else ()
  return [read_locality(args.root, devices=devices)], []


def _away(directory: pathlib.Path, info: dict[str, Any], places: list[Locality]) -> list[str]:
  """Names the processes of a run that left nothing on where they ran."""
  from jaxpace.runs import rundir

  told = info or rundir.told_by(rundir.read_processes(directory, None, []))
  away = rundir.left_nothing(told.get("processes") or 0,
                             [place.process for place in places if place.process is not None])
  return [away] if away else []


def _devices() -> list[Any]:
  try:
    import jax
    return jax.local_devices()
  except Exception as error:
    # RuntimeError of many kinds: no backend, a driver too old, a device held by another
    reason = next(iter(str(error).splitlines()), repr(error))
    raise UserError(f"JAX gives no devices here: {reason}") from error


def render(places: list[Locality], concerns: list[Concern], problems: list[str], console: Console,
           title: str | None = None) -> None:
  """Prints a tree for each kind of host, then the concerns."""
  from rich.padding import Padding
  from rich.text import Text

  from jaxpace.hosts.locality.job import WARNING, host_name
  from jaxpace.hosts.locality.outline import outlines

  if title:
    console.print(Text(title, style="bold"))
  for outline in outlines(places):
    console.print(_drawn(outline))
  hosts = {host_name(place) for place in places}
  for level, style in (("warning", "bold red"), ("note", "bold")):
    chosen = [concern for concern in concerns if concern.level == level]
    if chosen:
      console.print(Text(f"\n{level.capitalize()}s", style=style))
    for concern in chosen:
      where = [concern.host] if concern.host and len(hosts) > 1 else []
      if concern.processes and len(places) > 1:
        where.append(f"process {', '.join(map(str, concern.processes[:16]))}"
                     f"{', ...' if len(concern.processes) > 16 else ''}")
      text = f"{' '.join(where)}: {concern.sentence}" if where else concern.sentence
      console.print(Padding(Text(f"- {text}"), (0, 0, 0, 2), expand=False))
  for problem in problems:
    console.print(Text(f"  - {problem}", style="yellow"))
  if not any(concern.level == WARNING for concern in concerns):
    console.print(Text("\nNo warnings.", style="green"))


def _drawn(outline: Outline, above: Tree | None = None) -> Tree:
  """Draws an outline, as a branch of `above` if given."""
  from rich.text import Text
  from rich.tree import Tree
  text = Text(outline["text"])
  tree = Tree(text, guide_style="dim") if above is None else above.add(text)
  for line in outline["below"]:
    _drawn(line, tree)
  return tree
