"""Gradients over unequal numbers of micro-batches: each rank runs its own count, and they meet
once, after the loop."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core
from jax.sharding import PartitionSpec

from jaxpace.core.varying import manual_axes, vary, varying, varying_of_aval
from jaxpace.instrumentation import checks, losses
from jaxpace.instrumentation.program import axes_of, walk
from jaxpace.observation import everywhere, phases

Sums = Literal["float32", "parameters"]


def accumulate(
    loss_fn: Callable[..., Any],
    params: Any,
    micro_batches: Any,
    count: jax.typing.ArrayLike,
    axis_name: str | Sequence[str] = "data",
    *,
    key: jax.Array | None = None,
    index: jax.Array | None = None,
    has_aux: bool = False,
    sums: Sums = "float32",
    mesh: Any = None,
    fetch: bool = False,
    weighted: bool = True,
) -> tuple[Any, Any]:
  """Mean loss and its gradient over all ranks' micro-batches, of which this rank runs its first
  `count`.

  The loop runs `count` times, a number that is data: one compiled program serves all counts.
  Losses, weights and gradients are added up on each rank and summed over the ranks once, after the
  loop:

      loss  = sum of all losses / sum of all weights
      grads = sum of all gradients / sum of all weights

  both over every micro-batch of every rank. So token-weighted and masked losses are exact, and the
  result is that of any other way to share the same micro-batches, but for the order of the sums.

  Call it where a collective over `axis_name` may be called: inside `jax.shard_map` or `jax.pmap`,
  in a step of `jaxpace.instrument` too, where the loop is the rank's busy time. In a step that is
  jitted as a whole it makes such a place for itself, over the mesh of `jax.set_mesh` or `mesh`:
  `axis_name` manual, all other axes left to the compiler. There `micro_batches` has the capacity of
  all ranks together in front, rank by rank, and parameters that are split over `axis_name` (FSDP)
  are gathered before the loop.

  >>> import jax, jax.numpy as jnp, jaxpace
  >>> def loss_fn(w, x):
  ...   return jnp.sum((x - w) ** 2), x.size          # sum of losses, sum of weights
  >>> step = jax.pmap(lambda x, count: jaxpace.accumulate(loss_fn, jnp.float32(0), x, count, "data"),
  ...                 axis_name="data", devices=jax.devices()[:1])
  >>> x = jnp.array([[[1.0, 2.0], [3.0, 4.0], [9.0, 9.0]]])  # a capacity of three micro-batches
  >>> loss, grads = step(x, jnp.array([2]))
  >>> print(loss, grads)                              # of the first two: (1 + 4 + 9 + 16) / 4
  [7.5] [-5.]

  Args:
    loss_fn: `loss_fn(params, micro_batch)`, with `key` `loss_fn(params, micro_batch, key)`; returns
      the sum of the losses and the sum of their weights, both [], with `has_aux` also a tree of
      numbers. The weight must not depend on the parameters. `jax.checkpoint` may be inside,
      collectives over other axes too; over `axis_name` there can be none: ranks with other counts
      would never meet.
    params: a pytree of arrays, differentiated; the same on all ranks.
    micro_batches: a pytree of arrays with an axis of capacity in front.
    count: [] int32, this rank's number of micro-batches; or [R] int32, those of all R ranks, the
      same on all of them. At most the capacity: a larger one makes the loss NaN, for data would be
      missing; so does one below 0.
    axis_name: the data axis, or several that together are.
    key: a random key, the same on all ranks. Micro-batch number i of the global batch gets
      `jax.random.fold_in(key, i)`, whoever runs it: the ranks' shares follow one another in order,
      so every rank's count must be given, or `index`.
    index: [capacity] int32, numbers of this rank's micro-batches in the global batch, where their
      order is another one.
    has_aux: whether `loss_fn` returns a third thing, a pytree of numbers that are summed over all
      micro-batches of all ranks.
    sums: "float32": gradients are added up, summed over ranks and returned in float32 at least;
      "parameters": in each parameter's own type.
    mesh: in a step that is jitted as a whole and has no mesh in context.
    fetch: whether `micro_batches` is laid out evenly, as a loader does that knows of no counts:
      where counts are not even, every rank fetches the whole global batch before the loop, and runs
      its share of that. There is no capacity then: the axis in front holds as many as all counts
      add up to, on a rank its even part. For batches that are small beside the model, such as
      tokens.
    weighted: whether `loss_fn` returns a weight. Without, it is a loss as `jax.value_and_grad`
      takes it, (loss, aux) with `has_aux`, and every micro-batch counts as one: what a loop comes
      to that adds up and divides by their number.

  Returns:
    (loss, grads), or ((loss, aux), grads): loss [] float32, grads like `params`, the same on all
    ranks. Zeros where all weights are zero.

  Raises:
    ValueError: a collective over `axis_name` in the loss, a loss without weights, counts of another
      number of ranks or beyond the capacity, less room than the step's `jaxpace.shares` may ask
      for, or no place for the sum over `axis_name`.
  """  # noqa: E501
  names = checks.axis_names(axis_name)
  if sums not in ("float32", "parameters"):
    raise ValueError(f"sums={sums!r} must be 'float32' or 'parameters'.")
  checks.no_modules(params)
  checks.differentiable(params)
  if isinstance(count, (list, tuple)):
    traced = any(isinstance(each, jax.core.Tracer) for each in count)
    count = jnp.asarray(count) if traced else np.asarray(count)
  # As leaves: a node that keeps its shape beside its array fits none of what becomes of it.
  micro_batches, tree = jax.tree.flatten(micro_batches)
  run = functools.partial(_accumulate, losses.checked(loss_fn, tree, has_aux, weighted),
                          names=names, has_aux=has_aux, sums=sums, fetch=fetch)
  if not _bound(names):
    return _island(run, params, micro_batches, count, names, key, index, mesh, fetch)
  if mesh is not None:
    raise ValueError("jaxpace.accumulate needs no mesh inside jax.shard_map: leave it out.")
  own = _capacity(micro_batches)
  _fits(count, own, own * checks.axis_size(names), fetch)
  return run(params, micro_batches, count, key, index)


def _accumulate(loss_fn: Callable[..., Any], params: Any, micro_batches: Any, count: Any, key: Any,
                index: Any, *, names: tuple[str, ...], has_aux: bool,
                sums: Sums, fetch: bool) -> tuple[Any, Any]:
  """`accumulate` where the axes are bound."""
  capacity = _capacity(micro_batches)
  if fetch:
    micro_batches = _fetched(micro_batches, count, names, capacity)
    capacity *= checks.axis_size(names)
  own, before = _own_count(count, names, capacity)
  if fetch and (before is None or index is not None):
    raise ValueError("With fetch=True micro-batches are numbered as they lie in the global batch: "
                     "give the counts of all ranks, [R], as count, and no index.")
  if index is not None:
    index = jnp.asarray(index)
    if index.shape != (capacity,):
      raise ValueError(f"index has the shape {list(index.shape)}; one number for each of the "
                       f"{capacity} micro-batches that there is room for is needed.")
  elif key is not None and before is None:
    raise ValueError("A key for each micro-batch of the global batch takes to know where this "
                     "rank's share begins: give the counts of all ranks, [R], as count, or index=, "
                     "[capacity].")
  # Where JAX keeps track of what differs between ranks, a parameter that is the same on all would
  # have its gradient summed over them wherever it is differentiated: in the loop.
  own_axes = varying(jax.lax.axis_index(names))
  copies = jax.tree.map(lambda leaf: vary(jnp.asarray(leaf), own_axes), params)

  def picked(i: Any) -> Any:
    place = before + i if fetch else i
    part = jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(
        jnp.asarray(leaf), place, keepdims=False), micro_batches)
    if key is None:
      return part
    return part, jax.random.fold_in(key, before + i if index is None else index[i])

  def turn(params: Any, picked: Any) -> Any:
    given = (picked,) if key is None else picked
    (loss, (weight, aux)), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, *given)
    if sums == "float32":
      grads = jax.tree.map(lambda grad: grad.astype(losses.exact(grad.dtype)), grads)
    return loss, weight, aux, grads

  closed, shapes = jax.make_jaxpr(turn, return_shape=True)(copies, picked(jnp.int32(0)))
  _refuse(closed.jaxpr, names, varying(own))
  one_turn, tree = jex_core.jaxpr_as_fun(closed), jax.tree.structure(shapes)

  def body(i: Any, sofar: Any) -> Any:
    found = one_turn(*jax.tree.leaves((copies, picked(i))))
    return [a + b for a, b in zip(sofar, found, strict=True)]

  zeros = [vary(jnp.zeros(aval.shape, aval.dtype), own_axes | varying_of_aval(aval))
           for aval in closed.out_avals]
  with jax.named_scope("micro_batches"):
    total = jax.lax.fori_loop(jnp.int32(0), jnp.minimum(own, jnp.int32(capacity)), body, zeros)
  loss, *rest = total
  impossible = (own > jnp.int32(capacity)) | (own < jnp.int32(0))
  if fetch:
    # Counts of another global batch would leave some of it out, or run some twice.
    impossible |= jnp.sum(jnp.asarray(count), dtype=jnp.int32) != jnp.int32(capacity)
  loss = jnp.where(impossible, jnp.asarray(jnp.nan, loss.dtype), loss)
  loss, weight, aux, grads = jax.tree.unflatten(tree, jax.lax.psum([loss, *rest], names))
  some = weight != 0
  divisor = jnp.where(some, weight, jnp.ones_like(weight))
  loss = jnp.where(some | jnp.isnan(loss), loss / divisor, jnp.zeros_like(loss))

  def mean(grad: jax.Array) -> jax.Array:
    exact = losses.exact(grad.dtype)
    return jnp.where(some, (grad.astype(exact) / divisor.astype(exact)).astype(grad.dtype),
                     jnp.zeros_like(grad))

  return ((loss, aux) if has_aux else loss), jax.tree.map(mean, grads)


def _capacity(micro_batches: Any) -> int:
  sizes = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(micro_batches)}
  if len(sizes) != 1 or () in sizes or (0,) in sizes:
    said = (", ".join(str(list(jnp.shape(leaf))) for leaf in jax.tree.leaves(micro_batches)[:4])
            or "none")
    raise ValueError("Every array of micro_batches needs the same axis in front, of as many "
                     f"micro-batches as there is room for on a rank; the shapes are {said}.")
  return int(sizes.pop()[0])


def _fetched(micro_batches: list[Any], count: Any, names: tuple[str, ...], own: int) -> Any:
  """The whole global batch. Where every rank runs its even part, `own`, that part stands in the
  place of each other one: nobody asks for these, and a healthy job pays for no gathering."""
  ranks = checks.axis_size(names)

  def repeated(leaves: list[jax.Array]) -> list[jax.Array]:
    return [jnp.broadcast_to(leaf, (ranks, *leaf.shape)).reshape(ranks * own, *leaf.shape[1:])
            for leaf in leaves]

  def gathered(leaves: list[jax.Array]) -> list[jax.Array]:
    return [jax.lax.all_gather(leaf, names, tiled=True) for leaf in leaves]

  # Counts are the same on all ranks, so all of them gather or none.
  return jax.lax.cond(jnp.all(jnp.asarray(count) == own), repeated, gathered,
                      list(map(jnp.asarray, micro_batches)))


def _own_count(count: Any, names: tuple[str, ...],
               capacity: int) -> tuple[jax.Array, jax.Array | None]:
  """This rank's count and, where all counts are given, the sum of those before it: int32 []."""
  ranks = checks.axis_size(names)
  _within(count, capacity)
  count = jnp.asarray(count)
  if not jnp.issubdtype(count.dtype, jnp.integer):
    raise ValueError(f"count is {count.dtype}; it must be whole numbers, int32.")
  count = count.astype(jnp.int32)
  if not count.shape:
    return count, None
  if count.ndim > 1:
    raise ValueError(f"count has the shape {list(count.shape)}; it must be [], this rank's, or "
                     f"[{ranks}], those of all ranks.")
  if count.shape != (ranks,):
    hint = (" Give it as it is to every rank: P() in in_specs." if count.shape == (1,) else
            " They are of another mesh: make them anew, for this number of ranks.")
    raise ValueError(
        f"There are counts of {math.prod(count.shape)} ranks, and {ranks} along "
        f"{','.join(names)}.{hint}")
  place = jax.lax.axis_index(names)
  earlier = jnp.where(jnp.arange(ranks, dtype=jnp.int32) < place, count, jnp.int32(0))
  return (jax.lax.dynamic_index_in_dim(count, place, keepdims=False),
          jnp.sum(earlier, dtype=jnp.int32))


