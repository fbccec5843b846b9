"""`jaxpace replay`: what a pacer would have done in a recorded run."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxpace.cli import running
from jaxpace.core.words import plain, write_plain

if TYPE_CHECKING:
  from jaxpace.runs.run import Run

EPILOG = """\
The pacer's own code runs over the recorded arrivals, in the model in which a step lasts until its last rank has
arrived. It says what the pacer would have done and cost. It cannot say that pacing helps: see the end of the output.

EXPR is a pacer of jaxpace with its settings. A pacer or factory of your own is given with --pacer-from, which imports
MODULE, and so runs it.

examples:
  jaxpace replay runs/demo --pacer 'pace_early_ranks(window=64, threshold=0.05)'
  jaxpace replay runs/demo --pacer 'chain(pace_early_ranks(), limit(pace_early_ranks(cost=1e-2), 5e-3))'
  jaxpace replay runs/demo --balancer 'share_by_speed(total_micro_batches=32, capacity=16)'
  jaxpace replay runs/demo --pacer-from 'my_pacers:careful(rate=0.1)' --json replay.json
"""  # noqa: E501
LESS = "replay a window of it with --steps A:B"
_NO_STEP = ("{} holds no step in which every recorded rank's arrival is known: nothing can be "
            "replayed.")


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the arguments of `jaxpace replay`."""
  parser.add_argument("run", metavar="RUN", help="run directory")
  which = parser.add_mutually_exclusive_group(required=True)
  which.add_argument("--pacer", metavar="EXPR", help="what to run, see below")
  which.add_argument("--balancer", metavar="EXPR",
                     help="share the work by speed instead, and say what that would have gained")
  which.add_argument("--pacer-from", metavar="MODULE:ATTRIBUTE",
                     help="a pacer of your own; imports MODULE")
  running.add_json(parser, "the result")
  parser.add_argument("--steps", type=running.window, metavar="A:B", default=(None, None),
                      help="only steps A to B - 1, with a pacer that is new at A (default: all)")
  parser.add_argument("--ranks", type=running.ranks, metavar="N", default=10,
                      help="rows of the table of ranks, most delayed first, or 'all' (default: 10)")
  parser.add_argument("--no-share", action="store_true",
                      help="let each rank's pacer see its own arrival only, as with share=None")
  parser.add_argument("--as-recorded", action="store_true",
                      help="show the pacer what was observed, recorded delays included, and "
                           "compare its delays with those recorded: how far the pacer that ran can "
                           "be reproduced")


def run(args: argparse.Namespace) -> running.Answer:
  """Runs the command."""
  # JAX, numpy and Parquet are imported here: `jaxpace --help` needs none of them.
  # an accelerator here may be busy with the job itself
  os.environ.setdefault("JAX_PLATFORMS", "cpu")
  args.progress.during("Starting")
  from jaxpace.cli import pacer_expression
  from jaxpace.core.types import Balancer
  from jaxpace.runs.reader import read_run

  balancer = (pacer_expression.make(args.balancer, Balancer) if args.balancer
              else None)
  pacer = None
  if not balancer:
    pacer = (pacer_expression.import_pacer(args.pacer_from) if args.pacer_from
             else pacer_expression.make(args.pacer))
  recorded = read_run(args.run, window=args.steps, progress=args.progress.counting("Reading"))
  laid_out = _laid_out(args, recorded)
  args.progress.during("Compiling and replaying")
  return (_balanced(args, recorded, balancer, laid_out) if balancer
          else _paced(args, recorded, pacer, laid_out))


def _laid_out(args: argparse.Namespace, run: Run) -> Any:
  """[groups, R] ranks that synchronise with each other along the data axis.

  Raises:
    RunError: the run doesn't say, or has collectives in which not all of them meet.
  """
  from jaxpace.diagnose.groups import fully_grouped
  from jaxpace.runs.groups import groups
  from jaxpace.runs.run import RunError
  parts = fully_grouped(run)
  if parts is None:
    raise RunError(f"{args.run} has collectives in which not all ranks meet that others join: "
                   "groups of several kinds, or transfers from rank to rank. A pacer's ranks all "
                   "wait for all: nothing can be played.")
  laid_out = groups(run.info, run.ranks)
  if len(parts) > 1 and (laid_out is None or len(laid_out) != len(parts)):
    import numpy as np
    laid_out = np.stack(parts) if len({len(ranks) for ranks in parts}) == 1 else None
  if laid_out is None:
    raise RunError(f"run.json of {args.run} does not say which of its {run.ranks} recorded "
                   "ranks synchronise with each other along the data axis, so their arrivals "
                   "can't be put together.")
  return laid_out


