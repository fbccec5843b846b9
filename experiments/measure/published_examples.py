"""Runs one published example in a process of its own, bare or observed: of published_trainers.py.

Its file is executed as it is published, but for the example's edits: smaller numbers, and
`_watched` around its step. That observes and records the step where it is asked to, keeps the bits
of all arrays after each step, and ends the training after the steps that were asked for.
"""

from __future__ import annotations

import collections
import hashlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import logging
import os
import pathlib
import sys
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import jax
import numpy as np

import jaxpace
from experiments.measure import published_flax, published_jitted, published_pmapped
from experiments.measure.published_data import Example
from jaxpace.core.observed import ObservedProgram
from jaxpace.runs.reader import read_run

EXAMPLES = published_jitted.EXAMPLES | published_pmapped.EXAMPLES | published_flax.EXAMPLES

# Packages that examples use for data, vocabularies, logs, pictures and annotations alone.
_ASIDE = ("tensorflow", "tensorflow_datasets", "tensorflow_text", "tensorflow_probability", "clu",
          "grain", "sentencepiece", "matplotlib", "tensorboard", "tensorboardX", "jaxtyping",
          "wandb", "tiktoken", "transformers", "datasets", "huggingface_hub", "metrax", "tqdm",
          "mlxu", "diffusers", "seqio", "t5", "cv2", "torch", "gin", "tyro", "mujoco",
          "omegaconf", "hydra", "jumanji", "navix", "colorama", "flashbax", "tenacity",
          "flaxformer")


class Finished(Exception):
  """The steps that were asked for have been taken."""


class Said(logging.Handler):
  """Keeps what jaxpace warns of, with the number of steps taken by then."""

  def __init__(self) -> None:
    super().__init__(logging.WARNING)
    self.steps = 0
    self.kept: list[tuple[int, str]] = []

  def emit(self, record: logging.LogRecord) -> None:
    self.kept.append((self.steps, record.getMessage()))


class Digests:
  """Wraps a step: after each call, of every array its bits; ends the training after `steps`."""

  def __init__(self, step: Any, watch: Watch, held: Callable[[], Any]) -> None:
    self._step, self._watch, self._held = step, watch, held

  def __getattr__(self, name: str) -> Any:
    if name.startswith("_"):
      raise AttributeError(name)
    return getattr(self._step, name)

  def __get__(self, instance: Any, owner: Any = None) -> Any:
    if instance is None:
      return self
    return Digests(self._step.__get__(instance, owner), self._watch, self._held)

  def __call__(self, *args: Any, **named: Any) -> Any:
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((args, named))):
      return self._step(*args, **named)
    self._watch.start()
    out = self._step(*args, **named)
    self._watch.stepped(_arrays((args, named, out, self._held())))
    return out


class Watch:
  """What is done to an example's step: observed, recorded, its bits kept."""

  def __init__(self, folder: pathlib.Path, steps: int, observed: bool) -> None:
    self.folder, self.steps, self.observed = folder, steps, observed
    self.said = Said()
    self.taken: list[dict[str, str]] = []
    self.last: dict[str, np.ndarray] = {}
    self.step: Any = None
    self._context: Any = None
    logging.getLogger("jaxpace").addHandler(self.said)

  def watched(self, step: Any, held: Callable[[], Any] = lambda: ()) -> Any:
    """README's line around the step, where it is to be observed; `held`: its hidden state."""
    return Digests(self._recorded(step) if self.observed else step, self, held)

  def observe(self, step: Any) -> Any:
    """The other form, for steps that something else wraps before they are called."""
    if self.observed:
      self.step = step = jaxpace.observe(step)
    return step

  def digested(self, step: Any, held: Callable[[], Any] = lambda: ()) -> Any:
    """Around what wraps a step that was given to `observe`."""
    if self.observed and not self._context:
      self._context = jaxpace.Recorder(self.folder / "run", self.step)
    return Digests(step, self, held)

  def _recorded(self, step: Any) -> Any:
    self._context = jaxpace.recorded(self.folder / "run", step)
    self.step = self._context.step
    return self._context

  def start(self) -> None:
    if self.observed and not self.taken and not self.said.steps:
      self._context.__enter__()
      self.said.steps = 0

  def stepped(self, arrays: Iterator[tuple[str, np.ndarray]]) -> None:
    if isinstance(self._context, jaxpace.Recorder):
      self._context.record()
    kept = dict(arrays)
    self.taken.append({path: hashlib.sha256(array.tobytes()).hexdigest()
                       for path, array in kept.items()})
    self.said.steps = len(self.taken)
    if len(self.taken) == self.steps:
      self.last = {path: array for path, array in kept.items()
                   if np.issubdtype(array.dtype, np.floating)}
      raise Finished

  def end(self) -> None:
    if self._context is not None and self.taken:
      self._context.__exit__(None, None, None)

  def plan(self) -> dict[str, Any]:
    """What observing found."""
    return facts_of(self.step.plan.programs)


def facts_of(programs: Sequence[ObservedProgram]) -> dict[str, Any]:
  """What is timed of the last of some programs that has timestamps, and why others have none."""
  marked = [one for one in programs if not one.bare]
  kinds = collections.Counter(one.kind + (" in a loop" if one.loops else "")
                              for program in marked[-1:] for one in program.collectives)
  return {"programs": len(programs), "collectives": dict(kinds),
          "marks_a_step": marked[-1].marks if marked else 0,
          "untimed": len(marked[-1].unstamped) if marked else 0,
          "mesh": dict(marked[-1].mesh_axes) if marked else {},
          "bare_reasons": [one.bare for one in programs if one.bare],
          "notices": [notice for one in marked for notice in one.notices]}


