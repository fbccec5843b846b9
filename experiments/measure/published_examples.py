"""Runs one published example in a process of its own, on made-up data: of published_trainers.py."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import itertools
import json
import pathlib
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple
from unittest import mock

import jax
import numpy as np

import jaxpace
from jaxpace.trace.reader import read_run

# Packages that examples use for data, vocabularies, logs, pictures and annotations alone.
_ASIDE = ("tensorflow", "tensorflow_datasets", "tensorflow_text", "clu", "grain", "sentencepiece",
          "matplotlib", "tensorboard", "tensorboardX", "jaxtyping")
_VOCABULARY, _LENGTH = 256, 16


class Finished(Exception):
  """The steps that were asked for have been taken."""


class Example(NamedTuple):
  """A published file, where its step is made and how its data are."""

  file: str
  how: str
  step: str
  """Name of the compiled step in the file."""
  before: str
  """Line of the file before which the step is there to be observed."""
  start: Callable[[types.ModuleType], Any] | None = None
  """Trains; None where loading the file does."""
  modules: Mapping[str, Callable[[], types.ModuleType]] = types.MappingProxyType({})
  """Modules that stand in for files of the example: its data."""


class Digests:
  """Wraps a step: after each call, of every array its bits; ends the training after `steps`."""

  def __init__(self, step: Any, steps: int, after: Callable[[], None]) -> None:
    self._step, self._steps, self._after = step, steps, after
    self.taken: list[dict[str, str]] = []
    self.last: dict[str, np.ndarray] = {}

  def __getattr__(self, name: str) -> Any:
    return getattr(self._step, name)

  def __call__(self, *args: Any, **named: Any) -> Any:
    out = self._step(*args, **named)
    self._after()
    arrays = dict(_arrays((args, named, out)))
    self.taken.append({path: hashlib.sha256(array.tobytes()).hexdigest()
                       for path, array in arrays.items()})
    if len(self.taken) == self._steps:
      self.last = {path: array for path, array in arrays.items()
                   if np.issubdtype(array.dtype, np.floating)}
      raise Finished
    return out


def _arrays(tree: Any) -> Iterator[tuple[str, np.ndarray]]:
  """Arrays of a tree by path; of flax's modules, of their states; donated ones are gone."""
  from flax import nnx

  def state(leaf: Any) -> Any:
    return nnx.to_pure_dict(nnx.state(leaf)) if isinstance(leaf, nnx.Pytree) else leaf

  tree = jax.tree.map(state, tree, is_leaf=lambda leaf: isinstance(leaf, nnx.Pytree))
  for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
    if not isinstance(leaf, jax.Array) or leaf.is_deleted():
      continue
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
      leaf = jax.random.key_data(leaf)
    array = np.asarray(leaf)
    # numpy writes no bfloat16 to a file.
    yield jax.tree_util.keystr(path), array.astype(np.float32) if array.dtype.kind == "V" else array


def _tokens(step: int, rows: int, length: int = _LENGTH) -> np.ndarray:
  """Text of a chain that a model can learn."""
  rng = np.random.default_rng(step)
  return ((rng.integers(1, _VOCABULARY, (rows, 1)) + np.arange(length) * 3)
          % (_VOCABULARY - 1) + 1).astype(np.int32)


class _Encoder:
  def vocab_size(self) -> int:
    return _VOCABULARY

  def pad_id(self) -> int:
    return 0

  def tokenize(self, text: str) -> Any:
    del text
    return types.SimpleNamespace(numpy=lambda: np.array([3, 4, 2]))


def _module(**names: Any) -> types.ModuleType:
  made = types.ModuleType("made_up")
  vars(made).update(names)
  return made


def _config(module: types.ModuleType, name: str) -> Any:
  """An example's own config. By its path: `configs` is a package of this project, too."""
  path = pathlib.Path(str(module.__file__)).parent / "configs" / f"{name}.py"
  spec = importlib.util.spec_from_file_location(f"published_{name}", path)
  assert spec and spec.loader
  made = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(made)
  return made.get_config()


def _lm1b_data() -> types.ModuleType:
  def get_datasets(n_devices: int, config: Any, vocab_path: str) -> Any:
    del vocab_path
    rows = n_devices * config.per_device_batch_size
    batches = ({"inputs": _tokens(k, rows)} for k in itertools.count())
    return batches, [], [], _Encoder()

  return _module(get_datasets=get_datasets)


