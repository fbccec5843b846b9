"""Pacers that hold collectives back, in a live step: same results, what is in the program, what is
recorded."""

import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpace
from jaxpace.core import packing
from jaxpace.core.types import Decision, Hold, Pacer
from jaxpace.diagnose import accounting, step_times
from jaxpace.diagnose.follower import Follower
from jaxpace.diagnose.phases import phase_medians
from jaxpace.instrumentation import before_collective
from jaxpace.runs.dense import read_bounds
from jaxpace.runs.reader import read_run
from jaxpace.show.timeline import build
from tests.instrumentation import cases, models
from tests.instrumentation.running import extra_operands, hlo_collectives, mesh_of, pair, restless
from tests.patience import patiently
from tests.record.recording import table

pytestmark = pytest.mark.optimized

PAUSE = 2e-3  # s, held before each time of listening but the first


def listener(times=2, pause=PAUSE):
  """Listens so often before each collective; its state counts, and keeps the last reading. It
  delays ranks, too."""

  def init(ranks):
    return {"times": np.int32(0), "heard": np.float32(np.nan), "own": np.float32(0)}

  def update(seen, state):
    # jaxlib 0.11.2 crashes where it partitions a sum of nothing.
    held = jnp.float32(0) if isinstance(seen.holds, tuple) else jnp.sum(seen.holds)
    info = {"held": held, "heard": state["heard"], "times": state["times"].astype(jnp.float32)}
    mine = seen.step % seen.arrivals.shape[0] == seen.rank
    # What differs from rank to rank, and no hold depends on.
    return Decision(jnp.where(mine, jnp.float32(3e-4),
                              jnp.float32(0)), info), state | {"own": jnp.sum(seen.waits)}

  def hold(moment, state):
    again = (moment.listened < times) & (state["times"] >= 0)
    seconds = jnp.where(moment.listened > 0, jnp.float32(pause), jnp.float32(0))
    heard = jnp.where(moment.listened > 0, moment.heard, state["heard"])
    return (Hold(seconds, again),
            state | {"times": state["times"] + again.astype(jnp.int32), "heard": heard})

  return Pacer(init, update, hold)


def holding(pacer, **settings):
  """The plain step on two devices with this pacer: its state, its batches, both forms of it."""
  params, data = models.mlp_params(), models.batches(2)
  return params, data, pair(models.plain_step, mesh_of(data=2), params, data[0], pacer=pacer,
                            **settings)


@pytest.mark.parametrize("clock, check_vma, case", [
    ("auto", True, cases.by_autodiff),
    *(pytest.param(*case, marks=pytest.mark.long) for case in (
        ("callback", True, cases.by_user), ("auto", True, cases.by_user),
        ("auto", False, cases.matrices_clipped_and_cast),
        ("auto", False, cases.linen_sync_batch_norm)))])
def test_same_bits_while_it_listens_and_holds(clock, check_vma, case):
  step, state, *rest = case()
  data = models.batches(2)
  pacer = listener(pause=2e-4)
  both = pair(step, mesh_of(data=2), state, data[0], check_vma=check_vma, clock=clock, pacer=pacer,
              max_hold=0.05)
  both.check_bits(state, data, 8)
  state = both.paced.pacer_state(both.pace)
  asked = [c.index for c in both.paced.plan.collectives if not c.may_begin_early]
  # Not in the first step, nor in the second: ranks are compared first.
  assert np.asarray(state["times"]).tolist() == [2 * 7 * len(asked)] * 2
  assert both.paced.plan.holds and np.asarray(both.pace.alike).all()
  assert np.unique(np.asarray(state["heard"])).size == 1, ("what is heard is the same on all "
                                                           "ranks, to the last bit")


