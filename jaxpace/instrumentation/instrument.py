"""Wraps a per-device train step: phases and collectives timed, delays applied, nothing else
changed."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpace.core import own_context, packing
from jaxpace.core import pace as pace_state
from jaxpace.core.observed import InstrumentedFunction
from jaxpace.core.pace import PaceState
from jaxpace.core.plan import Plan
from jaxpace.core.types import Pacer, PacerState
from jaxpace.core.varying import vary, varying
from jaxpace.instrumentation import (
  before_collective,
  checks,
  piggyback,
  program,
  rewrite,
  script,
)
from jaxpace.instrumentation.before_collective import Holding
from jaxpace.instrumentation.calls import Call
from jaxpace.instrumentation.piggyback import Share
from jaxpace.observation import everywhere, programs
from jaxpace.observation.clocks import Clock, host_ring, resolve_clock
from jaxpace.observation.clocks.operands import NOWHERE, Event

_LOG = logging.getLogger("jaxpace")


def spec(mesh: Mesh, axes: Sequence[str] | None = None) -> PartitionSpec:
  """Returns the partition spec of the pace state: its leading axis over every manual axis of the
  mesh.

  Naming only some of them would silently drop the other devices' timestamps.

  Args:
    mesh: the mesh given to `jax.shard_map`.
    axes: the manual axes, where `shard_map` was given `axis_names`; all axes of the mesh by
      default.

  Raises:
    ValueError: the mesh has no such axis.
  """
  checks.is_mesh(mesh)
  names = (axes,) if isinstance(axes, str) else tuple(mesh.axis_names if axes is None else axes)
  checks.known_axes(names, mesh)
  return PartitionSpec(names[0] if len(names) == 1 else names)


def instrument(
    step: Callable[..., Any],
    axis_name: str | Sequence[str],
    pacer: Pacer | None = None,
    *,
    clock: str = "auto",
    share: Share = "auto",
    slots: int = 16,
    max_delay: float = 0.25,
    phases: bool = True,
    max_hold: float = 0.25,
) -> Instrumented:
  """Instruments a per-device train step.

  `(state, batch) -> out` becomes `(pace, state, batch) -> (pace, out)`, to be used where the bare
  step was: under `jax.shard_map` or `jax.pmap`. The step is traced once and evaluated again
  equation by equation, with timers at the boundaries of its phases and around its collectives over
  the data axis. Its results are the same, bit for bit.

  Args:
    step: the per-device function. It must exchange data over `axis_name`, by the user's hand or by
      JAX's.
    axis_name: the data axis, or several that together are the data axis.
    pacer: what decides on delays; None records only.
    clock: "auto", or a name from `jaxpace.observation.clocks.CLOCKS`.
    share: whether the ranks' arrivals ride in the gradient all-reduce, so that each rank's pacer
      sees all of them: True, False or None for not, "auto" by layout and backend.
      `plan.share_reason` says what was chosen.
    slots: most collectives a step that get timestamps; more are counted in `plan.overflow`.
    max_delay: seconds; no delay is longer, whatever a pacer asks.
    phases: whether forward and backward pass (and phases of `jaxpace.phase`) are separate, for
      which XLA must not run parts of both at once; without, what precedes a collective is
      `compute`.
    max_hold: seconds per step; a pacer that holds collectives back (`jaxpace.take_turns`) does so
      for no longer in all, the last time of listening apart. Before each timestamped collective
      that can be held back it is asked, and may listen: that is in the program, by its own
      condition, only with such a pacer. It needs `share`, which "auto" then is wherever an
      all-reduce can carry it; where none can, it is never asked, with a notice. Collectives in
      loops are not held back.

  Returns:
    A callable with `init`, and with `plan` once it has been traced.

  Raises:
    ValueError: an argument is out of range.
  """
  return Instrumented(step, axis_name, pacer, clock=clock, share=share, slots=slots,
                      max_delay=max_delay, phases=phases, max_hold=max_hold)


class Instrumented(InstrumentedFunction):
  """An instrumented step; made by `instrument`."""

  def __init__(self, step: Callable[..., Any], axis_name: str | Sequence[str], pacer: Pacer | None,
               *, clock: str, share: Share, slots: int, max_delay: float, phases: bool,
               max_hold: float):
    checks.settings(step, pacer, clock, share, slots, max_delay, phases, max_hold)
    functools.update_wrapper(self, step, updated=())
    self.step = step
    self.axis = checks.axis_names(axis_name)
    self.pacer = pacer
    self.clock_wanted = clock
    self.share_wanted: Share = share
    self.slots, self.max_delay, self.phases = int(slots), float(max_delay), phases
    self.max_hold, self.holds = float(max_hold), pacer is not None and pacer.hold is not None
    self.plan = None
    self.mesh_shape: dict[str, int] = {}
    self._platform: str | None = None
    self._warned = False

  # Making the state.

  def init(self, mesh: Mesh | None = None, *, devices: Sequence[jax.Device] | None = None,
           axes: Sequence[str] | None = None) -> PaceState:
    """Makes the pace state. Every process calls it, with the same mesh.

    Args:
      mesh: the mesh of `jax.shard_map`; the state is laid out over it by `jaxpace.spec(mesh)`.
      devices: for `jax.pmap` instead: this process's devices, `jax.local_devices()`.
      axes: manual axes, where `shard_map` was given `axis_names`.

    Returns:
      The state, before its first step.

    Raises:
      ValueError: neither or both of mesh and devices given, the mesh lacks the data axis, or
        jax_debug_nans is on.
    """
    checks.nan_is_allowed()
    if (mesh is None) == (devices is None):
      raise ValueError("paced.init needs either the mesh of jax.shard_map, paced.init(mesh), or "
                       "the devices of jax.pmap, paced.init(devices=jax.local_devices()).")
    if mesh is not None:
      sharding = NamedSharding(mesh, spec(mesh, axes))
      state = _stacked(*self._laid_out(mesh, sharding.spec))
      with own_context.on(mesh):
        return jax.tree.map(lambda leaf: jax.make_array_from_callback(
            leaf.shape, sharding, lambda index: leaf[index]), state)
    assert devices is not None
    checks.some_devices(devices)
    self._platform = devices[0].platform
    ranks = len(devices) * jax.process_count()
    self.first_place = first = jax.process_index() * len(devices)
    self.devices = tuple(device.id for device in devices)
    self.mesh_shape = {self.axis[0]: ranks}
    one = pace_state.fresh(ranks, self.slots, self.pacer)
    return jax.tree.map(jnp.asarray, _stacked(one, len(devices), first))

  def abstract(self, mesh: Mesh, axes: Sequence[str] | None = None) -> PaceState:
    """Describes the pace state without making it: to compile ahead of time for devices that are not
    there.

    Args:
      mesh: the mesh given to `jax.shard_map`, of `jax.experimental.topologies` perhaps.
      axes: manual axes, where `shard_map` was given `axis_names`.

    Returns:
      What `init` returns, with a `jax.ShapeDtypeStruct` that has a sharding in place of each array.

    Raises:
      ValueError: the mesh lacks the data axis.
    """
    sharding = NamedSharding(mesh, spec(mesh, axes))
    one, count = self._laid_out(mesh, sharding.spec)
    state: PaceState = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((count, *leaf.shape), leaf.dtype, sharding=sharding), one)
    return state

  def pacer_state(self, pace: PaceState) -> PacerState:
    """Returns the pacer's own state, as its `init` and `update` make it; in the pace state it is
    one vector.

    Where the pace state is of several processes' devices every process calls it, or none, on a copy
    in numpy of its own part.

    Args:
      pace: a pace state, of arrays on devices or in numpy.

    Returns:
      The tree that `pacer.init` returns, with the pace state's axis of ranks in front of every
      leaf; () without a pacer.

    Raises:
      ValueError: it is no pace state.
    """
    checks.is_pace(pace)
    packed = checks.packed_pacer(pace)
    if packed is None:
      return ()
    if not isinstance(packed.words, jax.Array) or isinstance(packed.words, jax.core.Tracer):
      return packing.unpack(packed)
    with own_context.on(packed.words):
      return jax.jit(packing.unpack)(packed)

  def with_pacer_state(self, pace: PaceState, state: PacerState) -> PaceState:
    """Returns the pace state with another state of the pacer's in it: for tests, and tools that
    change it.

    Args:
      pace: a pace state. Every process of the job calls it.
      state: what `pacer_state` returned, changed; leaves may be numpy arrays, of all ranks.

    Returns:
      The pace state, laid out as it was: a compiled step takes it as it took that.

    Raises:
      ValueError: `state` has other names, shapes or dtypes than the pacer's.
    """
    checks.is_pace(pace)
    packed = checks.packed_pacer(pace)
    if packed is None:
      checks.same_layout(packing.layout_of(state), packing.layout_of(()))
      return pace
    lead = packed.words.shape[:-1]
    checks.same_layout(packing.layout_of(state, len(lead)), packed.layout)
    pack = functools.partial(packing.pack, layout=packed.layout, lead=lead)
    if not isinstance(packed.words, jax.Array):
      return pace._replace(pacer=pack(jax.tree.map(np.asarray, state), xp=np))
    if isinstance(packed.words, jax.core.Tracer) or not packed.words.committed:
      return pace._replace(pacer=pack(state))
    with own_context.on(packed.words):
      return pace._replace(pacer=jax.jit(pack, out_shardings=packed.words.sharding)(state))

  def _laid_out(self, mesh: Mesh, partition: PartitionSpec) -> tuple[PaceState, int]:
    """One place's state, and the number of places, on a mesh that is from now on this step's."""
    checks.known_axes(self.axis, mesh)
    self._platform = mesh.devices.flat[0].platform
    self.mesh_shape = {name: int(size) for name, size in mesh.shape.items()}
    names = partition[0] if isinstance(partition[0], tuple) else (partition[0],)
    count = int(np.prod([mesh.shape[name] for name in names]))
    ranks = int(np.prod([mesh.shape[name] for name in self.axis]))
    others = [name for name in mesh.axis_names if name not in names]
    order = [mesh.axis_names.index(name) for name in (*names, *others)]
    # Of those that hold the same place, along axes that are the compiler's, the first.
    placed = mesh.devices.transpose(order).reshape(count, -1)[:, 0]
    self.first_place, self.devices = 0, tuple(int(device.id) for device in placed)
    return pace_state.fresh(ranks, self.slots, self.pacer), count

  # The step.

  def __call__(self, pace: PaceState, *args: Any, **kwargs: Any) -> tuple[PaceState, Any]:
    """Runs one step on one device. Call it where the bare step was called: inside `shard_map` or
    `pmap`.

    Raises:
      ValueError: the state isn't one of this step's, or the step has no collective over the axis.
    """
    checks.nan_is_allowed()
    checks.is_pace(pace)
    ranks = checks.axis_size(self.axis)
    checks.whole_mesh_named(pace)
    # shard_map leaves an axis of ranks in front, of length 1; pmap doesn't.
    stacked = jnp.ndim(pace.step) == 1
    one: PaceState = jax.tree.map(lambda leaf: leaf[0], pace) if stacked else pace
    checks.same_ranks(one, ranks, self.axis)
    if self.pacer is not None:
      checks.same_pacer(one, jax.eval_shape(functools.partial(self.pacer.init, ranks)))
    clock = resolve_clock(self.clock_wanted, self._platform or jax.default_backend())
    automatic = checks.axes_left_to_the_compiler(clock)
    if self.holds:
      checks.can_hold(automatic, mapped=not stacked)
    with Call(self.step, args, kwargs) as call:
      state, outputs = self._timestamped(one, stacked, ranks, clock, automatic, call)
      return state, call.result(outputs)

  def _timestamped(self, one: PaceState, stacked: bool, ranks: int, clock: Clock,
                   automatic: tuple[str, ...], call: Call) -> tuple[PaceState, list[Any]]:
    """Traces the step, and evaluates it with timestamps: the state after it, and its results,
    flat."""
    closed = jax.make_jaxpr(call.traced)(*call.leaves)
    flat = program.flatten(closed, self.axis)
    checks.some_collective(flat, self.axis, self.step)
    events, silent = self._events(clock, one)
    unmarked = self._leave_nested(clock, bool(automatic), events) if flat.hidden else ""
    untimed = checks.untimed_sums(flat, self.axis) if unmarked else ()
    if untimed and not self._warned:
      self._warned = True
      _LOG.warning("%s", untimed[0])
    written = script.write_script(flat, self.axis, slots=self.slots, delayed=self.pacer is not None,
                                  phases_apart=self.phases, overlap=clock.in_stream)
    carrier, reason = piggyback.chosen(
        self.share_wanted, written.carrier, clock, self.pacer, self.axis,
        self._platform or jax.default_backend())
    holding = None
    if carrier and self.pacer is not None and self.holds and not isinstance(one.alike, tuple):
      holding = Holding(clock, self.pacer, self.max_hold, one, self.axis, events)
    measured = rewrite.Evaluation(
        written, clock, one, jax.lax.axis_index(self.axis), self.pacer, carrier=carrier,
        delay_limit=self.max_delay if self.pacer is not None else None, mapped=not stacked,
        automatic=bool(automatic), holding=holding, events=events)
    outputs = measured.run(call.leaves)
    with jax.named_scope("jaxpace"):
      state, names = measured.after()
    self.note_traced(Plan(
        axis=",".join(self.axis), ranks=ranks, clock=clock.name, marks=written.marks,
        collectives=written.collectives, unstamped=written.unstamped, share=carrier is not None,
        share_reason=reason, carrier=carrier.slot if carrier else None, decisions=names,
        overflow=written.overflow, holds=holding is not None, program=events.program or None,
        notices=(*written.notices, *((clock.notice,) if clock.notice else ()), *automatic,
                 *silent, *((everywhere.UNTIMED.format(unmarked),) if unmarked else ()), *untimed,
                 *before_collective.notices(self.holds, len(written.collectives), holding))),
                     0 if unmarked else len(flat.hidden))
    axes = varying(one.last_exit)
    state = jax.tree.map(lambda leaf: vary(leaf[None] if stacked else leaf, axes), state)
    return state, outputs

  def _events(self, clock: Clock, one: PaceState) -> tuple[Event, tuple[str, ...]]:
    """Where the step's events go; nowhere, with a notice, where they can't be written."""
    try:
      if reason := host_ring.unwritable(clock.name):
        return NOWHERE, (f"Nothing of this step can be recorded. {reason}",)
      self.number = self.number or programs.next_number()
    except ValueError as error:
      return NOWHERE, (f"Nothing of this step can be recorded: {error}",)
    host_ring.tell_places(self.number, self.devices, self.first_place)
    everywhere.instrumented[self.number] = self
    return Event(self.number, clock.place(one.rank)), ()

  def _leave_nested(self, clock: Clock, automatic: bool, events: Event) -> str:
    """Leaves collectives that values can't reach, those in loops, branches and `jax.checkpoint`, to
    what compiles the step; says why that can't time them, empty where it can."""
    if not events.program:
      return "nothing of this step is recorded."
    if clock.name != "native":
      return f"that takes the native clock, not {clock.name!r}."
    if automatic:
      return "some axes of the mesh are the compiler's."
    try:
      everywhere.watch()
    except Exception as error:  # Whatever it is, the step runs.
      return str(error)
    return ""

  # What the recorder writes down.

  def settings_json(self) -> dict[str, Any]:
    """Returns how the step was instrumented, as plain JSON values."""
    pacer = self.pacer
    name: str | None = (getattr(pacer.update, "__qualname__", repr(pacer)).split(".")[0]
                        if pacer is not None else None)
    return {"step": getattr(self.step, "__qualname__", repr(self.step)), "axis": list(self.axis),
            "clock": self.clock_wanted, "share": self.share_wanted, "slots": self.slots,
            "max_delay": self.max_delay,
            **({"max_hold": self.max_hold} if self.holds else {}), "phases": self.phases,
            "pacer": name, "mesh": self.mesh_shape, "platform": self._platform}


def _stacked(one: PaceState, count: int, first: int = 0) -> PaceState:
  """The state of so many places, in numpy, given one's; numbered from `first` on."""
  state: PaceState = jax.tree.map(lambda leaf: np.broadcast_to(leaf, (count, *leaf.shape)), one)
  numbers: Any = np.arange(first, first + count, dtype=np.int32)
  return state._replace(rank=numbers)
