"""Published trainers whose step `jax.jit` compiles, or what wraps that."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from experiments.measure.published_data import (
  LENGTH,
  VOCABULARY,
  Example,
  batches,
  config_of,
  images_of,
  module_of,
  tokens,
)

# jax.


def _cookbook(dtype: str) -> Callable[[Any], None]:
  def start(module: Any) -> None:
    module.train_loop(module.Config(
        mesh_shape=(jax.device_count(),), seq_length=32, host_batch_size=8, num_layers=2,
        embed_dim=64, mlp_dim=128, num_heads=4, head_dim=16, dtype=dtype, learning_rate=1e-3))

  return start


_COOKBOOK = (("@jax.jit\ndef train_step", "@_watched\n@jax.jit\ndef train_step"),
             ("    time.sleep(0.5)\n", ""))


def _mnist() -> types.ModuleType:
  rng = np.random.default_rng(0)
  labels = rng.integers(0, 10, 2048)
  images = (rng.normal(size=(2048, 784)) + labels[:, None] / 10).astype(np.float32)
  targets = np.eye(10, dtype=np.float32)[labels]
  return module_of(mnist=lambda: (images, targets, images[:256], targets[:256]))

# big_vision.


def _big_vision_data() -> types.ModuleType:
  def start_global(data: Any, devices: Any, prefetch: int) -> Any:
    del data, prefetch
    import big_vision.utils as u
    rows = 16 // jax.process_count()

    def batch(k: int) -> Any:
      images, labels = images_of(k, (rows,))
      return {"image": u.make_fsarray_from_local_slice(images, devices),
              "labels": u.make_fsarray_from_local_slice(np.eye(10, dtype=np.float32)[labels],
                                                        devices)}

    return batches(batch)

  kind = types.SimpleNamespace(as_numpy_dtype=np.float32)
  spec = {"image": types.SimpleNamespace(shape=(16, 32, 32, 3), dtype=kind)}
  return module_of(training=lambda config: (types.SimpleNamespace(element_spec=spec), 10**6),
                 start_global=start_global)


def _big_vision(module: Any) -> None:
  import ml_collections
  config = ml_collections.ConfigDict({
      "model_name": "vit", "model": {
          "width": 32, "depth": 2, "mlp_dim": 64, "num_heads": 2, "patch_size": (8, 8),
          "pool_type": "gap", "posemb": "learn", "rep_size": False},
      "num_classes": 10, "total_steps": 1000, "input": {"batch_size": 16}, "evals": {},
      "pp_modules": [], "log_training_steps": 5, "optax_name": "scale_by_adam",
      "optax": {"mu_dtype": "bfloat16"}, "grad_clip_norm": 1.0, "lr": 1e-3, "wd": 1e-4,
      "loss": "softmax_xent", "mixup": {"p": 0.2},
      "schedule": {"warmup_steps": 5, "decay_type": "cosine"},
      "sharding_strategy": [(".*", 'fsdp(axis="data")')]})
  module.flags = types.SimpleNamespace(FLAGS=types.SimpleNamespace(config=config, workdir=None))
  module.main([])

# Keras.


def _keras(module: Any) -> None:
  del module
  import keras
  keras.utils.set_random_seed(0)
  keras.distribution.set_distribution(keras.distribution.DataParallel(devices=[
      f"cpu:{device.id}" for device in jax.devices()], auto_shard_dataset=False))
  model = keras.Sequential([
      keras.Input((16, 16, 3)), keras.layers.Conv2D(8, 3, activation="relu"),
      keras.layers.BatchNormalization(), keras.layers.Flatten(), keras.layers.Dropout(0.1),
      keras.layers.Dense(10)])
  model.compile(optimizer=keras.optimizers.AdamW(1e-3), metrics=["accuracy"],
                loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
  images, labels = images_of(0, (512 // jax.process_count(),), 16)
  model.fit(images, labels, batch_size=16, epochs=100, shuffle=False, verbose=0)

# Tunix.


def _tunix(module: Any) -> None:
  import optax
  from flax import nnx
  from tunix.tests import test_common
  mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, -1), ("fsdp", "tp"))
  model = test_common.get_lora_model(test_common.ToyTransformer(
      test_common.ModelConfig(num_layers=2), rngs=nnx.Rngs(0)), mesh=mesh)
  trainer = module.PeftTrainer(model, optax.adamw(1e-3), module.TrainingConfig(
      eval_every_n_steps=10**6, max_steps=10**6)).with_gen_model_input_fn(lambda data: {
          "input_tokens": data.input_tokens, "input_mask": data.input_mask,
          "positions": jax.numpy.arange(data.input_tokens.shape[1]),
          "attention_mask": jax.numpy.ones_like(data.input_tokens)})
  with mesh:
    trainer.train(batches(lambda k: module.TrainingInput(
        input_tokens=tokens(k, 8), input_mask=np.ones((8, LENGTH), np.int32))))


_TUNIX = (("self._jitted_train_step_fn = nnx.jit(\n          train_step, "
           'donate_argnames=("optimizer", "grad_accumulator")\n      )',
           'self._jitted_train_step_fn = _observe(nnx.jit(train_step, donate_argnames=('
           '"optimizer", "grad_accumulator")))'),
          ("    if eval_ds:\n      self._run_eval(",
           "    train_step = _digested(train_step, lambda: (self.model, self.optimizer))\n"
           "    if eval_ds:\n      self._run_eval("))

# NanoDO.


def _nanodo(module: Any) -> None:
  config = config_of(module, "default")
  config.update(batch_size=8, workdir="nanodo", checkpoint=False, write_to_xm_measurements=False,
                eval_every_steps=10**9, eval_steps=1, eval_max_target_length=LENGTH)
  config.model.update(D=32, H=2, L=LENGTH, N=2, F=64)
  module.data.get_py_tokenizer = lambda path: types.SimpleNamespace(
      GetPieceSize=lambda: VOCABULARY)
  module.data.py_batched_tfds = lambda **named: batches(lambda k: tokens(k, 8))
  module.evaluate = types.SimpleNamespace(Evaluator=lambda *args: types.SimpleNamespace(
      eval=lambda params: {}))
  module.train_and_evaluate(config)

# Equinox.

_EQUINOX = (('jax.config.update("jax_num_cpu_devices", 8)\n', ""),
            ("ys = np.sin(xs)", "xs = xs.astype(np.float32)\nys = np.sin(xs)"),
            ('@eqx.filter_jit(donate="all")', '@_watched\n@eqx.filter_jit(donate="all")'))

EXAMPLES = {
    "cookbook_float32": Example(
        "jax/docs/the-training-cookbook.py", "jax.jit, references, explicit mesh", _COOKBOOK,
        _cookbook("float32")),
    "cookbook_bfloat16": Example(
        "jax/docs/the-training-cookbook.py", "jax.jit, references, explicit mesh", _COOKBOOK,
        _cookbook("bfloat16")),
    "spmd_mnist": Example(
        "jax/examples/spmd_mnist_classifier_fromscratch.py", "jax.jit, mesh set and unset",
        (("@jax.jit(donate_argnums=0)", "@_watched\n@jax.jit(donate_argnums=0)"),
         ('if __name__ == "__main__":', "if True:"),
         ("scale * rng.randn(m, n), scale * rng.randn(n)",
          "np.float32(scale * rng.randn(m, n)), np.float32(scale * rng.randn(n))"),
         ("[784, 1024, 1024, 10]", "[784, 64, 64, 10]")),
        modules={"datasets": _mnist}),
    "equinox": Example(
        "equinox/docs/examples/parallelism.ipynb", "eqx.filter_jit", _EQUINOX),
    "big_vision": Example(
        "big_vision/big_vision/train.py", "jax.jit with shardings, transfers disallowed",
        (("  @functools.partial(\n      jax.jit,\n      donate_argnums=(0,),",
          "  @_watched\n  @functools.partial(\n      jax.jit,\n      donate_argnums=(0,),"),),
        _big_vision, {"big_vision.input_pipeline": _big_vision_data}, ("big_vision",),
        "big_vision.train"),
    "keras_fit": Example(
        "keras/keras/src/backend/jax/trainer.py", "jax.jit, in `fit`",
        (("        step_function = self._make_function(train_step)\n",
          "        train_step = _watched(train_step)\n"
          "        step_function = self._make_function(train_step)\n"),),
        _keras, paths=("keras",), module="keras.src.backend.jax.trainer"),
    "tunix_peft": Example(
        "tunix/tunix/sft/peft_trainer.py", "nnx.jit, cached_partial", _TUNIX, _tunix,
        paths=("tunix",), module="tunix.sft.peft_trainer"),
    "nanodo": Example(
        "nanodo/nanodo/train.py", "jax.jit with shardings, FSDP",
        (("  @property\n  def step(self)",
          "    self.step_fn = _watched(self.step_fn)\n\n  @property\n  def step(self)"),),
        _nanodo, paths=("nanodo",), module="nanodo.train"),
}
