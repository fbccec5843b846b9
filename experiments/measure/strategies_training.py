"""Trains the digits CNN on simulated workers in one process, each with its own images, by any
strategy.

Which gradients count, and how old their parameters are, comes from the simulated schedule; the rest
is real: gradients, optimizers (optax), messages encoded and decoded, errors fed back. Seeds and
learning rates run side by side.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

from experiments.examples.digits import data
from experiments.examples.digits.model import CNN
from experiments.measure import compression
from jaxpace.simulation.strategies.settings import Compressed, LocalSteps, Strategy
from jaxpace.simulation.strategies.timeline import CommonSteps, Updates

Optimizer = Callable[[Any], optax.GradientTransformation]
"""Makes an optimizer of a learning rate, which may be traced."""


class Task(NamedTuple):
  """What is trained: images of each worker, and the images held out."""

  image: jax.Array  # [R, M, 8, 8, 1] float32
  label: jax.Array  # [R, M] int32
  test_image: jax.Array  # [T, 8, 8, 1]
  test_label: jax.Array  # [T]
  batch: jax.Array  # [B] as many as a worker takes images a step; the values don't matter


class Curve(NamedTuple):
  """How training went: one point every so many steps, the first before any."""

  done: np.ndarray  # [E] steps (of rounds) or updates done
  loss: np.ndarray  # [E, ...] over all training images
  accuracy: np.ndarray  # [E, ...] share of the held-out images


def task(ranks: int, batch: int) -> Task:
  """The digits, shuffled and dealt to the workers in equal parts."""
  train, test = data.load()
  each = len(train["label"]) // ranks
  image, label = (jnp.asarray(x[:each * ranks].reshape(ranks, each, *x.shape[1:]))
                  for x in (train["image"], train["label"]))
  return Task(image, label, jnp.asarray(test["image"]), jnp.asarray(test["label"]),
              jnp.zeros((batch,)))


@functools.cache
def _model() -> tuple[CNN, Callable[[jax.Array], Any]]:
  model = CNN()
  _, unflatten = ravel_pytree(
      model.init(jax.random.key(0), jnp.zeros((1, 8, 8, 1), jnp.float32))["params"])
  return model, unflatten


def begin(key: jax.Array) -> jax.Array:
  """The parameters before training, as one vector."""
  return ravel_pytree(_model()[0].init(key, jnp.zeros((1, 8, 8, 1), jnp.float32))["params"])[0]


def logits(params: jax.Array, image: jax.Array) -> jax.Array:
  """[B, 8, 8, 1] images -> [B, 10]."""
  model, unflatten = _model()
  return model.apply({"params": unflatten(params)}, image)


def loss(params: jax.Array, image: jax.Array, label: jax.Array) -> jax.Array:
  """Mean cross-entropy."""
  return optax.softmax_cross_entropy_with_integer_labels(logits(params, image), label).mean()


def gradient(task: Task, params: jax.Array, key: jax.Array, rank: jax.Array) -> jax.Array:
  """The gradient of a batch that a worker draws of its own images: [n]."""
  drawn = jax.random.randint(key, task.batch.shape, 0, task.label.shape[1])
  return jax.grad(loss)(params, task.image[rank, drawn], task.label[rank, drawn])


def measured(task: Task, params: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Loss over all training images, and the share of the held-out ones that are told right."""
  whole = task.image.reshape(-1, *task.image.shape[2:]), task.label.ravel()
  right = logits(params, task.test_image).argmax(-1) == task.test_label
  return loss(params, *whole), right.mean()


def in_rounds(task: Task, strategy: Strategy, schedule: CommonSteps, optimizer: Optimizer,
              rates: Any, keys: jax.Array, points: int) -> Curve:
  """Trains with gradients that are averaged: every step, or every so many local ones.

  Args:
    task: what is trained.
    strategy: `Compressed` and `LocalSteps` change what is averaged, `Backup` by the schedule whose
      gradients count.
    schedule: K steps; K must be a multiple of `points`.
    optimizer: of the step, or of the local steps.
    rates: [L] learning rates.
    keys: [S] of parameters and batches; the same for every strategy to be compared.
    points: at which loss and accuracy are measured, besides the start.

  Returns:
    Curves with axes [E, L, S].
  """
  counted = jnp.asarray(schedule.counted, jnp.float32)
  rows = jnp.arange(len(counted), dtype=jnp.int32), counted
  changing = strategy if isinstance(strategy, (Compressed, LocalSteps)) else None
  train = _local if isinstance(strategy, LocalSteps) else _averaging
  return _curve(_all(train, changing, optimizer, points, task, rows, rates, keys), len(counted),
                points)


def one_by_one(task: Task, schedule: Updates, optimizer: Optimizer, rates: Any, keys: jax.Array,
               points: int) -> Curve:
  """Trains with gradients that are applied one by one, each made of parameters as old as the
  schedule says.

  Of R workers, R updates are as many images as one synchronous step: the rate of an update is the
  R-th part.

  Args:
    task, optimizer, rates, keys, points: as for `in_rounds`.
    schedule: U updates; those beyond the last multiple of `points` are left out.
  """
  ranks = task.label.shape[0]
  count = len(schedule.time) // points * points
  # how many updates the rank had made before: its own number of the step
  turns = np.empty(count, np.int32)
  for r in range(ranks):
    own = np.flatnonzero(schedule.rank[:count] == r)
    turns[own] = np.arange(len(own))
  rows = tuple(jnp.asarray(x, jnp.int32) for x in
               (np.arange(count), turns, schedule.rank[:count], schedule.delay[:count]))
  # A power of two, so that schedules that differ little share one compiled program.
  longest = 1 << max(5, int(schedule.delay[:count].max()).bit_length())
  return _curve(_all(_applying, longest, optimizer, points, task, rows, rates, keys), count, points)


