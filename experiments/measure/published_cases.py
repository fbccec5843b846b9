"""Published examples: which file, where its step is watched, and how little of it is trained."""

from __future__ import annotations

import dataclasses
import importlib.machinery
import importlib.util
import itertools
import pathlib
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple
from unittest import mock

import jax
import numpy as np

_VOCABULARY, _LENGTH = 256, 16


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


def _batches(make: Callable[[int], Any]) -> Iterator[Any]:
  """A batch for each step, without end."""
  return (make(step) for step in itertools.count())


def _tokens(step: int, rows: int, length: int = _LENGTH) -> np.ndarray:
  """Text of a chain that a model can learn."""
  rng = np.random.default_rng(step)
  return ((rng.integers(1, _VOCABULARY, (rows, 1)) + np.arange(length) * 3)
          % (_VOCABULARY - 1) + 1).astype(np.int32)


def _images(step: int, shape: tuple[int, ...], size: int = 32, classes: int = 10
            ) -> tuple[np.ndarray, np.ndarray]:
  """Pictures of shape [*shape, size, size, 3] and their labels; each process has its own."""
  rng = np.random.default_rng((step, jax.process_index()))
  label = rng.integers(0, classes, shape).astype(np.int32)
  noise = rng.normal(size=(*shape, size, size, 3)).astype(np.float32)
  return noise + label[..., None, None, None].astype(np.float32) / classes, label


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
  made.__spec__ = importlib.machinery.ModuleSpec("made_up", None)
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


def _parsed(*arguments: str) -> None:
  """The example's command line."""
  from absl import flags
  flags.FLAGS(["train", *arguments])


# flax.


def _lm1b_data() -> types.ModuleType:
  def get_datasets(n_devices: int, config: Any, vocab_path: str) -> Any:
    del vocab_path
    rows = n_devices * config.per_device_batch_size // jax.process_count()
    batches = _batches(lambda k: {"inputs": _tokens(k, rows)})
    return batches, [], [], _Encoder()

  return _module(get_datasets=get_datasets)


