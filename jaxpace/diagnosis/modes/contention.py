"""Transfers take longer than they need: `fabric_contention`. One slow host's link, or the fabric between all."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxpace.diagnosis import when
from jaxpace.diagnosis.changes import change_points
from jaxpace.diagnosis.counted import merged
from jaxpace.diagnosis.counters import per_step
from jaxpace.diagnosis.episodes import confidence
from jaxpace.diagnosis.mechanism import crowded_processors
from jaxpace.diagnosis.modes.case import CONTENTION, Case, Finding
from jaxpace.diagnosis.wording import hosts_of_processes, joined, milliseconds, name_process, percent

RAISED = 0.3
"""Part of the quiet level by which the median transfer of a stretch exceeds it if the stretch is contended. What is
more, nine of ten transfers in it are then slower than three of four outside: a crowded fabric slows nearly all of
them, while other load on the hosts' processors makes some very long and leaves the quickest as they were."""
_BUSIER = 2.5
"""Or half of them are slower than nine of ten outside, and the hosts' connections are busy this many times as long."""
_SHORTEST = 30
"""Steps of a contended stretch, at least."""
_LEAST = 0.03
"""By which the median transfer of a contended stretch is longer, as a share of the step."""
_CROWDED = 3.5
"""A fabric is crowded throughout if half of the transfers take this many times as long as the quickest twentieth:
competing flows let some through. Hosts with other load on their processors reach 2.8 (measured)."""
_MODES_APART = 6.0
"""Slow and quick steps are two modes, not one wide one, if their means of log transfer are this many standard
deviations apart (Ashman's D; a normal distribution cut in two has 2.7)."""
_LEAST_OF_EACH = 0.1
_SLOW_PAIR = 2.5
"""Of two hosts, one's link is the slow one if it is busy this many times as long as the other's."""
_SLOW_SECOND, _SLOW_OTHERS = 1.42, 1.5
"""Of more, if it is busy this many times as long as the next one's, which shares its slow connection, and as long as
the others' on the median ..."""
_SLOW_SHARE = 0.03
"""... and longer by this share of the step."""
_EVERYWHERE = 0.5


class Links(NamedTuple):
  """How long each process's connections had data on the way, seconds a step."""

  busy: dict[int, float]
  slow: tuple[int, ...]  # processes whose link is the slow one
  excess: float  # part of the time theirs is busy that the least busy one does without
  everywhere: bool  # all about equally


def links(case: Case, begin: int, end: int) -> Links:
  """Reads the counters over blocks `begin` to before `end`."""
  busy = {p: 1e-9 * ns for p, ns in per_step(case.run, case.counted, "tcp_busy_ns", begin, end).items()}
  if len(busy) < 2:
    return Links(busy, (), 0.0, False)
  order = sorted(busy, key=lambda p: -busy[p])
  top, rest = busy[order[0]], [busy[p] for p in order[1:]]
  usual = float(np.median(rest))
  alone = (top >= _SLOW_PAIR * rest[0] if len(rest) == 1 else
           top >= _SLOW_SECOND * rest[0] and top >= _SLOW_OTHERS * usual)
  slow = alone and top - usual >= _SLOW_SHARE * case.step_time
  return Links(busy, (order[0],) if slow else (), 1 - rest[-1] / top if slow else 0.0, rest[-1] >= _EVERYWHERE * top)


class Slow(NamedTuple):
  """When transfers are slow, and by how much."""

  seconds: float  # more than they need, a step, over the whole run
  confidence: float
  begin: int  # blocks
  end: int
  level: float  # mean transfer in the contended stretch, s
  quiet: float  # and outside of it, or the floor
  bursts: float  # share of the steps that are slow, where slow and quick ones take turns; 0 where they don't
  links: Links


def look(case: Case) -> Slow | None:
  """Finds out whether transfers are slow in a stretch of the run, now and then, or throughout.

  Throughout shows only against a known floor, or where one host's link is busy much longer than the others'.
  """
  transfer = case.transfer
  if not np.isfinite(transfer[case.counted.mask]).any():
    return None
  return _stretch(case, transfer) or _throughout(case, transfer) or _bursts(case, transfer)


