"""Stable codes of what the diagnosis says in sentences.

A code keeps its meaning; the wording beside it may change from one release to the next. Programs
and tests ask for codes. docs/reference/codes.md is made of this file.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from typing import Self

import numpy as np

from jaxpace.runs.problems import list_ranks
from jaxpace.runs.run import Run


class Code(enum.StrEnum):
  """A code that knows in a line what it stands for."""

  meaning: str

  def __new__(cls, value: str, meaning: str = "") -> Self:
    """Makes a member of a pair."""
    member = str.__new__(cls, value)
    member._value_ = value
    member.meaning = meaning
    return member


class Verdict(Code):
  """What the verdict of a report says. Of a finding in the headline it is the finding's mode."""

  PERSISTENT = "persistent_straggler", "the same ranks are late"
  AMPLIFICATION = "synchronization_amplification", "ranks are late in turn"
  CONTENTION = "fabric_contention", "transfers take longer than they need"
  LOCALITY = "locality", "ranks in a bad place are slow"
  JITTER = "runtime_jitter", "processes pause between steps"
  COSTS_LITTLE = "costs_little", "findings, of which none costs much"
  HEALTHY = "healthy", "nothing found, and nothing that hides"
  DATA_WAITS = "data_waits", "no finding, but every step waits for data"
  SLOW_TRANSFERS = "slow_transfers", "no finding, but transfers take longer than their best"
  FEW_PAUSES = "few_pauses", "no finding, but few long pauses take much of the time"
  UNNAMED_WAITING = "unnamed_waiting", "no finding, but much waiting without a cause that shows"
  NO_STEPS = "no_steps", "no step can be measured"
  TOO_FEW_STEPS = "too_few_steps", "fewer steps count than a judgement needs"
  NO_COLLECTIVES = "no_collectives", "no collective was recorded"
  UNTOLD = "untold", "timestamps cannot show who waits for whom"
  UNTIMED = "untimed", "collectives of the step are not timed"
  DOUBT = "doubt", "a sampled run can't tell what was seen in it"
  UNSEEN_RANKS = "unseen_ranks", "nothing is known of some ranks; `not_judged` has them"


class HangCode(Code):
  """What a job waits for: the kind of a cause, where a rank is instead, how its process is."""

  ABSENT = "absent", "ranks have not entered a collective that others wait in"
  ORDER = "order", "ranks wait for each other in different collectives"
  STUCK = "stuck", "all ranks have entered a collective, and it does not finish"
  UNKNOWN = "unknown", "nothing is known of the ranks that others wait for"
  IN_CALL = "in_call", "where in the same call of the program the rank is"
  EARLIER_CALL = "earlier_call", "the rank is still in an earlier call of the program"
  OTHER_PROGRAM = "other_program", "the rank is in another program"
  DEVICE_BEHIND = "device_behind", "the rank has not begun a call that others of its process have"
  NOT_BEGUN = "not_begun", "no rank of the process has begun the call"
  CLOSED = "closed", "the process has closed its recording"
  SILENT = "silent", "the process wrote nothing while its ring was watched"


class ChangeCode(Code):
  """What the verdict of a comparison says; `failed` says whether that is too much."""

  NONE = "no_change", "no change of the step time is sure"
  SLOWER = "slower", "the second run is surely slower"
  FASTER = "faster", "the second run is surely faster"


class Silence(Code):
  """Why there is no forecast for a number of ranks."""

  TOO_SHORT = "too_short", "the run has too few steps for so many ranks"
  NEW_TIER = "new_tier", ("the job would reach other hosts, and transfers between hosts were "
                          "not measured")
  BEYOND_FABRIC = "beyond_fabric", "the fabric file ends below so many ranks"
  NO_COST = "no_cost", "the fabric file has no cost of a collective"


