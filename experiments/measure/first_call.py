"""What instrumenting costs once: tracing, lowering and compiling a train step, bare and
instrumented, in turns.

    python -m experiments.measure.first_call

Three trainers: the digits CNN (flax.linen), the character transformer (flax.nnx) and a ResNet of 8
bottleneck blocks with batch norm, half as deep as that of flax's imagenet example and narrower.
Every figure is of a process of its own, since JAX keeps what it has traced; a round starts each
kind once. Nothing else should run meanwhile. Writes docs/measurements/first_call.json and .md.
Takes some three minutes.
"""

from __future__ import annotations

import functools
import json
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxpace
from experiments.lib import measured
from experiments.lib.paired import estimate

_MODULE = "experiments.measure.first_call"
_STAGES = ("trace", "lower", "compile")
_ARMS = ("bare", "instrumented")

Built = tuple[Callable[..., Any], Any, Any, bool]  # step, state, batch, check_vma


def define_flags() -> None:
  flags.DEFINE_list("trainers", "digits,chars,resnet", "Which to compile.")
  flags.DEFINE_integer("rounds", 3, "Starts of each kind.", lower_bound=2)
  flags.DEFINE_string("out", "docs/measurements/first_call.json",
                      "File the figures are written to.")
  flags.DEFINE_string("arm", "", "Internal: compile this one alone.")


def _digits() -> Built:
  import optax
  from flax.training.train_state import TrainState

  from experiments.examples.digits.model import CNN
  from experiments.examples.digits.train import train_step

  model = CNN()
  batch = {"image": np.zeros((256, 8, 8, 1), np.float32), "label": np.zeros(256, np.int32)}
  params = model.init(jax.random.key(0), batch["image"][:1])["params"]
  return (train_step, TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-2)),
          batch, False)


def _chars() -> Built:
  import optax
  from flax import nnx

  from experiments.examples.chars.model import Transformer
  from experiments.examples.chars.train import train_step

  model = Transformer(256, 32, 64, 4, 2, rngs=nnx.Rngs(0))
  graphdef, state = nnx.split((model, nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)))
  return functools.partial(train_step, graphdef), state, np.zeros((64, 33), np.int32), True


def _resnet() -> Built:
  import flax.linen as nn
  import optax

  class Block(nn.Module):
    width: int
    stride: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
      norm = functools.partial(nn.BatchNorm, use_running_average=False, momentum=0.9)
      y = nn.relu(norm()(nn.Conv(self.width, (1, 1), use_bias=False)(x)))
      y = nn.relu(norm()(nn.Conv(self.width, (3, 3), (self.stride,) * 2, use_bias=False)(y)))
      y = norm(scale_init=nn.initializers.zeros)(nn.Conv(4 * self.width, (1, 1), use_bias=False)(y))
      if x.shape != y.shape:
        x = norm()(nn.Conv(4 * self.width, (1, 1), (self.stride,) * 2, use_bias=False)(x))
      return nn.relu(x + y)

  class ResNet(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:  # [B, 64, 64, 3] -> [B, 100]
      x = nn.Conv(8, (7, 7), (2, 2), use_bias=False)(x)
      x = nn.relu(nn.BatchNorm(use_running_average=False)(x))
      for stage, blocks in enumerate((2, 2, 2, 2)):
        for block in range(blocks):
          x = Block(8 << stage, 2 if stage and not block else 1)(x)
      return nn.Dense(100)(x.mean((1, 2)))

  model, tx = ResNet(), optax.sgd(0.1, momentum=0.9, nesterov=True)
  batch = (np.zeros((16, 64, 64, 3), np.float32), np.zeros(16, np.int32))
  variables = jax.jit(model.init)(jax.random.key(0), batch[0][:1])

  def step(state: Any, batch: Any) -> Any:
    params, stats, moments = state

    def loss_fn(params: Any) -> Any:
      logits, new = model.apply({"params": params, "batch_stats": stats}, batch[0],
                                mutable=["batch_stats"])
      decay = sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(params) if leaf.ndim > 1)
      loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()
      return loss + 5e-5 * decay, (logits, new["batch_stats"])

    (loss, (logits, new)), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
    grads, loss, new = jax.lax.pmean((grads, loss, new), "data")
    updates, moments = tx.update(grads, moments, params)
    accuracy = jax.lax.pmean((logits.argmax(-1) == batch[1]).mean(), "data")
    return (optax.apply_updates(params,
                                updates), new, moments), {"loss": loss, "accuracy": accuracy}

  params = variables["params"]
  return step, (params, variables["batch_stats"], tx.init(params)), batch, False


