"""Which worker is the cause, and how its end is put into words and a status."""

import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpace.hosts.launch.launcher import (
    describe_status,
    exit_status,
    first_cause,
    is_follower,
)

GLOO = ("ValueError: UNKNOWN: Gloo all-reduce failed: [gloo/tcp/pair.cc:538] Read error: "
        "Connection reset by peer")
SERVICE = "the JAX distributed service detected fatal errors ... coordination service"


@given(st.lists(st.booleans(), min_size=1, max_size=8))
def test_the_cause_is_the_earliest_of_those_that_did_not_lose_their_peer(follows):
  ends = [(1, GLOO if one else "ValueError: shapes") for one in follows]
  assert first_cause(ends) == (0 if all(follows) else follows.index(False))


def test_the_victim_of_a_signal_is_the_cause_though_its_peers_are_seen_before_it():
  assert first_cause([(1, GLOO), (1, GLOO), (-9, "step 7")]) == 2
  assert first_cause([(1, GLOO), (1, GLOO), (-9, GLOO)]) == 2  # it had no time to say why


def test_an_abort_of_a_process_that_lost_process_0_is_no_cause():
  assert first_cause([(-signal.SIGABRT, SERVICE), (-9, "step 7")]) == 1
  assert first_cause([(-signal.SIGABRT, "assertion failed"), (-9, "step 7")]) == 0  # its own abort


@pytest.mark.parametrize("text", [GLOO, SERVICE, "Connection closed by peer",
                                  "Shutdown barrier has failed"])
def test_last_words_of_a_follower(text):
  assert is_follower(1, text)


@pytest.mark.parametrize("text", ["ValueError: shapes", "MemoryError", "", "Segmentation fault",
                                  "glue failed"])
def test_last_words_of_a_cause(text):
  assert not is_follower(1, text)


@pytest.mark.parametrize(("status", "words", "code"), [
    (3, "ended with exit status 3", 3), (1, "ended with exit status 1", 1),
    (-signal.SIGKILL, "was killed by SIGKILL (signal 9)", 137),
    (-signal.SIGSEGV, "was killed by SIGSEGV (signal 11)", 139),
    (137, "ended with exit status 137 (128 + SIGKILL)", 137)])
def test_words_and_status(status, words, code):
  assert describe_status(status) == words
  assert exit_status(status) == code
