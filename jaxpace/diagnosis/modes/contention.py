"""Transfers take longer than they need: `fabric_contention`. One slow host's link, or the fabric between all."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxpace.diagnosis import when
from jaxpace.diagnosis.changes import change_points
from jaxpace.diagnosis.counted import merged
from jaxpace.diagnosis.counters import per_step
from jaxpace.diagnosis.episodes import confidence
from jaxpace.diagnosis.modes.case import CONTENTION, COSTLY, Case, Finding
from jaxpace.diagnosis.wording import hosts_of_processes, milliseconds, name_process, percent

RAISED = 0.25
"""Part of the quiet level by which the transfer of a stretch exceeds it if the stretch is contended."""
_BURST = 0.5
_SLOW_RATIO = 2.5
"""A host's link is the slow one if it is busy this many times as long as the others' ..."""
_SLOW_SHARE = 0.03
"""... and longer by this share of the step."""
_EVERYWHERE = 0.5


class Links(NamedTuple):
  """How long each process's connections had data on the way, seconds a step."""

  busy: dict[int, float]
  slow: tuple[int, ...]  # processes whose link is the slow one
  excess: float  # by how much longer theirs is busy than the others', s a step
  everywhere: bool  # all about equally


def links(case: Case, begin: int, end: int) -> Links:
  """Reads the counters over blocks `begin` to before `end`."""
  busy = {p: 1e-9 * ns for p, ns in per_step(case.run, case.counted, "tcp_busy_ns", begin, end).items()}
  if len(busy) < 2:
    return Links(busy, (), 0.0, False)
  order = sorted(busy, key=lambda p: -busy[p])
  usual = float(np.median([busy[p] for p in order[1:]]))
  excess = busy[order[0]] - usual
  slow = busy[order[0]] >= _SLOW_RATIO * usual and excess >= _SLOW_SHARE * case.step_time
  everywhere = min(busy.values()) >= _EVERYWHERE * max(busy.values())
  return Links(busy, (order[0],) if slow else (), excess if slow else 0.0, everywhere)


class Slow(NamedTuple):
  """When transfers are slow, and by how much."""

  seconds: float  # above the floor, a step, over the whole run
  confidence: float
  begin: int  # blocks
  end: int
  level: float  # mean transfer in the contended stretch, s
  quiet: float  # and outside of it, or the floor
  bursts: float  # share of the steps that are slow where no stretch stands out; 0 where one does
  links: Links


def look(case: Case) -> Slow | None:
  """Finds out whether transfers are slow in a stretch of the run, now and then, or throughout."""
  counted, transfer = case.counted, case.transfer
  by_block = case.block_means(transfer)
  if not np.isfinite(by_block).any():
    return None
  weights = case.totals.block_steps.sum(axis=0)
  seconds = float(case.floor.contention[:, counted.mask].sum(axis=0).mean())
  floor = float(case.floor.floor.sum())
  points = change_points(by_block[None])[0]
  edges = [0, *points, counted.blocks]
  spans = list(zip(edges[:-1], edges[1:], strict=True))
  level = [float(np.nanmean(by_block[b:e])) if np.isfinite(by_block[b:e]).any() else np.inf for b, e in spans]
  low = min(level)
  raised = [i for i, value in enumerate(level)
            if np.isfinite(value) and value >= (1 + RAISED) * low and value - low >= _SLOW_SHARE * case.step_time]
  if raised and len(raised) < len(spans):
    begin, end = spans[raised[0]][0], spans[raised[-1]][1]
    sure = confidence(merged(by_block[begin:end] - low, weights[begin:end]))
    mean = float(np.nanmean(by_block[begin:end]))
    return Slow(seconds, sure, begin, end, mean, low, 0.0, links(case, begin, end))
  over = transfer[counted.mask] - floor
  over = over[np.isfinite(over)]
  bursts = over > max(_BURST * floor, COSTLY / 2 * case.step_time)
  known = case.floor.known
  if not known and over[bursts].sum() < _BURST * max(over.sum(), 1e-12):
    seconds = 0.0  # unsteady all over, but never slow for long: the collective's own noise
  found = links(case, 0, counted.blocks)
  if found.slow:
    seconds = max(seconds, min(found.excess, float(np.nanmean(by_block))))
  if seconds <= 0:
    return None
  sure = confidence(merged(by_block - floor, weights)) if not found.slow else 0.99
  return Slow(seconds, sure, 0, counted.blocks, float(np.nanmean(by_block)), floor, float(bursts.mean()), found)


