"""What can be wrong about a use of `instrument`: the likely mistake and the fix, in a sentence."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxpace.coordination import knobs
from jaxpace.core import fields, packing
from jaxpace.core.pace import PaceState
from jaxpace.core.packing import Layout, Packed
from jaxpace.core.plan import BACKWARD
from jaxpace.core.types import Pacer, PacerState
from jaxpace.core.varying import automatic_axes, manual_axes, varying
from jaxpace.instrumentation import primitives
from jaxpace.instrumentation.program import Program, axes_of, bodies, walk
from jaxpace.observation import phases
from jaxpace.observation.clocks import CLOCKS, Clock


def settings(step: Any, pacer: Any, clock: Any, share: Any, slots: Any, max_delay: Any,
             phases: Any, max_hold: Any) -> None:
  """Checks the arguments of `instrument` but for the axis."""
  if not callable(step):
    raise ValueError("jaxpace.instrument takes the train step itself, a function; it was given "
                     f"{step!r}.")
  if pacer is not None and not isinstance(pacer, Pacer):
    raise ValueError(f"pacer={pacer!r} is not a Pacer. Pass what a factory returns, or "
                     "jaxpace.Pacer(init, update), or None to record only.")
  fields.choice("clock", clock, CLOCKS)
  if share not in ("auto", True, False, None):
    raise ValueError(f"share={share!r} must be 'auto', True, False or None.")
  if not isinstance(phases, bool):
    raise ValueError(f"phases={phases!r} must be True or False. To name phases of your own: "
                     "with jaxpace.phase('name').")
  fields.whole("slots", slots, 1, 256)
  knobs.delay("max_delay", max_delay)
  knobs.delay("max_hold", max_hold)


def axis_names(axis_name: object) -> tuple[str, ...]:
  """Checks the data axis, a name or several; returns the names."""
  names = (axis_name,) if isinstance(axis_name, str) else axis_name
  if (not isinstance(names, (tuple, list)) or not names
      or not all(isinstance(n, str) and n for n in names)):
    raise ValueError(f"axis_name={axis_name!r} must be the name of the data axis, such as 'data', "
                     "or several names.")
  return tuple(names)


def can_hold(automatic: Sequence[str], mapped: bool) -> None:
  """Checks that all the ranks that meet take part in listening."""
  if automatic:
    raise ValueError(
        "A pacer that holds collectives back (jaxpace.take_turns does) needs every mesh axis to be "
        f"manual, for all devices must hold equally, but {', '.join(map(repr, automatic_axes()))} "
        "is left to the compiler by axis_names. Leave axis_names out, or pass a pacer without a "
        "hold, such as jaxpace.interleave_jobs().")
  if mapped:
    raise ValueError(
        "A pacer that holds collectives back (jaxpace.take_turns does) works under jax.shard_map, "
        "not under jax.pmap. Use jax.shard_map, or pass a pacer without a hold, such as "
        "jaxpace.interleave_jobs().")


def nan_is_allowed() -> None:
  """Checks that JAX does not stop at NaN, which stands for a time that isn't known."""
  if jax.config.jax_debug_nans:  # type: ignore[attr-defined]
    raise ValueError("jax_debug_nans is on, and JAX would stop at the first step: in the pace "
                     "state NaN stands for a time that is not known yet. Look for NaNs in the bare "
                     "step, without jaxpace, or turn jax_debug_nans off.")


def is_mesh(mesh: object) -> None:
  """Checks that this is a mesh."""
  if not isinstance(mesh, (Mesh, jax.sharding.AbstractMesh)):
    raise ValueError("A jax.sharding.Mesh is needed here, from jax.make_mesh; this is a "
                     f"{type(mesh).__name__}.")


def known_axes(names: Sequence[str], mesh: Mesh) -> None:
  """Checks that a mesh has these axes."""
  missing = [name for name in names if name not in mesh.axis_names]
  if missing or not names:
    raise ValueError(f"The mesh has no axis {', '.join(map(repr, missing))}: its axes are "
                     f"{', '.join(map(repr, mesh.axis_names))}. Is axis_name the one the step's "
                     "psum uses?")


