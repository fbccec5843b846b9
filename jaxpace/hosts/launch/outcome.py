"""Which worker ended a job, and why: the cause told apart from those that only followed it."""

from __future__ import annotations

import dataclasses
import re
import signal
from collections.abc import Sequence
from pathlib import Path

from jaxpace.files.documents import parse

_LOST_PEER = re.compile(
    r"gloo .*failed|connection closed by peer|connection reset by peer|coordination service|"
    r"heartbeat timeout|shutdown barrier|socket closed|another task died|unavailable:",
    re.IGNORECASE)

HINTS: dict[int, str] = {
    signal.SIGKILL: "Nobody but the system or a person sends SIGKILL: when memory runs out, the "
                    "kernel does (see `dmesg`, or the container's memory limit).",
    signal.SIGSEGV:
    "A crash in native code; `python -X faulthandler` shows the Python line it happened in.",
    signal.SIGBUS: "Often a full /dev/shm or a memory-mapped file that was cut short.",
    signal.SIGABRT: "Native code gave up; its last words are in the log.",
}


@dataclasses.dataclass(frozen=True)
class Failure:
  """One worker's unsuccessful end, or its announcement of one.

  Attributes:
    index: process index.
    when_ns: CLOCK_MONOTONIC nanoseconds at which it was seen, or at which the worker announced it.
    status: as `subprocess` has it: the exit status, or minus the signal's number; None while it
      still runs.
    announced: the exception that ends it ("ValueError: ..."), where the worker said so.
  """

  index: int
  when_ns: int
  status: int | None
  announced: str | None = None


def lost_its_peer(text: str) -> bool:
  """Returns whether a worker's last words are those of one whose peer went away first."""
  return _LOST_PEER.search(text) is not None


def is_follower(failure: Failure, last_words: str) -> bool:
  """Returns whether a worker failed because another one had.

  Args:
    failure: its end.
    last_words: the end of its log; not asked where the worker announced its exception.
  """
  if failure.status is not None and failure.status < 0 and -failure.status != signal.SIGABRT:
    # it was cut short: its log says nothing of why. JAX aborts when process 0 is gone, and says so.
    return False
  return lost_its_peer(failure.announced or last_words)


def first_cause(failures: Sequence[Failure], last_words: Sequence[str],
                together_ns: int = 50_000_000) -> Failure:
  """Returns the failure that the others follow from.

  Followers, by what they say, come after all others: the kernel closes a dying process's
  connections before it reports the death, so peers of a killed process may well fail earlier than
  the launcher sees the kill. Of those that remain the earliest is the cause; a signal's victim
  among those seen `together_ns` apart or less.

  Args:
    failures: at least one failure.
    last_words: the end of each one's log, in the same order.
    together_ns: nanoseconds within which the order of events is not trusted.

  Returns:
    One of `failures`.
  """
  causes = [failure for failure, words in zip(failures, last_words, strict=True)
            if not is_follower(failure, words)]
  causes = causes or list(failures)
  earliest = min(failure.when_ns for failure in causes)
  near = [failure for failure in causes if failure.when_ns - earliest <= together_ns]
  return min(near, key=lambda failure: (failure.status is None or failure.status >= 0,
                                        failure.when_ns, failure.index))


def signal_name(number: int) -> str:
  """Returns "SIGKILL" for 9."""
  try:
    return signal.Signals(number).name
  except ValueError:
    return f"signal {number}"


def describe_status(status: int) -> str:
  """Returns "was killed by SIGKILL (signal 9)" for -9, "ended with exit status 3" for 3."""
  if status < 0:
    return f"was killed by {signal_name(-status)} (signal {-status})"
  # a shell in between reports it so
  if status > 128 and status - 128 in [int(s) for s in signal.Signals]:
    return f"ended with exit status {status} (128 + {signal_name(status - 128)})"
  return f"ended with exit status {status}"


def exit_status(status: int) -> int:
  """Returns the launcher's exit status for a worker's: the same, or 128 + the signal's number."""
  return 128 - status if status < 0 else status


def read_announcement(path: Path, index: int) -> Failure | None:
  """Returns what a worker announced, or None if it announced nothing."""
  try:
    found = parse(path.read_bytes())
    return Failure(index, int(found["when_ns"]), None, str(found["exception"]))
  except (OSError, ValueError, KeyError, TypeError):
    return None
