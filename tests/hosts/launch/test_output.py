"""Logs shown while they grow, and their ends."""

import os
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpace.hosts.launch.launcher import describe_status, is_follower
from jaxpace.hosts.launch.output import Display, LogView, tail


@given(st.lists(st.binary(max_size=40), max_size=12))
def test_bytes_come_through_as_they_are_however_they_arrive(tmp_path_factory, pieces):
  log = tmp_path_factory.mktemp("log") / "log"
  log.touch()
  view, shown = LogView(log), b""
  for piece in pieces:
    with log.open("ab") as file:
      file.write(piece)
    shown += b"".join(view.new())
  assert shown + view.finish() == b"".join(pieces)


@given(st.lists(st.text("ab\n", max_size=8), max_size=12))
def test_with_a_prefix_every_line_is_whole_and_has_it(tmp_path_factory, pieces):
  log = tmp_path_factory.mktemp("log") / "log"
  log.touch()
  view, shown = LogView(log, "[3] "), b""
  for piece in pieces:
    with log.open("a") as file:
      file.write(piece)
    shown += b"".join(view.new())
    assert shown == b"" or shown.endswith(b"\n")
  whole = "".join(pieces)
  lines = whole.split("\n")
  expected = [*lines[:-1], *([lines[-1]] if lines[-1] else [])]
  assert (shown + view.finish()).decode() == "".join(f"[3] {line}\n" for line in expected)


def test_an_endless_line_is_shown_in_pieces(tmp_path):
  log = tmp_path / "log"
  log.write_bytes(b"x" * (3 << 16))
  view = LogView(log, "[0] ")
  assert len(b"".join(view.new())) > 2 << 16
  view.finish()


def test_the_end_of_a_job_shows_what_follows_a_long_piece_of_a_line(tmp_path):
  log = tmp_path / "log"
  log.write_bytes(b"x" * 100_000 + b"\nlast\n")
  screen = os.open(tmp_path / "screen", os.O_WRONLY | os.O_CREAT)
  display = Display([LogView(log, "[0] ")], screen)
  display._over.set()  # the job ended before anything was shown
  display.run()
  os.close(screen)
  assert (tmp_path / "screen").read_bytes().endswith(b"[0] last\n")


def test_a_truncated_log_is_read_from_its_start(tmp_path):
  log = tmp_path / "log"
  log.write_bytes(b"long line before")
  view = LogView(log)
  assert b"".join(view.new()) == b"long line before"
  log.write_bytes(b"new")
  assert b"".join(view.new()) == b"new"
  view.finish()


@pytest.mark.parametrize(("content", "lines", "expected"), [
    (b"", 5, []), (b"a\nb\nc\n", 2, ["b", "c"]), (b"a\nb\n\n \n", 5, ["a", "b"]), (b"a\nb", 0, []),
    (b"1 %\r2 %\r3 %\ndone\r\n", 5, ["3 %", "done"]), (b"\xff\n", 1, ["\ufffd"])])
def test_tail(tmp_path, content, lines, expected):
  log = tmp_path / "log"
  log.write_bytes(content)
  assert tail(log, lines) == expected


def test_the_tail_of_a_large_or_missing_log(tmp_path):
  log = tmp_path / "log"
  log.write_text("".join(f"line {k}\n" for k in range(50_000)))
  assert tail(log, 3) == ["line 49997", "line 49998", "line 49999"]
  assert tail(log, 10**6, limit_bytes=100)[0].startswith("line ")
  assert tail(tmp_path / "none", 3) == []


# Which worker follows another, and how its end is put into words.

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
