"""Checks that a line of shell in the documentation could be typed: real commands, real flags, files
that are there."""

from __future__ import annotations

import argparse
import ast
import functools
import importlib
import pathlib
import re
import shlex
from collections.abc import Callable

from jaxpace.cli import pacer_expression
from jaxpace.cli.main import COMMANDS
from tests.docs.blocks import ROOT

OTHERS = {"cd", "apt-get", "apt", "ip", "tc", "rsync"}
"""Programs of others that are named without a check of their arguments."""
USERS = re.compile(r"(train|serve|client|my_\w+)\.py")
"""Scripts that stand for the reader's own."""
FLAGS_OF_ABSL = {"alsologtostderr", "v", "log_dir", "verbosity", "help"}
DEFINES = re.compile(r"DEFINE_(\w+)")


class NotTypeableError(AssertionError):
  """A command line that would fail when typed, and why."""


def check(text: str) -> int:
  """Checks all command lines of a block; returns how many there were.

  Raises:
    NotTypeableError: one of them names a command, a flag or a file that does not exist.
  """
  lines = [line for line in text.replace("\\\n", " ").splitlines()
           if line.partition("#")[0].strip()]
  for line in lines:
    words = shlex.split(line, comments=True)
    for part in _split(words, ("&&", "||", ";", "|")):
      _command(part)
  return len(lines)


def _split(words: list[str], at: tuple[str, ...]) -> list[list[str]]:
  parts: list[list[str]] = [[]]
  for word in words:
    if word in at:
      parts.append([])
    else:
      parts[-1].append(word)
  return [part for part in parts if part]


def _command(words: list[str]) -> None:
  while words and (re.fullmatch(r"\w+=.*", words[0]) or words[0] in ("sudo", "time", "env")):
    words = words[1:]
  if not words:
    return
  name, rest = words[0], words[1:]
  if name in ("chrt", "nice", "timeout"):
    at = next(i for i, word in enumerate(words) if word in ("python", "jaxpace"))
    _command(words[at:])
  elif name == "jaxpace":
    _jaxpace(rest)
  elif pathlib.PurePath(name).name in ("python", "python3"):
    _python(rest)
  elif name in ("srun", "mpirun"):
    at = next((i for i, word in enumerate(words) if word in ("python", "jaxpace")), None)
    _need(at is not None, words, "starts nothing that is known")
    _command(words[at:])
  elif name == "make":
    targets = set(re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(),
                            re.MULTILINE)[1].split())
    _need(all(word in targets or "=" in word for word in rest), words,
          f"make has the targets {sorted(targets)}")
  elif name == "sbatch":
    _need((ROOT / rest[0]).is_file() and USERS.fullmatch(rest[1]), words,
          "names no script that is there")
  elif name == "kubectl":
    _need(rest[:2] == ["apply", "-f"] and (ROOT / rest[2]).is_file(), words,
          "names no manifest that is there")
  elif name == "pip":
    _pip(words, rest)
  elif name == "source":
    _need(rest == [".venv/bin/activate"], words, "is not what the Makefile makes")
  else:
    _need(name in OTHERS, words, f"{name} is not known to tests/docs/shell.py")


def _jaxpace(words: list[str]) -> None:
  _need(words[0] in COMMANDS, ["jaxpace", *words], "is no command of jaxpace")
  own = words[1:]
  if words[0] == "run":
    at = own.index("--")
    own, started = own[:at], own[at + 1:]
    _command(started)
    own = [*own, "--", *started]
  module = importlib.import_module(f"jaxpace.cli.{words[0].replace('-', '_')}")
  args = _parse(module.add_arguments, ["jaxpace", *words], own)
  pacer = getattr(args, "pacer", None)
  if words[0] == "replay" and pacer:
    pacer_expression.make(pacer)
  if words[0] == "simulate":
    _need((ROOT / args.config).is_file(), ["jaxpace", *words], "names no config that is there")


def _parse(add_arguments: Callable[[argparse.ArgumentParser], None], words: list[str],
           own: list[str]) -> argparse.Namespace:
  parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
  add_arguments(parser)
  try:
    return parser.parse_args(own)
  except (SystemExit, argparse.ArgumentError) as error:
    raise NotTypeableError(f"{shlex.join(words)}: {error}") from error


def _python(words: list[str]) -> None:
  if words[0] == "-c":
    imports = [node for node in ast.walk(ast.parse(words[1])) if isinstance(node, ast.Import)]
    for name in [alias.name for node in imports for alias in node.names]:
      importlib.import_module(name)
    return
  if words[0] != "-m":
    _need(USERS.fullmatch(words[0]), words, "is no script that stands for the reader's own")
    return
  module, rest = words[1], words[2:]
  if module == "pytest":
    _need(all((ROOT / word).exists() for word in rest if word[0] != "-"), words,
          "names tests that are not there")
    return
  _need(module.split(".")[0] in ("experiments", "jaxpace"), words,
        f"{module} is not known to tests/docs/shell.py")
  if "--" in rest:
    at = rest.index("--")
    rest, started = rest[:at], rest[at + 1:]
    _command(started)
  program = (ROOT / (module.replace(".", "/") + ".py"))
  if program.is_file() and "def add_arguments(" in program.read_text():
    _parse(importlib.import_module(module).add_arguments, ["python", *words], rest)
    return
  defined = flags_of(module)
  for word in rest:
    if word.startswith("--"):
      flag = word[2:].partition("=")[0].partition(".")[0]
      known = (flag in defined or flag in FLAGS_OF_ABSL
               or defined.get(flag.removeprefix("no")) in ("bool", "boolean"))
      _need(known, words, f"{module} has no flag --{flag}; it has {sorted(defined)}")


@functools.cache
def flags_of(module: str) -> dict[str, str]:
  """Names of the absl flags that a program and the modules of ours that it imports define, with
  their kinds.

  Read from the source: programs define their flags when they run.

  Raises:
    NotTypeableError: there is no such program.
  """
  seen: set[str] = set()
  found: dict[str, str] = {}
  queue = [module]
  while queue:
    name = queue.pop()
    path = ROOT / (name.replace(".", "/") + ".py")
    path = path if path.is_file() else ROOT / name.replace(".", "/") / "__init__.py"
    if name in seen or not path.is_file():
      continue
    seen.add(name)
    for node in ast.walk(ast.parse(path.read_text())):
      if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
        kind, first = DEFINES.fullmatch(node.func.attr), node.args[0]
        if kind and isinstance(first, ast.Constant):
          found[str(first.value)] = kind[1]
      elif (isinstance(node, ast.ImportFrom)
            and (node.module or "").split(".")[0] in ("experiments", "configs")):
        queue += [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
      elif isinstance(node, ast.Import):
        queue += [alias.name for alias in node.names if alias.name.startswith("experiments")]
  _need(module in seen, [module], "there is no such program")
  return found


def _pip(words: list[str], rest: list[str]) -> None:
  setup = (ROOT / "setup.py").read_text()
  for word in rest[1:]:
    extra = re.fullmatch(r"jaxpace\[(\w+)\]", word)
    _need(word == "." or (extra and f'"{extra[1]}": [' in setup), words,
          "setup.py has no such extra")


def _need(holds: object, words: list[str], why: str) -> None:
  if not holds:
    raise NotTypeableError(f"{shlex.join(words)}: {why}")