def _paced(args: argparse.Namespace, run: Run, pacer: Any, laid_out: Any) -> running.Answer:
  """Plays a pacer."""
  from jaxpace.diagnose.selected_steps import count_steps
  from jaxpace.runs.run import RunError
  from jaxpace.simulation.replay import replay, summarise

  named = args.pacer_from or args.pacer
  settings = run.info.get("settings") or {}
  try:
    replayed = replay(run, pacer, ranks=laid_out[0], max_delay=settings.get("max_delay") or 0.25,
                      slots=settings.get("slots") or 16, shared=not args.no_share,
                      as_recorded=args.as_recorded, progress=args.progress.counting("Replaying"),
                      max_hold=settings.get("max_hold") or 0.25)
  except (ValueError, TypeError) as error:
    raise RunError(f"{named} can't be run on {laid_out.shape[1]} ranks: {error}") from error
  summary = summarise(replayed, count_steps(run).mask, args.as_recorded)
  if summary is None:
    raise RunError(_NO_STEP.format(args.run))
  notes = [*_hold_notes(pacer, summary, args),
           *_notes(run, summary, laid_out, not args.no_share)]
  return running.Answer(
      lambda: write_plain(_text(args, run, summary, notes)),
      lambda: {"schema": 1, "run": run.id, "pacer": named, "shared": not args.no_share,
               "as_recorded": args.as_recorded, **summary, "notes": notes})


def _balanced(args: argparse.Namespace, run: Run, balancer: Any, laid_out: Any
              ) -> running.Answer:
  """Plays the work shared by speed."""
  from jaxpace.diagnose.selected_steps import count_steps
  from jaxpace.runs.run import RunError
  from jaxpace.simulation.shared_work import replay_balancer
  try:
    found = replay_balancer(run, balancer, laid_out[0], count_steps(run).mask)
  except ValueError as error:
    raise RunError(f"{args.balancer} can't be run on {laid_out.shape[1]} ranks: {error}") from error
  if found is None:
    raise RunError(_NO_STEP.format(args.run))
  notes = list(run.problems)
  if len(laid_out) > 1:
    notes.append(
        f"The job has {len(laid_out)} groups of ranks that never meet: the first was replayed.")
  last, took = found["counts"], found["step_time"]
  counts = "/".join(map(str, last[:16])) + ("/..." if len(last) > 16 else "")
  lines = [f"{plain(run.path)}  run {plain(run.id)}: {len(last)} ranks, {found['steps']} steps",
           f"balancer  {args.balancer}", "",
           f"step as recorded       {_ms(took['recorded'])}",
           f"work shared by speed   {_ms(took['with'])}  {found['speedup']:.2f}x",
           f"counts changed         {found['changes']:>10} times; at the end {counts}"]
  lines += _listed(notes, found["cannot_know"])
  return running.Answer(
      lambda: write_plain("\n".join(lines)),
      lambda: {"schema": 1, "run": run.id, "balancer": args.balancer, **found, "notes": notes})


def _hold_notes(pacer: Any, summary: dict[str, Any], args: argparse.Namespace) -> list[str]:
  """What is to be known of a pacer's `hold` in this run."""
  if pacer is None or pacer.hold is None:
    return []
  held = summary["held"]
  if args.no_share:
    return ["Where nothing is shared nothing is held back: it was not asked before collectives."]
  if held is None:
    return ["The run does not say before which collectives its pacer was asked: what this one's "
            "hold would have done is not known, and only its update ran."]
  if not held["on_record"]:
    return ["Nothing was heard on record: what its hold would have done where it listens is not "
            "known."] if held["listened"] else []
  if held["unanswered"]:
    return ["Where it listened more often than the recorded pacer, or than the run keeps, it "
            "learned that nothing is known (NaN): live it would have heard something."]
  return []


