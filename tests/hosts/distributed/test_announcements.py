"""Messages by number, with a dictionary in the place of the coordination service."""

import threading
import time

import pytest

from jaxpace.hosts.distributed import rounds
from jaxpace.hosts.distributed.rounds import KEPT, Announcements


def test_alone_it_is_what_was_said():
  alone = Announcements("test/alone")
  alone.say(0, lambda: "first")
  alone.say(1, lambda: "second")
  assert [alone.take(0, 10)[1], alone.take(1, 10)[1]] == ["first", "second"]
  alone.close()
  assert not alone._thread.is_alive()


def test_what_is_said_is_heard_however_late(store):
  leader, follower = Announcements("test/job"), Announcements("test/job")
  follower.expect(0)
  while len(store.asked) < 4:  # several slices pass before anything is said
    time.sleep(0.005)
  leader.say(0, lambda: "go")
  assert leader.take(0, 10)[1] == follower.take(0, 10)[1] == "go"
  for number in range(1, KEPT + 3):
    leader.say(number, lambda number=number: str(number))
    follower.expect(number)
    assert leader.take(number, 10)[1] == follower.take(number, 10)[1] == str(number)
  assert sorted(int(key.rpartition("/")[2]) for key in store.words) == list(range(3, KEPT + 3))
  assert all(key.startswith("jaxpace/test/job/") for key in store.words)
  leader.close()
  follower.close()


def test_saying_does_not_wait_for_the_service(store):
  begun, go_on = threading.Event(), threading.Event()

  def make():
    begun.set()
    assert go_on.wait(300)
    return "slowly"

  leader = Announcements("test/slow")
  leader.say(0, make)
  assert begun.wait(300), "by a thread of its own"
  with pytest.raises(TimeoutError, match=r"waited 0.01 s for jaxpace/test/slow/0 of process 0"):
    leader.take(0, 0.01)
  leader.say(1, lambda: "next")
  go_on.set()
  assert leader.take(1, 10)[1] == "next"
  leader.close()


def test_what_can_not_come_is_said(store, monkeypatch):
  follower = Announcements("test/lost")

  def lost(key, timeout):
    raise ConnectionError("process 0 is gone")

  monkeypatch.setattr(rounds, "key_value_get", lost)
  follower.expect(0)
  with pytest.raises(ConnectionError, match="^process 0 is gone"):
    follower.take(0, 10)
  follower.close()
  leader = Announcements("test/failing")
  leader.say(0, lambda: str(1 // 0))
  with pytest.raises(ConnectionError, match="test/failing/0: ZeroDivisionError"):
    leader.take(0, 10)
  leader.say(1, lambda: "still there")
  assert leader.take(1, 10)[1] == "still there"
  leader.close()


def test_closing_ends_a_reader_that_waits(store):
  follower = Announcements("test/closed")
  follower.expect(0)
  follower.close()
  assert not follower._thread.is_alive()
  with pytest.raises(ConnectionError, match="closed"):
    follower.take(0, 10)
  never = Announcements("test/never")
  never.close()