class Evidence(Code):
  """What a sentence of a finding's evidence shows."""

  LATE = "late", "how late a rank arrives, and when"
  AT = "at", "at which collective, iteration and line of the model a rank is late"
  MOST_WAITED = "most_waited", "at which collective most of the waiting is"
  MOST_CONTENDED = "most_contended", "along which axis of the mesh, and where, transfers are slow"
  WHERE = "where", "which part of the step is longer than the typical rank's"
  LATE_AND_LESS = "late_and_less", "more ranks of the finding, late by less"
  WHOLE_HOST = "whole_host", "all ranks of a host are late"
  ELSEWHERE = "elsewhere", "hosts with other ranks in time"
  SAVES_MORE = "saves_more", "why mending it saves more than its share"
  ROWS_MISSING = "rows_missing", ("some ranks left no rows, and waiting for them looks like "
                                  "slow transfers")
  SLOW_AS_WELL = "slow_as_well", "transfers are slow by the same fault"
  LATE_AS_WELL = "late_as_well", "a host is late by the same fault"
  IN_PLACE = "in_place", "the slow ranks are those in a bad place"
  PLACE = "place", "what is bad about the place"
  LAST_RANK = "last_rank", "how the last rank changes"
  WORST_TENTH = "worst_tenth", "whether rare pauses or everyday jitter hold the waiting"
  SPELL = "spell", "from which step to which it is so"
  WAITING_FOR = "waiting_for", "what the last ranks are longer busy with"
  MOSTLY_HOST = "mostly_host", "a host holds more of the waiting than its part of the ranks"
  PAUSES = "pauses", "how long gaps are as a rule, and on average"
  PAUSES_COST = "pauses_cost", "what a step loses in pauses, and in waiting for them"
  PAUSES_HELD = "pauses_held", "the part of the pauses that the named ranks hold"
  PAUSE_ALIKE = "pause_alike", "all ranks pause equally"
  NO_CAUSE = "no_cause", "no cause that the loop measures takes that long"
  GC = "gc", "a process collects garbage"
  DATA = "data", "a process waits for data"
  CHECKPOINT = "checkpoint", "a process writes checkpoints"
  BETWEEN = "between", "a process is between two steps, and no column shows for what"
  PREEMPTED = "preempted", "something else runs on a process's processors"
  WORK = "work", "a process has more work"
  ASLEEP = "asleep", "a process sleeps or waits, and it doesn't show for what"
  THROTTLED = "throttled", "a process is throttled by a CPU limit"
  STEAL = "steal", "a hypervisor gives the processors to others"
  GPU_CLOCK = "gpu_clock", "a GPU runs at a lower clock"
  TWO_KINDS = "two_kinds", "slow and quick transfers take turns"
  THROUGHOUT = "throughout", "transfers are slow in every step"
  STRETCH = "stretch", "transfers are slow in a stretch of the run"
  NEEDS_FLOOR = "needs_floor", "what is slow throughout shows against a known floor only"
  NO_COUNTERS = "no_counters", "no counters tell a slow link from a crowded fabric"
  SLOW_LINK = "slow_link", "one host's connections are busy much longer"
  ALL_BUSY = "all_busy", "all hosts' connections are equally busy"
  BOTH_BUSY = "both_busy", "of two hosts, both are busy"
  NO_SINGLE_LINK = "no_single_link", "the counters name no single link"
  QUEUE = "queue", "round trips are longer in the contended stretch"
  RESENT = "resent", "segments are sent again"
  PROBE = "probe", "what the link probe names"
  PROBE_NOTHING = "probe_nothing", "the link probe names nothing"


