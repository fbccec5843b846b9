"""The housekeeper in one process: what it does at which step, what it leaves behind, what it tells
a careless user."""

import gc
import itertools
import logging
import os
import types
import weakref

import jax.numpy as jnp
import numpy as np
import pytest

import jaxpace
from jaxpace.live.housekeeping import keeper as module
from jaxpace.live.housekeeping.memory import Ceiling
from jaxpace.live.housekeeping.modes import ALONE, MODES
from tests.lib.said import numbers


class Node:
  pass


def garbage():
  """A cycle that no young collection frees any more."""
  node = Node()
  node.itself = node
  gc.collect(1)
  return weakref.ref(node)


def late_collections(keeper, steps, pace=None):
  """Steps after which full collections ran."""
  found = []
  for _ in range(steps):
    before = keeper.summary()["full_collections"]
    keeper.step(pace)
    found += [keeper.steps] * (keeper.summary()["full_collections"] - before)
  return found


def test_aligned_collects_at_the_multiples_and_at_no_other_step():
  with jaxpace.Housekeeper(every=10, mode="aligned", warmup=5) as keeper:
    assert late_collections(keeper, 40) == [10, 20, 30, 40]


def test_after_a_resume_the_steps_are_those_of_the_run():
  with jaxpace.Housekeeper(every=10, mode="aligned", start=1007, warmup=2) as keeper:
    assert late_collections(keeper, 20) == [1010, 1020] and keeper.steps == 1027


def test_frozen_collects_once_after_warm_up():
  heap = [[i] for i in range(5000)]
  with jaxpace.Housekeeper(every=10, mode="frozen", warmup=7) as keeper:
    assert late_collections(keeper, 40) == [7]
    assert gc.get_freeze_count() > 1000 and heap


def test_alone_does_nothing():
  with jaxpace.Housekeeper(every=10, mode="alone", warmup=0) as keeper:
    assert late_collections(keeper, 40) == [] and gc.get_freeze_count() == 0


def test_garbage_waits_for_the_aligned_step():
  with jaxpace.Housekeeper(every=10, mode="aligned", warmup=0) as keeper:
    keeper.step()
    gone = garbage()
    for _ in range(8):
      keeper.step()
    assert gone() is not None
    keeper.step()
    assert gone() is None


def early_pace(early):
  arrivals = jnp.asarray([[0.1 - early, 0.1]], jnp.float32)
  return types.SimpleNamespace(arrivals=arrivals, delays=jnp.zeros_like(arrivals),
                               rank=jnp.zeros((2,), jnp.int32))


def test_in_slack_an_early_process_collects_before_the_others():
  with jaxpace.Housekeeper(every=40, mode="in-slack", warmup=0, ranks=[0]) as keeper:
    found = late_collections(keeper, 160, early_pace(early=60.0))
  assert found[0] == 40  # nothing known yet of how long it takes
  assert [step % 40 for step in found[1:]] == [20, 20, 20]


@pytest.mark.parametrize("pace", [None, early_pace(early=0.0)], ids=["no pace state", "no slack"])
def test_in_slack_without_slack_is_aligned(pace):
  with jaxpace.Housekeeper(every=40, mode="in-slack", warmup=0, ranks=[0]) as keeper:
    assert late_collections(keeper, 160, pace) == [40, 80, 120, 160]


@pytest.mark.long
def test_hooks_run_at_their_steps_in_every_mode_and_movable_ones_in_the_slack():
  for mode in (*MODES, "auto"):
    called = {"fixed": [], "movable": []}
    with jaxpace.Housekeeper(every=40, mode=mode, warmup=0, ranks=[0]) as keeper:
      keeper.add(lambda: called["fixed"].append(keeper.steps), every=40)  # noqa: B023
      keeper.add(lambda: called["movable"].append(keeper.steps), every=40, movable=True)  # noqa: B023
      for _ in range(160):
        keeper.step(early_pace(60.0))
    assert called["fixed"] == [40, 80, 120, 160]
    assert called["movable"] == ([40, 60, 100, 140] if mode == "in-slack" else [40, 80, 120, 160])


