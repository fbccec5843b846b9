"""Which worker is the cause, and how its end is put into words and a status."""

import json
import random
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpace.launch.outcome import (
  Failure,
  describe_status,
  exit_status,
  first_cause,
  lost_its_peer,
  read_announcement,
)

MS = 1_000_000
GLOO = "ValueError: UNKNOWN: Gloo all-reduce failed: [gloo/tcp/pair.cc:538] Read error: Connection reset by peer"
SERVICE = "the JAX distributed service detected fatal errors ... coordination service"


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=8, unique=True), st.randoms(use_true_random=False))
def test_the_earliest_is_the_cause_when_the_times_are_far_apart(times, rng: random.Random):
  failures = [Failure(i, t * 100 * MS, 1) for i, t in enumerate(times)]
  rng.shuffle(failures)
  words = [GLOO if rng.random() < 0.5 else "anything" for _ in failures]
  assert first_cause(failures, words).when_ns == min(times) * 100 * MS


def test_seen_together_the_one_that_lost_its_peer_is_not_the_cause():
  failures = [Failure(0, 0, 1), Failure(1, 3 * MS, 3), Failure(2, 1 * MS, 1)]
  assert first_cause(failures, [GLOO, "no space left", GLOO]).index == 1


def test_seen_together_a_killed_one_comes_first_whatever_its_log_ends_with():
  failures = [Failure(0, 0, 1), Failure(1, 3 * MS, -9)]
  assert first_cause(failures, ["ValueError: mine", "step 7"]).index == 1
  assert first_cause(failures, [GLOO, GLOO]).index == 1


def test_words_decide_only_within_the_window():
  failures = [Failure(0, 0, 1), Failure(1, 51 * MS, -9)]
  assert first_cause(failures, [GLOO, "step 7"]).index == 0
  assert first_cause(failures, [GLOO, "step 7"], together_ns=60 * MS).index == 1


def test_an_announcement_counts_as_last_words():
  failures = [Failure(0, 0, None, GLOO), Failure(1, 2 * MS, None, "KeyError: 'label'")]
  assert first_cause(failures, ["", ""]).index == 1


@pytest.mark.parametrize("text", [GLOO, SERVICE, "Connection closed by peer", "Shutdown barrier has failed"])
def test_last_words_of_a_follower(text):
  assert lost_its_peer(text)


@pytest.mark.parametrize("text", ["ValueError: shapes", "MemoryError", "", "Segmentation fault", "glue failed"])
def test_last_words_of_a_cause(text):
  assert not lost_its_peer(text)


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