def _within(count: Any, capacity: int) -> None:
  """Checks counts that are known while the step is traced."""
  known = np.asarray(count if isinstance(count, (int, np.ndarray, np.generic)) else 0)
  if np.max(known, initial=0) > capacity:
    raise ValueError(f"A rank is to run {np.max(known)} micro-batches, and micro_batches has room "
                     f"for {capacity}: make its first axis as long as the balancer's capacity.")


def _fits(count: Any, room: int, whole: int, fetch: bool) -> None:
  """Checks that there is room for whatever counts the feeds of the step that is called here may
  give, where these are data."""
  step = everywhere.called() if isinstance(count, jax.core.Tracer) else None
  totals, most = zip(*step.shared, strict=True) if step is not None and step.shared else ((), ())
  if fetch and totals and whole not in totals:
    raise ValueError(f"jaxpace.shares shares total_micro_batches={totals[0]}, and micro_batches "
                     f"are {whole} of all ranks together: cut the batch into {totals[0]}, or give "
                     f"jaxpace.shares total_micro_batches={whole}.")
  if not fetch and most and room < min(most):
    raise ValueError(f"micro_batches has room for {room} micro-batches of a rank, and "
                     f"jaxpace.shares gives up to {min(most)}: where a loader lays batches out "
                     "that knows of no counts, give jaxpace.accumulate fetch=True; else give "
                     f"jaxpace.shares capacity={room}.")


