"""`jaxpace control`: asks a running job to change its pacing."""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Callable
from typing import Any

from jaxpace.cli import running
from jaxpace.files import UserError
from jaxpace.live import control_file
from jaxpace.live.control_file import ControlRequest, RequestError

EPILOG = """\
Writes RUN/control.json, which a job with `jaxpace.Control(RUN)` in its loop follows: a few seconds later the change
applies, at one step on all ranks. What is not named stays as it is. Without an option it says what is asked for.

examples:
  jaxpace control runs/demo --off
  jaxpace control runs/demo --on --ranks 0-7 --from-step 5000       (try it on a few ranks first)
  jaxpace control runs/demo --ranks all --max-delay 5ms --threshold 0.1
  jaxpace control runs/demo --reset
"""  # noqa: E501
_UNITS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
_AS_MADE = {"max_delay": "made", "threshold": "made", "ranks": "all", "until_step": "none"}
_STEP = running.number("the number", 0, 2**31 - 1)
_NUMBER = running.number("the number", 0, whole=False)


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the arguments of `jaxpace control`."""
  parser.add_argument("run", metavar="RUN",
                      help="run directory, or the .json file that the job follows")
  switch = parser.add_mutually_exclusive_group()
  switch.add_argument("--on", dest="enabled", action="store_true", default=None,
                      help="allow delays")
  switch.add_argument("--off", dest="enabled", action="store_false", default=None, help="no delays")
  switch.add_argument("--reset", action="store_true", help="everything as the pacer was made")
  parser.add_argument("--max-delay", type=_or("made", _seconds), metavar="TIME",
                      help="longest delay, with its unit, such as 5ms or 0.005s; 'made' for the "
                           "pacer's own")
  parser.add_argument("--threshold", type=_or("made", _NUMBER), metavar="SHARE",
                      help="persistent slack at which pacing begins, such as 0.1 of a step; 'made' "
                           "for the pacer's own")
  who = parser.add_mutually_exclusive_group()
  who.add_argument("--ranks", metavar="LIST",
                   help="only these, such as 0-7,9; or 'all'")
  who.add_argument("--nodes", type=_STEP, metavar="N",
                   help="only the ranks of the run's first N hosts")
  parser.add_argument("--from-step", type=_STEP, metavar="N", help="no delay before this step")
  parser.add_argument("--until-step", type=_or("none", _STEP), metavar="N",
                      help="no delay from this step on; 'none' for good")


def run(args: argparse.Namespace) -> int:
  """Runs the command.

  Returns:
    Exit status: 0, or 2 where there is no such run, or the file can't be read or written.
  """
  path = control_file.locate(args.run)
  if not path.parent.is_dir():
    raise UserError(f"There is no directory {path.parent}. Give the run directory that the job "
                    "records to.")
  changes = {name: value for name, value in vars(args).items()
             if name in ("enabled", "max_delay", "threshold", "ranks", "from_step", "until_step")
             and value is not None}
  try:
    asked = ControlRequest() if args.reset else control_file.read(path)
  except RequestError as error:
    if args.enabled is not False:  # whatever stands there: pacing can be switched off
      raise UserError(f"{path}: {error}. --reset overwrites it.") from error
    print(f"jaxpace control: {path}: {error}. This overwrites it.", file=sys.stderr)
    asked = ControlRequest()
  try:
    if args.nodes is not None:
      changes["ranks"] = _of_hosts(path.parent, args.nodes)
    if args.reset or changes:
      plain = {name: None if value == _AS_MADE.get(name) else value
               for name, value in changes.items()}
      asked = ControlRequest.from_json(asked.to_json() | plain)
      control_file.write(path, asked)
  except RequestError as error:
    raise UserError(f"{error}.") from error
  except OSError as error:
    raise UserError(f"{path} can't be written: {error.strerror or error}.") from error
  print(f"asked    {asked}")
  applied = control_file.last_note(path)
  if applied is None:
    print("applied  nothing yet: has the job's loop a jaxpace.Control on this directory?")
  else:
    print(f"applied  {applied[1]}, from step {applied[0]:,} on")
  return 0


def _of_hosts(directory: pathlib.Path, count: int) -> tuple[int, ...]:
  """Ranks, by their index along the data axis, of the hosts of the first processes."""
  from jaxpace.core.words import plural
  from jaxpace.runs import rundir
  from jaxpace.runs.groups import groups
  hosts: dict[str, list[int]] = {}
  for one in sorted(rundir.read_processes(directory, None, []), key=lambda one: one.process):
    hosts.setdefault(one.host, []).extend(one.ranks)
  devices = sum(map(len, hosts.values()))
  if not devices:
    raise RequestError(
        "the run does not say yet which ranks are on which host; name them with --ranks")
  if not 1 <= count <= len(hosts):
    raise RequestError(f"the run has {plural(len(hosts), 'host')}, not {count}")
  laid_out = groups(rundir.read_json(directory / rundir.RUN_FILE) or {}, devices)
  if laid_out is None:
    raise RequestError(
        "run.json does not say which ranks are along the data axis; name them with --ranks")
  chosen = {device for ranks in list(hosts.values())[:count] for device in ranks}
  return tuple(rank for rank in range(laid_out.shape[1]) if set(laid_out[:, rank].tolist())
               & chosen)


def _or(word: str, parse: Callable[[str], Any]) -> Callable[[str], Any]:
  """Parses a value, or the word that stands for what there is without a request."""
  return lambda text: text if text == word else parse(text)


def _seconds(text: str) -> float:
  """Parses a time; whether it is in range the request says.

  >>> _seconds("5ms"), _seconds("0.02s"), _seconds("250us"), _seconds("0")
  (0.005, 0.02, 0.00025, 0.0)
  """
  unit = next((one for one in _UNITS if text.endswith(one)), "")
  value = float(_NUMBER(text.removesuffix(unit)))
  if not unit and value > 0:
    raise argparse.ArgumentTypeError(
        f"{text!r} has no unit: write {text}ms for milliseconds, or 0.005s for seconds")
  return round(value * _UNITS.get(unit, 1.0), 12)
