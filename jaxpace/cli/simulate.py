"""`jaxpace simulate`: jobs on a fabric, from a config file, written as recorded runs."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import os
import pathlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jaxpace.cli import running
from jaxpace.core.words import write_plain
from jaxpace.files import UserError

if TYPE_CHECKING:
  from jaxpace.simulation.settings import JobSettings, Scenario

EPILOG = """\
CONFIG is a Python file with a get_config() (it is run, and may name a pacer of your own as MODULE:ATTRIBUTE), or a JSON
file, which is data: nothing in it is run. configs/simulate.py shows every field.
The pacers are the live ones, unchanged. Each job becomes a run directory, DIR itself or DIR/<job> with several jobs, on
which `jaxpace report`, `replay` and the others work as on a real one.

examples:
  jaxpace simulate configs/simulate.py
  jaxpace simulate configs/simulate.py --output runs/simulated && jaxpace report runs/simulated/a
  jaxpace simulate configs/simulate.py --set steps=500 --set jobs.a.pacer='pace_early_ranks()'
"""  # noqa: E501
LESS = "simulate fewer steps, or fewer ranks"


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the arguments of `jaxpace simulate`."""
  parser.add_argument("config", metavar="CONFIG",
                      help="Python file with get_config(), or JSON file")
  parser.add_argument("--output", metavar="DIR", help="write each job as a recorded run")
  parser.add_argument("--set", metavar="FIELD=VALUE", action="append", default=[],
                      help="change a field of the config, such as jobs.a.forward=0.02; may be "
                           "given often")
  running.add_json(parser, "the figures")


def run(args: argparse.Namespace) -> running.Answer:
  """Runs the command."""
  os.environ.setdefault("JAX_PLATFORMS", "cpu")  # an accelerator here may be busy with a job
  progress = args.progress
  progress.during("Starting")
  from jaxpace.cli import pacer_expression
  from jaxpace.files.folders import ForeignFileError
  from jaxpace.simulation import scenario as scenarios
  from jaxpace.simulation import settings
  from jaxpace.simulation.record import RunWriter

  writers: list[RunWriter] = []
  whole = False
  try:
    if args.output == "":
      raise UserError("--output is empty: name a directory.")
    config = load(args.config, args.set)
    scenario = settings.read(config, functools.partial(
        pacer_expression.make, imports=args.config.endswith(".py")))
    for job in scenario.jobs if args.output else ():
      writers.append(RunWriter(_place(args.output, scenario, job), job, scenario, config))
    adding = [scenarios.Adding() for _ in scenario.jobs]
    total, done = scenario.steps * len(scenario.jobs), 0
    progress.during("Compiling and simulating")
    for index, steps in scenarios.run(scenario):
      adding[index].add(steps)
      if writers:
        writers[index].write(steps, progress.counting("Writing"))
      done += len(steps.step_time)
      progress.counting("Simulating")(done, total)
    for writer in writers:
      writer.close()
    whole = True
  except (settings.SettingsError, ForeignFileError) as error:
    raise UserError(str(error)) from error
  except OSError as error:
    raise UserError(f"{args.output} can't be written: {error.strerror or error}.") from error
  finally:
    if not whole:
      for writer in writers:
        writer.discard()
  summaries = [each.summary(job, scenario.seed)
               for each, job in zip(adding, scenario.jobs, strict=True)]
  return running.Answer(lambda: write_plain(_text(args, scenario, summaries)),
                        lambda: _document(scenario, summaries))


def load(path: str, changes: list[str]) -> dict[str, Any]:
  """Reads a config file and applies `--set`.

  Raises:
    UserError: there is no such file, it fails, or it returns something else.
  """
  file = pathlib.Path(path)
  if not file.is_file():
    raise UserError(f"there is no file {path}.")
  if file.suffix == ".py":
    config = _plain(_from_python(file))
  else:
    try:
      config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
      raise UserError(
          f"{path} is not a JSON file: {error}. A Python config ends in .py.") from error
  if not isinstance(config, dict):
    raise UserError(f"{path} gives a {type(config).__name__}; a dict of fields is needed.")
  for change in changes:
    _set(config, change)
  return config


