"""Progress of a long report."""

import io

from jaxpace.reporting.progress import Progress


class Terminal(io.StringIO):
  def isatty(self):
    return True


def test_a_terminal_sees_it_and_it_goes_away():
  stream = Terminal()
  progress = Progress(stream, quiet_seconds=0)
  progress.reading(1, 4)
  assert "Reading 25 %" in stream.getvalue()
  progress.clear()
  assert stream.getvalue().endswith("\r\x1b[K")


def test_a_quick_report_and_a_pipe_see_nothing():
  quick, pipe = Terminal(), io.StringIO()
  for progress in (Progress(quick, quiet_seconds=60), Progress(pipe, quiet_seconds=0)):
    progress.reading(1, 4)
    progress.adding_up(4, 4)
    progress.clear()
  assert quick.getvalue() == pipe.getvalue() == ""
