"""Evaluates a script: the step's own equations, with timestamps, gates and the shared operand."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from jaxpace.core import pacing, packing, ring_layout
from jaxpace.core.pace import PaceState
from jaxpace.core.types import Decision, Pacer
from jaxpace.core.varying import vary, varying
from jaxpace.instrumentation import checks, piggyback
from jaxpace.instrumentation.before_collective import Holding, agree
from jaxpace.instrumentation.piggyback import Carrier
from jaxpace.instrumentation.program import Ref, evaluate
from jaxpace.instrumentation.schedule import BucketTimestamps, Stage
from jaxpace.instrumentation.script import Script
from jaxpace.observation import phases
from jaxpace.observation.clocks import Clock, gate, words
from jaxpace.observation.clocks.operands import NOWHERE, Event, first_element


class Evaluation:
  """A step that is evaluated with timestamps, and what they say.

  Attributes:
    timestamps: uint32 [2] each, in the order of the plan's timestamps.
    arrival: float32 [] s, own, undelayed, at the first timestamped collective; NaN if unknown.
    delay: float32 [] s, applied.
    shared: what came along in the all-reduce; None where nothing is shared.
    waits: float32 [] s each, by slot, without what holding took.
    last_exit: uint32 [2].
  """

  def __init__(self, script: Script, clock: Clock, one: PaceState, index: jax.Array,
               pacer: Pacer | None, *, delay_limit: float | None, carrier: Carrier | None = None,
               mapped: bool = False, automatic: bool = False, holding: Holding | None = None,
               events: Event = NOWHERE):
    """Prepares.

    Args:
      index: int32 [], this rank's index along the axis.
      delay_limit: s; None: the step has no delay operation.
      carrier: the all-reduce that the ranks' arrivals ride in; None: not shared.
      mapped: whether under pmap, which gives every output one more axis when the step is over.
      automatic: whether some mesh axes are the compiler's: it would gather a whole operand of a
        timestamp over them.
      holding: who is asked before collectives; None: nobody.
    """
    self.script, self.clock, self.one, self.pacer = script, clock, one, pacer
    self.index, self.ranks, self.slots = index, one.arrivals.shape[0], one.transfers.shape[0]
    self.delay_limit, self.carrier, self.mapped = delay_limit, carrier, mapped
    self.automatic, self.holding, self.events = automatic, holding, events
    self.tags = ring_layout.timestamp_tags(script.marks)
    self.program = script.program
    self.env: dict[int, Any] = dict(self.program.constants)
    self.timestamps: list[jax.Array] = []
    # A timestamp that is no timestamp, which the next one comes after.
    self.chained: jax.Array | None = None
    # The timestamp that holds back the next segment.
    self.holder = self.last_exit = one.last_exit
    self.exits: list[jax.Array] = []
    self.waits: list[jax.Array] = []
    self.arrival = jnp.float32(jnp.nan)
    self.delay = jnp.float32(0)
    self.shared: piggyback.PiggybackSum | None = None

  def read(self, ref: Ref, seen: Mapping[int, Any] | None = None) -> Any:
    if isinstance(ref, Literal):
      return ref.val
    return seen[ref] if seen and ref in seen else self.env[ref]

  def timestamp(self, *after: Any) -> jax.Array:
    before = self.timestamps[-1] if self.chained is None else self.chained
    measured = self.clock.timestamp(before, *after, event=self.event(len(self.timestamps)))
    self.timestamps.append(measured)
    self.chained = None
    return measured

  def event(self, place: int) -> Event:
    """What a timestamp leaves in the ring, by its place among the step's."""
    return self.events.at(self.tags[place])

  def begin(self) -> None:
    one, first = self.one, self.event(0)
    with jax.named_scope("jaxpace"):
      if self.delay_limit is None:
        self.timestamps.append(self.clock.timestamp(one.last_exit, event=first))
      else:
        early, late = self.clock.delay(one.delay, self.delay_limit, one.last_exit,
                                       events=(first, self.event(1)))
        self.timestamps += [early, late]
        self.delay = words.seconds_between(early, late)
      if self.events.program:
        # The number of the step, and what the pacer decided for it.
        numbers = [one.step[None], one.delay[None], *([] if self.pacer is None else [one.info])]
        self.timestamps[-1] = self.clock.note(
            self.timestamps[-1], jnp.concatenate(list(map(words.of_bits, numbers))),
            self.events.at(ring_layout.STEP_VALUE))
      self.holder = self.timestamps[-1]

  def equations(self, indices: Sequence[int], gated: Sequence[int]) -> None:
    """Evaluates a segment, which sees the values in `gated` only after the timestamp before it."""
    waiting = set(gated)
    seen: dict[int, Any] = {}
    holder = self.holder

    def look(ref: Ref) -> Any:
      # Gated at first sight: some gated values are made within the segment.
      if isinstance(ref, int) and ref in waiting and ref not in seen:
        with jax.named_scope("jaxpace"):
          (seen[ref],) = gate(self.clock, holder, [self.env[ref]])
      return self.read(ref, seen)

    for index in indices:
      self.equation(index, look)

  def equation(self, index: int, read: Callable[[Ref], Any]) -> None:
    equation, events = self.program.equations[index], self.events
    scope: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if equation.holds_some and events.program:
      scope = jax.named_scope(phases.nested_scope(events.program, len(self.exits)))
    with scope:
      outputs = evaluate(equation, [read(ref) for ref in equation.inputs])
    self.env.update(zip(equation.outputs, outputs, strict=True))

  def bucket(self, stage: Stage) -> None:
    """Evaluates collectives that meet, between their timestamps if they have any."""
    timestamps = stage.timestamps
    if timestamps is None:
      for index in stage.bucket:
        self.equation(index, self.read)
      return
    seen: dict[int, Any] = {}
    with jax.named_scope("jaxpace"):
      enter = self.timestamp(*map(self.sentinel, timestamps.operands))
      if not self.exits:
        busy = words.seconds_between(self.one.last_exit, enter) - self.delay
        first = words.is_zero(self.one.last_exit)
        self.arrival = jnp.where(first, jnp.float32(jnp.nan), busy)
      begin = self.hold_back(timestamps, enter)
      ours = self.our_operand(timestamps, begin)
      if timestamps.gate is not None and (ours is None or not timestamps.last):
        (seen[timestamps.gate],) = gate(self.clock, begin, [self.env[timestamps.gate]])
    for index in stage.bucket:
      self.equation(index, functools.partial(self.read, seen=seen))
    with jax.named_scope("jaxpace"):
      # On a GPU XLA makes several collectives of one bucket, to overlap them with what is computed
      # meanwhile.
      awaited = timestamps.results if self.clock.in_stream else [timestamps.latest_result]
      ends = [self.sentinel(value) for value in awaited]
      if ours is not None and timestamps.joinable is not None:
        total = jax.lax.psum(ours, timestamps.joinable.axes)
        if self.carries(timestamps):
          self.shared = piggyback.unpack(total, self.ranks, timestamps.joinable.dtype,
                                         len(self.script.collectives), self.slots,
                                         self.holding is not None)
        else:
          # XLA drops what nobody reads, and with it what holds the bucket back.
          ends.append(total)
      leave = self.timestamp(*ends)
      if not self.clock.in_stream:
        held = gate(self.clock, leave, [self.env[value] for value in timestamps.held_after])
        self.env.update(zip(timestamps.held_after, held, strict=True))
      self.exits.append(leave)
      if self.holding is not None and timestamps.slot in self.holding.held:
        enter = words.add(enter, self.holding.held[timestamps.slot].lost)
      self.waits.append(words.seconds_between(enter, leave))

  def hold_back(self, timestamps: BucketTimestamps, enter: jax.Array) -> jax.Array:
    """Asks the pacer, and holds the bucket back: the timestamp after which it may begin.

    A bucket that may begin before its entry timestamp can't be held back, so nobody is asked there.
    """
    if self.holding is None or timestamps.may_begin_early:
      return enter
    over = self.exits[-1] if self.exits else self.one.last_exit
    begin = self.holding.before(timestamps.slot, over, enter)
    # What comes after is chained to it; it is no timestamp of the plan's.
    self.chained = begin
    return begin

  def carries(self, timestamps: BucketTimestamps) -> bool:
    """Whether the ranks' arrivals ride in this bucket."""
    return timestamps.joinable is not None and timestamps.joinable == self.carrier

  def our_operand(self, timestamps: BucketTimestamps, enter: jax.Array) -> jax.Array | None:
    """The operand that holds the last bucket back by itself, if there is one.

    It is the ranks' arrivals, or, where no operand of the step's may be held back, a single zero.
    The last bucket only. XLA joins all-reduces that follow each other in the order in which it
    meets them, and ours it meets last: it would join an operand of an earlier bucket to the last
    one's all-reduce, or leave it alone.
    """
    joinable = timestamps.joinable
    if joinable is None:
      return None
    if carries := self.carries(timestamps):
      # What a rank says of the step before: own step time, and its own times of collectives. What
      # is over by now goes along.
      job = jnp.zeros((0,), jnp.float32) if self.pacer is None else jnp.concatenate([
          self.one.step_time[None], self.one.transfers[:len(self.script.collectives)],
          *(wait[None] for wait in self.waits)])
      payload = piggyback.operand(self.arrival, self.delay, job, self.index, self.ranks,
                                  joinable.dtype, self.holding.digest if self.holding else None)
    elif timestamps.gate is None and timestamps.last:
      payload = jnp.zeros((1,), joinable.dtype)
    else:
      return None
    payload = vary(payload, varying(self.one.last_exit) & set(joinable.axes))
    if carries and self.clock.in_stream:
      # Made of the entry timestamp: it can't be there before it.
      return payload
    (held,) = gate(self.clock, enter, [payload])
    return held

  def sentinel(self, number: int) -> jax.Array:
    """What a timestamp is given to wait for a value: the value if it is flat, else one element of
      it.

    Where timestamps are kernels in a stream XLA makes matrices in their layout anyway, and each
    element would be a copy of its own.
    """
    value = self.env[number]
    whole = (value.ndim < 2 or self.clock.in_stream) and not self.automatic
    return value if whole else first_element(value)

  def run(self, inputs: Sequence[Any]) -> list[Any]:
    """Evaluates the step on its inputs, flat; returns the outputs, bit for bit what the bare step
    gives."""
    self.env.update(zip(self.program.inputs, inputs, strict=True))
    self.begin()
    for stage in self.script.stages:
      for segment in stage.segments:
        if segment.boundary is not None:
          with jax.named_scope("jaxpace"):
            self.holder = self.timestamp(*(self.env[v] for v in segment.boundary))
        self.equations(segment.equations, segment.gated)
      self.bucket(stage)
    outputs = [self.read(ref) for ref in self.program.outputs]
    with jax.named_scope("jaxpace"):
      # What a step hands back as it came is there from the start, and keeping it to the end would
      # cost a copy where it is donated.
      given = set(self.program.inputs)
      ends = [v for ref, v in zip(self.program.outputs, outputs, strict=True)
              if isinstance(v, jax.Array) and v.size
              and not (isinstance(ref, int) and ref in given)]
      if self.mapped:
        ends = self.clock.awaited_under_pmap(ends)
      if self.automatic:
        # As integers: the sums that bring them to all devices must not be combined with those of
        # the entry timestamps.
        ends = [first_element(_integer(v)) for v in ends]
      # What is waited for must be what ends the last kernels, or they would be cut differently.
      # Entry timestamps first: see ORDER in jaxpace.observation.clocks.native.
      entered = [timestamp for timestamp,
                 mark in zip(self.timestamps, self.script.marks, strict=False)
                 if mark.kind == "enter"]
      self.timestamp(*entered, *[v[None] if self.mapped else v for v in ends])
    self.last_exit = self.exits[-1] if self.exits else self.timestamps[-1]
    # Typed as the same everywhere so far; a pacer may not take it for that.
    own = functools.partial(vary, axes=varying(self.one.last_exit))
    self.timestamps, self.waits = list(map(own, self.timestamps)), list(map(own, self.waits))
    self.arrival, self.delay, self.last_exit = map(
        own, (self.arrival, self.delay, self.last_exit))
    return outputs

  def after(self) -> tuple[PaceState, tuple[str, ...]]:
    """Makes the state after the step, which has run: what it showed, and the pacer's decision for
    the next; and the names of the decision's columns."""
    one, pacer, slots, holding = self.one, self.pacer, self.slots, self.holding
    shared, nothing = self.shared, jnp.float32(np.nan)
    mine = jnp.arange(self.ranks, dtype=jnp.int32) == self.index
    arrivals, delays = (shared.arrivals, shared.delays) if shared is not None else (
        jnp.where(mine, self.arrival, nothing), jnp.where(mine, self.delay, nothing))
    decision, packed = Decision(jnp.float32(0), {}), checks.packed_pacer(one)
    step_time, transfers = one.step_time, one.transfers
    if pacer is not None and packed is not None:
      waits = jnp.stack([*self.waits, *([nothing] * (slots - len(self.waits)))])
      first = words.is_zero(one.last_exit)
      step_time = jnp.where(first, nothing, words.seconds_between(one.last_exit, self.last_exit))
      held = () if holding is None else jnp.stack([
          holding.held[slot].seconds if slot in holding.held else jnp.float32(0)
          for slot in range(slots)])
      seen, transfers = pacing.observe(
          one.step, self.index, arrivals, delays, waits, step_time,
          pacing.nothing_shared(slots) if shared is None else shared.alike, held)
      decision, state = pacing.decide(
          pacer, seen, packing.unpack(packed) if holding is None else holding.state)
      packed = packing.pack(state, packed.layout)
    info = [*decision.info.values()]
    info += [jnp.float32(0)] * (ring_layout.MAX_DECISIONS - len(info))
    alike = None if shared is None else shared.digests
    return PaceState(
        end=self.timestamps[-1], step=one.step + jnp.int32(1), rank=one.rank,
        last_exit=self.last_exit, delay=decision.delay, info=jnp.stack(info),
        arrivals=arrivals, delays=delays, step_time=step_time, transfers=transfers,
        pacer=() if packed is None else packed,
        alike=one.alike if alike is None else agree(alike)), tuple(decision.info)


def _integer(value: jax.Array) -> jax.Array:
  if not jnp.issubdtype(value.dtype, jnp.floating):
    return value
  return jax.lax.bitcast_convert_type(value, jnp.dtype(f"uint{8 * value.dtype.itemsize}"))