def _from_python(file: pathlib.Path) -> Any:
  spec = importlib.util.spec_from_file_location("jaxpace_simulate_config", file)
  assert spec is not None and spec.loader is not None
  module = importlib.util.module_from_spec(spec)
  try:
    spec.loader.exec_module(module)
    return module.get_config()
  except ModuleNotFoundError as error:
    raise UserError(
        f"{file} needs {error.name}, which is not installed: pip install {error.name}.") from error
  except (Exception, SystemExit) as error:  # whatever the user's file does
    raise UserError(
        f"{file} fails: {type(error).__name__}: {error}. It must define get_config().") from error


def _plain(config: Any) -> Any:
  to_dict = getattr(config, "to_dict", None)
  config = to_dict() if to_dict else config
  if isinstance(config, Mapping):
    return {key: _plain(value) for key, value in config.items()}
  return config


def _set(config: dict[str, Any], change: str) -> None:
  name, equals, text = change.partition("=")
  if not equals:
    raise UserError(f"--set {change} must be FIELD=VALUE, such as jobs.a.forward=0.02.")
  *path, last = name.strip().split(".")
  place: Any = config
  for key in path:
    place = place.get(key) if isinstance(place, dict) else None
    if not isinstance(place, dict):
      raise UserError(f"--set {change}: there is no section {'.'.join(path)} in the config.")
  try:
    place[last] = json.loads(text)
  except (ValueError, RecursionError):
    place[last] = text  # a word, or a pacer


def _place(output: str, scenario: Scenario, job: JobSettings) -> pathlib.Path:
  return pathlib.Path(output) if len(scenario.jobs) == 1 else pathlib.Path(output) / job.name


def _text(args: argparse.Namespace, scenario: Scenario, summaries: list[dict[str, Any]]) -> str:
  fabric = scenario.fabric
  titles = "".join(f"{title:>13}" for title in ("mean", "median", "p99"))
  lines = [f"{fabric.nodes:,} nodes of {fabric.per_node}, oversubscription "
           f"{fabric.oversubscription:g}, seed {scenario.seed}", "",
           f"{'job':<12}{'ranks':>7}{'steps':>9}{titles}{'CV':>8}"
           f"{'alone':>13}{'waiting':>13}{'transfer':>13}"]
  for job, found in zip(scenario.jobs, summaries, strict=True):
    figures = [f"{found['cv']:>8.3f}" if name == "cv" else _ms(found[name])
               for name in ("mean", "median", "p99", "cv", "alone", "earliness", "transfer")]
    lines.append(f"{job.name:<12}{job.shape.ranks:>7,}{found['steps']:>9,}{''.join(figures)}")
  for job, found in zip(scenario.jobs, summaries, strict=True):
    if job.pacer:
      lines += ["", f"{job.name} is paced by {job.pacer_text}: mean delay "
                    f"{found['delay'] * 1e3:.3f} ms, which held a step back by "
                    f"{found['cost'] * 1e3:.4f} ms ({found['cost'] / found['mean']:.3%})."]
      if job.pacer.hold is not None:
        lines += ["What it holds back before collectives is not simulated, only its delays."]
    if s := found.get("failures"):
      lines += ["", f"{job.name} with failures: {s['elapsed']:,.0f} s in all, "
                    f"{s['work'] / s['elapsed']:.1%} of it steps that last; checkpoints "
                    f"{s['checkpoints']:,.0f} s, {s['failures']:,} failures lose {s['lost']:,.0f} "
                    f"s, restarts {s['restarts']:,.0f} s."]
  if args.output:
    lines += ["", *(f"Written: {_place(args.output, scenario, job)}" for job in scenario.jobs)]
  return "\n".join(lines)


def _document(scenario: Scenario, summaries: list[dict[str, Any]]) -> dict[str, Any]:
  jobs = {job.name: {"ranks": job.shape.ranks, "pacer": job.pacer_text or None, **found}
          for job, found in zip(scenario.jobs, summaries, strict=True)}
  return {"schema": 1, "seed": scenario.seed, "nodes": scenario.fabric.nodes,
          "oversubscription": scenario.fabric.oversubscription, "jobs": jobs}


def _ms(seconds: float) -> str:
  return f"{seconds * 1e3:>10,.3f} ms"