def _lm1b(module: types.ModuleType) -> None:
  config = _config(module, "default")
  config.update(per_device_batch_size=2, max_target_length=_LENGTH, max_eval_target_length=_LENGTH,
                max_predict_length=8, num_layers=2, qkv_dim=32, emb_dim=32, mlp_dim=64, num_heads=4,
                vocab_size=_VOCABULARY, save_checkpoints=False, restore_checkpoints=False,
                ici_fsdp_parallelism=4, ici_tensor_parallelism=2, ici_data_parallelism=1,
                warmup_steps=10, use_bfloat16=False)
  # Not of the step: they would run on their own data.
  module.evaluate = lambda **named: {"loss": 0.0}
  module.generate_prediction = lambda **named: ""
  module.train_and_evaluate(config, str(pathlib.Path("lm1b").resolve()))


def _gemma_data() -> types.ModuleType:
  def get_datasets(config: Any, *, vocab_path: str | None = None, data_sharding: Any = None) -> Any:
    del vocab_path
    rows = jax.device_count() * config.per_device_batch_size

    def batches() -> Iterator[dict[str, jax.Array]]:
      for k in itertools.count():
        text = _tokens(k, rows, _LENGTH + 1)
        where = np.broadcast_to(np.arange(_LENGTH, dtype=np.int32), (rows, _LENGTH))
        batch = {"inputs": text[:, :-1], "targets": text[:, 1:], "inputs_position": where,
                 "inputs_segmentation": np.ones((rows, _LENGTH), np.int32)}
        yield {name: jax.device_put(np.ascontiguousarray(one), data_sharding)
               for name, one in batch.items()}

    return batches(), [], _Encoder()

  return _module(get_datasets=get_datasets)


def _gemma(transforms: str) -> Callable[[types.ModuleType], None]:
  def start(module: types.ModuleType) -> None:
    config = _config(module, "tiny")
    small = dict(config.transformer_params, num_layers=2, embed_dim=32, hidden_dim=64, num_heads=4,
                 head_dim=8, attention_types=(1, 1))
    config = dataclasses.replace(
        config, transformer_params=small, vocab_size=_VOCABULARY, per_device_batch_size=2,
        max_target_length=_LENGTH, save_checkpoints=False, restore_checkpoints=False,
        fsdp_parallelism=4, tensor_parallelism=2, warmup_steps=10, use_bfloat16=False,
        use_nnx_transforms=transforms)
    module.train_and_evaluate(config, str(pathlib.Path("gemma").resolve()))

  return start


def _imagenet(module: types.ModuleType) -> None:
  config = _config(module, "default")
  config.update(model="_ResNet1", batch_size=16, num_train_steps=1000, steps_per_eval=1,
                num_epochs=1.0, half_precision=False)

  def batches(*args: Any, **named: Any) -> Iterator[dict[str, np.ndarray]]:
    del args, named
    devices = jax.local_device_count()
    for k in itertools.count():
      rng = np.random.default_rng(k)
      yield {"image": rng.normal(size=(devices, 2, 32, 32, 3)).astype(np.float32),
             "label": rng.integers(0, 1000, (devices, 2)).astype(np.int32)}

  module.create_input_iter = batches
  split = types.SimpleNamespace(num_examples=10**9)
  module.tfds.builder = lambda name: types.SimpleNamespace(
      info=types.SimpleNamespace(splits={"train": split, "validation": split}))
  # Its first checkpoint is looked for with tensorflow's files, which may be stood in for.
  module.restore_checkpoint = lambda state, workdir: state
  module.train_and_evaluate(config, str(pathlib.Path("imagenet").resolve()))


