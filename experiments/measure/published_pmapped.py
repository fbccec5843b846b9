"""Published trainers whose step `jax.pmap` compiles."""

from __future__ import annotations

import itertools
import types
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.measure.published_data import (
  LENGTH,
  VOCABULARY,
  Example,
  batches,
  images_of,
  module_of,
  parsed,
  tokens,
)

# Haiku.


def _haiku_data() -> types.ModuleType:
  def load(split: Any, *, is_training: bool, batch_dims: Any, **named: Any) -> Any:
    del split, is_training, named
    return batches(lambda k: dict(zip(("images", "labels"), images_of(k, tuple(batch_dims)),
                                       strict=True)))

  split = types.SimpleNamespace(num_examples=10**6)
  return module_of(Batch=dict, load=load, Split=types.SimpleNamespace(from_string=lambda _: split))


def _haiku(module: Any) -> None:
  parsed("--train_device_batch_size=2", "--eval_batch_size=8")
  module.main(["train"])


_HAIKU = (("ResNet50(1000,", "ResNet((1, 1, 1, 1), 1000, bottleneck=False, "
           "channels_per_group=(8, 8, 16, 16), "),
          ("@functools.partial(jax.pmap", "@_watched\n@functools.partial(jax.pmap"),
          ("hk.nets.ResNet50, mp_policy", "hk.nets.ResNet, mp_policy"))

# brax.


def _brax(module: Any) -> None:
  from brax import envs
  module.train(envs.get_environment("fast"), num_timesteps=10**6, episode_length=64,
               num_envs=16, batch_size=8, num_minibatches=4, unroll_length=5, num_evals=1000,
               num_updates_per_batch=2, normalize_observations=True, run_evals=False, seed=3)

# gpt-jax.


class _AsTensor(NamedTuple):
  array: np.ndarray

  def _numpy(self) -> np.ndarray:
    return self.array


def _gpt_data() -> types.ModuleType:
  def get_dataset(*args: Any, **named: Any) -> Any:
    del args, named
    shape = jax.local_device_count(), 2, LENGTH + 1
    return (_AsTensor(tokens(k, shape[0] * shape[1], shape[2]).reshape(shape))
            for k in itertools.count())

  return module_of(get_dataset=get_dataset)


def _gpt_line() -> types.ModuleType:
  def cli(kind: Any, default: Any) -> Any:
    del default
    from model import GPTConfig  # type: ignore[import-not-found]
    return kind(batch_size=2, eval_interval=7, eval_steps=2, model=GPTConfig(
        block_size=LENGTH, vocab_size=VOCABULARY, num_layers=2, num_heads=2, num_embeds=32))

  return module_of(cli=cli)


_GPT = (("@partial(jax.pmap, axis_name='batch')\ndef train_step",
         "@_watched\n@partial(jax.pmap, axis_name='batch')\ndef train_step"),
        ("return frozen_dict.freeze(param_mask)", "return param_mask"),
        ('if __name__ == "__main__":', "if True:"),
        ("checkpoints.restore_checkpoint(\n        f'{config.out_dir}/checkpoints/train_state', "
         "train_state)", "train_state"),
        ("if (val_loss < best_val_loss):", "if False:"))

# vision_transformer.


def _vit_data() -> types.ModuleType:
  def batch(k: int) -> dict[str, np.ndarray]:
    images, labels = images_of(k, (jax.local_device_count(), 4))
    return {"image": images, "label": np.eye(10, dtype=np.float32)[labels]}

  class Data:
    def __iter__(self) -> Any:
      return batches(batch)

  return module_of(get_dataset_info=lambda *_: {"num_classes": 10},
                 get_datasets=lambda config: (Data(), Data()), prefetch=lambda data, count: data)


def _vit(module: Any) -> None:
  import ml_collections
  config = ml_collections.ConfigDict({
      "dataset": "made up", "pretrained_dir": ".", "total_steps": 1000, "base_lr": 0.03,
      "decay_type": "cosine", "warmup_steps": 5, "grad_norm_clip": 1, "accum_steps": 2,
      "prefetch": 1, "progress_every": 5, "eval_every": 0, "checkpoint_every": 0, "batch": 16,
      "batch_eval": 16, "model": {
          "model_name": "tiny", "hidden_size": 32, "patches": {"size": (8, 8)},
          "classifier": "token", "representation_size": None, "transformer": {
              "mlp_dim": 64, "num_heads": 2, "num_layers": 2, "attention_dropout_rate": 0.0,
              "dropout_rate": 0.1}}})
  module.train_and_evaluate(config, "vit")

EXAMPLES = {
    "haiku_imagenet": Example(
        "dm-haiku/examples/imagenet/train.py", "jax.pmap", _HAIKU, _haiku,
        {"examples.imagenet.dataset": _haiku_data}, ("dm-haiku",), "examples.imagenet.train"),
    "brax_ppo": Example(
        "brax/brax/training/agents/ppo/train.py", "jax.pmap of a scan",
        (("  # Note that this is NOT a pure jittable method.",
          "  training_epoch = _watched(training_epoch)\n  # Note that this is NOT"),),
        _brax, paths=("brax",), module="brax.training.agents.ppo.train"),
    "gpt_jax": Example(
        "gpt-jax/train.py", "jax.pmap, evaluation in between", _GPT, None,
        {"dataset": _gpt_data, "tyro": _gpt_line}),
    "vision_transformer": Example(
        "vision_transformer/vit_jax/train.py", "jax.pmap, accumulation",
        (("return jax.pmap(update_fn, axis_name='batch', donate_argnums=(0,))",
          "return _watched(jax.pmap(update_fn, axis_name='batch', donate_argnums=(0,)))"),
         ("params, opt_state, initial_step = flax_checkpoints.restore_checkpoint(\n      workdir, "
          "(params, opt_state, initial_step))", "")),
        _vit, {"vit_jax.input_pipeline": _vit_data, "vit_jax.checkpoint": lambda: module_of(
            load_pretrained=lambda init_params, **named: init_params)},
        ("vision_transformer",), "vit_jax.train"),
}
