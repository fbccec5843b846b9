"""Which worker is the cause, and how its end is put into words and a status."""

import random
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpace.hosts.launch.launcher import (
    Failure,
    describe_status,
    exit_status,
    first_cause,
    is_follower,
)

MS = 1_000_000
GLOO = ("ValueError: UNKNOWN: Gloo all-reduce failed: [gloo/tcp/pair.cc:538] Read error: "
        "Connection reset by peer")
SERVICE = "the JAX distributed service detected fatal errors ... coordination service"


@given(st.lists(st.tuples(st.integers(0, 10**12), st.booleans()), min_size=1, max_size=8,
                unique_by=lambda t: t[0]),
       st.randoms(use_true_random=False))
def test_the_cause_is_the_earliest_of_those_that_did_not_lose_their_peer(
    events, rng: random.Random):
  events = [(time * 100 * MS, follows) for time, follows in events]  # never seen together
  rng.shuffle(events)
  failures = [Failure(i, time, 1) for i, (time, _) in enumerate(events)]
  words = [GLOO if follows else "ValueError: shapes" for _, follows in events]
  causes = [time for time, follows in events if not follows] or [time for time, _ in events]
  assert first_cause(failures, words).when_ns == min(causes)


def test_the_victim_of_a_signal_is_the_cause_though_its_peers_are_seen_long_before_it():
  failures = [Failure(0, 0, 1), Failure(1, 10_000 * MS, -9), Failure(2, 1 * MS, 1)]
  assert first_cause(failures, [GLOO, "step 7", GLOO]).worker == 1
  assert first_cause(failures, [GLOO, GLOO, GLOO]).worker == 1  # it had no time to say why


def test_an_abort_of_a_process_that_lost_process_0_is_no_cause():
  failures = [Failure(0, 5 * MS, -9), Failure(1, 0, -signal.SIGABRT)]
  assert first_cause(failures, ["step 7", SERVICE]).worker == 0
  assert first_cause(failures, ["step 7", "assertion failed"]).worker == 1  # an abort of its own


@pytest.mark.parametrize("text", [GLOO, SERVICE, "Connection closed by peer",
                                  "Shutdown barrier has failed"])
def test_last_words_of_a_follower(text):
  assert is_follower(Failure(0, 0, 1), text)


@pytest.mark.parametrize("text", ["ValueError: shapes", "MemoryError", "", "Segmentation fault",
                                  "glue failed"])
def test_last_words_of_a_cause(text):
  assert not is_follower(Failure(0, 0, 1), text)


@pytest.mark.parametrize(("status", "words", "code"), [
    (3, "ended with exit status 3", 3), (1, "ended with exit status 1", 1),
    (-signal.SIGKILL, "was killed by SIGKILL (signal 9)", 137),
    (-signal.SIGSEGV, "was killed by SIGSEGV (signal 11)", 139),
    (137, "ended with exit status 137 (128 + SIGKILL)", 137)])
def test_words_and_status(status, words, code):
  assert describe_status(status) == words
  assert exit_status(status) == code
