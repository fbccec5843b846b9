"""What every pacer promises about any observation whatever: a delay that is finite and within its
bounds."""

import inspect

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpace
from jaxpace.core import packing
from jaxpace.core.types import Observation
from tests.coordination.test_combinators import MOST, RANKS, SLOTS, always
from tests.quick import examples, long

ANY = st.one_of(st.floats(width=32), st.floats(0, 0.125, width=32),
                st.sampled_from([np.nan, np.inf, -np.inf, -1.0, 1.8e10, 4.29, 3.4e38, 0.0]))
EAGER = jaxpace.pace_early_ranks(window=8, threshold=0.0, noise=0.0, quantile=0.9, cost=1.0,
                                 max_delay=MOST)
SHIFT = jaxpace.interleave_jobs(max_delay=MOST, floor=1e-3, budget=1.0, key=3)
TURNS = jaxpace.take_turns(key=3, floor=1e-3, learn=4, trial=4, retry=4)
PACERS = {
    "pace_early_ranks eager": EAGER,
    "interleave_jobs": SHIFT,
    "interleave_jobs floor seen": jaxpace.interleave_jobs(max_delay=MOST, window=8),
    "chain": jaxpace.chain(EAGER, SHIFT, jaxpace.limit(always(np.nan), MOST)),
    "limit": jaxpace.limit(always(np.inf), MOST),
    "limit of anything": jaxpace.limit(jaxpace.Pacer(lambda ranks: (), lambda seen, state: (
        jaxpace.Decision(jnp.max(seen.waits) - seen.step_time, {}), state)), MOST),
    "only_ranks": jaxpace.only_ranks(EAGER, [0, 1]),
    "guard": jaxpace.guard(EAGER, block=2, settle=0, retry=2),
    "take_turns": TURNS,
    "steerable": jaxpace.steerable(EAGER),
}
"""Those that bound their delays, at least one for every public factory. Bound by `MOST`."""
ALIKE = ("interleave_jobs floor seen", "limit", "only_ranks", "steerable", "chain")
"""What others of them do as well."""
TRIED = [*(name for name in PACERS if name not in ALIKE), *long(*ALIKE)]
COMPILED = {name: jax.jit(pacer.update) for name, pacer in PACERS.items()}
_WHOLE = st.integers(-2**31, 2**31 - 1)


def field(*shape):
  """Unknown, or anything at all: None stands for what it is in a plain step."""
  values = st.lists(ANY, min_size=shape[0], max_size=shape[0]) if shape else ANY
  return st.one_of(st.none(), st.just(np.full(shape, np.nan)), values).map(
      lambda wild: None if wild is None else np.asarray(wild, np.float32))


_FIELDS = st.tuples(field(RANKS), field(RANKS), field(SLOTS), field(), field(), field(SLOTS),
                    field(SLOTS), field(SLOTS))
_JUNK = st.tuples(st.just(1), _WHOLE, st.one_of(st.integers(-1, RANKS), _WHOLE), _FIELDS)
_PLAIN = st.tuples(st.integers(1, 12), st.integers(0, 100), st.integers(0, RANKS - 1),
                   st.just((None,) * 8))


def observations(runs):
  """Runs of plain imbalance, through which delays come up, and junk."""
  return st.lists(st.one_of(_PLAIN, _JUNK), min_size=1, max_size=runs).map(
      lambda runs: [observed(step + k if count > 1 else step, rank, fields)
                    for count, step, rank, fields in runs for k in range(count)])


def observed(step, rank, fields):
  tame = plain(step, rank)
  made = [own if wild is None else wild
          for wild, own in zip(fields, (*tame[2:9], tame.holds), strict=True)]
  return Observation(*tame[:2], *made[:-1], holds=made[-1])


def plain(step, rank):
  f32 = np.float32
  return Observation(np.int32(step), np.int32(rank), 1e-2 * np.arange(1, 1 + RANKS, dtype=f32),
                     np.zeros(RANKS, f32), np.full(SLOTS, 3e-2, f32), f32(5e-2), f32(5e-2),
                     np.asarray([3e-3, 2e-3, 1e-3], f32), np.asarray([3e-3, 2e-3, np.nan], f32),
                     holds=np.zeros(SLOTS, f32))


def check(decision):
  assert decision.delay.shape == () and decision.delay.dtype == jnp.float32
  assert 0 <= float(decision.delay) <= np.float32(MOST)
  assert all(np.shape(value) == () for value in decision.info.values())


def test_every_public_pacer_is_here():
  """Whatever jaxpace offers that returns a Pacer."""
  factories = {name for name in jaxpace.__all__
               if inspect.isfunction(value := getattr(jaxpace, name)) and
               inspect.signature(value).return_annotation in ("Pacer", "Guarded", jaxpace.Pacer)}
  assert ({"chain", "guard", "interleave_jobs", "limit", "only_ranks", "pace_early_ranks"}
          <= factories)
  assert factories == {name.split()[0] for name in PACERS}


@pytest.mark.parametrize("name", TRIED)
@hypothesis.given(observations(8))
@hypothesis.settings(max_examples=examples(30))
def test_every_decision_is_finite_and_within_bounds(name, seen):
  state = PACERS[name].init(RANKS)
  shapes = jax.tree.map(lambda leaf: (jnp.shape(leaf), jnp.asarray(leaf).dtype), state)
  for one in seen:
    decision, state = COMPILED[name](one, state)
    check(decision)
  assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state) == shapes, "fit to be carried"
  assert not packing.not_finite(PACERS[name].init(RANKS), state), "and to be kept in a checkpoint"


POISON = [name for name in PACERS if not name.startswith(("limit", "guard"))
          and name not in ("interleave_jobs floor seen", "take_turns")]


@pytest.mark.parametrize("value", [np.nan, *long(np.inf, -1.0)])
@pytest.mark.parametrize("name", POISON)
def test_junk_is_got_over(name, value):
  """Once all is plain again, delays come back as before: nothing is poisoned by what no duration
  can be."""
  state, junk = PACERS[name].init(RANKS), plain(0, 0)
  junk = Observation(junk.step, junk.rank, *(np.full_like(field, value) for field in junk[2:]))
  for _ in range(4):
    _, state = COMPILED[name](junk, state)
  delays = []
  for k in range(60):
    decision, state = COMPILED[name](plain(k, 0), state)
    delays.append(float(decision.delay))
  assert max(delays[30:]) > 0