_TRAINERS = {"digits": _digits, "chars": _chars, "resnet": _resnet}


def _compile(trainer: str, arm: str) -> dict[str, float]:
  """Seconds of each stage of the step's first call, in this process."""
  step, state, batch, check_vma = _TRAINERS[trainer]()
  mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
  arguments: tuple[Any, ...] = (state, batch)
  if arm == "bare":
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(),
                           check_vma=check_vma)
  else:
    paced = jaxpace.instrument(step, "data")
    spec = jaxpace.spec(mesh)
    mapped = jax.shard_map(paced, mesh=mesh, in_specs=(spec, P(), P("data")), out_specs=(spec, P()),
                           check_vma=check_vma)
    arguments = (paced.init(mesh), *arguments)
  cpu, begin = time.process_time(), time.perf_counter()
  traced = jax.jit(mapped).trace(*arguments)
  at_trace = time.perf_counter()
  lowered = traced.lower()
  at_lower = time.perf_counter()
  lowered.compile()
  stages = np.diff([begin, at_trace, at_lower, time.perf_counter()]).tolist()
  return {**dict(zip(_STAGES, stages, strict=True)), "cpu": time.process_time() - cpu}


def _measure(trainer: str, rounds: int) -> dict[str, Any]:
  found: dict[str, list[dict[str, float]]] = {arm: [] for arm in _ARMS}
  say = measured.progress(trainer, rounds)
  for done in range(rounds):
    for arm in _ARMS:
      command = [sys.executable, "-m", _MODULE, f"--arm={arm}", f"--trainers={trainer}"]
      ended = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
      found[arm].append(json.loads(ended.stdout.splitlines()[-1]))
    say(done + 1)
  total = {arm: np.array([sum(one[stage] for stage in _STAGES) for one in starts])
           for arm, starts in found.items()}
  cpu = {arm: np.array([one["cpu"] for one in starts]) for arm, starts in found.items()}
  return {"seconds": {arm: {stage: round(float(np.median([one[stage] for one in starts])), 3)
                            for stage in _STAGES}
                      for arm, starts in found.items()},
          "total": {arm: estimate(values).to_json() for arm, values in total.items()},
          "percent": estimate((total["instrumented"] / total["bare"] - 1) * 100).to_json(),
          "cpu_s": {arm: estimate(values).to_json() for arm, values in cpu.items()},
          "cpu_percent": estimate((cpu["instrumented"] / cpu["bare"] - 1) * 100).to_json()}


def _lines(figures: dict[str, Any]) -> list[str]:
  lines = measured.introduction("What instrumenting costs once", figures)
  lines += ["Seconds from the first call of a step to its first run: tracing, lowering, compiling; "
            "each start is a process of its own on one device. Medians over rounds; in brackets 95 "
            "% Student intervals, of ratios within a round. CPU is that of all threads: other "
            "programs lengthen it less.", ""]
  rows = []
  for trainer, entry in figures["trainers"].items():
    for arm in _ARMS:
      more = (("", "") if arm == "bare" else (_cell(entry["percent"], ".0f"),
                                              _cell(entry["cpu_percent"], ".0f")))
      rows.append([trainer, arm, *(f"{entry['seconds'][arm][stage]:.2f}" for stage in _STAGES),
                   _cell(entry["total"][arm], ".2f"), _cell(entry["cpu_s"][arm], ".2f"), *more])
  return lines + measured.table(
      ["trainer", "step", *_STAGES, "in all, s", "CPU, s", "more than bare, %", "CPU, %"], rows)


def _cell(interval: list[float], form: str) -> str:
  median, low, high = (format(value, form) for value in interval)
  return f"{median} [{low}, {high}]"


def main(_: list[str]) -> None:
  given = flags.FLAGS
  if unknown := set(given.trainers) - set(_TRAINERS):
    raise app.UsageError(
        f"--trainers: {', '.join(sorted(unknown))} is none of {', '.join(_TRAINERS)}.")
  if given.arm:
    print(json.dumps(_compile(given.trainers[0], given.arm)))
    return
  figures = {**measured.circumstances(_MODULE),
             "trainers": {trainer: _measure(trainer, given.rounds) for trainer in given.trainers}}
  measured.write(figures, _lines(figures), pathlib.Path(given.out))


if __name__ == "__main__":
  define_flags()
  app.run(main)
