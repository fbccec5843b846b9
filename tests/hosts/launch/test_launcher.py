"""Which worker follows another, and how its end is put into words."""

import signal

import pytest

from jaxpace.hosts.launch.launcher import describe_status, is_follower

GLOO = ("ValueError: UNKNOWN: Gloo all-reduce failed: [gloo/tcp/pair.cc:538] Read error: "
        "Connection reset by peer")
SERVICE = "the JAX distributed service detected fatal errors ... coordination service"


@pytest.mark.parametrize(("status", "text", "follows"), [
    (1, GLOO, True), (1, SERVICE, True), (1, "Connection closed by peer", True),
    (1, "Shutdown barrier has failed", True), (-signal.SIGABRT, SERVICE, True),
    (1, "ValueError: shapes", False), (1, "MemoryError", False), (1, "", False),
    (1, "Segmentation fault", False), (1, "glue failed", False),
    (-signal.SIGKILL, GLOO, False),  # it had no time to say why
    (-signal.SIGABRT, "assertion failed", False)])
def test_a_follower_complains_of_a_lost_peer(status, text, follows):
  assert is_follower(status, text) == follows


@pytest.mark.parametrize(("status", "words"), [
    (3, "ended with exit status 3"), (-signal.SIGSEGV, "was killed by SIGSEGV (signal 11)"),
    (137, "ended with exit status 137 (128 + SIGKILL)")])
def test_words_of_a_status(status, words):
  assert describe_status(status) == words