def _arrays(tree: Any) -> Iterator[tuple[str, np.ndarray]]:
  """Arrays of a tree by path, this process's part of each; of flax's modules, of their states;
  of references, what they hold; donated ones are gone."""
  from flax import nnx

  def state(leaf: Any) -> Any:
    return nnx.to_pure_dict(nnx.state(leaf)) if isinstance(leaf, nnx.Pytree) else leaf

  tree = jax.tree.map(state, tree, is_leaf=lambda leaf: isinstance(leaf, nnx.Pytree))
  with jax.transfer_guard("allow"):
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
      if isinstance(leaf, jax.Ref):
        leaf = jax.ref.get(leaf)
      if isinstance(leaf, jax.Array) and not leaf.is_deleted():
        yield jax.tree_util.keystr(path), _local(leaf)


def _local(leaf: jax.Array) -> np.ndarray:
  """This process's part of an array, as plain numbers."""
  if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
    leaf = jax.random.key_data(leaf)
  if leaf.is_fully_addressable:
    array = np.asarray(leaf)
  else:
    array = np.stack([np.asarray(shard.data) for shard in leaf.addressable_shards])
  # numpy writes no bfloat16 to a file.
  return array.astype(np.float32) if array.dtype.kind == "V" else array


def stand_in() -> list[str]:
  """Puts mocks in the place of packages that aren't installed; returns their names."""
  absent = [name for name in _ASIDE if importlib.util.find_spec(name) is None]

  class Loader(importlib.abc.Loader):
    def create_module(self, spec: Any) -> Any:
      made = mock.MagicMock(name=spec.name)
      made.__path__, made.__spec__, made.__name__ = [], spec, spec.name
      # Libraries that ask whether an array is another framework's.
      made.Tensor = made.Variable = type("Tensor", (), {})
      return made

    def exec_module(self, module: Any) -> None:
      del module

  class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
      del path, target
      if name.split(".")[0] in absent:
        return importlib.machinery.ModuleSpec(name, Loader(), is_package=True)
      return None

  sys.meta_path.append(Finder())
  return absent


def text_of(path: pathlib.Path) -> str:
  """A file's program; of a notebook, that of its cells."""
  if path.suffix != ".ipynb":
    return path.read_text()
  cells = json.loads(path.read_text())["cells"]
  return "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")


def edited(text: str, example: Example) -> str:
  """The file's text with the example's edits."""
  for old, new in example.edits:
    if old not in text:
      raise SystemExit(f"{example.file} has no {old!r}: it was rewritten since.")
    text = text.replace(old, new, 1)
  return text


class _Edited(importlib.machinery.SourceFileLoader):
  """Loads the example's file with its edits, wherever in a package it lies."""

  def __init__(self, path: pathlib.Path, example: Example, watch: Watch) -> None:
    super().__init__(example.module, str(path))
    self._example, self._watch = example, watch

  def get_code(self, fullname: str) -> Any:
    path = pathlib.Path(self.path)
    return compile(edited(text_of(path), self._example), str(path), "exec")

  def exec_module(self, module: types.ModuleType) -> None:
    watch = self._watch
    vars(module).update(_watched=watch.watched, _observe=watch.observe, _digested=watch.digested)
    super().exec_module(module)


def load(example: Example, sources: pathlib.Path, watch: Watch) -> types.ModuleType:
  """Imports the example's file, its data stood in for."""
  path = sources / example.file

  class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, paths: Any = None, target: Any = None) -> Any:
      del paths, target
      return importlib.util.spec_from_file_location(
          name, path, loader=_Edited(path, example, watch)) if name == example.module else None

  sys.meta_path.insert(0, Finder())
  for folder in example.paths or (str(pathlib.Path(example.file).parent),):
    sys.path.insert(0, str(sources / folder))
  for module_name, make in example.modules.items():
    sys.modules[module_name] = make()
  return importlib.import_module(example.module)


def join() -> None:
  """Joins the other processes, where there are any."""
  if "TRAINER_PROCESS" in os.environ:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        os.environ["TRAINER_COORDINATOR"], int(os.environ["TRAINER_PROCESSES"]),
        int(os.environ["TRAINER_PROCESS"]),
        local_device_ids=[0] if "NCCL_HOSTID" in os.environ else None)


def run(name: str, sources: pathlib.Path, steps: int, observed: bool, folder: pathlib.Path) -> None:
  """Trains; writes left.json and last.npz, each with the number of this process."""
  example = EXAMPLES[name]
  process = os.environ.get("TRAINER_PROCESS", "0")
  join()
  standing_in = stand_in()
  jax.config.update("jax_traceback_filtering", "off")
  # The published files draw from it.
  np.random.seed(0)
  watch, failed = Watch(folder, steps, observed), ""
  try:
    module = load(example, sources, watch)
    if example.start:
      example.start(module)
  except Finished:
    pass
  except BaseException as error:
    failed = "".join(traceback.format_exception(error))
  left: dict[str, Any] = {"digests": watch.taken, "standing_in": standing_in, "failed": failed,
                          "said": watch.said.kept, "plan": {}, "rows": {}}
  watch.end()
  if watch.taken and observed:
    left["plan"] = watch.plan()
  np.savez(folder / f"last{process}.npz", allow_pickle=False, **watch.last)
  (folder / f"left{process}.json").write_text(json.dumps(left))


def rows_of(run_folder: pathlib.Path) -> list[int]:
  """Steps that each rank has in its trace."""
  return [int((steps >= 0).sum()) for steps in read_run(run_folder).all_steps.attempt]


if __name__ == "__main__":
  run(sys.argv[1], pathlib.Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "observed",
      pathlib.Path(sys.argv[5]))