def _refuse(jaxpr: Any, names: tuple[str, ...], uneven: frozenset[str]) -> None:
  """Checks that no ranks whose counts differ meet in the loop; and that the loss asks for no
  sharding over the data axis, which JAX would refuse when it compiles."""
  for eqn, stack in walk(jaxpr):
    spec = (getattr(eqn.params.get("sharding"), "spec", None)
            if eqn.primitive.name == "sharding_constraint" else None)
    asked = {name for part in spec or () for name in (part if isinstance(part, tuple) else (part,))}
    if met := [name for name in names if name in asked]:
      raise ValueError(
          f"The loss asks for a sharding over {', '.join(map(repr, met))}, {spec}, and inside "
          "jaxpace.accumulate each rank has its own micro-batch whole: there let shardings name "
          "other axes only.")
    if met := [axis for axis in axes_of(eqn.primitive, eqn.params)
               if axis in names or axis in uneven]:
      called = phases.collective_name(stack)
      where = f" in {called}" if called else ""
      raise ValueError(
          f"The loss holds a collective over {', '.join(map(repr, met))}: "
          f"{eqn.primitive.name}{where}. It would run once a micro-batch, and ranks that run "
          "different numbers of them would wait for each other for ever. jaxpace.accumulate sums "
          "losses, weights and gradients itself, after the loop: take psum and pmean out of the "
          "loss, keep statistics of batch norm on the rank, and gather parameters that are split "
          "over this axis (FSDP) before the call.")


