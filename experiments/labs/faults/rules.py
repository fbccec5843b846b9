"""The rules of the diagnosis, each with the answer that takes it out: what
`experiments.labs.ablation` goes through.

A rule is a condition that makes a finding, keeps one back or names somebody. Measurements that
findings are made of (arrivals, shares, floors) are none, nor is wording. Not here, for no run of
the lab has what they are about: groups and chains of a mesh, sampled runs, steps in part, devices
that take turns, ranks without rows, timestamps that don't tell.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxpace.diagnose.floor import find_floor
from jaxpace.diagnose.limits import COSTLY
from jaxpace.diagnose.modes import contention
from jaxpace.diagnose.tcp import BusyLinks


class Rule(NamedTuple):
  """One rule.

  Attributes:
    name: short.
    says: the rule in words.
    neutral: what takes its place, by "module of jaxpace.diagnose:name".
    kept: what it is for where the lab's runs don't have it, and the test that shows it.
  """

  name: str
  says: str
  neutral: Mapping[str, Any]
  kept: str = ""


def _answer(value: Any) -> Any:
  return lambda *args, **kwargs: value


def _no_links(case: Any, busy: Any, *args: Any) -> BusyLinks:
  return BusyLinks({}, (), 0.0, False)


def _own_floor(run: Any, fabric: Any, totals: Any) -> Any:
  return find_floor(run, None, totals)


RULES = (
    # Who is late.
    Rule("late.changes",
         "levels of lateness change in the run: who is late is asked between change-points",
         {"episodes:change_points": lambda series, *_: [[] for _ in series]}),
    Rule("late.outages", "single blocks that stick out are cut before ranks are judged",
         {"lateness:without_outages": lambda series: series}),
    Rule("late.confidence", "a rank is late only with 99 % confidence",
         {"episodes:CONFIDENCE": 0.0}),
    Rule("late.effect", "a rank is late only from 2 % of the step on", {"episodes:EFFECT": 0.0}),
    Rule("late.fewest", "a rank late for fewer than 30 steps isn't persistently late",
         {"episodes:FEWEST_STEPS": 0}),
    Rule("late.grown",
         "neighbouring stretches too short to be sure of, and half as late, belong to an episode",
         {"episodes:_grown": lambda late, tested, step_time: list(late)},
         "from which step on a rank is late: the lab judges kinds and ranks, not dates "
         "(test_lateness: late_for_a_stretch_of_the_run)"),
    Rule("late.pauses", "a rank late on average for a few long gaps pauses, and is not late",
         {"lateness:_pauses": _answer(False)}),
    Rule("late.least", "waiting for late ranks is a finding from 1 % of the step on",
         {"modes.straggler:LEAST": 0.0}),
    Rule("late.mechanism",
         "hosts' columns say why a rank is late; one that is preempted makes transfers slow, too",
         {"modes.straggler:of_lateness": _answer([])},
         "why a rank is late, for the advice: the lab judges kinds and ranks, not causes "
         "(test_findings: each_mode_is_found; test_joined: "
         "a_host_whose_processors_are_taken)"),
    # By their place.
    Rule("place.late", "late ranks that are exactly those in a bad place are late for it",
         {"modes.straggler:late_in_place": _answer(None)}),
    Rule("place.slow", "a slow link of exactly the process in a bad place is slow for it",
         {"modes.straggler:slow_in_place": _answer(None)}),
    # One fault or two.
    Rule("one.fault", "a late host whose transfers are slow from the same step on is one fault",
         {"findings:_one_fault": _answer(False)}),
    Rule("one.little",
         "of one fault, lateness by a little beside queues in the network is the network's",
         {"findings:PART": 0.0}),
    Rule("one.slowly",
         "a late process that is slow to take what it is sent makes its partners' connections busy",
         {"tcp:taken_slowly": _answer(False)}),
    # Intermittent.
    Rule("turns.costly", "waiting by turns is a finding from 5 % of the step on",
         {"modes.amplification:COSTLY": 0.0}),
    Rule("confidence", "waiting by turns and slow transfers are findings only with 99 % confidence",
         {"findings:CONFIDENCE": 0.0}),
    Rule("turns.everyday",
         "waiting for gaps that are no finding counts where there is waiting for work in "
         "every step", {"modes.amplification:everyday": _answer(0.0)}),
    Rule("turns.stretch",
         "waiting by turns in a part of the run that stands out is a finding, whatever the "
         "whole has", {"modes.amplification:_stretch": lambda case: (0, case.selected.blocks)}),
    Rule("turns.mostly",
         "of ranks that are last by turns one is named that is last in most steps, more often than "
         "by chance (binomial), and holds most of the waiting",
         {"modes.amplification:_mostly_last": _answer(None)}),
    # Pauses.
    Rule("pauses.explained",
         "pauses whose cause is measured are a finding from 2.5 % of the step on, not from 5",
         {"modes.jitter:SHOWS": COSTLY}),
    Rule("pauses.unexplained",
         "pauses without a cause are a finding from 20 % of the step on, not from 5",
         {"modes.jitter:UNEXPLAINED": COSTLY}),
    Rule("pauses.measured", "of pauses with a measured cause only what that cause holds counts",
         {"modes.jitter:paused": _answer(None)}),
    Rule("pauses.crowded", "on crowded processors pauses without a cause are none",
         {"modes.jitter:crowded_processors": _answer(False)}),
    Rule("pauses.few", "pauses are no finding if a few blocks hold them",
         {"modes.jitter:SELDOM": 0.0}),
    Rule("pauses.alone", "a process that alone pauses long and often is named without a cause",
         {"modes.jitter:standing_out": _answer(None)}),
    Rule("pauses.columns", "who pauses is told by measured causes, not by gaps",
         {"modes.jitter:held_by_causes": _answer(None)}),
    Rule("pauses.chance", "nobody is named whose part in the pauses may be chance",
         {"modes.jitter:_by_chance": _answer(False)}),
    # Slow transfers.
    Rule("slow.stretch", "transfers slow in a stretch of the run",
         {"modes.contention:_stretch": _answer(None)}),
    Rule("slow.throughout", "transfers slow throughout",
         {"modes.contention:_throughout": _answer(None)}),
    Rule("slow.bursts", "transfers slow now and then", {"modes.contention:_bursts": _answer(None)}),
    Rule("slow.floor", "the fabric measured beforehand is the floor",
         {"diagnose:find_floor": _own_floor}),
    Rule("slow.probe", "the link probe names the slow link",
         {"modes.contention:_probed": lambda case, slow: (slow.links.slow, [])},
         "jobs whose connections can't be counted, with a link probe made beside "
         "(test_joined: a_link_probe_names_the_slow_host_or_link)"),
    Rule("slow.whose", "connections that are busy longest name the slow link",
         {"tcp:whose": _no_links}),
    Rule("slow.slower", "connections tell whether the network is slower in a stretch",
         {"tcp:says_slower": _answer(None)}),
    Rule("slow.slow", "connections tell whether the network is slow throughout",
         {"tcp:says_slow": _answer(None)}),
    Rule("slow.crowded", "transfers long on crowded processors are not the network's",
         {"modes.contention:crowded_processors": _answer(False)},
         "two hosts, or a fabric without TCP, beside other programs: seed 7 has four "
         "hosts, whose connections tell (test_contention: unless_processors_are_crowded)"),
    Rule("slow.host", "on one host there is no network to be crowded",
         {"tcp:on_one_host": _answer(False)},
         "several processes on one host (test_tcp: processes_of_one_host_have_no_network)"),
    Rule("slow.costly",
         "slow transfers are a finding from 5 % of the step on, with 99 % confidence",
         {"findings:_slow": lambda case: contention.look(case) if case.run.ranks > 1 else None}),
)
"""All of them, in the order of the diagnosis."""
