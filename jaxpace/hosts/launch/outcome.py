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
  """One worker's unsuccessful end, or its announcement of one."""

  index: int
  when_ns: int  # CLOCK_MONOTONIC, at which it was seen or announced
  status: int | None  # as `subprocess` has it; None while it still runs
  announced: str | None = None  # the exception that ends it, where the worker said so


def is_follower(failure: Failure, last_words: str) -> bool:
  """Returns whether a worker failed because another one had, by what it announced or, where it
  announced nothing, by the end of its log."""
  if failure.status is not None and failure.status < 0 and -failure.status != signal.SIGABRT:
    # it was cut short: its log says nothing of why. JAX aborts when process 0 is gone, and says so.
    return False
  return _LOST_PEER.search(failure.announced or last_words) is not None


def first_cause(failures: Sequence[Failure], last_words: Sequence[str]) -> Failure:
  """Returns the failure that the others follow from: the earliest of those that don't complain of a
  lost peer.

  Peers of a killed process may well fail before the launcher sees the kill: the kernel closes a
  dying process's connections first.

  Args:
    failures: at least one failure.
    last_words: the end of each one's log, in the same order.
  """
  causes = [failure for failure, words in zip(failures, last_words, strict=True)
            if not is_follower(failure, words)]
  return min(causes or failures, key=lambda failure: (failure.when_ns, failure.index))


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