def test_what_is_in_the_program_and_nothing_where_it_is_off():
  params, data = models.mlp_params(), models.batches(2)
  held = listener()
  programs = {name: pair(models.plain_step, mesh_of(data=2), params, data[0], **settings)
              for name, settings in {
                  "on": {"pacer": held, "share": True},
                  "off": {"pacer": held._replace(hold=None), "share": True},
                  "not shared": {"pacer": held, "share": False},
                  "none": {"pacer": restless(), "share": True}}.items()}
  listening = [kind for kind, operands in hlo_collectives(programs["on"].hlo)
               if operands in ({"f32[1]": 1}, {"f32[3]": 1})]
  # One time of listening and one of telling for the only bucket, in a loop; ranks' numbers ride
  # along with the rest.
  assert len(listening) == 2
  assert (len(hlo_collectives(programs["on"].hlo)) == len(hlo_collectives(programs["on"].bare_hlo))
          + 2)
  for name in ("off", "none"):
    both = programs[name]
    assert len(extra_operands(both.bare_hlo, both.hlo)) <= 1 and not both.paced.plan.holds
    assert "pmin" not in both.hlo and not isinstance(both.pace.alike, jax.Array)
  assert not extra_operands(programs["not shared"].bare_hlo, programs["not shared"].hlo)
  assert not programs["not shared"].paced.plan.holds
  assert "Nothing is held back" in " ".join(programs["not shared"].paced.plan.notices)
  whiles = {name: len(re.findall(r" while\(", both.hlo)) for name, both in programs.items()}
  assert whiles["on"] == whiles["off"] + 1 == whiles["not shared"] + 1


def test_ranks_that_would_hold_differently_are_found_out_and_nobody_waits_for_ever():
  params, data, both = holding(listener())
  state = both.paced.pacer_state(both.pace)
  other = both.paced.with_pacer_state(both.pace, state | {"times": np.array([0, 1], np.int32)})
  both.pace = other
  both.run(params, data, 4)
  assert not np.asarray(both.pace.alike).any()
  assert (np.asarray(both.paced.pacer_state(both.pace)["times"]).tolist()
          == [0, 1]), "nobody listened"


@pytest.mark.long
def test_numbers_that_no_hold_depends_on_may_differ():
  pacer, digests = listener(), []
  for changed in ({}, {"own": 7.0}, {"times": 3}, {"heard": 1.0}):
    state = (pacer.init(2) | {name: np.asarray(value, pacer.init(2)[name].dtype)
                              for name, value in changed.items()})
    packed = packing.pack(jax.tree.map(jnp.asarray, state))
    digests.append(float(jax.jit(lambda packed: before_collective.digest(packed, pacer))(packed)))
  assert digests[0] == digests[1] == digests[3] != digests[2]
  turns = jaxpace.take_turns(key=3)
  mixed = jaxpace.chain(jaxpace.pace_early_ranks(), turns)
  for pacer, change, same in ((turns, lambda s: s._replace(mode=np.int32(3)), False),
                              (turns, lambda s: s._replace(key=np.uint32(4)), False),
                              (turns, lambda s: s._replace(spent=np.float32(1)), True),
                              (mixed,
                               lambda s: (jax.tree.map(lambda leaf: leaf + leaf.dtype.type(1),
                                                       s[0]), s[1]), True)):
    state = jax.tree.map(np.asarray, pacer.init(2))
    found = [float(before_collective.digest(packing.pack(jax.tree.map(jnp.asarray, each)), pacer))
             for each in (state, jax.tree.map(np.asarray, change(state)))]
    assert (found[0] == found[1]) == same and found[0] == round(found[0]) < 2**24


def recorded(directory, both, state, batch):
  """Twelve instrumented steps, recorded and read."""
  with jaxpace.Recorder(directory, both.paced) as recorder:
    state, batch = both.place(state, batch)
    for _ in range(12):
      both.pace, (state, _) = both.instrumented(both.pace, state, batch)
      recorder.record()
      jax.block_until_ready(state)
  return read_run(directory)


def test_what_was_held_and_heard_is_recorded_and_counts_as_pacing(tmp_path):
  params, data, both = holding(listener(), clock="auto")
  run = recorded(tmp_path, both, params, data[0])
  held, delayed = run.durations["held"], run.durations["delay_applied"]
  listened = {(row["step"], row["listened"] or 0) for row in table(tmp_path, "collectives")}
  assert listened == {(0, 0), *((step, 2) for step in range(1, 12))}
  assert (held[:, 3:] > 2 * PAUSE).all()
  work = accounting.account(step_times.busy(run, slice(0, len(run.steps))))
  known = np.isfinite(work.step)
  np.testing.assert_allclose((work.pacing + work.compute + work.runtime)[known], (
      work.step - work.waiting_compute - work.waiting_runtime - work.waiting_pacing - work.spread
      - work.transfer.sum(axis=0))[known], atol=1e-7)
  # All that was held is pacing, so none of it is in the other parts of that sum.
  np.testing.assert_allclose(work.pacing[:, 1:], (held + delayed)[:, 1:], atol=1e-7)