def test_a_hook_that_raises_is_told_once_and_stops_nothing(caplog):
  with caplog.at_level(logging.WARNING,
                       "jaxpace"), jaxpace.Housekeeper(every=10, mode="aligned") as keeper:
    keeper.add(lambda: 1 / 0, every=3, name="flush")
    later = []
    keeper.add(lambda: later.append(keeper.steps), every=3)
    for _ in range(30):
      keeper.step()
  assert keeper.errors == {"flush": 10} and len(later) == 10
  assert keeper.summary()["errors"] == {"flush": 10}
  assert len(caplog.records) == 1
  assert "'flush'" in caplog.text and "ZeroDivisionError" in caplog.text
  assert 3 in numbers(caplog.messages[0]) and "goes on" in caplog.text


def test_an_interrupt_in_a_hook_passes_and_settings_are_restored():
  def interrupt():
    raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt), jaxpace.Housekeeper(every=10, mode="aligned",
                                                             warmup=0) as keeper:
    keeper.add(interrupt, every=2)
    keeper.step()
    assert gc.get_threshold() != (700, 10, 10) or not gc.isenabled()
    keeper.step()
  # that they are restored, the fixture of every test checks


@pytest.mark.parametrize("mode", [*MODES, "auto"])
@pytest.mark.parametrize("error", [None, ValueError])
def test_every_mode_restores_the_settings(mode, error):
  before = gc.isenabled(), gc.get_threshold()
  try:
    with jaxpace.Housekeeper(every=2, mode=mode, warmup=0) as keeper:
      for _ in range(9):
        keeper.step()
      if error:
        raise error("out of the loop")
  except ValueError:
    assert error
  assert (gc.isenabled(), gc.get_threshold()) == before and gc.get_freeze_count() == 0


def test_memory_growth_forces_a_collection_and_says_so_once(caplog):
  with caplog.at_level(logging.WARNING, "jaxpace"), jaxpace.Housekeeper(
      every=10_000, mode="aligned", warmup=0, max_objects=50_000) as keeper:
    keeper.step()
    kept = []
    for _ in range(10):
      gone = garbage()
      kept.append([[i] for i in range(30_000)])
      keeper.step()
  assert 3 <= keeper.forced <= 6 and keeper.summary()["forced"] == keeper.forced
  assert len(caplog.records) == 1 and "max_objects=50,000" in caplog.text
  assert gone() is None or keeper.forced


def test_frozen_garbage_is_collected_at_the_ceiling():
  resident, clock, heap = [100], itertools.count(), [[i] for i in range(5000)]
  with jaxpace.Housekeeper(every=10, mode="frozen", warmup=1) as keeper:
    keeper._ceiling = Ceiling(None, 10, None, lambda: resident[0], lambda: next(clock))
    node = Node()
    node.itself = node
    gone = weakref.ref(node)
    keeper.step()  # frozen
    del node
    gc.collect()
    keeper.step()
    assert gone() is not None and keeper.forced == 0
    resident[0] = 111
    keeper.step()
    assert gone() is None and keeper.forced == 1 and gc.get_freeze_count() > 1000 and heap
    keeper.step()
    assert keeper.forced == 1


def test_what_is_due_for_all_stays_due_after_a_forced_collection():
  with jaxpace.Housekeeper(every=10, mode="aligned", warmup=0, max_objects=20_000) as keeper:
    for _ in range(7):
      keeper.step()
    more = [[i] for i in range(40_000)]
    assert late_collections(keeper, 3) == [8, 10] and more


def test_a_second_one_is_refused_while_the_first_is_open():
  with jaxpace.Housekeeper() as first:
    with pytest.raises(RuntimeError, match="open already.*keeper.add"), jaxpace.Housekeeper():
      pass
    first.step()
  with pytest.raises(RuntimeError, match="opened once"), first:
    pass
  with jaxpace.Housekeeper() as second:
    second.step()


