"""Progress of a long report."""

import contextlib
import io
import json
import os
import pty
import re
import subprocess
import sys
import threading
import time

import pytest

from jaxpace.reporting.progress import Progress
from tests.multiprocess.jobs import ROOT


class Terminal(io.StringIO):
  def isatty(self):
    return True


def test_a_terminal_sees_it_and_it_goes_away():
  stream = Terminal()
  progress = Progress(stream, quiet_seconds=0)
  progress.counting("Reading")(1, 4)
  assert "Reading 25 %" in stream.getvalue()
  progress.clear()
  assert stream.getvalue().endswith("\r\x1b[K")


def test_a_quick_report_and_a_pipe_see_nothing():
  quick, pipe = Terminal(), io.StringIO()
  for progress in (Progress(quick, quiet_seconds=60), Progress(pipe, quiet_seconds=0)):
    progress.counting("Reading")(1, 4)
    progress.counting("Adding up")(4, 4)
    progress.clear()
  assert quick.getvalue() == pipe.getvalue() == ""


def test_what_can_not_say_how_far_it_is_shows_its_seconds():
  stream = Terminal()
  progress = Progress(stream, quiet_seconds=0)
  progress.during("Compiling")
  wait_for(lambda: "Compiling, 0 s" in stream.getvalue())
  progress.counting("Simulating")(1, 4)
  wait_for(lambda: "Simulating 25 %, " in stream.getvalue())
  progress.clear()
  progress.clear()
  assert stream.getvalue().endswith("\r\x1b[K")
  assert not any(thread.name == "jaxpace-progress" for thread in threading.enumerate())
  pipe = io.StringIO()
  quiet = Progress(pipe, quiet_seconds=0)
  quiet.during("Compiling")
  quiet.clear()
  assert pipe.getvalue() == ""


def wait_for(condition):
  until = time.monotonic() + 300
  while not condition():
    assert time.monotonic() < until
    time.sleep(0.02)


CONFIG = {"steps": 200, "fabric": {"nodes": 8, "per_node": 1, "rack": 4, "uplink_rate": 25e9},
          "jobs": {
              "a": {"nodes": [0, 1, 4, 5]}, "b": {"nodes": [2, 3, 6, 7], "buckets": 4}}}


@pytest.mark.long
def test_long_commands_say_on_a_terminal_what_they_do(tmp_path):
  """`simulate` and `replay` begin with imports and a compilation, seconds in which nothing can be
  counted."""
  (tmp_path / "config.json").write_text(json.dumps(CONFIG))
  said = on_terminal("simulate", str(tmp_path / "config.json"), "--output", str(tmp_path / "runs"))
  assert "Starting, " in said or "Compiling and simulating, " in said
  assert re.search(r"\x1b\[K[^\n]* \d+ s", said) and "Written: " in said.split("\x1b[K")[-1]
  said = on_terminal("replay", str(tmp_path / "runs" / "a"), "--pacer", "pace_early_ranks()")
  assert re.search(r"(Starting|Compiling and replaying|Replaying \d+ %), \d+ s", said)
  assert "What this cannot know" in said.split("\x1b[K")[-1]


def on_terminal(*arguments):
  """What a command writes on a terminal; quick machines show it from the first second on, as slow
  ones do."""
  program = ("import sys; from jaxpace.reporting.progress import Progress; "
             "Progress.__init__.__defaults__ = (None, 0.3); from jaxpace.cli.main import main; "
             "sys.exit(main(sys.argv[1:]))")
  master, slave = pty.openpty()
  child = subprocess.Popen([sys.executable, "-c", program, *arguments], cwd=ROOT, stdin=slave,
                           stdout=slave, stderr=slave, env={**os.environ, "JAX_PLATFORMS": "cpu"})
  os.close(slave)
  parts = []
  # A terminal whose other side is closed gives an error on Linux.
  with contextlib.suppress(OSError):
    while part := os.read(master, 65536):
      parts.append(part)
  os.close(master)
  assert child.wait(timeout=300) == 0
  return b"".join(parts).decode()
