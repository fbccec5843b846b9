"""Replay of `Pacer.hold`: over the record of a live step, and over runs whose truth is known."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

import jaxpace
from jaxpace.coordination import take_turns
from jaxpace.core.types import Decision, Hold, Pacer
from jaxpace.runs.reader import read_run
from jaxpace.simulation.replay import replay
from tests.instrumentation.running import P, instrumented, mesh_of
from tests.quick import QUICK, long
from tests.simulation.test_replay import summary_of
from tests.synthetic import synthetic_runs
from tests.synthetic.synthetic_runs import SyntheticJob

# Decisions of a compiled step and of its replay are compared bit by bit.
pytestmark = pytest.mark.optimized
EXACT = ("held", "wait", "arrival", "transfer", "quiet", "loud", "doubts", "heard", "mode", "sum")
"""Columns of what a pacer sees, and of what its `hold` answers by."""
FLOORS = [3e-4, 1e-4, 2e-4]
"""s, which `take_turns` is given: `spent` is a share of their sum."""


def three_sums(state, batch):
  """Three collectives, one after the other."""
  for name in sorted(state):
    grad = jax.lax.pmean(jnp.tanh(batch @ state[name]).mean(axis=0), "data")
    state = state | {name: state[name] - 0.1 * grad}
    batch = batch + grad
  return state, grad.sum()


def recorded(path, pacer, ranks, steps=20, **settings):
  """A live run: its record, the delays asked for, and the pacer's columns."""
  mesh = mesh_of(data=ranks)
  paced, step, pace = instrumented(three_sums, mesh, P(), P("data"), pacer=pacer, share=True,
                                   **settings)
  # Laid out and typed as the step returns it: otherwise the second step would wait until the step
  # is compiled again, for seconds on a busy machine.
  start = jnp.full((4, 4), 0.1, jnp.float32)
  state = jax.device_put(dict.fromkeys("abc", start), NamedSharding(mesh, P()))
  batch = jnp.linspace(-1, 1, 32 * ranks).reshape(8 * ranks, 4)
  asked, info = [], []
  with jaxpace.Recorder(path, paced) as recorder:
    for _ in range(steps):
      asked.append(np.asarray(pace.delay))
      pace, (state, _) = jax.block_until_ready(step(pace, state, batch))
      recorder.record()
      info.append(np.asarray(pace.info))
  columns = np.stack(info).transpose(2, 0, 1)
  return read_run(path), np.stack(asked), dict(zip(paced.plan.decisions, columns, strict=False))


def spied(pacer, *names):
  """Adds what it sees and what it remembers to a pacer's columns."""
  def update(seen, state):
    decision, after = pacer.update(seen, state)
    info = {name: jnp.asarray(getattr(state, name), jnp.float32) for name in names}
    for i in range(3):
      info |= {f"wait{i}": seen.waits[i], f"transfer{i}": seen.job_transfers[i]}
      info |= {} if isinstance(seen.holds, tuple) else {f"held{i}": seen.holds[i]}
    return Decision(decision.delay, info | {"arrival": seen.arrivals[seen.rank]}), after
  return Pacer(pacer.init, update, pacer.hold)


def turns(by):
  """The package's own, made to take turns from the start: any reading is of a link in use that is
  not much shorter than the longest so far. So small floors that no step has more readings than are
  kept."""
  pacer = jaxpace.take_turns(key=5, by=by, floor=FLOORS, slots=3)

  def init(ranks):
    return pacer.init(ranks)._replace(mode=take_turns.TRIES, quiet=jnp.float32(1e-8),
                                      loud=jnp.float32(1e-6))

  return Pacer(init, spied(pacer, "quiet", "loud", "doubts", "heard", "mode", "spent").update,
               pacer.hold)


def curious():
  """Listens once, twice or thrice, by its count of questions, and once more after a reading that is
  longer than the one before; holds for parts of what it heard. Its delays depend on what was held.
  """
  def init(ranks):
    return {"asked": np.int32(0), "before": np.float32(0), "sum": np.float32(0)}

  def update(seen, state):
    held = jnp.float32(0) if isinstance(seen.holds, tuple) else seen.holds[0]
    delay = jnp.where(seen.rank == 0, jnp.minimum(held, np.float32(2e-3)) * np.float32(0.25),
                      np.float32(0))
    return Decision(delay, {"sum": state["sum"], "held": held}), state

  def hold(moment, state):
    known = moment.heard >= np.float32(0)
    heard = jnp.where(known, moment.heard, np.float32(0))
    wanted = np.int32(1) + (state["asked"] + moment.slot) % np.int32(3)
    longer = known & (heard > state["before"]) & (moment.listened < np.int32(5))
    first = (moment.listened == np.int32(0)).astype(jnp.int32)
    # Of the order of readings, of what was told (in `held`), and of all before.
    mixed = state["sum"] * np.float32(0.5) + heard + moment.held * np.float32(0.25)
    after = {"asked": state["asked"] + first, "before": heard, "sum": mixed}
    return Hold(mixed * np.float32(0.125), (moment.listened < wanted) | longer), after

  return Pacer(init, update, hold)