class Note(Code):
  """What a note says."""

  IMPOSSIBLE_STEPS = "impossible_steps", "report: steps with times that can't be are left out"
  WARMUP = "warmup", "report: the first steps are left out"
  UNFINISHED = "unfinished", "report: the last steps are left out, rows are missing there"
  UNMEASURED = "unmeasured", "report: steps without a recorded exit before them"
  IN_FULL = "in_full", "report: some steps are detailed, of the others only totals are known"
  LOWER_BOUND = "lower_bound", "report: contention is a lower bound"
  ONE_OFF = "one_off", "report: one step holds much of all the waiting"
  WAITING_FOR = "waiting_for", "report: what waiting without a finding is for, and where it is"
  FEW_PAUSES = "few_pauses", "report: few long pauses, and their steps"
  SLOW_FOR_GOOD = "slow_for_good", "report: what helps where ranks are slow for good, and how much"
  SPREAD = "spread", "report: ranks leave the collectives apart from each other"
  PACED = "paced", "report, forecast: delays are taken out of arrivals"
  UNTOLD = "untold", "report, compare, watch: timestamps cannot show who waits for whom"
  GROUPS_APART = "groups_apart", "report, forecast: groups of ranks never meet"
  MEETING_UNKNOWN = "meeting_unknown", "report, forecast: run.json doesn't tell which ranks meet"
  POINT_TO_POINT = "point_to_point", "report: collectives from one rank to another"
  STAGES = "stages", "report: groups that never meet keep step"
  BUBBLES = "bubbles", "report: what stages wait for each other counts as transfer"
  FABRIC_UNUSED = "fabric_unused", ("report: the quiet fabric that was given says nothing of "
                                    "this run")
  CLOCK_JUMPED = "clock_jumped", "report: steps of ranks whose clock jumped are left out"
  CROWDED_PROCESSORS = "crowded_processors", "report: other programs run on the processors"
  NO_SLOT = "no_slot", "report: collectives without a slot count as compute"
  NOT_STAMPED = "not_stamped", "report: a collective without timestamps, and why"
  PLAN_NOTICE = "plan_notice", "report: what `instrument` noticed of the step"
  NEVER_MEET = "never_meet", "report: of a sampled run, ranks don't all wait for each other"
  TURNS = "turns", "report: of a sampled run, devices take turns on few cores"
  HUNG = "hung", "report: a watchdog found a step overdue"
  SAME_RUN = "same_run", "compare: both are the same run"
  RANKS_DIFFER = "ranks_differ", "compare: numbers of ranks"
  HOSTS_DIFFER = "hosts_differ", "compare: hosts"
  STEPS_DIFFER = "steps_differ", "compare: one run is much shorter"
  COLLECTIVES_DIFFER = "collectives_differ", "compare: collectives of the step"
  OWN_FLOOR = "own_floor", "compare: each run has a floor of its own"
  CLOCKS_DIFFER = "clocks_differ", "compare: clocks"
  SETTINGS_DIFFER = "settings_differ", "compare: versions, config, pacer"
  BETWEEN_STARTS = "between_starts", ("compare: what changes between two starts is not in "
                                      "the interval")
  RANKS_AWAY = "ranks_away", ("report: some ranks left no rows in a stretch: nothing there counts "
                              "as contention")
  RANKS_UNSEEN = "ranks_unseen", "compare: a finding's ranks left no rows in the other run"
  RANKS_LEFT_OUT = "ranks_left_out", "forecast: ranks known in too few of the steps"
  LATE_TOGETHER = "late_together", "forecast: ranks of a process count as one"
  RANKS_DIFFER_FOR_GOOD = "ranks_differ_for_good", "forecast: ranks with lasting differences"
  NOT_INDEPENDENT = "not_independent", "forecast: ranks late together, the forecast is too high"
  ONE_SIZE = "one_size", "forecast: transfers of one size give bounds only"
  SAME_TIER = "same_tier", "forecast: new hosts are taken to hang where the recorded ones do"
  TAIL = "tail", "forecast: by a fitted tail, beyond what was observed"
  SILENT_RANKS = "silent_ranks", "watch: ranks without rows in the steps shown"
  NOT_CLEARED = "not_cleared", "watch: waiting for ranks without rows counts as transfer"
  STOPPED_EARLY = "stopped_early", "watch: ranks that stopped recording before the others"
  RANKS_NOT_SHOWN = "ranks_not_shown", "watch: ranks beyond what the screen reads"
  STOPPED_RECORDING = "stopped_recording", "watch: a process stopped recording, and why"
  LACKS_STEPS = "lacks_steps", "watch: a process did not copy some steps"


class Sentence(str):
  """A sentence for people, with the code that stands for it in programs. To everything else it is a
  string."""

  __slots__ = ("code",)
  code: Code

  def __new__(cls, code: Code, text: str) -> Self:
    """Puts them together."""
    made = str.__new__(cls, text)
    made.code = code
    return made

  def __getnewargs__(self) -> tuple[Code, str]:  # type: ignore[override]
    """For copies and pickles."""
    return self.code, str(self)


def codes(sentences: Iterable[str]) -> list[str | None]:
  """The codes of some sentences, in their order; None of a string that has none."""
  return [str(s.code) if isinstance(s, Sentence) else None for s in sentences]


# Words and numbers of sentences that a person reads.

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


def some_ranks(ranks: Sequence[int] | np.ndarray) -> str:
  """Names ranks in a sentence: "rank 3", "ranks 3 and 5"."""
  return f"rank{'s' if len(ranks) > 1 else ''} {list_ranks(ranks)}"


def milliseconds(seconds: float) -> str:
  """Seconds, shown as milliseconds.

  >>> milliseconds(0.02034), milliseconds(0.00031), milliseconds(1.5)
  ('20.3 ms', '0.31 ms', '1,500 ms')
  """
  value = seconds * 1e3
  digits = 2 if abs(value) < 10 else 1 if abs(value) < 1000 else 0
  return f"{value:,.{digits}f} ms"


def signed(seconds: float) -> str:
  """A difference in seconds, shown as milliseconds with its sign; what shows as nothing has none.

  >>> signed(0.002), signed(-0.0005), signed(-1e-6)
  ('+2.00 ms', '-0.50 ms', '0.00 ms')
  """
  shown = milliseconds(abs(seconds))
  return shown if not shown.strip("0., ms") else ("+" if seconds > 0 else "-") + shown


def more(seconds: float) -> str:
  """A difference in seconds, in words.

  >>> more(-0.002)
  '2.00 ms shorter'
  """
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