_LOOP = "  # Main Train Loop"
EXAMPLES = {
    "nnx_data_parallel": Example(
        "nnx_toy_examples/04_data_parallel_with_jit.py", "nnx.jit", "train_step",
        "def dataset(steps, batch_size):"),
    "nnx_fsdp": Example(
        "nnx_toy_examples/10_fsdp_and_optimizer.py", "nnx.jit", "train_step",
        "X = np.linspace(-2, 2, 100)[:, None]"),
    "lm1b": Example("lm1b/train.py", "jax.jit with shardings, FSDP x tensor", "jit_train_step",
                    _LOOP, _lm1b, {"input_pipeline": _lm1b_data}),
    "gemma": Example("gemma/train.py", "jax.jit, explicit mesh, FSDP x tensor", "jit_train_step",
                     _LOOP, _gemma("no"), {"input_pipeline": _gemma_data}),
    "gemma_nnx": Example(
        "gemma/train.py", "nnx.jit, explicit mesh, FSDP x tensor", "jit_train_step", _LOOP,
        _gemma("all"), {"input_pipeline": _gemma_data}),
    "imagenet": Example("imagenet/train.py", "jax.pmap", "p_train_step",
                        "  train_metrics = []", _imagenet,
                        {"input_pipeline": lambda: _module(create_split=None)}),
}


def _stand_in() -> list[str]:
  """Puts mocks in the place of packages that aren't installed; returns their names."""
  absent = [name for name in _ASIDE if importlib.util.find_spec(name) is None]

  class Loader(importlib.abc.Loader):
    def create_module(self, spec: Any) -> Any:
      made = mock.MagicMock(name=spec.name)
      made.__path__, made.__spec__ = [], spec
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


def _edited(text: str, example: Example, observed: bool) -> tuple[str, list[str]]:
  """The file's text with the lines that observe the step before `example.before`."""
  lines = text.splitlines(keepends=True)
  at = [i for i, line in enumerate(lines) if line.rstrip("\n") == example.before]
  if not at:
    raise SystemExit(f"{example.file} has no line {example.before!r}: it was rewritten since.")
  step, indent = example.step, " " * (len(example.before) - len(example.before.lstrip()))
  added = [f"{indent}{step} = _jaxpace.observe({step})\n"] if observed else []
  watched = f"{indent}{step} = _watched({step})\n"
  return "".join([*lines[:at[0]], *added, watched, *lines[at[0]:]]), added


def _plan(step: Any) -> dict[str, Any]:
  """What observing found, of the program that ran last."""
  programs = step.plan.programs
  program = programs[-1]
  kinds = collections.Counter(one.kind + (" in a loop" if one.loops else "")
                              for one in program.collectives)
  return {"programs": len(programs), "collectives": dict(kinds), "marks_a_step": program.marks,
          "untimed": len(program.unstamped), "mesh": dict(program.mesh_axes),
          "bare_reasons": [each.bare for each in programs if each.bare],
          "notices": [*program.notices]}


def run(name: str, clone: pathlib.Path, steps: int, observed: bool, folder: pathlib.Path) -> None:
  """Trains; writes left.json and last.npz."""
  example = EXAMPLES[name]
  path = clone / "examples" / example.file
  standing_in = _stand_in()
  for module_name, make in example.modules.items():
    sys.modules[module_name] = make()
  sys.path.insert(0, str(path.parent))
  text, added = _edited(path.read_text(), example, observed)
  # The published files draw from it.
  np.random.seed(0)
  recorders: list[Any] = []
  seen: list[Digests] = []

  def watched(step: Any) -> Any:
    if observed:
      recorders.append(jaxpace.Recorder(folder / "run", step))
      recorders[-1].__enter__()
    seen.append(Digests(step, steps, recorders[-1].record if recorders else lambda: None))
    return seen[-1]

  module = types.ModuleType("train")
  module.__file__ = str(path)
  sys.modules["train"] = module
  vars(module).update(_jaxpace=jaxpace, _watched=watched)
  with contextlib.suppress(Finished):
    exec(compile(text, str(path), "exec"), vars(module))
    if example.start:
      example.start(module)
  digests = seen[-1]
  left: dict[str, Any] = {"digests": digests.taken, "lines_added": len(added) + 2 * len(recorders),
                          "standing_in": standing_in, "reported_steps": None, "plan": {}}
  if observed:
    recorders[-1].__exit__(None, None, None)
    left["plan"] = _plan(digests)
    left["reported_steps"] = _steps_in(folder / "run")
  np.savez(folder / "last.npz", **{str(i): array for i, array in enumerate(digests.last.values())})
  (folder / "left.json").write_text(json.dumps(left))


def _steps_in(run_folder: pathlib.Path) -> int:
  """Steps of the run's rank 0 in its trace."""
  return len(read_run(run_folder).steps)


if __name__ == "__main__":
  run(sys.argv[1], pathlib.Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "observed",
      pathlib.Path(sys.argv[5]))