def guarded():
  """Everything that passes a hold on, around one that listens."""
  inner = jaxpace.chain(jaxpace.pace_early_ranks(window=8), jaxpace.limit(curious(), 1e-3))
  return jaxpace.guard(jaxpace.steerable(inner), block=3)


def check(run, pacer, asked, info):
  """Whether the replayed pacer does as it did live; returns the replay."""
  replayed = replay(run, pacer, as_recorded=True)
  held = replayed.holds_recorded
  assert held.sum() == 3 * (len(asked) - 1) and not held[0].any(), "not asked in a first step"
  assert replayed.holds_agree[held].all() and not replayed.holds.unanswered.any()
  begin, end = run.collectives[0].enter_ns, run.collectives[-1].exit_ns
  begin = np.concatenate([begin[:, :1], np.minimum(begin[:, 1:], end[:, :-1])], axis=1)
  longest = np.maximum.accumulate((end - begin).max(axis=0) * 1e-9)[:, None]
  # What lasts longer than the lower of two words tells is rounded twice, or once by the compiler,
  # and later steps remember it: a machine that stood still.
  told = longest[:, 0] < 4
  for name, values in {**info, "delays": asked}.items():
    found = replayed.delays if name == "delays" else replayed.columns[name]
    if QUICK or not name.startswith(EXACT):
      # Compiled another way than a user's, two programs may round differently; so may sums in
      # `update`, over the slots or a window, compiled for one rank or for all. A difference of long
      # times is as wrong as they are.
      unit = sum(FLOORS) if name == "spent" else 1
      off = np.abs(found - values) / (1e-7 + 1e-5 * np.abs(values) + 1e-6 * longest / unit)
      np.testing.assert_array_less(np.where(np.isnan(found) & np.isnan(values), 0, off)[told], 1,
                                   err_msg=name)
    else:
      np.testing.assert_array_equal(found[told], values[told], err_msg=name)
  return replayed


@pytest.mark.long
@pytest.mark.parametrize(("by", "ranks"), [
    ("message", 4), *long(("message", 2), ("bucket", 2), ("bucket", 4))])
def test_turns_are_taken_again_as_they_were_live(tmp_path, by, ranks):
  run, asked, info = recorded(tmp_path / "run", turns(by), ranks)
  replayed = check(run, turns(by), asked, info)
  listened = replayed.holds.listened
  # From the second step on, until they are found not to pay, if they are.
  assert listened[1, 0] > 0 and listened[:, 1].any() == (by == "bucket")
  np.testing.assert_array_equal(listened.sum(axis=1), replayed.readings)


@pytest.mark.long
@pytest.mark.parametrize("pacer", [
    pytest.param(curious, id="alone"),
    pytest.param(guarded, id="combined", marks=pytest.mark.long)])
def test_a_pacer_that_listens_by_what_it_remembers_and_hears(tmp_path, pacer):
  """The same bit for bit; any change of what was heard, told or allowed is found out."""
  run, asked, info = recorded(tmp_path / "run", pacer(), 2)
  check(run, pacer(), asked, info)
  if pacer is guarded:
    return
  heard = run.listening
  assert heard is not None
  at = int(np.flatnonzero((heard.turn[1:] == 1) & (np.diff(heard.heard_ns) != 0))[0])
  swapped = heard.heard_ns.copy()
  swapped[[at, at + 1]] = swapped[[at + 1, at]]
  told = heard.told_ns.copy()
  assert told[at] == 0 < told[at + 1], "telling takes time that is told the next time"
  told[at + 1] += 100_000
  first = run.collectives[0]
  denied = first.held.asked_ns.copy()
  denied[:, 5] = np.iinfo(np.int64).min
  for changed in (
      dataclasses.replace(run, listening=heard._replace(heard_ns=swapped)),
      dataclasses.replace(run, listening=heard._replace(told_ns=told)),
      dataclasses.replace(run, collectives=(
          dataclasses.replace(first, held=first.held._replace(asked_ns=denied)),
          *run.collectives[1:]))):
    replayed = replay(changed, pacer(), as_recorded=True)
    assert not replayed.holds_agree[replayed.holds_recorded].all()


@pytest.fixture(scope="module")
def listened(tmp_path_factory):
  """A run in which a pacer listened once before each collective, and then held for a while."""
  def hold(moment, state):
    return Hold(jnp.where(moment.listened > 0, np.float32(1e-3), np.float32(0)),
                moment.listened < np.int32(1)), state

  path = tmp_path_factory.mktemp("listened") / "run"
  return recorded(path, Pacer(lambda ranks: (), nothing, hold), 2)[0]


def nothing(seen, state):
  return Decision(jnp.float32(0), {}), state