def _notes(run: Run, summary: dict[str, Any], laid_out: Any, shared: bool) -> list[str]:
  notes, groups = [], len(laid_out)
  absent = [place for place, rank in enumerate(laid_out[0]) if (run.attempt[rank] < 0).all()]
  if absent:
    who = ", ".join(map(str, absent[:10])) + (" and others" if len(absent) > 10 else "")
    notes.append(f"Rank {who} was never recorded: the steps are played with the others alone. A "
                 "pacer that needs every rank's arrival never gets it here.")
  if left_out := summary["steps_left_out"]:
    notes.append(f"{left_out:,} of {left_out + summary['steps']:,} steps don't count: "
                 "warm-up, or some rank's times are missing. The pacer saw those as unknown (NaN); "
                 "live it may have known more.")
  if shared and not run.plan.get("share", False):
    notes.append("Arrivals were not shared when this was recorded. The pacer was shown them all "
                 "the same, as with share=True; --no-share shows each rank its own only.")
  if groups > 1:
    notes.append(f"The job has {groups} groups of ranks that never meet: the first was replayed.")
  if run.window[0] is not None:
    notes.append(f"The pacer starts new at step {run.window[0]:,}.")
  return [*notes, *run.problems]


def _text(args: argparse.Namespace, run: Run, summary: dict[str, Any], notes: list[str]) -> str:
  from jaxpace.core.words import plural
  ranks, steps, held, took = (summary[name] for name in ("ranks", "steps", "held", "step_time"))
  lines = [
      f"{plain(run.path)}  run {plain(run.id)}: {plural(ranks, 'rank')}, {plural(steps, 'step')}",
      f"pacer  {args.pacer_from or args.pacer}", ""]
  if args.as_recorded:
    lines += ["Shown what was really observed, it asks for the recorded delay in "
              f"{summary['agreement']:.2%} of {ranks * steps:,} cases."]
    if held and held["agreement"] is not None:
      lines.append("Before collectives it asks for what is recorded, and listens as often, in "
                   f"{held['agreement']:.2%} of {held['asked']:,} cases.")
    lines.append("")
  lines += [f"step as recorded       {_ms(took['recorded'])}",
            f"step without {'pacing' if held else 'delays'}    {_ms(took['without'])}",
            f"step with this pacer   {_ms(took['with'])}  {summary['change']:+.3%}",
            f"held back in all       {summary['cost']['total']:10.4f} s  "
            "(sum of L = max(A + d) - max(A))",
            f"active in              {summary['active_share']:10.1%} of steps, longest delay "
            f"{summary['delay']['longest'] * 1e3:.3f} ms"]
  lines += _held_lines(held, steps) if held else []
  lines.append("")
  if summary["active_share"]:
    order = sorted(summary["delay"]["by_rank"].items(), key=lambda one: -one[1]["mean"])
    shown = order if args.ranks is None else order[:args.ranks]
    lines.append("rank   mean delay      delayed in")
    lines += [f"{rank:>4}  {_ms(own['mean'])}  {own['active_share']:>9.1%} of steps"
              for rank, own in shown]
    if len(shown) < ranks:
      lines.append(f"      and {ranks - len(shown)} more (--ranks all)")
  else:
    lines.append("No rank is ever delayed.")
  if summary["columns"]:
    lines += ["", "its columns, on average: "
              + ", ".join(f"{n} {v:.4g}" for n, v in summary["columns"].items())]
  return "\n".join([*lines, *_listed(notes, summary["cannot_know"])])


def _listed(notes: Sequence[str], cannot_know: Sequence[str]) -> list[str]:
  """The end of the text: notes, if there are any, and what nobody can know."""
  return [line for title, sentences in (("Notes", notes), ("What this cannot know", cannot_know))
          if sentences for line in ("", title, *(f"  - {sentence}" for sentence in sentences))]


def _held_lines(held: dict[str, Any], steps: int) -> list[str]:
  listened = f"listened {held['listened']:,} times"
  if held["unanswered"]:
    listened += f", {held['unanswered']:,} of them with no reading on record"
  return [f"collectives held       {_ms(held['mean'])} per step, at most "
          f"{held['longest'] * 1e3:.3f} ms, in {held['active_share']:.1%} of steps; {listened}",
          f"longer by that         {_ms(held['cost']['total'] / steps)} per step"]


def _ms(seconds: float) -> str:
  return f"{seconds * 1e3:10.3f} ms"
