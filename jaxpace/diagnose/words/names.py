"""Names and numbers as sentences have them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxpace.runs.run import Run


def ranks_by_host(run: Run) -> dict[str, list[int]]:
  """Ranks of each host by its name, in the names' order; those of unknown hosts under the empty
  one."""
  found: dict[str, list[int]] = {}
  for rank in range(run.ranks):
    found.setdefault(run.host_of_rank(rank), []).append(rank)
  return dict(sorted(found.items()))


def hosts_of(run: Run, ranks: Sequence[int] | np.ndarray) -> tuple[str, ...]:
  """Names of the hosts of `ranks`, in their order, each once."""
  return tuple(dict.fromkeys(h for h in (run.host_of_rank(int(r)) for r in ranks) if h))


def hosts_of_processes(run: Run, processes: Sequence[int]) -> tuple[str, ...]:
  """Names of the hosts of `processes`, in their order, each once."""
  names = {p.process: p.host for p in run.processes}
  return tuple(dict.fromkeys(names[p] for p in processes if names.get(p)))


def name_rank(run: Run, rank: int) -> str:
  """Names a rank for people: "Rank 3 (host1, process 1)"."""
  process, host = int(run.process_of_rank[rank]), run.host_of_rank(rank)
  where = ", ".join(x for x in (host, f"process {process}" if process >= 0 else "") if x)
  return f"Rank {rank}" + (f" ({where})" if where else "")


def name_process(run: Run, process: int) -> str:
  """Names a process for people: "process 1 (host1)"."""
  hosts = hosts_of_processes(run, [process])
  return f"process {process}" + (f" ({hosts[0]})" if hosts else "")


def milliseconds(seconds: float) -> str:
  """Seconds, shown as milliseconds.

  >>> milliseconds(0.02034), milliseconds(0.00031), milliseconds(1.5), milliseconds(0.009996)
  ('20.3 ms', '0.31 ms', '1,500 ms', '10.0 ms')
  """
  value = seconds * 1e3
  digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 999.95 else 0
  return f"{value:,.{digits}f} ms"


def signed(seconds: float) -> str:
  """A difference in seconds, shown as milliseconds with its sign; what shows as nothing has none.

  >>> signed(0.002), signed(-0.0005), signed(-1e-6)
  ('+2.00 ms', '-0.50 ms', '0.00 ms')
  """
  shown = milliseconds(abs(seconds))
  return shown if not shown.strip("0., ms") else ("+" if seconds > 0 else "-") + shown


def more(seconds: float) -> str:
  """A difference in seconds, in words that "than" goes on.

  >>> more(-0.002), more(-1e-6)
  ('2.00 ms shorter', 'no longer')
  """
  if not signed(seconds).strip("0., ms"):
    return "no longer"
  return f"{milliseconds(abs(seconds))} {'longer' if seconds >= 0 else 'shorter'}"


def percent(share: float) -> str:
  """A share of one.

  >>> percent(0.5), percent(0.0123)
  ('50 %', '1.2 %')
  """
  value = 100 * float(share)
  return f"{value:.0f} %" if value >= 9.95 or value == 0 else f"{value:.1f} %"


NAMED = 3
"""Names that a sentence holds; of more it has the number. The JSON report has all."""


def named(names: Sequence[str]) -> str:
  """A few of many names, and how many more there are; all where there is one more at most.

  >>> named(["vm1", "vm2"]), named(["vm1", "vm2", "vm3", "vm4"])
  ('vm1 and vm2', 'vm1, vm2, vm3 and vm4')
  >>> named([f"vm{i}" for i in range(1, 33)])
  'vm1, vm2, vm3 and 29 more'
  """
  if len(names) > NAMED + 1:
    names = [*names[:NAMED], f"{len(names) - NAMED:,} more"]
  return joined(names)


def joined(words: Sequence[str]) -> str:
  """An enumeration.

  >>> joined(["a", "b", "c"])
  'a, b and c'
  """
  return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)