def some_devices(devices: Sequence[Any]) -> None:
  """Checks the devices of pmap."""
  if not devices:
    raise ValueError("paced.init(devices=...) needs at least one device: jax.local_devices().")
  away = [d for d in devices if d.process_index != jax.process_index()]
  if away:
    raise ValueError(f"paced.init(devices=...) takes this process's own devices, but {away[0]} "
                     f"belongs to process {away[0].process_index}. Use jax.local_devices(), not "
                     "jax.devices().")


def is_pace(pace: Any) -> None:
  """Checks that the first argument is a pace state."""
  if not isinstance(pace, PaceState):
    raise ValueError(
        "The instrumented step takes the pace state first: step(pace, state, batch). Its first "
        f"argument is a {type(pace).__name__}. Make the state with pace = paced.init(mesh), and "
        "put jaxpace.spec(mesh) first in in_specs and out_specs.")


def whole_mesh_named(pace: PaceState) -> None:
  """Checks that the pace state is split over every manual axis."""
  axes = manual_axes()
  shape = jnp.shape(pace.step)
  # Under check_vma=True the type says which axes the state varies over.
  named = varying(pace.step)
  absent = [a for a in axes if named and a not in named and jax.lax.axis_size(a) > 1]
  if len(shape) <= 1 and (not shape or shape[0] == 1) and not absent:
    return
  if len(shape) > 1:
    raise ValueError(f"The pace state's leaves have {len(shape) - 1} axes too many. Was it "
                     "vmapped, or stacked twice?")
  some = "some of " + ", ".join(map(repr, axes)) if axes else "the axis"
  left_out = ", ".join(map(repr, absent)) if absent else some
  raise ValueError(
      "Each device must hold its own part of the pace state, but this one holds "
      f"{shape[0] if shape else 1}: the partition spec leaves out {left_out}, and their devices "
      "would vanish from the record. Use spec = jaxpace.spec(mesh) in in_specs and out_specs of "
      "jax.shard_map; it names every axis.")


def differentiable(params: Any) -> None:
  """Checks that `accumulate` can take the gradient of all parameters."""
  for leaf in jax.tree.leaves(params):
    dtype = getattr(leaf, "dtype", None)
    if not (isinstance(leaf, (float, complex)) if dtype is None
            else jnp.issubdtype(dtype, jnp.inexact)):
      raise ValueError(
          "jaxpace.accumulate differentiates all of params, which must be arrays of floating-point "
          f"numbers; one of them is a {dtype or type(leaf).__name__}. Give it those alone, and let "
          "the loss close over the rest: with equinox params, rest = eqx.partition(model, "
          "eqx.is_inexact_array), in the loss model = eqx.combine(params, rest).")


def no_modules(params: Any) -> None:
  """Checks that `accumulate` was given parameters, not the model."""
  nnx = sys.modules.get("flax.nnx")
  if nnx is None:
    return
  kinds = (nnx.Module, nnx.Optimizer)
  if any(isinstance(leaf, kinds)
         for leaf in jax.tree.leaves(params, is_leaf=lambda leaf: isinstance(leaf, kinds))):
    raise ValueError(
        "jaxpace.accumulate takes the parameters of an nnx model, not the model, whose other state "
        "(statistics, streams of random numbers) would depend on which rank runs what: graphdef, "
        "params, rest = nnx.split(model, nnx.Param, ...); in the loss model = nnx.merge(graphdef, "
        "params, rest).")


def axis_size(axis: Sequence[str]) -> int:
  """Ranks along the data axis; an error where it isn't bound."""
  size = 1
  for name in axis:
    try:
      size *= jax.lax.axis_size(name)
    except NameError:
      bound = ", ".join(map(repr, manual_axes()))
      where = f"The axes bound here are {bound}." if bound else (
          "No axis is bound here. Either the instrumented step runs outside jax.shard_map and "
          "jax.pmap: put it where the bare step was, e.g. jax.jit(jax.shard_map(paced, mesh=mesh, "
          "...)). Or it was given a step that is already shard_mapped: give jaxpace.instrument the "
          "per-device function. Or plain jit over sharded arrays: time it with jaxpace.observe.")
      raise ValueError(f"The data axis {name!r} is not known where the instrumented step runs. "
                       f"{where}") from None
  return size