def asks(seconds, times=0):
  """Listens so often before each collective, then holds it back."""
  def hold(moment, state):
    again = moment.listened < np.int32(times)
    return Hold(jnp.where(again, np.float32(0), np.float32(seconds)), again), state
  return Pacer(lambda ranks: (), nothing, hold)


def test_what_was_held_is_taken_out_and_what_is_asked_for_counted_in(listened):
  bare = summary_of(listened, Pacer(lambda ranks: (), nothing))
  # A millisecond before each of three collectives, and listening.
  took = bare["step_time"]
  assert bare["held"] is None and took["without"] < took["recorded"] - 3e-3
  seen = replay(listened, Pacer(lambda ranks: (), lambda seen, state: (
      Decision(jnp.float32(0), {"took": seen.step_time}), state)))
  np.testing.assert_allclose(seen.columns["took"][seen.known].mean(axis=1), seen.bare[seen.known],
                             rtol=1e-4)
  again = summary_of(listened, asks(1e-3, 1))
  held, took = again["held"], again["step_time"]
  assert held["listened"] == held["on_record"] and not held["unanswered"]
  # But for the last time of telling, which nobody is told.
  assert took["recorded"] * 0.5 < took["with"] <= took["recorded"] * 1.0001
  silent = summary_of(listened, asks(0.0))
  assert silent["held"]["mean"] == silent["held"]["cost"]["total"] == 0
  assert silent["step_time"]["with"] == silent["step_time"]["without"]


def test_asked_beyond_the_record_it_is_told_that_nothing_is_known(listened):
  more = replay(listened, asks(0.0, 3))
  asked = np.isfinite(more.holds.held)
  assert asked.sum() == 3 * (len(more.steps) - 1)
  assert (more.holds.listened[asked] == 3).all() and (more.holds.unanswered[asked] == 2).all()
  once = replay(listened, asks(0.0, 1))
  np.testing.assert_array_equal(more.holds.held[asked], once.holds.held[asked])
  held = summary_of(listened, asks(0.0, 3))["held"]
  assert held["unanswered"] * 3 == held["listened"] * 2
  assert held["on_record"] * 3 == held["listened"]


def test_no_more_is_held_in_a_step_than_the_run_was_instrumented_for(listened):
  most = replay(listened, asks(1e-3), max_hold=2.5e-3).holds.held[3, :3]
  np.testing.assert_allclose(most, [1e-3, 1e-3, 0.5e-3], rtol=1e-5)


def test_nobody_is_asked_where_nothing_is_shared_or_the_record_does_not_tell(listened, tmp_path):
  assert not np.isfinite(replay(listened, asks(1e-3), shared=False).holds.held).any()
  synthetic_runs.write(tmp_path / "run", SyntheticJob(ranks=2, steps=30))
  synthetic = read_run(tmp_path / "run")
  assert not np.isfinite(replay(synthetic, asks(1e-3), as_recorded=True).holds.held).any()


@pytest.mark.parametrize("seconds", [*long(1e-3), 15e-3])
def test_a_hold_costs_what_computing_does_not_hide(tmp_path, seconds):
  """Of a job whose last rank reaches the first collective 27.5 ms after the last exit, and the
  others 10 ms apart: a hold for longer than the pause before a collective is what is too long."""
  job = SyntheticJob(ranks=2, steps=30, collectives=2, late={1: 6e-3})
  synthetic_runs.write(tmp_path / "run", job)
  run = read_run(tmp_path / "run")
  replayed = replay(run, asks(seconds), max_hold=1.0)
  pauses = np.array([job.update + job.gap + job.forward + 6e-3 + 10e-3, 10e-3])
  wanted = np.maximum(seconds - pauses, 0).sum()
  np.testing.assert_allclose(replayed.hold_cost[1:], wanted, atol=1e-8)
  np.testing.assert_allclose(replayed.holds.held[1:, :2], np.float32(seconds))
  listening = replay(run, asks(seconds, 2))
  assert (listening.holds.unanswered[1:, :2] == 2).all() and not listening.readings.any()
  # It listens at once, so what it waits for after that hides behind nothing.
  np.testing.assert_allclose(listening.hold_cost[1:], 2 * seconds, rtol=1e-5)


def test_damaged_readings_are_taken_as_far_as_they_make_sense(listened):
  """One turn missing, and more readings in a step than any recorder keeps."""
  heard = listened.listening
  many = np.arange(300)
  added = {"step": np.full(300, listened.steps[-1]), "collective": np.full(300, 2),
           "turn": 2 + many, "heard_ns": 1000 * many, "told_ns": many}
  more = heard._replace(**{name: np.concatenate([getattr(heard, name), values])
                           for name, values in added.items()})
  for changed in (heard._replace(turn=heard.turn + 1), more):
    run = dataclasses.replace(listened, listening=changed)
    found, whole = (replay(each, asks(0.0, 2)).holds for each in (run, listened))
    lost = found.unanswered - whole.unanswered
    asked = np.isfinite(whole.held)
    assert (lost[asked] == (1 if changed is not more else 0)).all()
