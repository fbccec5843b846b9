"""Rounds of a loop on two processes: at one turn on both, and nothing that stops either."""

import itertools
import json
import threading
import time

import pytest

from jaxpace.hosts.distributed import rounds
from jaxpace.hosts.distributed.rounds import Round, Rounds
from tests.patience import awaited

LENGTHS = (4, 7, 3, 40, 5, 4)


def leader(lengths=LENGTHS):
  """Process 0; says in which turn what applies was chosen."""
  chosen, left = [], list(lengths)

  def propose(begins):
    chosen.append(begins)
    return begins + left.pop(0), lambda: {"round": len(chosen)}
  return Rounds("test/rounds", timeout=300, read=dict, propose=propose)


def follower(timeout=300.0):
  return Rounds("test/rounds", timeout=timeout, read=dict, propose=None)


def test_all_take_a_round_up_at_one_turn(store):
  """However far ahead process 0 is, or the others are."""
  zero, one = leader(), follower()
  begun = {0: [], 1: []}
  for turn in range(sum(LENGTHS[:-1]) - 1):
    for process, each in ((0, zero), (1, one)):
      found = each.at(turn)
      if found is not None:
        begun[process].append((turn, found.first, found.until))
        assert not found.again and set(found.said) == {"round"}
  assert begun[0] == begun[1]
  begins = [sum(LENGTHS[:k]) for k in range(5)]
  assert [turn for turn, _, _ in begun[1]] == [at for _, at, _ in begun[1]] == begins
  zero.close()
  one.close()


def test_between_rounds_there_is_nothing_to_do():
  alone = leader([100, 100, 100])
  woken = []
  for turn in range(201):
    if turn >= alone.wake:
      woken.append(turn)
      alone.at(turn)
  assert woken == [0, 50, 100, 150, 200], "the next round is said half a round before it begins"
  assert alone.number == 3
  alone.close()


def test_who_hears_nothing_says_so_once_goes_on_and_joins_again(store):
  """What is heard of is a later round by then: process 0 has deleted the earlier ones."""
  late = follower()
  store.words[late.key(0)] = json.dumps([0, 5, {}])
  assert late.at(0) == Round(0, 5, {}, False)
  late._timeout = 0.5  # what is there is heard however slow the machine is
  with pytest.raises(ConnectionError, match=r"waited 0.5 s for jaxpace/test/rounds/1 of process 0"):
    for turn in range(1, 100):
      late.at(turn)
  assert turn == 5
  assert [late.at(turn) for turn in range(6, 50)] == [None] * 44
  store.words.clear()
  store.words[late.key(13)] = json.dumps([40, 90, {"round": 13}])
  store.words[late.key(12)] = json.dumps([30, 40, {"round": 12}])
  found, turn, deadline = [], 50, time.monotonic() + 300
  while not found and time.monotonic() < deadline:
    turn += turn < 80
    found += filter(None, [late.at(turn)])
    time.sleep(0.01)
  assert found == [Round(40, 90, {"round": 13}, True)]
  assert late.number == 14 and turn < late.wake < 90
  late.close()


@pytest.mark.parametrize("text", ["no JSON", "[0, 5]", "[0, null, {}]", "[0, 5, 7]", "17"])
def test_what_can_not_be_understood_is_asked_for_again(store, monkeypatch, text):
  monkeypatch.setattr(rounds, "_RETRY_SECONDS", 0.05)
  late = follower()
  store.words[late.key(0)] = text
  with pytest.raises(ConnectionError):
    late.at(0)
  assert late.at(1) is None
  store.words[late.key(0)] = json.dumps([0, 50, {}])
  turns = itertools.chain(range(2, 40), itertools.repeat(40))
  assert awaited(lambda: late.at(next(turns))) == Round(0, 50, {}, True)
  late.close()


def test_few_messages_are_kept(store, monkeypatch):
  monkeypatch.setattr(rounds, "KEPT", 3)
  zero = leader()
  for turn in range(sum(LENGTHS[:-1])):
    zero.at(turn)
  zero.close()
  assert sorted(store.words) == [f"jaxpace/test/rounds/{number}" for number in (3, 4, 5)]


def test_what_is_slow_to_make_holds_up_no_turn_for_longer_than_the_timeout(store):
  go_on = threading.Event()

  def make():
    assert go_on.wait(300)
    return {}

  slow = Rounds("test/slow", timeout=0.01, read=dict, propose=lambda begins: (begins + 4, make))
  with pytest.raises(ConnectionError, match=r"waited 0.01 s for jaxpace/test/slow/0 of process 0"):
    slow.at(0)
  go_on.set()
  assert awaited(lambda: slow.at(2)) == Round(0, 4, {}, True)
  slow.close()


def test_what_can_not_come_is_said(store, monkeypatch):
  def lost(key, timeout):
    raise ConnectionError("process 0 is gone")

  monkeypatch.setattr(rounds, "key_value_get", lost)
  one = follower()
  with pytest.raises(ConnectionError, match="^process 0 is gone"):
    one.at(0)
  one.close()
  zero = Rounds("test/failing", timeout=300, read=dict,
                propose=lambda begins: (4, lambda: 1 // 0))
  with pytest.raises(ConnectionError, match="test/failing/0: ZeroDivisionError"):
    zero.at(0)
  zero.close()


def test_closing_ends_a_reader_that_waits(store):
  one = follower()
  store.words[one.key(0)] = json.dumps([0, 10, {}])
  one.at(0)
  assert one.at(5) is None
  one.close()
  assert not one._thread.is_alive()
  follower().close()
