"""What processes share by name, where process 0 says nothing."""

import threading

import pytest

from jaxpace.hosts.distributed import client


def test_a_thread_that_waits_for_process_0_ends_once_that_is_given_up(monkeypatch):
  """A daemon thread that is within JAX's client when the interpreter ends aborts the process."""
  asked, waits = [], threading.Event()

  def nothing_is_said(key, timeout):
    asked.append(timeout)
    if len(asked) == 2:
      waits.set()
    raise TimeoutError

  monkeypatch.setattr(client, "client", object)
  monkeypatch.setattr(client, "process_index", lambda: 1)
  monkeypatch.setattr(client, "process_count", lambda: 2)
  monkeypatch.setattr(client, "key_value_get", nothing_is_said)
  given_up = threading.Event()

  def wait():
    with pytest.raises(TimeoutError, match=r"1 of 2 waited 1e\+06 s for process 0 to share"):
      client.share_string("run", None, 1e6, given_up)
    given_up.clear()

  waiting = threading.Thread(target=wait)
  waiting.start()
  assert waits.wait(60)
  given_up.set()
  waiting.join(60)
  assert not waiting.is_alive() and not given_up.is_set()
  assert max(asked) <= 1, "no single wait is long"