def _lm1b(module: Any) -> None:
  config = _config(module, "default")
  config.update(per_device_batch_size=2, max_target_length=_LENGTH, max_eval_target_length=_LENGTH,
                max_predict_length=8, num_layers=2, qkv_dim=32, emb_dim=32, mlp_dim=64, num_heads=4,
                vocab_size=_VOCABULARY, save_checkpoints=False, restore_checkpoints=False,
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
      text = _tokens(k, rows, _LENGTH + 1)
      where = np.broadcast_to(np.arange(_LENGTH, dtype=np.int32), (rows, _LENGTH))
      made = {"inputs": text[:, :-1], "targets": text[:, 1:], "inputs_position": where,
              "inputs_segmentation": np.ones((rows, _LENGTH), np.int32)}
      return {name: jax.device_put(np.ascontiguousarray(one), data_sharding)
              for name, one in made.items()}

    return _batches(batch), [], _Encoder()

  return _module(get_datasets=get_datasets)


def _gemma(transforms: str) -> Callable[[Any], None]:
  def start(module: Any) -> None:
    config = _config(module, "tiny")
    small = dict(config.transformer_params, num_layers=2, embed_dim=32, hidden_dim=64, num_heads=4,
                 head_dim=8, attention_types=(1, 1))
    config = dataclasses.replace(
        config, transformer_params=small, vocab_size=_VOCABULARY, per_device_batch_size=2,
        max_target_length=_LENGTH, save_checkpoints=False, restore_checkpoints=False,
        fsdp_parallelism=2, tensor_parallelism=2, warmup_steps=10, use_bfloat16=False,
        use_nnx_transforms=transforms)
    module.train_and_evaluate(config, str(pathlib.Path("gemma").resolve()))

  return start


def _flax_imagenet(module: Any) -> None:
  config = _config(module, "default")
  config.update(model="_ResNet1", batch_size=8, num_train_steps=1000, steps_per_eval=1,
                num_epochs=1.0, half_precision=False)

  def batches(*args: Any, **named: Any) -> Iterator[dict[str, np.ndarray]]:
    del args, named
    shape = jax.local_device_count(), 2
    return _batches(lambda k: dict(zip(("image", "label"), _images(k, shape), strict=True)))

  module.create_input_iter = batches
  split = types.SimpleNamespace(num_examples=10**9)
  module.tfds.builder = lambda name: types.SimpleNamespace(
      info=types.SimpleNamespace(splits={"train": split, "validation": split}))
  # Its first checkpoint is looked for with tensorflow's files, which may be stood in for.
  module.restore_checkpoint = lambda state, workdir: state
  module.train_and_evaluate(config, str(pathlib.Path("imagenet").resolve()))


_FLAX = "flax/examples"
_LOOP = "  # Main Train Loop\n"
_JITTED = ((_LOOP, f"  jit_train_step = _watched(jit_train_step)\n{_LOOP}"),)

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
  return _module(mnist=lambda: (images, targets, images[:256], targets[:256]))


# Haiku.


def _haiku_data() -> types.ModuleType:
  def load(split: Any, *, is_training: bool, batch_dims: Any, **named: Any) -> Any:
    del split, is_training, named
    return _batches(lambda k: dict(zip(("images", "labels"), _images(k, tuple(batch_dims)),
                                       strict=True)))

  split = types.SimpleNamespace(num_examples=10**6)
  return _module(Batch=dict, load=load, Split=types.SimpleNamespace(from_string=lambda _: split))


def _haiku(module: Any) -> None:
  _parsed("--train_device_batch_size=2", "--eval_batch_size=8")
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


# big_vision.


def _big_vision_data() -> types.ModuleType:
  def start_global(data: Any, devices: Any, prefetch: int) -> Any:
    del data, prefetch
    import big_vision.utils as u
    rows = 16 // jax.process_count()

    def batch(k: int) -> Any:
      images, labels = _images(k, (rows,))
      return {"image": u.make_fsarray_from_local_slice(images, devices),
              "labels": u.make_fsarray_from_local_slice(np.eye(10, dtype=np.float32)[labels],
                                                        devices)}

    return _batches(batch)

  kind = types.SimpleNamespace(as_numpy_dtype=np.float32)
  spec = {"image": types.SimpleNamespace(shape=(16, 32, 32, 3), dtype=kind)}
  return _module(training=lambda config: (types.SimpleNamespace(element_spec=spec), 10**6),
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
  images, labels = _images(0, (512 // jax.process_count(),), 16)
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
    trainer.train(_batches(lambda k: module.TrainingInput(
        input_tokens=_tokens(k, 8), input_mask=np.ones((8, _LENGTH), np.int32))))


_TUNIX = (("self._jitted_train_step_fn = nnx.jit(\n          train_step, "
           'donate_argnames=("optimizer", "grad_accumulator")\n      )',
           'self._jitted_train_step_fn = _observe(nnx.jit(train_step, donate_argnames=('
           '"optimizer", "grad_accumulator")))'),
          ("    if eval_ds:\n      self._run_eval(",
           "    train_step = _digested(train_step, lambda: (self.model, self.optimizer))\n"
           "    if eval_ds:\n      self._run_eval("))

# NanoDO.


def _nanodo(module: Any) -> None:
  config = _config(module, "default")
  config.update(batch_size=8, workdir="nanodo", checkpoint=False, write_to_xm_measurements=False,
                eval_every_steps=10**9, eval_steps=1, eval_max_target_length=_LENGTH)
  config.model.update(D=32, H=2, L=_LENGTH, N=2, F=64)
  module.data.get_py_tokenizer = lambda path: types.SimpleNamespace(
      GetPieceSize=lambda: _VOCABULARY)
  module.data.py_batched_tfds = lambda **named: _batches(lambda k: _tokens(k, 8))
  module.evaluate = types.SimpleNamespace(Evaluator=lambda *args: types.SimpleNamespace(
      eval=lambda params: {}))
  module.train_and_evaluate(config)


# gpt-jax.


class _AsTensor(NamedTuple):
  array: np.ndarray

  def _numpy(self) -> np.ndarray:
    return self.array


def _gpt_data() -> types.ModuleType:
  def get_dataset(*args: Any, **named: Any) -> Any:
    del args, named
    shape = jax.local_device_count(), 2, _LENGTH + 1
    return (_AsTensor(_tokens(k, shape[0] * shape[1], shape[2]).reshape(shape))
            for k in itertools.count())

  return _module(get_dataset=get_dataset)


def _gpt_line() -> types.ModuleType:
  def cli(kind: Any, default: Any) -> Any:
    del default
    from model import GPTConfig  # type: ignore[import-not-found]
    return kind(batch_size=2, eval_interval=7, eval_steps=2, model=GPTConfig(
        block_size=_LENGTH, vocab_size=_VOCABULARY, num_layers=2, num_heads=2, num_embeds=32))

  return _module(cli=cli)


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
    images, labels = _images(k, (jax.local_device_count(), 4))
    return {"image": images, "label": np.eye(10, dtype=np.float32)[labels]}

  class Data:
    def __iter__(self) -> Any:
      return _batches(batch)

  return _module(get_dataset_info=lambda *_: {"num_classes": 10},
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


# jax-diffusion-transformer.


def _dit_data() -> types.ModuleType:
  return _module(
      load=mock.MagicMock(), split_for_jax_process=mock.MagicMock(),
      as_numpy=lambda data: _batches(lambda k: _images(k, (8,), 16)))


def _dit(module: Any) -> None:
  _parsed("--batch_size=16" if jax.process_count() > 1 else "--batch_size=8",
          "--use_stable_vae=0", "--seed=3")
  module.main([])


_DIT = (("    @partial(jax.pmap, axis_name='data')\n    def update",
         "    @_watched\n    @partial(jax.pmap, axis_name='data')\n    def update"),
        ("float(jax.local_devices()[0].memory_stats()['bytes_limit'])", "0"),
        ("open('data/imagenet_labels.txt').read().splitlines()", "[]"))


# flax, wmt.


def _wmt_data() -> types.ModuleType:
  def get_wmt_datasets(n_devices: int, config: Any, **named: Any) -> Any:
    del named
    rows = n_devices * config.per_device_batch_size
    return _batches(lambda k: {"inputs": _tokens(k, rows), "targets": _tokens(k + 10**6, rows)}
                    ), [], [], _Encoder()

  return _module(get_wmt_datasets=get_wmt_datasets)


def _wmt(module: Any) -> None:
  config = _config(module, "default")
  config.update(per_device_batch_size=2, max_target_length=_LENGTH, max_eval_target_length=_LENGTH,
                max_predict_length=8, num_layers=2, qkv_dim=32, emb_dim=32, mlp_dim=64, num_heads=4,
                save_checkpoints=False, restore_checkpoints=False, num_predict_steps=0,
                eval_every_steps=10**9, num_train_steps=10**6, warmup_steps=10)
  module.evaluate = lambda **named: {"loss": 0.0}
  module.translate_and_calculate_bleu = lambda **named: ("", 0.0)
  module.train_and_evaluate(config, str(pathlib.Path("wmt").resolve()))


# Equinox.

_EQUINOX = (('jax.config.update("jax_num_cpu_devices", 8)\n', ""),
            ("ys = np.sin(xs)", "xs = xs.astype(np.float32)\nys = np.sin(xs)"),
            ('@eqx.filter_jit(donate="all")', '@_watched\n@eqx.filter_jit(donate="all")'))

_FORCED = "os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=8'", ""
# Two processes refuse numbers of 64 bits, which JAX makes 32 bits of, as not the same.
_DRAWN = "yield x, y", "yield np.float32(x), np.float32(y)"
_TOY = "flax/examples/nnx_toy_examples"
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
    "haiku_imagenet": Example(
        "dm-haiku/examples/imagenet/train.py", "jax.pmap", _HAIKU, _haiku,
        {"examples.imagenet.dataset": _haiku_data}, ("dm-haiku",), "examples.imagenet.train"),
    "brax_ppo": Example(
        "brax/brax/training/agents/ppo/train.py", "jax.pmap of a scan",
        (("  # Note that this is NOT a pure jittable method.",
          "  training_epoch = _watched(training_epoch)\n  # Note that this is NOT"),),
        _brax, paths=("brax",), module="brax.training.agents.ppo.train"),
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
    "gpt_jax": Example(
        "gpt-jax/train.py", "jax.pmap, evaluation in between", _GPT, None,
        {"dataset": _gpt_data, "tyro": _gpt_line}),
    "vision_transformer": Example(
        "vision_transformer/vit_jax/train.py", "jax.pmap, accumulation",
        (("return jax.pmap(update_fn, axis_name='batch', donate_argnums=(0,))",
          "return _watched(jax.pmap(update_fn, axis_name='batch', donate_argnums=(0,)))"),
         ("params, opt_state, initial_step = flax_checkpoints.restore_checkpoint(\n      workdir, "
          "(params, opt_state, initial_step))", "")),
        _vit, {"vit_jax.input_pipeline": _vit_data, "vit_jax.checkpoint": lambda: _module(
            load_pretrained=lambda init_params, **named: init_params)},
        ("vision_transformer",), "vit_jax.train"),
    "diffusion_transformer": Example(
        "jax-diffusion-transformer/train_diffusion.py", "jax.pmap of a method", _DIT, _dit,
        {"tensorflow_datasets": _dit_data,
         "utils.stable_vae": lambda: _module(StableVAE=None)}),
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
        _flax_imagenet, {"input_pipeline": lambda: _module(create_split=None)}),
}
