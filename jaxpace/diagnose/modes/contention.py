"""Finds out whether and when transfers take longer than they need: one slow host's link, or the
fabric between all, and describes what it finds."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxpace.core.words import Sentence
from jaxpace.diagnose import tcp
from jaxpace.diagnose.episodes import confidence, joined
from jaxpace.diagnose.lateness import series_changes, spell
from jaxpace.diagnose.limits import MIN_STEPS, NEARLY_ALL, PART, SELDOM, SHOWS, TWICE
from jaxpace.diagnose.mechanism import crowded_processors, per_step
from jaxpace.diagnose.modes.inputs import EvidenceInputs, Finding
from jaxpace.diagnose.selected_steps import merged
from jaxpace.diagnose.waiting_places import most_contended
from jaxpace.diagnose.words.codes import Verdict
from jaxpace.diagnose.words.evidence import Evidence, advise
from jaxpace.diagnose.words.names import (
  hosts_of_processes,
  milliseconds,
  name_process,
  named,
  percent,
)

# Set looking at the fault lab's runs of seeds 0 to 3; measurements/fault_lab_seed4 is what they are
# worth on others.
_CROWDED = 3.5
"""A fabric is crowded throughout if half of the transfers take this many times as long as the
quickest twentieth: competing flows let some through. Hosts with other load on their processors
reach 2.8 (measured); where connections are busy longer as well, `TWICE` is enough."""
_MODES_APART = 6.0
"""Slow and quick steps are two modes, not one wide one, if their means of log transfer are this
many standard deviations apart (Ashman's D; a normal distribution cut in two has 2.7)."""


class SlowTransfers(NamedTuple):
  """When transfers are slow, and by how much."""

  seconds: float  # more than they need, a step, over the whole run
  confidence: float
  begin: int  # blocks
  end: int
  level: float  # mean transfer in the contended stretch, s
  quiet: float  # and outside of it, or the floor
  links: tcp.BusyLinks
  # share of the steps that are slow, where slow and quick ones take turns; 0 where they don't
  bursts: float = 0.0
  # round trips in the contended stretch and outside, s, where both are known
  trips: tuple[float, float] | None = None

  @property
  def queued(self) -> bool:
    """Whether data queue longer on the way in the contended stretch than outside of it."""
    return self.trips is not None and self.trips[0] > tcp.LONGER * self.trips[1]


def look(case: EvidenceInputs) -> SlowTransfers | None:
  """Finds out whether transfers are slow in a stretch of the run, now and then, or throughout.

  Throughout shows only against a known floor, by connections that are busy longer than the quickest
  transfers can keep them, or where one host's link is busy much longer than the others'.
  """
  transfer = case.transfer
  if not np.isfinite(transfer[case.selected.mask]).any():
    return None
  busy = tcp.read(case)
  return (_stretch(case, transfer, busy)
          or _throughout(case, transfer, busy) or _bursts(case, transfer, busy))


def _stretch(case: EvidenceInputs, transfer: np.ndarray,
             busy: tcp.BusyConnections) -> SlowTransfers | None:
  """Slow from a step on, up to one, or in between."""
  by_block = case.selected.medians(transfer)
  spans = case.levels(by_block)
  median = np.array([np.median(v) if v.size else np.inf
                     for v in (_known_in(case, transfer, [span]) for span in spans)])
  slow = np.isfinite(median) & (median >= (1 + PART) * median.min())
  if not slow.any() or slow.all():
    return None
  those, others = ([span for span, is_slow in zip(spans, slow, strict=True) if is_slow == which]
                   for which in (True, False))
  inside, outside = (_known_in(case, transfer, own) for own in (those, others))
  if not outside.size or np.median(inside) - np.median(outside) < SHOWS * case.mean_step:
    return None
  nearly_all = np.quantile(inside, 0.1) >= np.quantile(outside, 0.75)
  most = np.median(inside) >= np.quantile(outside, 0.9)
  if not (nearly_all or most and tcp.says_slower(busy, those, others)):
    return None
  beyond = by_block - float(np.median(outside))
  # Ranks that leave a contended collective apart from each other are part of what it costs.
  inside, outside = (_known_in(case, case.beyond_arrival, own) for own in (those, others))
  if not outside.size or inside.size < max(1, min(MIN_STEPS, case.selected.size / 3)):
    return None
  level, quiet = float(inside.mean()), float(outside.mean())
  if level - quiet < SHOWS * case.mean_step:
    return None
  begin, end = _longest(those)
  blocks = np.concatenate([np.arange(*span) for span in those])
  return SlowTransfers(
      seconds=(level - quiet) * inside.size / case.selected.size,
      confidence=confidence(merged(beyond[blocks], np.ones(len(blocks)))), begin=begin, end=end,
      level=level, quiet=quiet, links=tcp.whose(case, busy, those),
      trips=tcp.typical_trips(busy, those, others))


def _longest(slow: list[tuple[int, int]]) -> tuple[int, int]:
  """From where to where it is slow: neighbouring slow spans that hold most of all slow blocks, else
  all of them."""
  runs = joined(slow)
  longest = max(runs, key=lambda own: own[1] - own[0])
  most = longest[1] - longest[0] >= NEARLY_ALL * sum(end - begin for begin, end in runs)
  return longest if most else (runs[0][0], runs[-1][1])


def _known_in(case: EvidenceInputs, values: np.ndarray, spans: list[tuple[int, int]]) -> np.ndarray:
  """What is known of [K] values in the steps of some spans."""
  return _known(np.concatenate([values[case.selected.within(*span)] for span in spans]))


def _known(values: np.ndarray) -> np.ndarray:
  return values[np.isfinite(values)]


def _throughout(case: EvidenceInputs, transfer: np.ndarray,
                busy: tcp.BusyConnections) -> SlowTransfers | None:
  """Slow in every step: above a floor known from elsewhere, by busy connections, or because of one
  host's link."""
  selected = case.selected
  known = _known(transfer[selected.mask])
  mean, (low, middle) = (float(_known(case.beyond_arrival[selected.mask]).mean()),
                         np.quantile(known, [0.05, 0.5]))
  found, seconds, sure = tcp.whose(case, busy, [(0, selected.blocks)]), 0.0, 0.0
  # What was measured while other load ran is no floor: transfers of the run that are quicker are
  # believed before it.
  quiet = min(float(case.floor.floor.sum()), float(low)) if case.floor.known else float(low)
  slower = tcp.says_slow(busy, quiet, mean - quiet)
  if case.floor.known:
    least = (1 + PART) * quiet if slower else TWICE * quiet
    crowded = float(np.quantile(known, 0.25)) >= least
  else:
    least = TWICE * low if slower else _CROWDED * low
    # On one host there is no network to be crowded: transfers that vary this much wait for
    # processors or memory.
    crowded = (middle >= least and middle - low >= SHOWS * case.mean_step
               and not tcp.on_one_host(case))
  # Processes that wait for a processor make transfers long as well.
  if crowded and (slower is True or slower is None and not crowded_processors(case)):
    seconds = (mean - quiet if case.floor.known or slower
               else float(case.floor.contention[:, selected.mask].sum(axis=0).mean()))
    sure = case.sure(case.selected.means(transfer) - quiet)
  # What the others' links don't need, nor does this one: an estimate, for the floor of such a run
  # hides it.
  excess = found.excess * float(middle)
  # a floor above what the run itself has was measured while other load ran, and says nothing
  if quiet < low:
    excess = min(excess, mean - quiet)
  if found.slow and excess > seconds:
    seconds, sure = excess, 0.99
  if not seconds > 0:
    return None
  return SlowTransfers(
      seconds=seconds, confidence=sure, begin=0, end=selected.blocks, level=mean,
      quiet=mean - seconds, links=found)


def _bursts(case: EvidenceInputs, transfer: np.ndarray,
            busy: tcp.BusyConnections) -> SlowTransfers | None:
  """Slow now and then: two separate modes."""
  selected = case.selected
  known = transfer[selected.mask]
  known = known[np.isfinite(known) & (known > 0)]
  if known.size < MIN_STEPS or crowded_processors(case):
    return None
  order = np.sort(np.log(known))
  number = np.arange(1, len(order))
  total, square = np.cumsum(order), np.cumsum(order**2)
  low, high = total[:-1] / number, (total[-1] - total[:-1]) / (len(order) - number)
  # as Otsu cuts a histogram
  within = square[-1] - number * low**2 - (len(order) - number) * high**2
  cut = int(within.argmin())
  slow = 1 - (cut + 1) / len(order)
  variances = np.array([max(order[:cut + 1].var(), 1e-8), max(order[cut + 1:].var(), 1e-8)])
  apart = float(np.sqrt(2) * (high[cut] - low[cut]) / np.sqrt(variances.sum()))
  ratio = float(np.exp(high[cut] - low[cut]))
  if apart < _MODES_APART or ratio < 1 + PART or not SELDOM <= slow <= 1 - SELDOM:
    return None
  is_slow = np.log(np.maximum(transfer, 1e-12)) > order[cut]
  whole = case.beyond_arrival
  level, quiet = (float(_known(whole[selected.mask & (is_slow == which)]).mean())
                  for which in (True, False))
  beyond = np.where(is_slow, whole - quiet, 0.0)
  return SlowTransfers(
      seconds=(level - quiet) * slow, confidence=case.sure(selected.means(beyond)), begin=0,
      end=selected.blocks, level=level, quiet=quiet, bursts=slow,
      links=tcp.whose(case, busy, [(0, selected.blocks)]))


# Describes transfers that take longer than they need, `fabric_contention`, and whose link that is.

def describe(case: EvidenceInputs, slow: SlowTransfers) -> Finding:
  """Describes slow transfers, and whose link it is as far as that is known."""
  run = case.run
  first, last = series_changes(run, case.selected, case.transfer, slow.begin, slow.end)
  if slow.bursts:
    evidence = [Evidence.TWO_KINDS.say(part=percent(slow.bursts), level=milliseconds(slow.level),
        quiet=milliseconds(slow.quiet))]
  elif first is None and last is None:
    quiet = milliseconds(slow.quiet)
    if case.floor.known:
      quiet = (f"on a quiet fabric {milliseconds(float(case.floor.floor.sum()))} "
               f"({case.floor.source})")
    elif slow.links.slow:
      quiet = f"without that host's link about {quiet}"
    else:
      quiet = f"the quickest about {quiet}"
    evidence = [Evidence.THROUGHOUT.say(level=milliseconds(slow.level), quiet=quiet)]
  else:
    evidence = [Evidence.STRETCH.say(level=milliseconds(slow.level), spell=spell(first, last),
        quiet=milliseconds(slow.quiet))]
  if not case.floor.known:
    evidence.append(Evidence.NEEDS_FLOOR.say())
  at = most_contended(case)
  evidence += [at] if at else []
  evidence += _whose(case, slow)
  processes, sentences = _probed(case, slow)
  evidence += sentences
  hosts = hosts_of_processes(run, processes)
  share = slow.seconds / case.mean_step
  inside = tcp.on_one_host(case)
  advice = advise(Verdict.CONTENTION, "link" if hosts else "host" if inside else "fabric",
                  hosts=named(hosts))
  ranks = tuple(r for r in range(run.ranks) if int(run.process_of_rank[r]) in processes)
  kinds = (("slow_host",) if processes else ("trunk",) if _crowded(case, slow)
           else ("shared_host",) if inside else ())
  return Finding(
      mode=Verdict.CONTENTION, share=share, confidence=slow.confidence, ranks=ranks, hosts=hosts,
      evidence=tuple(evidence), advice=advice, causes=kinds, first_step=first, last_step=last)


def _probed(case: EvidenceInputs, slow: SlowTransfers) -> tuple[tuple[int, ...], list[Sentence]]:
  """Processes with slow links, by the counters, else by a link probe; and what the probe says."""
  if case.links is None:
    return slow.links.slow, []
  said = [Evidence.PROBE.say(says=culprit.sentence()) for culprit in case.links.culprits]
  if not said:
    return slow.links.slow, [Evidence.PROBE_NOTHING.say(why=case.links.cannot_tell or (
        "no host or link was slower than the others when it was made."))]
  host_of = {p.process: p.host for p in case.run.processes}
  named = tuple(p for culprit in case.links.culprits for p in culprit.processes
                if host_of.get(p) in culprit.hosts)
  return slow.links.slow or tuple(dict.fromkeys(named)), said


def _crowded(case: EvidenceInputs, slow: SlowTransfers) -> bool:
  busy = slow.links.busy
  return (len(busy) > 2 and slow.links.everywhere
          and min(busy.values()) >= SHOWS * case.mean_step)


def _whose(case: EvidenceInputs, slow: SlowTransfers) -> list[Sentence]:
  run, busy = case.run, slow.links.busy
  if len(busy) < 2:
    return [Evidence.ONE_HOST.say() if tcp.on_one_host(case) else Evidence.NO_COUNTERS.say()]
  worst = max(busy, key=lambda p: busy[p])
  others = float(np.median([value for p, value in busy.items() if p != worst]))
  least, most = milliseconds(min(busy.values())), milliseconds(busy[worst])
  process = name_process(run, worst)
  if slow.links.slow:
    said = [Evidence.SLOW_LINK.say(process=process, busy=most, others=milliseconds(others))]
  elif _crowded(case, slow):
    said = [Evidence.ALL_BUSY.say(least=least, most=most)]
  elif len(busy) == 2:
    said = [Evidence.BOTH_BUSY.say(least=least, most=most)]
  else:
    said = [Evidence.NO_SINGLE_LINK.say(least=least, most=most, process=process)]
  if slow.queued and slow.trips:
    said.append(Evidence.QUEUE.say(then=milliseconds(slow.trips[0]),
        otherwise=milliseconds(slow.trips[1])))
  resent = per_step(run, case.selected, "retransmits", slow.begin, slow.end)
  if resent and max(resent.values()) >= 0.01:
    worst = max(resent, key=lambda p: resent[p])
    said.append(Evidence.RESENT.say(segments=resent[worst], process=name_process(run, worst)))
  return said
