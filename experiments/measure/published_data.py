"""How a published example is described, and the synthetic data that such examples train on."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import itertools
import pathlib
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

VOCABULARY, LENGTH = 256, 16


class Example(NamedTuple):
  """A published file, where its step is watched and how its data are."""

  file: str
  """Below the folder of clones."""
  how: str
  """How the step is compiled."""
  edits: tuple[tuple[str, str], ...]
  """Text of the file and what it becomes, in the order of the file: `_watched` (or `_observe` and
  `_digested`) around the step; smaller numbers."""
  start: Callable[[Any], Any] | None = None
  """Trains; None where loading the file does."""
  modules: Mapping[str, Callable[[], types.ModuleType]] = types.MappingProxyType({})
  """Modules that stand in for files of the example: its data."""
  paths: tuple[str, ...] = ()
  """Folders that it imports from, below the folder of clones; none: its own."""
  module: str = "train"
  devices: int = 4


def batches(make: Callable[[int], Any]) -> Iterator[Any]:
  """A batch for each step, without end."""
  return (make(step) for step in itertools.count())


def tokens(step: int, rows: int, length: int = LENGTH) -> np.ndarray:
  """Text of a chain that a model can learn."""
  rng = np.random.default_rng(step)
  return ((rng.integers(1, VOCABULARY, (rows, 1)) + np.arange(length) * 3)
          % (VOCABULARY - 1) + 1).astype(np.int32)


def images_of(step: int, shape: tuple[int, ...], size: int = 32, classes: int = 10
            ) -> tuple[np.ndarray, np.ndarray]:
  """Pictures of shape [*shape, size, size, 3] and their labels; each process has its own."""
  rng = np.random.default_rng((step, jax.process_index()))
  label = rng.integers(0, classes, shape).astype(np.int32)
  noise = rng.normal(size=(*shape, size, size, 3)).astype(np.float32)
  return noise + label[..., None, None, None].astype(np.float32) / classes, label


class Encoder:
  def vocab_size(self) -> int:
    return VOCABULARY

  def pad_id(self) -> int:
    return 0

  def tokenize(self, text: str) -> Any:
    del text
    return types.SimpleNamespace(numpy=lambda: np.array([3, 4, 2]))


def module_of(**names: Any) -> types.ModuleType:
  made = types.ModuleType("made_up")
  made.__spec__ = importlib.machinery.ModuleSpec("made_up", None)
  vars(made).update(names)
  return made


def config_of(module: types.ModuleType, name: str) -> Any:
  """An example's own config. By its path: `configs` is a package of this project, too."""
  path = pathlib.Path(str(module.__file__)).parent / "configs" / f"{name}.py"
  spec = importlib.util.spec_from_file_location(f"published_{name}", path)
  assert spec and spec.loader
  made = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(made)
  return made.get_config()


def parsed(*arguments: str) -> None:
  """The example's command line."""
  from absl import flags
  flags.FLAGS(["train", *arguments])
