"""What workers say reaches their logs, or is counted; who says it never hears of it."""

import contextlib
import os
import resource
import time

from jaxpace.hosts.launch import scribe as scribe_module
from jaxpace.hosts.launch.scribe import Scribe


@contextlib.contextmanager
def limited(size):
  """Files of at most so many bytes, for what is forked inside."""
  before = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
  try:
    yield
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_what_was_said_is_in_the_log_after_sync(tmp_path, monkeypatch):
  monkeypatch.setattr(scribe_module, "_END_SECONDS", 1000.0)
  scribe = Scribe()
  ends = [scribe.open(tmp_path / f"{i}.log") for i in range(3)]
  for number in range(50):
    for i, end in enumerate(ends):
      os.write(end, b"%d of %d\n" % (number, i))
    scribe.sync()
    assert [(tmp_path / f"{i}.log").read_text().splitlines()[-1] for i in range(3)] == [
        f"{number} of {i}" for i in range(3)]
  for end in ends:
    os.close(end)
  began = time.monotonic()
  scribe.close()
  assert time.monotonic() - began < 900, "it waited for the time-out"


def test_a_log_that_cannot_be_written_is_no_error_of_whom_it_is_of(tmp_path):
  with limited(100_000):
    scribe = Scribe()
  end = scribe.open(tmp_path / "a.log")
  for _ in range(100):
    assert os.write(end, b"x" * 4000) == 4000
  scribe.sync()
  assert (tmp_path / "a.log").stat().st_size == 100_000
  os.truncate(tmp_path / "a.log", 10)  # room again
  os.write(end, b"again")
  scribe.sync()
  said = (tmp_path / "a.log").read_text()
  assert said == "x" * 10 + ("\n[jaxpace launch: 300,000 bytes are missing here, the log could not "
                             "be written]\nagain")
  os.close(end)
  scribe.close()


def test_it_goes_on_without_its_launcher_until_nobody_can_write(tmp_path):
  scribe = Scribe()
  end = scribe.open(tmp_path / "a.log")
  scribe._socket.close()
  time.sleep(0.1)
  os.write(end, b"late")
  os.close(end)
  assert os.waitpid(scribe._pid, 0)[1] == 0 and (tmp_path / "a.log").read_text() == "late"