def test_steps_outside_of_the_block_are_refused():
  keeper = jaxpace.Housekeeper()
  with pytest.raises(RuntimeError, match="outside"):
    keeper.step()
  with keeper:
    keeper.step()
  with pytest.raises(RuntimeError, match="outside"):
    keeper.step()


@pytest.mark.parametrize(("arguments", "words"), [
    ({"mode": "best"}, "alone, aligned, frozen, in-slack, auto"), ({"every": 1}, "every=1"),
    ({"every": 2.5}, "every"), ({"start": -1}, "start=-1"), ({"warmup": -3}, "warmup"),
    ({"max_growth": 0}, "max_growth=0"), ({"max_memory": -1}, "max_memory"),
    ({"max_objects": 0}, "max_objects"), ({"timeout": 0}, "timeout")])
def test_arguments_out_of_range_are_named(arguments, words):
  with pytest.raises(ValueError, match=words):
    jaxpace.Housekeeper(**arguments)


def test_hooks_that_are_none_are_refused():
  keeper = jaxpace.Housekeeper()
  with pytest.raises(TypeError, match="lambda"):
    keeper.add("save", every=3)
  with pytest.raises(ValueError, match="every=0"):
    keeper.add(print, every=0)


def test_a_donated_pace_state_is_refused():
  pace = early_pace(0.0)
  pace.arrivals.delete()
  with jaxpace.Housekeeper() as keeper, pytest.raises(ValueError, match="donated"):
    keeper.step(pace)


def test_columns_for_the_trace():
  with jaxpace.Housekeeper(every=10, mode="aligned", warmup=0) as keeper:
    assert keeper.columns() == {"pauses_ns": 0, "housekeeping": MODES.index(ALONE)}
    keeper.add(lambda: np.linalg.norm(np.ones(100)), every=2, name="checkpoint")
    keeper.add(lambda: np.linalg.norm(np.ones(100)), every=3)
    for _ in range(2):
      keeper.step()
    found = keeper.columns()
    assert (found["checkpoint_ns"] > 0 and found["pauses_ns"] == 0
            and MODES[found["housekeeping"]] == "aligned")
    keeper.step()
    found = keeper.columns()
    assert found["checkpoint_ns"] == 0 and found["pauses_ns"] > 0


@pytest.mark.long
def test_auto_alone_tries_every_mode_it_can_and_tells_what_it_found():
  seen = set()
  with jaxpace.Housekeeper(every=2, mode="auto", warmup=2) as keeper:
    for _ in range(400):
      keeper.step()
      seen.add(keeper.mode)
    found = keeper.summary()["trial"]
  assert seen == {"alone", "aligned", "frozen"}  # there is no slack
  assert (set(found) == {"chosen", "unit", "testing", "frozen", "aligned", "in-slack"}
          and found["frozen"]["pairs"] > 0)


def test_a_child_process_leaves_the_parents_housekeeping_alone():
  with jaxpace.Housekeeper(mode="aligned", warmup=0) as keeper:
    keeper.step()
    keeper._pid = os.getpid() + 1
  assert gc.get_threshold() != (700, 10, 10) or not gc.isenabled()
  keeper._collector.restore()
  assert not module._active


@pytest.mark.long
def test_in_auto_a_collection_ends_every_block_that_is_aligned():
  collected, aligned = [], []
  with jaxpace.Housekeeper(every=4, mode="auto", warmup=2) as keeper:
    for _ in range(3000):
      mode = keeper.mode
      before = keeper._collector.own
      keeper.step()
      if mode == "aligned" or keeper.mode == "aligned":
        aligned.append(keeper.steps)
        if keeper._collector.own > before:
          collected.append(keeper.steps)
      if len(collected) > 5:
        break
  unit = keeper.summary()["trial"]["unit"]
  assert unit == 32 and aligned  # in so few steps the interpreter itself collects seldom
  assert {b - a for a, b in itertools.pairwise(collected)} >= {unit}


def test_a_state_that_is_no_pace_state_is_named():
  with jaxpace.Housekeeper(mode="in-slack") as keeper, pytest.raises(
      TypeError, match="train state"):
    keeper.step({"params": 1})
