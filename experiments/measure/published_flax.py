"""Flax's examples: linen's and nnx's."""

from __future__ import annotations

import dataclasses
import pathlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from experiments.measure.published_data import (
  LENGTH,
  VOCABULARY,
  Encoder,
  Example,
  batches,
  config_of,
  images_of,
  module_of,
  tokens,
)

# flax.


def _lm1b_data() -> types.ModuleType:
  def get_datasets(n_devices: int, config: Any, vocab_path: str) -> Any:
    del vocab_path
    rows = n_devices * config.per_device_batch_size // jax.process_count()
    return batches(lambda k: {"inputs": tokens(k, rows)}), [], [], Encoder()

  return module_of(get_datasets=get_datasets)


def _lm1b(module: Any) -> None:
  config = config_of(module, "default")
  config.update(per_device_batch_size=2, max_target_length=LENGTH, max_eval_target_length=LENGTH,
                max_predict_length=8, num_layers=2, qkv_dim=32, emb_dim=32, mlp_dim=64, num_heads=4,
                vocab_size=VOCABULARY, save_checkpoints=False, restore_checkpoints=False,
                ici_fsdp_parallelism=2, ici_tensor_parallelism=2, ici_data_parallelism=1,
                warmup_steps=10, use_bfloat16=False)
  # Not of the step: they would run on their own data.
  module.evaluate = lambda **named: {"loss": 0.0}
  module.generate_prediction = lambda **named: ""
  module.train_and_evaluate(config, str(pathlib.Path("lm1b").resolve()))


def _gemma_data() -> types.ModuleType:
  def get_datasets(config: Any, *, vocab_path: str | None = None, data_sharding: Any = None) -> Any:
    del vocab_path
    rows = jax.device_count() * config.per_device_batch_size

    def batch(k: int) -> dict[str, jax.Array]:
      text = tokens(k, rows, LENGTH + 1)
      where = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), (rows, LENGTH))
      made = {"inputs": text[:, :-1], "targets": text[:, 1:], "inputs_position": where,
              "inputs_segmentation": np.ones((rows, LENGTH), np.int32)}
      return {name: jax.device_put(np.ascontiguousarray(one), data_sharding)
              for name, one in made.items()}

    return batches(batch), [], Encoder()

  return module_of(get_datasets=get_datasets)


def _gemma(transforms: str) -> Callable[[Any], None]:
  def start(module: Any) -> None:
    config = config_of(module, "tiny")
    small = dict(config.transformer_params, num_layers=2, embed_dim=32, hidden_dim=64, num_heads=4,
                 head_dim=8, attention_types=(1, 1))
    config = dataclasses.replace(
        config, transformer_params=small, vocab_size=VOCABULARY, per_device_batch_size=2,
        max_target_length=LENGTH, save_checkpoints=False, restore_checkpoints=False,
        fsdp_parallelism=2, tensor_parallelism=2, warmup_steps=10, use_bfloat16=False,
        use_nnx_transforms=transforms)
    module.train_and_evaluate(config, str(pathlib.Path("gemma").resolve()))

  return start


def _flax_imagenet(module: Any) -> None:
  config = config_of(module, "default")
  config.update(model="_ResNet1", batch_size=8, num_train_steps=1000, steps_per_eval=1,
                num_epochs=1.0, half_precision=False)

  def create(*args: Any, **named: Any) -> Iterator[dict[str, np.ndarray]]:
    del args, named
    shape = jax.local_device_count(), 2
    return batches(lambda k: dict(zip(("image", "label"), images_of(k, shape), strict=True)))

  module.create_input_iter = create
  split = types.SimpleNamespace(num_examples=10**9)
  module.tfds.builder = lambda name: types.SimpleNamespace(
      info=types.SimpleNamespace(splits={"train": split, "validation": split}))
  # Its first checkpoint is looked for with tensorflow's files, which may be stood in for.
  module.restore_checkpoint = lambda state, workdir: state
  module.train_and_evaluate(config, str(pathlib.Path("imagenet").resolve()))


_FLAX = "flax/examples"
_LOOP = "  # Main Train Loop\n"
_JITTED = ((_LOOP, f"  jit_train_step = _watched(jit_train_step)\n{_LOOP}"),)

# flax, wmt.


def _wmt_data() -> types.ModuleType:
  def get_wmt_datasets(n_devices: int, config: Any, **named: Any) -> Any:
    del named
    rows = n_devices * config.per_device_batch_size
    return batches(lambda k: {"inputs": tokens(k, rows), "targets": tokens(k + 10**6, rows)}
                    ), [], [], Encoder()

  return module_of(get_wmt_datasets=get_wmt_datasets)


def _wmt(module: Any) -> None:
  config = config_of(module, "default")
  config.update(per_device_batch_size=2, max_target_length=LENGTH, max_eval_target_length=LENGTH,
                max_predict_length=8, num_layers=2, qkv_dim=32, emb_dim=32, mlp_dim=64, num_heads=4,
                save_checkpoints=False, restore_checkpoints=False, num_predict_steps=0,
                eval_every_steps=10**9, num_train_steps=10**6, warmup_steps=10)
  module.evaluate = lambda **named: {"loss": 0.0}
  module.translate_and_calculate_bleu = lambda **named: ("", 0.0)
  module.train_and_evaluate(config, str(pathlib.Path("wmt").resolve()))

_FORCED = "os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=8'", ""
# Two processes refuse numbers of 64 bits, which JAX makes 32 bits of, as not the same.
_DRAWN = "yield x, y", "yield np.float32(x), np.float32(y)"
_TOY = "flax/examples/nnx_toy_examples"

EXAMPLES = {
    "wmt": Example(
        f"{_FLAX}/wmt/train.py", "jax.pmap",
        ((_LOOP, f"  p_train_step = _watched(p_train_step)\n{_LOOP}"),), _wmt,
        {"input_pipeline": _wmt_data}),
    "nnx_data_parallel": Example(
        f"{_TOY}/04_data_parallel_with_jit.py", "nnx.jit",
        (_FORCED, _DRAWN, ("def dataset(", "train_step = _watched(train_step)\ndef dataset("),
         ("jax.local_device_count()", "jax.device_count()"))),
    "nnx_fsdp": Example(
        f"{_TOY}/10_fsdp_and_optimizer.py", "nnx.jit",
        (_FORCED, ("device_mesh((2, 4))", "device_mesh((2, 2))"),
         ("yield X[idx], Y[idx]", "yield np.float32(X[idx]), np.float32(Y[idx])"),
         ("X = np.linspace(", "train_step = _watched(train_step)\nX = np.linspace("),)),
    "lm1b": Example(f"{_FLAX}/lm1b/train.py", "jax.jit with shardings, FSDP x tensor", _JITTED,
                    _lm1b, {"input_pipeline": _lm1b_data}),
    "gemma": Example(f"{_FLAX}/gemma/train.py", "jax.jit, explicit mesh, FSDP x tensor", _JITTED,
                     _gemma("no"), {"input_pipeline": _gemma_data}),
    "gemma_nnx": Example(
        f"{_FLAX}/gemma/train.py", "nnx.jit, explicit mesh, FSDP x tensor", _JITTED,
        _gemma("all"), {"input_pipeline": _gemma_data}),
    "flax_imagenet": Example(
        f"{_FLAX}/imagenet/train.py", "jax.pmap",
        (("  train_metrics = []",
          "  p_train_step = _watched(p_train_step)\n  train_metrics = []"),),
        _flax_imagenet, {"input_pipeline": lambda: module_of(create_split=None)}),
}