def _bound(names: tuple[str, ...]) -> bool:
  """Whether the axes are bound here, by shard_map or pmap."""
  missing = []
  for name in names:
    try:
      jax.lax.axis_size(name)
    except NameError:
      missing.append(name)
  bound = manual_axes()
  if missing and (len(missing) < len(names) or bound):
    raise ValueError(f"The axis {', '.join(map(repr, missing))} is not known where "
                     "jaxpace.accumulate runs; those bound here are "
                     f"{', '.join(map(repr, bound)) or 'others'}. Is axis_name the mesh's "
                     "data axis?")
  return not missing


def _island(run: Callable[..., Any], params: Any, micro_batches: Any, count: Any,
            names: tuple[str, ...], key: Any, index: Any, mesh: Any, fetch: bool
            ) -> tuple[Any, Any]:
  """Runs it in a step that is jitted as a whole: the data axis manual, the others the
  compiler's."""
  if mesh is not None:
    checks.is_mesh(mesh)
    checks.known_axes(names, mesh)
  given = mesh if mesh is not None else jax.sharding.get_abstract_mesh()
  absent = [name for name in names if name not in given.axis_names]
  if absent:
    raise ValueError(f"The axis {', '.join(map(repr, absent))} is not known where "
                     "jaxpace.accumulate runs. Call it inside jax.shard_map or jax.pmap; or, in a "
                     "step that is jitted as a whole, give it the mesh: mesh=mesh, or with "
                     "jax.set_mesh(mesh).")
  ranks = math.prod(given.shape[name] for name in names)
  if jnp.shape(count) != (ranks,):
    raise ValueError(f"In a step that is jitted as a whole count must be those of all {ranks} "
                     f"ranks, [{ranks}] int32; its shape is {list(jnp.shape(count))}.")
  whole = _capacity(micro_batches)
  if whole % ranks:
    raise ValueError(f"micro_batches has room for {whole} micro-batches, which don't divide among "
                     f"{ranks} ranks: in a step that is jitted as a whole its first axis is that "
                     "of all ranks together, rank by rank.")
  # Inside they are an argument, whose values nobody knows.
  _within(count, whole if fetch else whole // ranks)
  _fits(count, whole // ranks, whole, fetch)
  split = PartitionSpec(names if len(names) > 1 else names[0])
  everywhere = PartitionSpec()
  specs = (everywhere, split, everywhere, everywhere, everywhere if index is None else split)
  place = jax.shard_map(run, mesh=given, axis_names=set(names), in_specs=specs,
                        out_specs=everywhere, check_vma=False)
  gathered = jax.tree.map(lambda leaf: _split_by(leaf, _without(names, _spec(leaf))), params)
  loss, grads = place(gathered, micro_batches, count, key, index)
  return loss, jax.tree.map(lambda grad, leaf: _split_by(grad, _spec(leaf)), grads, params)


def _spec(leaf: Any) -> PartitionSpec:
  """The sharding that an array's type has: of axes that are explicit in `jax.make_mesh`, else of
  none."""
  spec: PartitionSpec = getattr(getattr(jax.typeof(leaf), "sharding", None), "spec",
                                PartitionSpec())
  return spec


def _without(names: tuple[str, ...], spec: PartitionSpec) -> PartitionSpec:
  parts = (part if isinstance(part, tuple) else (part,) for part in spec)
  left = (tuple(name for name in part if name is not None and name not in names) for part in parts)
  return PartitionSpec(*(part if len(part) > 1 else part[0] if part else None for part in left))


def _split_by(leaf: Any, spec: PartitionSpec) -> Any:
  return leaf if _spec(leaf) == spec else jax.reshard(leaf, spec)
