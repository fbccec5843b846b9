"""Two runs compared: step time, shares, ranks, findings, and what was set differently."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from scipy import special

from jaxpace.core.observed import function_of
from jaxpace.core.words import Sentence, list_ranks, plural
from jaxpace.diagnose.diagnosis import Diagnosis
from jaxpace.diagnose.floor import SHARES, seconds_of
from jaxpace.diagnose.forecast_sample import correlation_time
from jaxpace.diagnose.inconclusive import unseen_sentence
from jaxpace.diagnose.limits import INTERVAL, LEAST, LISTED, MIN_STEPS, MOST, SCHEMA
from jaxpace.diagnose.selected_steps import mean_known, ratio
from jaxpace.diagnose.words.codes import ChangeCode, Verdict, codes
from jaxpace.diagnose.words.names import hosts_of, joined, milliseconds, percent, signed
from jaxpace.diagnose.words.notes import Note
from jaxpace.runs.loops import step_found
from jaxpace.runs.run import Run, RunError

_OF_RANKS = (Verdict.PERSISTENT, Verdict.LOCALITY, Verdict.AMPLIFICATION)


class Comparison(NamedTuple):
  """What changed from run A to run B."""

  a: Diagnosis
  b: Diagnosis
  step_time: Change
  shares: dict[str, Change]  # seconds per step, by name in `SHARES`; they sum to the step
  # by how much later each rank arrives than those of which it changed as usual; empty where ranks
  # can't be set beside each other
  ranks: dict[int, Change]
  new: tuple[Verdict, ...]  # modes of findings that only B has
  gone: tuple[Verdict, ...]  # that only A has
  # on findings of one run that the other can't tell: the ranks left no rows there
  inconclusive: tuple[Sentence, ...]
  limit: float | None  # share of A's step time that B may be longer
  failed: bool
  verdict: Sentence
  notes: tuple[Sentence, ...]

  @property
  def changed_ranks(self) -> list[int]:
    """Ranks whose lateness surely changed by 1 % of the step or more, the largest change first."""
    least = LEAST * self.step_time.a
    found = [rank for rank, late in self.ranks.items()
             if late.sure and abs(late.difference) >= least]
    return sorted(found, key=lambda rank: -abs(self.ranks[rank].difference))


def compare(a: Diagnosis, b: Diagnosis, limit: float | None = None) -> Comparison:
  """Compares two diagnosed runs.

  Args:
    a: the run that counts as normal.
    b: the other one.
    limit: B fails where its mean step is longer than A's by more than this share of it, and surely
      longer at all.

  Raises:
    RunError: one of them has fewer than 20 steps that count.
  """
  for diagnosis in (a, b):
    if diagnosis.selected.size < MIN_STEPS:
      raise RunError(f"{diagnosis.run.path} has {plural(diagnosis.selected.size, 'step')} that "
                     f"count; comparing needs {MIN_STEPS} in both runs. Let the job run on.")
  first, second = series(a), series(b)
  whole = change_of_ratio(first["step"], second["step"])
  shares = {name: change(first[name], second[name], len(SHARES)) for name in SHARES}
  failed = limit is not None and whole.relative[0] > limit and whole.low > 0
  modes = [tuple(dict.fromkeys(f.mode for f in d.findings)) for d in (a, b)]
  found = Comparison(
      a, b, whole, shares, _ranks(a, b), *_only_in_one(a, b, modes), limit, failed,
      Sentence(ChangeCode.NONE, ""),
      (*_notes(a, b), Note.BETWEEN_STARTS.say(a=whole.blocks[0], b=whole.blocks[1])))
  return found._replace(verdict=_verdict(found))


def _only_in_one(a: Diagnosis, b: Diagnosis, modes: list[tuple[Verdict, ...]]
                 ) -> tuple[tuple[Verdict, ...], tuple[Verdict, ...], tuple[Sentence, ...]]:
  """Modes new in B, gone in B, and sentences on those of which the other run can't tell whether it
  has them."""
  inconclusive: list[Sentence] = []
  sure: dict[str, list[Verdict]] = {"BA": [], "AB": []}
  for (first, second), one, other, own in (("BA", b, a, modes[1]), ("AB", a, b, modes[0])):
    for mode in own:
      if mode in modes[0] and mode in modes[1]:
        continue
      ranks = {r for f in one.findings if f.mode == mode for r in f.ranks}
      hidden = (sorted(ranks & set(other.unseen))
                or (list(other.unseen) if not ranks and mode in _OF_RANKS else []))
      words = {"mode": mode.replace("_", " ").capitalize(), "one": first, "other": second}
      if hidden:
        inconclusive.append(Note.RANKS_UNSEEN.say(
            **words, rank="ranks" if len(hidden) > 1 else "rank", numbers=list_ranks(hidden)))
      elif other.inconclusive and mode in _OF_RANKS:
        inconclusive.append(Note.UNTOLD.say(**words))
      else:
        sure[first + second].append(mode)
  return tuple(sure["BA"]), tuple(sure["AB"]), tuple(inconclusive)


def series(diagnosis: Diagnosis) -> dict[str, np.ndarray]:
  """[K] seconds of every counted step by share, and "step", their sum."""
  mask, per_step = diagnosis.selected.mask, diagnosis.totals.per_step
  use = mask & np.isfinite(per_step["step"])
  part = {name: np.nan_to_num(values[use]) for name, values in per_step.items()}
  floor = diagnosis.floor
  quiet, contention = (np.nan_to_num(x[:, use]).sum(axis=0)
                       for x in (floor.quiet, floor.contention))
  return {"step": part["step"], **seconds_of(part, quiet, contention)}


def _ranks(a: Diagnosis, b: Diagnosis) -> dict[int, Change]:
  if (a.run.ranks != b.run.ranks or a.run.ranks < 2 or not a.run.collectives
      or not b.run.collectives):
    return {}
  first, second = _lateness(a), _lateness(b)
  with np.errstate(invalid="ignore"):
    moved = mean_known(second) - mean_known(first)
  order = np.argsort(moved, kind="stable")[:int(np.isfinite(moved).sum())]
  cut = max(1, len(order) // 4) if len(order) > 2 else 0
  usual = order[cut:len(order) - cut]
  first, second = (values - mean_known(values[usual], axis=0) if len(usual) else values
                   for values in (first, second))
  found = {}
  for rank in range(a.run.ranks):
    blocks = [x[rank][np.isfinite(x[rank])] for x in (first, second)]
    if min(map(len, blocks)) >= 3:
      found[rank] = from_blocks(blocks[0], blocks[1], a.run.ranks)
  return found


def _lateness(diagnosis: Diagnosis) -> np.ndarray:
  """[R, B] seconds by which a rank arrives after the mean rank, by block of neighbouring steps; NaN
  where absent."""
  return ratio(diagnosis.totals.lateness.sum(axis=0), diagnosis.totals.block_steps)


def _verdict(found: Comparison) -> Sentence:
  whole, relative = found.step_time, found.step_time.relative
  amount = (
      f"{100 * relative[0]:+.1f} % (95 % interval {100 * relative[1]:+.1f} to "
      f"{100 * relative[2]:+.1f} %)")
  said = f"A step takes {milliseconds(whole.b)} instead of {milliseconds(whole.a)}: {amount}"
  if not whole.sure:
    code = ChangeCode.NONE
    sentence = f"No sure change. {said}."
  else:
    code = ChangeCode.SLOWER if whole.difference > 0 else ChangeCode.FASTER
    moved = {name: c for name, c in found.shares.items() if c.sure
             and c.difference * whole.difference > 0}
    name = max(moved, key=lambda n: abs(moved[n].difference), default=None)
    sentence = f"{'Slower' if whole.difference > 0 else 'Faster'}. {said}"
    if name:
      part = signed(moved[name].difference)
      most = abs(moved[name].difference) >= MOST * abs(whole.difference)
      sentence += f", most of it {name} ({part})" if most else f", {part} of it surely in {name}"
    sentence += "."
    if found.changed_ranks and name in ("skew", "runtime", "pacing"):
      top = found.changed_ranks[0]
      host, late = found.b.run.host_of_rank(top), found.ranks[top].difference
      sentence += (f" Rank {top}{f' on {host}' if host else ''} arrives {milliseconds(abs(late))} "
                   f"{'later' if late > 0 else 'earlier'} than before, against the usual rank.")
  sentence = " ".join([sentence, *(f"{letter}: {unseen_sentence(d.run, d.unseen)}"
                                   for letter, d in (("A", found.a), ("B", found.b)) if d.unseen)])
  if found.limit is None:
    return Sentence(code, sentence)
  allowed = f"{100 * found.limit:g} %"
  if found.failed:
    return Sentence(code, f"{sentence} That is above the {allowed} allowed.")
  if relative[0] > found.limit:
    return Sentence(code, f"{sentence} That would be above the {allowed} allowed, but it may be "
                          "chance: more steps would tell.")
  return Sentence(code, f"{sentence} At most {allowed} are allowed.")


def _notes(a: Diagnosis, b: Diagnosis) -> list[Sentence]:
  notes: list[Sentence] = []
  if a.run.id == b.run.id and a.run.window == b.run.window:
    notes.append(Note.SAME_RUN.say())
  hosts = [set(hosts_of(d.run, range(d.run.ranks))) for d in (a, b)]
  if a.run.ranks != b.run.ranks:
    notes.append(Note.RANKS_DIFFER.say(a=plural(a.run.ranks_in_all, "rank"), b=b.run.ranks_in_all))
  if hosts[0] != hosts[1]:
    notes.append(Note.HOSTS_DIFFER.say("devices" if a.run.ranks == b.run.ranks else "hosts",
                     a=_listed(hosts[0]), b=_listed(hosts[1])))
  short, long = sorted((a.selected.size, b.selected.size))
  if short * 4 < long:
    notes.append(Note.STEPS_DIFFER.say(a=a.selected.size, b=b.selected.size))
  notes += [_one_loop(letter, d.run) for letter, d in (("A", a), ("B", b)) if d.run.loops[1:]]
  left_out = [d.in_other_shapes for d in (a, b)]
  if max(left_out) >= LEAST:
    notes.append(Note.SHAPES_LEFT_OUT.say(a=percent(left_out[0]), b=percent(left_out[1])))
  programs = [_programs(d.run) for d in (a, b)]
  if all(programs) and {*map(function_of, programs[0])} != {*map(function_of, programs[1])}:
    notes.append(Note.PROGRAMS_DIFFER.say(a=joined(programs[0]), b=joined(programs[1])))
  plans = [[(c.name, c.bytes) for c in d.run.collectives] for d in (a, b)]
  if plans[0] != plans[1]:
    notes.append(Note.COLLECTIVES_DIFFER.say(a=_collectives(plans[0]), b=_collectives(plans[1])))
  elif (any(d.floor.known for d in (a, b)) != all(d.floor.known for d in (a, b))
        or not a.floor.known):
    notes.append(Note.OWN_FLOOR.say())
  clocks = [d.run.info.get("clock") or d.run.plan.get("clock") for d in (a, b)]
  if clocks[0] != clocks[1]:
    notes.append(Note.CLOCKS_DIFFER.say(a=clocks[0], b=clocks[1]))
  if differing := _settings(a.run, b.run):
    notes.append(Note.SETTINGS_DIFFER.say(settings="; ".join(differing)))
  return notes


def _one_loop(letter: str, run: Run) -> Sentence:
  own, *others = run.loops
  spans = [(loop, *loop.longest) for loop in others[:LISTED]]
  return Note.ONE_LOOP.say(run=letter, step=joined(own.programs), others=joined(
      [f"{joined(loop.programs)} (`--steps-{letter.lower()} {first}:{last + 1}`)"
       for loop, first, last in spans]))


def _programs(run: Run) -> tuple[str, ...]:
  """Names of the programs whose executions are the steps, where those were found; else ()."""
  if run.loops:
    return run.loops[0].programs
  return tuple(step_found(run.info).get("programs") or ())


def _settings(a: Run, b: Run) -> list[str]:
  """What `run.json` says differently of versions, config and pacer."""
  flat = [_flat({name: run.info.get(name) for name in ("versions", "config", "pacer")})
          for run in (a, b)]
  names = [n for n in sorted({*flat[0], *flat[1]}) if flat[0].get(n) != flat[1].get(n)]
  words = [f"{n} {_short(flat[0].get(n))} → {_short(flat[1].get(n))}" for n in names[:8]]
  return words + ([f"and {len(names) - 8} more"] if len(names) > 8 else [])


def _flat(value: Any, path: str = "") -> dict[str, Any]:
  if isinstance(value, dict):
    return {name: leaf for key, inner in value.items()
            for name, leaf in _flat(inner, f"{path}.{key}" if path else str(key)).items()}
  return {} if value is None else {path: value}


def _short(value: Any) -> str:
  text = "none" if value is None else str(value)
  return text if len(text) <= 40 else text[:37] + "..."


def _collectives(plan: list[tuple[str, int | None]]) -> str:
  if not plan:
    return "none"
  size = sum(s or 0 for _, s in plan)
  return plural(len(plan), "collective") + (f" of {size:,} bytes" if size else "")


def _listed(hosts: set[str]) -> str:
  names = sorted(hosts)
  return (", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "") if names
          else "unnamed hosts")


# The comparison as a JSON document.

def to_json(found: Comparison) -> dict[str, Any]:
  """Returns plain lists, dicts and scalars; seconds per step, and shares of A's step where it says
  relative."""
  whole, notable = found.step_time, found.changed_ranks
  return {
      "schema": SCHEMA, "a": _run(found.a), "b": _run(found.b), "level": INTERVAL,
      "step_time": {**whole.to_json(),
                    "relative": dict(zip(("difference", "low", "high"), whole.relative,
                                         strict=True))},
      "shares": {name: c.to_json() for name, c in found.shares.items()},
      "ranks": [{"rank": rank, "host_a": found.a.run.host_of_rank(rank) or None,
                 "host_b": found.b.run.host_of_rank(rank) or None, "notable": rank in notable,
                 **late.to_json()} for rank, late in found.ranks.items()],
      "findings": {"new": [str(mode) for mode in found.new],
                   "gone": [str(mode) for mode in found.gone],
                   "untold": [str(said) for said in found.inconclusive],
                   "untold_codes": codes(found.inconclusive)},
      "fail_above": found.limit, "failed": found.failed, "verdict": str(found.verdict),
      "verdict_code": str(found.verdict.code), "notes": [str(note) for note in found.notes],
      "note_codes": codes(found.notes)}


def _run(diagnosis: Diagnosis) -> dict[str, Any]:
  run = diagnosis.run
  return {"run": run.id, "path": str(run.path), "ranks": run.ranks_in_all,
          "hosts": sorted(hosts_of(run, range(run.ranks))),
          "steps": diagnosis.selected.size, "window": list(run.window),
          "problems": list(run.problems)}


# The change of a mean between two series of steps, with an interval that autocorrelated noise does
# not fool.

# Chosen by hand; no measurement of them is published.
_MOST_BLOCKS, _LEAST_BLOCKS, _MEMORIES = 50, 5, 6


class Change(NamedTuple):
  """Means of two runs and their difference, b - a, with its interval. Seconds."""

  a: float
  b: float
  difference: float
  low: float
  high: float
  blocks: tuple[int, int]  # of neighbouring steps of a and b that the interval is by

  @property
  def sure(self) -> bool:
    """Whether the interval leaves no change out."""
    return self.low > 0 or self.high < 0

  @property
  def relative(self) -> tuple[float, float, float]:
    """Difference, low and high as shares of the mean of a, which is above 0."""
    return self.difference / self.a, self.low / self.a, self.high / self.a

  def to_json(self) -> dict[str, Any]:
    """Returns plain values; seconds."""
    return {**self._asdict(), "sure": self.sure}


def change(a: np.ndarray, b: np.ndarray, tests: int = 1) -> Change:
  """Compares the means of two series of neighbouring steps.

  By means of blocks, 6 times as long as the series remembers (5 to 50 blocks), and Welch's t over
  them.

  Args:
    a: [K] seconds, without NaN.
    b: [L] seconds, without NaN.
    tests: how many such comparisons are looked at together (Bonferroni).
  """
  return from_blocks(blocked(a), blocked(b), tests, float(a.mean()), float(b.mean()))


def blocked(values: np.ndarray) -> np.ndarray:
  """[B] means of blocks of neighbouring steps; the last steps are left out where they fill no
  block."""
  size = len(values)
  memory = correlation_time(values[None]) if size > 3 and float(values.std()) > 0 else 1.0
  count = int(np.clip(size // math.ceil(_MEMORIES * memory), _LEAST_BLOCKS, _MOST_BLOCKS))
  count = min(count, size)
  width = size // count
  return values[:count * width].reshape(count, width).mean(axis=1)


def from_blocks(a: np.ndarray, b: np.ndarray, tests: int = 1, mean_a: float | None = None,
                mean_b: float | None = None) -> Change:
  """The same from means of blocks, 2 or more of each."""
  mean_a = float(a.mean()) if mean_a is None else mean_a
  mean_b = float(b.mean()) if mean_b is None else mean_b
  half = _half_width(a, b, tests)
  difference = mean_b - mean_a
  return Change(mean_a, mean_b, difference, difference - half, difference + half,
                (len(a), len(b)))


def change_of_ratio(a: np.ndarray, b: np.ndarray) -> Change:
  """Compares the means of two series of neighbouring steps that are all above 0, such as step
  times.

  As `change`, but by the logarithm of their ratio: a step can't become shorter by more than itself,
  and neither can the interval.
  """
  mean_a, mean_b, blocks = float(a.mean()), float(b.mean()), (blocked(a), blocked(b))
  # what a mean strays by, relative to itself, its logarithm strays by
  factor = math.exp(_half_width(blocks[0] / mean_a, blocks[1] / mean_b))
  return Change(mean_a, mean_b, mean_b - mean_a, mean_b / factor - mean_a, mean_b * factor - mean_a,
                (len(blocks[0]), len(blocks[1])))


def _half_width(a: np.ndarray, b: np.ndarray, tests: int = 1) -> float:
  """Half of Welch's interval of the difference of two means, Bonferroni over `tests`."""
  # Times are whole nanoseconds: a spread below that is rounding.
  error_a, error_b = (max(float(x.var(ddof=1)) / len(x), 1e-20) for x in (a, b))
  freedom = (error_a + error_b)**2 / (error_a**2 / (len(a) - 1) + error_b**2 / (len(b) - 1))
  return (float(special.stdtrit(freedom, 1 - (1 - INTERVAL) / (2 * tests)))
          * math.sqrt(error_a + error_b))
