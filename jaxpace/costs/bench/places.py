"""The levels at which the devices at hand can exchange: in a process, on a host, between hosts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

PROCESS, HOST, HOSTS = "process", "host", "between hosts"


class Group(NamedTuple):
  """A level, and the devices that exchange at it: every group does at the same time."""

  level: str
  # positions of the devices, by group; all groups are of one size
  members: tuple[tuple[int, ...], ...]
  ranks: int | None  # most ranks that the level joins; None where nothing here limits it


def levels(process_of: Sequence[int],
           host_of_process: Sequence[int]) -> tuple[list[Group], list[str]]:
  """Finds the levels, the smallest first.

  Args:
    process_of: process of every device.
    host_of_process: host of every process, any numbers.

  Returns:
    The levels that have two devices or more to a group, and sentences on those that could not be
    made.
  """
  host_of = [host_of_process[p] for p in process_of]
  everyone = tuple(range(len(process_of)))
  several_hosts = len(set(host_of)) > 1
  found: list[Group] = []
  notes: list[str] = []
  for level, owner in ((PROCESS, list(process_of)), (HOST, host_of),
                       (HOSTS, [0] * len(process_of))):
    members = tuple(tuple(d for d in everyone if owner[d] == key) for key in dict.fromkeys(owner))
    if level == HOSTS and not several_hosts:
      continue
    if found and members == found[-1].members:
      continue
    if len({len(m) for m in members}) > 1:
      notes.append(f"Level '{level}' was left out: its groups are of {min(map(len, members))} to "
                   f"{max(map(len, members))} devices, and all must be of one size.")
      continue
    size = len(members[0])
    if size > 1:
      found.append(Group(level, members, None if level == HOSTS else size))
  return found, notes