def find(case: Case, slow: Slow) -> Finding:
  """Describes slow transfers, and whose link it is as far as that can be told."""
  run, counted = case.run, case.counted
  first = None if slow.begin == 0 else when.series_change(run, counted, case.transfer, slow.begin)
  last = None if slow.end == counted.blocks else when.series_change(run, counted, case.transfer, slow.end) - 1
  spell = when.spell(first, last, was=f"{milliseconds(slow.quiet)} before")
  evidence = [f"The collectives themselves take {milliseconds(slow.level)} a step {spell}; "
              + (f"on a quiet fabric {milliseconds(slow.quiet)} ({case.floor.source})." if first is None else
                 f"the rest of the run shows what they take otherwise ({case.floor.source}).")]
  if slow.bursts and first is None and last is None and not slow.links.slow:
    evidence.append(f"It comes in bursts: {percent(slow.bursts)} of the steps are slow.")
  if not case.floor.known:
    evidence.append("The share is a lower bound: what is slow in every step of the run hides in the floor. "
                    "`--floor` with what `jaxpace bench` measured gives the whole.")
  hosts = hosts_of_processes(run, slow.links.slow)
  evidence += _whose(case, slow)
  share = slow.seconds / case.step_time
  advice = (f"Look at the link of {hosts[0]}: its rate and errors, its cable and port, other traffic of that host."
            if hosts else
            "Look for other traffic on the links that all hosts share (other jobs, storage, checkpoints): place the "
            "job under one switch, shift the jobs' phases (`jaxpace.interleave_jobs`), or send less.")
  ranks = tuple(r for r in range(run.ranks) if int(run.process_of_rank[r]) in slow.links.slow)
  kinds = ("slow_host",) if slow.links.slow else ("trunk",) if _crowded(case, slow) else ()
  return Finding(CONTENTION, share, slow.confidence, ranks, hosts, tuple(evidence), advice, kinds, first, last)


def _crowded(case: Case, slow: Slow) -> bool:
  return slow.links.everywhere and min(slow.links.busy.values()) >= _SLOW_SHARE * case.step_time


def _whose(case: Case, slow: Slow) -> list[str]:
  run, busy = case.run, slow.links.busy
  if len(busy) < 2:
    return ["Whether one host's link is slow or a trunk that all share is crowded can't be told: no TCP counters of "
            "the hosts were sampled (`Recorder(hosts=...)`), or the collectives don't use TCP."]
  said = []
  worst = max(busy, key=lambda p: busy[p])
  others = float(np.median([value for p, value in busy.items() if p != worst]))
  if slow.links.slow:
    said.append(f"The link of {name_process(run, worst)} is the slow one: its connections had data on the way for "
                f"{milliseconds(busy[worst])} a step, the others' for {milliseconds(others)}.")
  elif _crowded(case, slow):
    said.append(f"All hosts' connections are busy alike, {milliseconds(min(busy.values()))} to "
                f"{milliseconds(busy[worst])} a step: the fabric between them is crowded, not one host's link.")
  else:
    said.append(f"The hosts' TCP counters name no single link: {milliseconds(min(busy.values()))} to "
                f"{milliseconds(busy[worst])} a step with data on the way, most on {name_process(run, worst)}.")
  resent = per_step(run, case.counted, "retransmits", slow.begin, slow.end)
  if resent and max(resent.values()) >= 0.01:
    most = max(resent, key=lambda p: resent[p])
    said.append(f"Segments are lost and sent again: up to {resent[most]:.2f} a step on {name_process(run, most)}.")
  return said
