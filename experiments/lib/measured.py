"""What goes with every measurement: the command, the machine, the day; tables of Markdown; pages.

    python -m experiments.lib.measured                # writes `PAGES` anew from their records
"""

from __future__ import annotations

import datetime
import importlib
import json
import os
import pathlib
import platform
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from absl import flags

from experiments.lib import paired


def circumstances(module: str) -> dict[str, Any]:
  """Command line, machine, versions, date and load of this run of a program.

  Args:
    module: name of the program, as in `python -m`.
  """
  # Here, so that a program may still say which devices JAX takes.
  import jax
  return {"command": shlex.join(["python", "-m", module, *sys.argv[1:]]),
          "date": datetime.date.today().isoformat(),
          "machine": {"cores": os.cpu_count(), "platform": platform.platform(),
                      "jax": jax.__version__, "python": platform.python_version()},
          "load_average_at_start": round(os.getloadavg()[0], 2), "intervals": paired.METHOD}


# glibc's allocator gives the memory of large temporary buffers back to the system and takes it
# anew, or doesn't, as the heap happens to lie: some starts of a program pay thousands of page
# faults a step, others none.
_HEAP = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(8 << 30),
         "MALLOC_TOP_PAD_": str(256 << 20), "MALLOC_ARENA_MAX": "1"}


def keep_memory(module: str) -> None:
  """Starts this program anew, once, with an allocator that keeps its memory; returns if it does
  already.

  Programs started by this one inherit that. Has no effect where the C library isn't glibc.

  Args:
    module: name of the program, as in `python -m`.
  """
  if all(os.environ.get(name) == value for name, value in _HEAP.items()):
    return
  sys.stdout.flush()
  os.execve(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]], {**os.environ, **_HEAP})


def define_priority_flag() -> None:
  """Defines `--real_time`."""
  flags.DEFINE_bool("real_time", False, "Run with real-time priority (needs the right to).")


def take_priority() -> None:
  """Runs before anything else on the machine, if `--real_time` says so.

  To be called before any other thread is started: they inherit it.

  Raises:
    SystemExit: there is no right to.
  """
  if not flags.FLAGS.real_time:
    return
  try:
    os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(5))
  except PermissionError:
    raise SystemExit("--real_time needs the right to real-time priority: run it as root, or leave "
                     "it out.") from None


def priority(figures: dict[str, Any]) -> str:
  """What a page says of it, behind what was run."""
  return (", with real-time priority: nothing else on the machine runs before its threads"
          if figures.get("real_time") else "")


def define_flags(name: str, rounds: int, of: str) -> None:
  """Defines `--out` and `--rounds`: not while a program is imported, where they would meet the
  flags of another.

  Args:
    name: of the file the figures are written to, below docs/measurements.
    rounds: how many there are by default.
    of: what a round is, in a sentence.
  """
  flags.DEFINE_string("out", f"docs/measurements/{name}.json", "File the figures are written to.")
  flags.DEFINE_integer("rounds", rounds, of, lower_bound=2)


def progress(what: str, of: int) -> Callable[[int], None]:
  """Makes a function that tells on standard error how far something is, a few times in all."""
  said = -1

  def say(done: int) -> None:
    nonlocal said
    if done * 4 // of > said:
      said = done * 4 // of
      print(f"  {what}: {done} of {of}", file=sys.stderr, flush=True)

  return say


def portable(text: str) -> str:
  """Takes the folders of the checkout and of Python out of a text: of tracebacks, say."""
  root = pathlib.Path(__file__).parents[2]
  for folder in sorted({str(root), sys.prefix, sys.base_prefix}, key=len, reverse=True):
    text = text.replace(f"{folder}/", "")
  return text


def introduction(title: str, figures: dict[str, Any]) -> list[str]:
  """Heading, and what `circumstances` says, in Markdown."""
  machine = figures["machine"]
  return [f"# {title}", "",
          f"`{figures['command']}`, {figures['date']}, {machine['cores']} cores, "
          f"{machine['platform']}, jax {machine['jax']}, Python {machine['python']}, load average "
          f"at the start {figures['load_average_at_start']:g}.", ""]


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
  """A Markdown table, numbers with four significant digits at most, and an empty line."""
  lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
  lines += ["| " + " | ".join(cell(value) for value in row) + " |" for row in rows]
  return [*lines, ""]


def cell(value: Any) -> str:
  """One entry: yes and no for booleans, a dash for what is not known."""
  if value is None:
    return "–"
  if isinstance(value, bool):
    return "yes" if value else "no"
  return f"{value:.4g}" if isinstance(value, float) else str(value)


FOLDER = pathlib.Path(__file__).parents[2] / "docs" / "measurements"


PAGES = ("null_live",)
"""Records whose pages are those that their programs make of them today."""


def program(record: pathlib.Path) -> str | None:
  """The module that made a record; None where it is gone: then the record names a commit."""
  module = re.findall(r"python -m (experiments[\w.]+)", record.read_text())[0]
  here = (FOLDER.parents[1] / module.replace(".", "/")).with_suffix(".py").exists()
  return str(module) if here else None


def page(record: pathlib.Path) -> str:
  """The page that a record's program makes of it, by its `lines`."""
  made = importlib.import_module(str(program(record))).lines(json.loads(record.read_text()))
  return _page(made)


def _page(lines: Sequence[str]) -> str:
  return portable("\n".join(lines).rstrip("\n")) + "\n"


def write(figures: dict[str, Any], lines: Sequence[str], out: pathlib.Path) -> None:
  """Writes `out` (.json) and the Markdown beside it, both without paths of this machine."""
  out.parent.mkdir(parents=True, exist_ok=True)
  out.write_text(portable(json.dumps(figures, indent=1)) + "\n")
  out.with_suffix(".md").write_text(_page(lines))
  print(f"Written to {out} and {out.with_suffix('.md')}.")


if __name__ == "__main__":
  for name in PAGES:
    (FOLDER / f"{name}.md").write_text(page(FOLDER / f"{name}.json"))