def _stretch(case: Case, transfer: np.ndarray) -> Slow | None:
  """Slow from a step on, up to one, or in between."""
  counted = case.counted
  by_block = case.block_medians(transfer)
  edges = [0, *change_points(by_block[None])[0], counted.blocks]
  spans = list(zip(edges[:-1], edges[1:], strict=True))
  if len(spans) < 2:
    return None
  values = [transfer[counted.within(*span)] for span in spans]
  values = [v[np.isfinite(v)] for v in values]
  median = np.array([np.median(v) if v.size else np.inf for v in values])
  slow = np.isfinite(median) & (median >= (1 + RAISED) * median.min())
  at = np.flatnonzero(slow)
  if not at.size or slow.all():
    return None
  outside = np.concatenate([values[i] for i in range(len(spans)) if not slow[i]])
  inside = np.concatenate([values[i] for i in at])
  if (inside.size < min(_SHORTEST, counted.size / 3)
      or np.median(inside) - np.median(outside) < _LEAST * case.step_time):
    return None
  nearly_all = np.quantile(inside, 0.1) >= np.quantile(outside, 0.75)
  most = np.median(inside) >= np.quantile(outside, 0.9)
  if not nearly_all and not (most and _busier(case, [spans[i] for i in at],
                                              [span for i, span in enumerate(spans) if not slow[i]])):
    return None
  begin, end = spans[at[0]][0], spans[at[-1]][1]
  low = float(outside.mean())
  seconds = max(float(inside.mean()) - low, 0.0) * inside.size / max(1, counted.size)
  blocks = np.concatenate([np.arange(*spans[i]) for i in at])
  sure = confidence(merged(by_block[blocks] - float(np.median(outside)), np.ones(len(blocks))))
  return Slow(seconds, sure, begin, end, float(inside.mean()), low, 0.0, links(case, begin, end))


def _busier(case: Case, inside: list[tuple[int, int]], outside: list[tuple[int, int]]) -> bool:
  """Whether the hosts' connections are busy much longer in some stretches than in others."""
  busy = [[float(np.median(list(own.values()))) for own in (links(case, *span).busy for span in spans) if own]
          for spans in (inside, outside)]
  return bool(busy[0] and busy[1] and float(np.median(busy[0])) >= _BUSIER * float(np.median(busy[1])))


def _throughout(case: Case, transfer: np.ndarray) -> Slow | None:
  """Slow in every step: above a floor known from elsewhere, or because of one host's link."""
  counted, floor = case.counted, float(case.floor.floor.sum())
  known = transfer[counted.mask]
  known = known[np.isfinite(known)]
  found, seconds, sure = links(case, 0, counted.blocks), 0.0, 0.0
  mean = float(known.mean())
  if case.floor.known and float(np.quantile(known, 0.25)) >= (1 + RAISED) * floor:
    seconds = float(case.floor.contention[:, counted.mask].sum(axis=0).mean())
    sure = confidence(merged(case.block_means(transfer) - floor, case.totals.block_steps.sum(axis=0)))
  low, middle = np.quantile(known, [0.05, 0.5])
  if middle >= _CROWDED * low and middle - low >= _LEAST * case.step_time and not case.floor.known:
    seconds = float(case.floor.contention[:, counted.mask].sum(axis=0).mean())
    sure = confidence(merged(case.block_medians(transfer) - floor, case.totals.block_steps.sum(axis=0)))
  if found.slow and found.excess * middle > seconds:
    # What the others' links don't need, nor does this one: an estimate, for the floor of such a run hides it.
    seconds, sure = found.excess * float(middle), 0.99
  if not seconds > 0:
    return None
  return Slow(seconds, sure, 0, counted.blocks, mean, mean - seconds, 0.0, found)


def _bursts(case: Case, transfer: np.ndarray) -> Slow | None:
  """Slow now and then: two modes that can be told apart."""
  counted = case.counted
  known = transfer[counted.mask]
  known = known[np.isfinite(known) & (known > 0)]
  if known.size < 20 or crowded_processors(case):
    return None
  order = np.sort(np.log(known))
  number = np.arange(1, len(order))
  total, square = np.cumsum(order), np.cumsum(order**2)
  low, high = total[:-1] / number, (total[-1] - total[:-1]) / (len(order) - number)
  within = square[-1] - number * low**2 - (len(order) - number) * high**2  # as Otsu cuts a histogram
  cut = int(within.argmin())
  slow = 1 - (cut + 1) / len(order)
  variances = np.array([max(order[:cut + 1].var(), 1e-8), max(order[cut + 1:].var(), 1e-8)])
  apart = float(np.sqrt(2) * (high[cut] - low[cut]) / np.sqrt(variances.sum()))
  ratio = float(np.exp(high[cut] - low[cut]))
  if apart < _MODES_APART or ratio < 1 + RAISED or not _LEAST_OF_EACH <= slow <= 1 - _LEAST_OF_EACH:
    return None
  quiet = float(np.exp(order[:cut + 1]).mean())
  level = float(np.exp(order[cut + 1:]).mean())
  beyond = np.where(np.log(np.maximum(transfer, 1e-12)) > order[cut], transfer - quiet, 0.0)
  sure = confidence(merged(case.block_means(beyond), case.totals.block_steps.sum(axis=0)))
  return Slow((level - quiet) * slow, sure, 0, counted.blocks, level, quiet, slow, links(case, 0, counted.blocks))