@pytest.mark.long
@patiently(PAUSE=2e-3)
def test_what_is_held_before_a_later_collective_is_pacing_on_every_page(tmp_path):
  def step(params, batch):
    # The second sum needs the first one's result.
    shift = jax.lax.pmean(batch["x"].mean(0), "data")
    gradient = jax.grad(lambda w: jnp.mean(((batch["x"] - shift) @ w) ** 2))(params)
    return params - 0.1 * jax.lax.pmean(gradient, "data"), shift.sum()

  def hold(moment, state):
    seconds = jnp.where(moment.slot == 1, jnp.float32(10 * PAUSE), jnp.float32(0))
    return Hold(seconds, jnp.zeros((), jnp.bool_)), state

  pacer = Pacer(lambda ranks: (), lambda seen, state: (Decision(jnp.float32(0), {}), state), hold)
  both = pair(step, mesh_of(data=2), jnp.ones((4, 3)), {"x": jnp.ones((8, 4))}, pacer=pacer,
              clock="auto")
  run = recorded(tmp_path, both, jnp.ones((4, 3)), {"x": jnp.ones((8, 4))})
  assert len(both.paced.plan.collectives) == 2
  held = run.durations["held"][:, 3:]
  assert (held > 9 * PAUSE).all()
  work = accounting.account(step_times.busy(run, slice(0, len(run.steps))))
  np.testing.assert_allclose(work.pacing[:, 3:], held, atol=1e-6)
  assert (work.compute[:, 3:] < 5 * PAUSE).all()

  numbers = Follower(tmp_path).poll(time.monotonic(), time.time()).numbers
  assert numbers is not None and numbers.shares["pacing"] > 0.5

  phases = phase_medians(run, np.arange(len(run.steps)) > 2)
  assert (phases["held"] > 9 * PAUSE).all() and (phases["sync"] < 5 * PAUSE).all()
  shown = build(run, read_bounds(run))
  spans = {name: (shown.end - shown.begin)[shown.name == i] for i, name in enumerate(shown.names)}
  assert np.sort(spans["held back"])[-18:].min() > 9 * PAUSE * 1e9 and "held" not in spans


def test_what_the_pacer_sees_of_its_holds():
  params, data, both = holding(listener(), max_hold=0.1)
  both.run(params, data, 6)
  info = np.asarray(both.pace.info)
  assert both.paced.plan.decisions == ("heard", "held", "times")
  assert (info[:, 0] > 0).all() and (info[:, 1] >= 2 * PAUSE).all() and (info[0] == info[1]).all()


@pytest.mark.long
def test_the_packages_own_is_silent_alone():
  params, data, both = holding(jaxpace.guard(jaxpace.take_turns(key=1), block=8))
  both.check_bits(params, data, 10)
  assert both.paced.plan.holds and np.asarray(both.pace.alike).all()


def test_refused_in_a_sentence():
  paced = jaxpace.instrument(models.plain_step, "data", listener())
  params, data = models.mlp_params(), models.batches(2)
  pace = paced.init(devices=jax.local_devices()[:2])
  split = jax.tree.map(lambda leaf: leaf.reshape(2, -1, *leaf.shape[1:]), data[0])
  with pytest.raises(ValueError, match=r"jax\.shard_map, not under jax\.pmap"):
    jax.pmap(paced, "data", in_axes=(0, None,
                                     0), devices=jax.local_devices()[:2])(pace, params, split)
  mesh = mesh_of(data=2, model=2)
  pace = paced.init(mesh, axes=["data"])
  spec = jaxpace.spec(mesh, axes=["data"])
  with pytest.raises(ValueError, match=r"every mesh axis to be manual.*'model'"):
    jax.eval_shape(jax.shard_map(paced, mesh=mesh, in_specs=(spec, jax.P(), jax.P("data")),
                                 out_specs=(spec, jax.P()), axis_names={"data"}), pace, params,
                   data[0])


