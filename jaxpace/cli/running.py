"""Runs a subcommand: its errors, its JSON document and its progress line, the same for all."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

from jaxpace.files import UserError
from jaxpace.show.console import (
  Progress,
  check_target,
  give_up_output,
  refuse,
  write_file,
)


class Answer(NamedTuple):
  """What a subcommand found."""

  show: Callable[[], None]
  """Prints it; not called where the document itself goes to standard output."""
  document: Callable[[], dict[str, Any]]
  """Makes the JSON document; called only if somebody wants it."""
  status: int = 0


def add_json(parser: argparse.ArgumentParser, what: str) -> None:
  """Adds `--json`: the runner writes the answer's document there."""
  parser.add_argument("--json", metavar="FILE",
                      help=f"also write {what} as JSON; '-' writes it to standard output and "
                           "nothing else")


def call(name: str, command: ModuleType, args: argparse.Namespace) -> int:
  """Runs a subcommand and delivers its answer; whatever the user can mend is one sentence.

  Args:
    name: of the subcommand.
    command: its module, imported only when it is called. `add_arguments(parser)` in it adds its
      arguments; `run(args)` returns an `Answer` or an exit status, and raises a `UserError` where
      it can't do what was asked. `EPILOG` ends its help, `LESS` names a way to need less memory.
    args: as parsed. `args.progress` shows how far it is.

  Returns:
    The exit status; 2 where it could not do what was asked.

  Raises:
    BrokenPipeError: the reader of standard output has left.
  """
  args.progress = Progress()
  try:
    if target := getattr(args, "json", None):
      check_target(target)
    answer = command.run(args)
    args.progress.clear()
    return _delivered(answer, target) if isinstance(answer, Answer) else answer
  except BrokenPipeError:
    raise
  except UserError as error:
    sentence = str(error)
  except MemoryError:
    less = getattr(command, "LESS", None)
    sentence = "this needs more memory than there is" + (f": {less}." if less else ".")
  except OSError as error:
    why = error.strerror or error
    sentence = f"{error.filename}: {why}." if error.filename else f"{why}."
  finally:
    args.progress.clear()
  return refuse(name, sentence)


def _delivered(answer: Answer, target: str | None) -> int:
  try:
    if target != "-":
      answer.show()
    if target:
      text = json.dumps(answer.document(), indent=1, allow_nan=False) + "\n"
      if target == "-":
        sys.stdout.write(text)
      else:
        write_file([text.encode("utf-8")], target)
    sys.stdout.flush()
  except BrokenPipeError:
    raise
  except OSError as error:
    give_up_output()
    raise UserError(
        f"standard output can't be written: {error.strerror or error}.") from error
  return answer.status


def number(what: str, least: float, most: float = math.inf, *, whole: bool = True
           ) -> Callable[[str], Any]:
  """Makes a parser of a number from `least` to `most`; `what` names it where it refuses one.

  >>> number("the port", 0, 65535)("8080"), number("seconds", 0, whole=False)("0.5")
  (8080, 0.5)
  """
  def parse(text: str) -> float:
    try:
      value = int(text) if whole else float(text)
    except ValueError:
      value = math.nan
    if math.isnan(value) or math.isinf(value):
      raise argparse.ArgumentTypeError(f"{text!r} is not a {'whole' if whole else 'finite'} number")
    if value < least:
      raise argparse.ArgumentTypeError(f"{what} must be at least {least}, not {text}")
    if value > most:
      raise argparse.ArgumentTypeError(f"{what} must be at most {most}, not {text}")
    return value

  return parse


def listed(parse: Callable[[str], Any], example: str) -> Callable[[str], list[Any]]:
  """Makes a parser of several values with commas between them; each counts once.

  >>> listed(number("the number of ranks", 1), "128,512")("128,512,128")
  [128, 512]
  """
  def parse_all(text: str) -> list[Any]:
    try:
      return list(dict.fromkeys(parse(part.strip()) for part in text.split(",")))
    except argparse.ArgumentTypeError as error:
      raise argparse.ArgumentTypeError(f"{error}: write them like {example}") from None

  return parse_all


def window(text: str) -> tuple[int | None, int | None]:
  """Parses "A:B".

  >>> window("100:200"), window(":50")
  ((100, 200), (None, 50))
  """
  begin, colon, end = text.partition(":")
  try:
    first, stop = int(begin) if begin else None, int(end) if end else None
  except ValueError:
    colon = ""
  if not colon:
    raise argparse.ArgumentTypeError(
        f"{text!r} is not a range of steps: write A:B, such as 100:200, 100: or :200")
  if not 0 <= (first or 0) < (math.inf if stop is None else stop):
    raise argparse.ArgumentTypeError(
        f"{text!r} is empty: steps begin at 0, and B is one past the last step, so above A")
  return first, stop


def ranks(text: str) -> int | None:
  """Parses a number of ranks from 1, or "all", which is None."""
  if text == "all":
    return None
  if not text.isdecimal() or int(text) < 1:
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of ranks: give 1 or more, or 'all'")
  return int(text)