def _averaging(strategy: Compressed | None, optimizer: Optimizer, points: int, task: Task,
               rows: Any, rate: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
  way, first, ranks = optimizer(rate), begin(key), len(task.label)

  def step(carry: Any, row: Any) -> Any:
    params, state, errors = carry
    number, weight = row
    gradients = jax.vmap(lambda r: gradient(task, params, _drawn(key, number, r), r))(
        jnp.arange(ranks))
    if strategy:
      mean, errors = compression.averaged(strategy, gradients, errors)
    else:
      mean = weight @ gradients / jnp.sum(weight)
    changes, state = way.update(mean, state, params)
    return (optax.apply_updates(params, changes), state, errors), None

  start = first, way.init(first), compression.no_errors(ranks, len(first))
  return _points(task, step, start, rows, points, lambda carry, _: carry[0])


def _local(strategy: LocalSteps, optimizer: Optimizer, points: int, task: Task, rows: Any,
           rate: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
  way, first, ranks = optimizer(rate), begin(key), len(task.label)
  outer = optax.sgd(strategy.outer_rate, strategy.outer_momentum or None,
                    nesterov=strategy.outer_momentum > 0)

  def step(carry: Any, row: Any) -> Any:
    own, states, shared, outer_state = carry
    number, _ = row
    gradients = jax.vmap(lambda p, r: gradient(task, p, _drawn(key, number, r), r))(
        own, jnp.arange(ranks))
    changes, states = jax.vmap(way.update)(gradients, states, own)
    own = optax.apply_updates(own, changes)

    def meet(_: None) -> Any:
      change, after = outer.update(shared - jnp.mean(own, axis=0), outer_state, shared)
      met = optax.apply_updates(shared, change)
      return jnp.broadcast_to(met, own.shape), met, after

    own, shared, outer_state = jax.lax.cond(
        (number + 1) % strategy.every == 0, meet, lambda _: (own, shared, outer_state), None)
    return (own, states, shared, outer_state), None

  own = jnp.broadcast_to(first, (ranks, len(first)))
  start = own, jax.vmap(way.init)(own), first, outer.init(first)
  # Measured is what a checkpoint would hold: the parameters after the last exchange.
  return _points(task, step, start, rows, points, lambda carry, _: carry[2])


def _applying(longest: int, optimizer: Optimizer, points: int, task: Task, rows: Any,
              rate: jax.Array, key: jax.Array
              ) -> tuple[jax.Array, jax.Array]:
  way, first = optimizer(rate / len(task.label)), begin(key)

  def step(carry: Any, row: Any) -> Any:
    past, state = carry  # [D, n] parameters after the last D updates, in a ring
    number, turn, rank, delay = row
    params = past[number % longest]
    made = gradient(task, past[(number - delay) % longest], _drawn(key, turn, rank), rank)
    changes, state = way.update(made, state, params)
    return (past.at[(number + 1) % longest].set(optax.apply_updates(params, changes)), state), None

  start = jnp.zeros((longest, len(first)), jnp.float32).at[0].set(first), way.init(first)
  return _points(task, step, start, rows, points, lambda carry, done: carry[0][done % longest])


def _drawn(key: jax.Array, number: jax.Array, rank: jax.Array) -> jax.Array:
  """The key of a worker's batch: it depends on its own step alone, so that all strategies draw the
  same images."""
  return jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(key, 1), number), rank)


def _points(task: Task, step: Any, start: Any, rows: Any, points: int,
            newest: Any) -> tuple[jax.Array, jax.Array]:
  """Runs the steps in equal pieces and measures before the first one and after each: two [E].

  `newest` gives the parameters to measure, of what is carried and the number of steps done.
  """
  pieces = jax.tree.map(lambda leaf: leaf.reshape(points, -1, *leaf.shape[1:]), rows)
  length = jax.tree.leaves(pieces)[0].shape[1]

  def piece(carry: Any, given: Any) -> Any:
    number, rows = given
    carry, _ = jax.lax.scan(step, carry, rows)
    return carry, measured(task, newest(carry, (number + 1) * length))

  before = measured(task, newest(start, 0))
  _, after = jax.lax.scan(piece, start, (jnp.arange(points), pieces))
  return jax.tree.map(lambda first, rest: jnp.concatenate([first[None], rest]), before, after)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _all(train: Any, what: Any, optimizer: Optimizer, points: int, task: Task, rows: Any,
         rates: Any, keys: jax.Array
         ) -> tuple[jax.Array, jax.Array]:
  """Trains with every rate and key: two [L, S, E]. One after the other, since CPUs are slow at
  grouped convolutions."""
  rates = jnp.asarray(rates, jnp.float32)
  pairs = jnp.repeat(rates, len(keys)), jnp.tile(keys, len(rates))
  found = jax.lax.map(lambda pair: train(what, optimizer, points, task, rows, *pair), pairs)
  return jax.tree.map(lambda x: x.reshape(len(rates), len(keys), -1), found)


def _curve(found: tuple[jax.Array, jax.Array], count: int, points: int) -> Curve:
  losses, accuracies = (np.moveaxis(np.asarray(x, np.float64), -1, 0) for x in found)
  return Curve(np.arange(points + 1) * (count // points), losses, accuracies)
