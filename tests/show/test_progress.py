"""Progress of a long report."""

import io
import threading
import time

from jaxpace.show.console import Progress


class Terminal(io.StringIO):
  def isatty(self):
    return True


def test_a_terminal_sees_it_and_it_goes_away():
  stream = Terminal()
  progress = Progress(stream, quiet_seconds=0)
  progress.counting("Reading")(1, 4)
  wait_for(lambda: "Reading 25 %, 0 s" in stream.getvalue())
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