def axes_left_to_the_compiler(clock: Clock) -> tuple[str, ...]:
  """Checks that the clock works where some mesh axes aren't manual.

  Returns a notice on them, if there are any.
  """
  axes = ", ".join(map(repr, automatic_axes()))
  if not axes:
    return ()
  if clock.name == "callback":
    raise ValueError(
        f"The callback clock works only where shard_map's axes are all manual, but {axes} is left "
        "to the compiler by axis_names: JAX allows no callback there. Leave axis_names out, or use "
        f"the native clock. {clock.notice}")
  return (f"The mesh axis {axes} is left to the compiler: one device of each group along it is "
          "recorded, and the compiler adds collectives over it, small ones for what the timestamps "
          "wait for, larger ones for what they hold back.",)


def same_ranks(one: PaceState, ranks: int, axis: Sequence[str]) -> None:
  """Checks that the state was made for this number of ranks."""
  made = one.arrivals.shape[-1]
  if made != ranks:
    raise ValueError(
        f"The pace state was made for {made} ranks along {','.join(axis)}, but the step runs on "
        f"{ranks}. After a change of the number of ranks make a new one, pace = paced.init(mesh); "
        "it holds no training state.")


def packed_pacer(pace: PaceState) -> Packed | None:
  """Returns the pacer's state as it is carried; None where there is no pacer."""
  if isinstance(pace.pacer, Packed):
    return pace.pacer
  if pace.pacer != ():
    raise ValueError(
        "The field `pacer` of the pace state holds the pacer's state packed into a vector, but "
        f"this one's holds a {type(pace.pacer).__name__}. Read it by paced.pacer_state(pace), and "
        "change it by pace = paced.with_pacer_state(pace, state).")
  return None


def same_pacer(one: PaceState, state: PacerState) -> None:
  """Checks that the state was made for this pacer, whose own would be `state`, of shapes and
  dtypes."""
  packed = packed_pacer(one)
  if packed is None or packed.layout.mark != packing.layout_of(state).mark:
    raise ValueError(
        "The pace state was made for another pacer, or for none. Make it with this step's own pace "
        "= paced.init(mesh); it holds no training state. One from a checkpoint goes through "
        "jaxpace.restore_pace.")


def same_places(pace: PaceState, places: int) -> None:
  """Checks that the state that a step returned holds every device's part, as many as went in."""
  held = pace.rank.shape[0] if pace.rank.ndim else 1
  if held < places:
    raise ValueError(
        f"The pace state that the step returned holds the part of {held} "
        f"device{'s' if held > 1 else ''} of {places}: its partition spec in out_specs of "
        "jax.shard_map leaves out a mesh axis, so the next step will not take it. Use spec = "
        "jaxpace.spec(mesh) in both in_specs and out_specs: out_specs=(spec, P()). With jax.pmap: "
        "in_axes=(0, *old), out_axes=(0, old).")


def same_layout(given: Layout, wanted: Layout) -> None:
  """Checks that a pacer's state has the structure, shapes and dtypes of the one it takes the place
  of."""
  if given != wanted:
    raise ValueError("The pacer's state must be what paced.pacer_state(pace) returns, with other "
                     "values: the same structure, shapes and dtypes.\nGiven:  "
                     f"{_said(given)}\nWanted: {_said(wanted)}")


def _said(layout: Layout) -> Any:
  return jax.tree.unflatten(layout.structure, [
      f"{kind}{list(shape)}" for shape, kind in zip(layout.shapes, layout.kinds, strict=True)])


def some_collective(program: Program, axis: Sequence[str], step: Callable[..., Any]) -> None:
  """Checks that the step has a collective over the data axis."""
  if program.hidden or any(e.collective for e in program.equations):
    return
  name = getattr(step, "__name__", "the step")
  nested = (eqn for equation in program.equations for body in bodies(equation.params)
            for eqn, _ in walk(body))
  others = {name for eqn in (*program.equations, *nested)
            for name in axes_of(eqn.primitive, eqn.params)}
  label = ",".join(axis)
  if others:
    raise ValueError(f"{name} has no collective over {label!r}, but over "
                     f"{', '.join(map(repr, sorted(others)))}. Is axis_name of jaxpace.instrument "
                     "the axis that gradients are summed over?")
  raise ValueError(
      f"{name} has no collective over {label!r}: nothing synchronises the ranks there, so there is "
      "nothing to time. Likely causes: the gradients are not averaged, e.g. grads = "
      f"jax.lax.pmean(grads, {label!r}); or the psum is outside of the function given to "
      "jaxpace.instrument; or the batch isn't split over the axis in in_specs.")


