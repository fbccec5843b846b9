"""A signal counts every time it comes, and belongs again to whoever had it before."""

import logging
import os
import signal
import threading

from jaxpace.live.control import file
from jaxpace.live.control.leader import Applied, Leader, Toggle
from jaxpace.live.control.request import ControlRequest


def press(times=1):
  for _ in range(times):
    os.kill(os.getpid(), signal.SIGUSR2)


def test_two_presses_between_two_looks_are_off_and_on_again(tmp_path):
  before = signal.getsignal(signal.SIGUSR2)
  toggle = Toggle(signal.SIGUSR2)
  toggle.install()
  leader = Leader(tmp_path / file.NAME, toggle, ranks=4)
  assert Applied.from_json(leader.applied()) == (0, ControlRequest())
  press(2)
  assert (Applied.from_json(leader.applied()) == (0, ControlRequest())
          and not (tmp_path / file.NAME).exists())
  press(3)
  assert Applied.from_json(leader.applied()) == (1, ControlRequest(enabled=False))
  assert file.read(tmp_path / file.NAME) == ControlRequest(enabled=False)
  assert (Applied.from_json(leader.applied())
          == (1, ControlRequest(enabled=False))), "its own file is no news"
  toggle.restore()
  assert signal.getsignal(signal.SIGUSR2) == before


def test_outside_the_main_thread_it_says_so(caplog):
  caplog.set_level(logging.WARNING)
  toggle = Toggle(signal.SIGUSR2)
  thread = threading.Thread(target=lambda: (toggle.install(), toggle.restore()))
  before = signal.getsignal(signal.SIGUSR2)
  thread.start()
  thread.join()
  assert signal.getsignal(signal.SIGUSR2) == before and "outside the main thread" in caplog.text
  assert not Toggle(None).turned()
