"""A process of bounded memory that runs the commands on damaged runs. Prints what went wrong, and
how much it tried.

  python -m tests.cli.hostile_worker SOUND_RUN SCRATCH SECONDS FIRST_SEED [LAST_SEED]
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import json
import pathlib
import random
import resource
import shutil
import signal
import sys
import time
import traceback
import warnings

from jaxpace.cli.main import main
from jaxpace.files.folders import ForeignFileError
from jaxpace.hang import read_rings
from jaxpace.runs import rundir
from tests.cli import hostile

MEMORY = 3 << 29
"""Bytes that the commands may ask for beyond what a sound run has needed."""
SECONDS = 300
"""That one command may take on one small run, on a machine that has other things to do."""


class TooLongError(BaseException):
  """Not caught by `except Exception`."""


def commands(run: pathlib.Path, sound: pathlib.Path, scratch: pathlib.Path) -> dict[str, list[str]]:
  """Command lines by name."""
  html, trace, chrome = (str(scratch / name) for name in ("r.html", "r.pftrace", "r.json"))
  return {
      "report": ["report", str(run), "--json", chrome],
      "page": ["report", str(run), "--html", html, "--chrome", trace, "--ranks", "all"],
      "watch": ["watch", str(run), "--once"],
      "compare": ["compare", str(sound), str(run)],
      "compare to": ["compare", str(run), str(sound)],
      "forecast": ["report", str(run), "--forecast", "8,64"],
      "replay": ["replay", str(run), "--pacer", "pace_early_ranks()"],
      "doctor": ["doctor", str(run)],
      "control": ["control", str(run), "--nodes", "1"],
      "record": [],
      "floor": ["report", str(run), "--floor", str(run / "inputs" / "fabric.json")],
      "nccl": ["read-nccl", str(run / "inputs" / "nccl"), "--to", str(scratch / "nccl")],
  }


WEIGHTS = {"report": 8, "page": 2, "watch": 8, "compare": 2, "compare to": 1, "forecast": 2,
           "replay": 0.3, "doctor": 3, "control": 3, "record": 2, "floor": 2, "nccl": 5}
OF_INPUTS = {"floor", "nccl"}
"""Commands that read the inputs; for the others the run is damaged."""


def record(run: pathlib.Path) -> int:
  """What a recorder does with a directory before it writes."""
  with contextlib.suppress(ForeignFileError):
    rundir.claim(run, run.name.endswith("1"), time.time_ns())
  return 0


def attempt(name: str, argv: list[str], run: pathlib.Path) -> tuple[str, float]:
  """Runs a command; returns what is wrong about how it went, empty if nothing, and its seconds."""
  out, err = io.StringIO(), io.StringIO()
  began = time.monotonic()
  signal.alarm(SECONDS)
  try:
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
      status = main(argv) if argv else record(run)
  except BaseException:
    return traceback.format_exc(limit=-8), time.monotonic() - began
  finally:
    signal.alarm(0)
  taken = time.monotonic() - began
  text = err.getvalue()
  if status not in (0, 2) and not (name.startswith("compare") and status == 1):
    return f"status {status}", taken
  if "Traceback" in text or "more memory than there is" in text:
    return text, taken
  if any(c < " " and c != "\n" for c in out.getvalue() + text):
    return "control characters: " + repr(next(
        line for line in (out.getvalue() + text).split("\n")
        if any(c < " " for c in line))[:300]), taken
  if status == 2 and (text.count("\n") != 1 or not text.startswith(f"jaxpace {argv[0]}: ")):
    return f"not one sentence: {text!r}", taken
  return "", taken


def work(sound: pathlib.Path, scratch: pathlib.Path, seconds: float, first: int,
         last: int | None) -> int:
  """Tries seed after seed until the time is over."""
  warnings.simplefilter("error")  # an overflow is a wrong number
  # Runs that hang are watched for so long to see who still writes: nobody does.
  read_rings.WATCHED_SECONDS = 0.01
  signal.signal(signal.SIGALRM, _too_long)
  for name, argv in commands(sound, sound, scratch).items():  # everything is imported, and compiled
    if argv:
      wrong, _ = attempt(name, argv, sound)
      assert not wrong, wrong
  pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
  limit = pages * resource.getpagesize() + MEMORY
  resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
  end, seed, failures, slowest = time.monotonic() + seconds, first, [], ("", 0.0)
  tried: dict[str, int] = {}
  files = 0
  before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  while time.monotonic() < end and (last is None or seed <= last):
    chance = random.Random(seed)
    run = scratch / f"run \x1b[31m{seed % 2}"
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(sound, run)
    lines = commands(run, sound, scratch)
    name = chance.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    said = hostile.damage(chance, run, name in OF_INPUTS)
    files += len({one.partition(":")[0] for one in said})
    faulthandler.dump_traceback_later(4 * SECONDS, exit=True)
    wrong, taken = attempt(name, lines[name], run)
    faulthandler.cancel_dump_traceback_later()
    tried[name] = tried.get(name, 0) + 1
    slowest = max(slowest, (f"seed {seed}: {name}, {said}", taken), key=lambda pair: pair[1])
    if wrong:
      failures.append(f"seed {seed}: {name}, {said}\n{wrong}")
      if len(failures) >= 30:
        break
    seed += 1
  after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  print(json.dumps({"tried": sum(tried.values()), "files": files, "by_command": tried,
                    "next_seed": seed, "failures": failures, "slowest": slowest,
                    "grown_mib": (after - before) // 1024}))
  return 1 if failures else 0


def _too_long(*_) -> None:
  raise TooLongError(f"longer than {SECONDS} s")


if __name__ == "__main__":
  sys.exit(work(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), float(sys.argv[3]),
                int(sys.argv[4]), int(sys.argv[5]) if len(sys.argv) > 5 else None))