def of_specs(error: Exception) -> str | None:
  """Says what is wrong about specs or axes that JAX refused for the pace state.

  None if it refused something else.

  JAX compares them with arguments and results before and after the instrumented function runs,
  where that can't see them; but whoever calls the compiled step sees JAX's error.
  """
  said = str(error)
  for parts, text in _OF_SPECS.items():
    if all(any(word in said for word in part.split("|")) for part in parts):
      return text
  return None


_ARGUMENTS = ("{} don't fit the instrumented step's arguments, of which the pace state is the "
              "first: {}").format
_RESULTS = ("{} don't fit what the instrumented step returns: always two things, the pace state "
            "and all that the bare step returns, as it returns it. {}").format
_PYTREE = "pytree structure error"
_OF_SPECS = {
    (_PYTREE, "shard_map in_specs"): _ARGUMENTS(
        "in_specs of jax.shard_map", "in_specs=(spec, *old), with spec = jaxpace.spec(mesh) and "
        "the bare step's in_specs as old."),
    (_PYTREE, "shard_map out_specs"): _RESULTS(
        "out_specs of jax.shard_map", "out_specs=(spec, old), with the bare step's out_specs as "
        "old: (spec, (P(), P())) where they were (P(), P()), not (spec, P(), P())."),
    (_PYTREE, "pmap in_axes"): _ARGUMENTS(
        "in_axes of jax.pmap", "in_axes=(0, *old), with the bare step's in_axes as old."),
    (_PYTREE, "broadcast_prefix|out_axes"): _RESULTS(
        "out_axes of jax.pmap", "out_axes=(0, old), with the bare step's out_axes as old: (0, "
        "(None, 0)) where they were (None, 0)."),
    ("require replication", "out_specs is |out_specs[0] is "):
        "out_specs of jax.shard_map say that the first result is the same on all devices, but it "
        "is the pace state, each device's own: out_specs=(spec, old), with spec = "
        "jaxpace.spec(mesh) and the bare step's out_specs as old.",
}
"""What JAX's error says, all of it, each in one of several ways; and what that means here."""


_LOOPS = ("inside jax.lax.scan", "inside jax.lax.while_loop")
_AGAIN = "inside jax.checkpoint"


def untimed_sums(program: Program, axis: Sequence[str]) -> tuple[str, ...]:
  """A notice on sums in a loop or jax.checkpoint, which aren't timed, with the line that mends it.

  Under `check_vma` JAX sums the gradient of a parameter that is the same on all ranks where it is
  differentiated: in an accumulation loop at every turn. The gradient of a copy whose type varies is
  left for the user to sum.
  """
  name = repr(axis[0]) if len(axis) == 1 else repr(tuple(axis))
  sums = [hidden for hidden in program.hidden if hidden.primitive in primitives.SUMS]
  by_autodiff = [hidden for hidden in sums
                 if phases.classify(hidden.name) == BACKWARD
                 and hidden.reason.startswith((*_LOOPS, _AGAIN))]
  by_hand = [hidden for hidden in sums if hidden.reason.startswith(_LOOPS)]
  for hidden in [*by_autodiff, *by_hand][:1]:
    where = hidden.reason.partition(":")[0]
    untimed = f"{where}, where nothing is timed, so the waiting for late ranks counts as compute."
    if by_autodiff:
      return (f"Gradients are summed over {name} {untimed} For one sum that is timed: "
              f'`params = jax.lax.pcast(params, {name}, to="varying")` before they are '
              f"differentiated, and `grads = jax.lax.psum(grads, {name})` after it.",)
    return (f"A sum over {name} runs {untimed} Where only the total is needed, add up in the loop "
            f"and sum over the ranks after it: `total = jax.lax.psum(total, {name})`.",)
  return ()