def find(case: Case, slow: Slow) -> Finding:
  """Describes slow transfers, and whose link it is as far as that can be told."""
  run, counted = case.run, case.counted
  first = None if slow.begin == 0 else when.series_change(run, counted, case.transfer, slow.begin)
  last = None if slow.end == counted.blocks else when.series_change(run, counted, case.transfer, slow.end) - 1
  if slow.bursts:
    evidence = [f"The collectives come in two kinds: {percent(slow.bursts)} of the steps take "
                f"{milliseconds(slow.level)} in them, the others {milliseconds(slow.quiet)}."]
  elif first is None and last is None:
    evidence = [f"The collectives themselves take {milliseconds(slow.level)} a step throughout; "
                + (f"on a quiet fabric {milliseconds(float(case.floor.floor.sum()))} ({case.floor.source})."
                   if case.floor.known else f"without that host's link about {milliseconds(slow.quiet)}.")]
  else:
    evidence = [f"The collectives themselves take {milliseconds(slow.level)} a step {when.spell(first, last)}, "
                f"{milliseconds(slow.quiet)} in the rest of the run."]
  if not case.floor.known:
    evidence.append("What is slow in every step of the run alike can't be seen without a known floor: `--floor` takes "
                    "what `jaxpace bench` measured.")
  evidence += _whose(case, slow)
  processes, told = _probed(case, slow)
  evidence += told
  hosts = hosts_of_processes(run, processes)
  share = slow.seconds / case.step_time
  advice = (f"Look at the link of {joined(hosts)}: its rate and errors, its cable and port, other traffic on it."
            if hosts else
            "Look for other traffic on the links that all hosts share (other jobs, storage, checkpoints): place the "
            "job under one switch, shift the jobs' phases (`jaxpace.interleave_jobs`), or send less.")
  ranks = tuple(r for r in range(run.ranks) if int(run.process_of_rank[r]) in processes)
  kinds = ("slow_host",) if processes else ("trunk",) if _crowded(case, slow) else ()
  return Finding(CONTENTION, share, slow.confidence, ranks, hosts, tuple(evidence), advice, kinds, first, last)


def _probed(case: Case, slow: Slow) -> tuple[tuple[int, ...], list[str]]:
  """Processes with slow links, by the counters, else by a link probe; and what the probe says."""
  if case.links is None:
    return slow.links.slow, []
  said = [f"The link probe: {culprit.sentence()}" for culprit in case.links.culprits]
  if not said:
    return slow.links.slow, ["The link probe names nothing: " + (
        case.links.cannot_tell or "no host or link was slower than the others when it was made.")]
  host_of = {p.process: p.host for p in case.run.processes}
  named = tuple(p for culprit in case.links.culprits for p in culprit.processes if host_of.get(p) in culprit.hosts)
  return slow.links.slow or tuple(dict.fromkeys(named)), said


def _crowded(case: Case, slow: Slow) -> bool:
  busy = slow.links.busy
  return len(busy) > 2 and slow.links.everywhere and min(busy.values()) >= _SLOW_SHARE * case.step_time


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
  elif len(busy) == 2:
    said.append(f"Both hosts' connections are busy, {milliseconds(min(busy.values()))} and {milliseconds(busy[worst])} "
                "a step: of two hosts, one's slow link and a crowded one between them look alike.")
  else:
    said.append(f"The hosts' TCP counters name no single link: {milliseconds(min(busy.values()))} to "
                f"{milliseconds(busy[worst])} a step with data on the way, most on {name_process(run, worst)}.")
  resent = per_step(run, case.counted, "retransmits", slow.begin, slow.end)
  if resent and max(resent.values()) >= 0.01:
    most = max(resent, key=lambda p: resent[p])
    said.append(f"Segments are lost and sent again: up to {resent[most]:.2f} a step on {name_process(run, most)}.")
  return said
