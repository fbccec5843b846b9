"""Which worker is the cause, and how its end is put into words and a status."""

import json
import random
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpace.hosts.launch.outcome import (
    Failure,
    describe_status,
    exit_status,
    first_cause,
    is_follower,
    read_announcement,
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
  failures = [Failure(0, 0, 1, GLOO), Failure(1, 10_000 * MS, -9), Failure(2, 1 * MS, 1)]
  assert first_cause(failures, ["", "step 7", GLOO]).index == 1
  assert first_cause(failures, ["", GLOO, GLOO]).index == 1  # it had no time to say why


def test_an_abort_of_a_process_that_lost_process_0_is_no_cause():
  failures = [Failure(0, 5 * MS, -9), Failure(1, 0, -signal.SIGABRT)]
  assert first_cause(failures, ["step 7", SERVICE]).index == 0
  assert first_cause(failures, ["step 7", "assertion failed"]).index == 1  # an abort of its own


def test_an_announcement_counts_more_than_the_log():
  failures = [Failure(0, 0, None, GLOO), Failure(1, 2 * MS, None, "KeyError: 'label'")]
  assert first_cause(failures, ["KeyError", GLOO]).index == 1


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


def test_announcements_are_read_and_torn_ones_passed_over(tmp_path):
  file = tmp_path / "process-3"
  assert read_announcement(file, 3) is None
  for torn in ("", "{", "[]", "{}", '{"when_ns": "x", "exception": "y"}'):
    file.write_text(torn)
    assert read_announcement(file, 3) is None
  file.write_text(json.dumps({"when_ns": 5, "pid": 1, "exception": "KeyError: 'x'"}))
  assert read_announcement(file, 3) == Failure(3, 5, None, "KeyError: 'x'")
