"""The housekeeper in one process: what it does at which step, what it leaves behind, what it tells
a careless user."""

import gc
import logging
import os
import time
import weakref

import pytest

import jaxpace
from jaxpace.live import housekeeper
from jaxpace.live.housekeeper import MODES
from jaxpace.runs.reader import read_run
from tests.record import fake_step as fake
from tests.record.recording import table


class Node:
  pass


def late_collections(keeper, steps):
  """Steps after which full collections ran."""
  found = []
  for _ in range(steps):
    before = keeper.summary()["full_collections"]
    keeper.step()
    found += [keeper.steps] * (keeper.summary()["full_collections"] - before)
  return found


@pytest.mark.parametrize("mode, warmup, start, steps, collected", [
    ("aligned", 5, 0, 40, [10, 20, 30, 40]),
    # After a resume the steps are those of the run.
    ("aligned", 2, 1007, 20, [1010, 1020]),
    # Once, after the warm-up.
    ("frozen", 7, 0, 40, [7])])
def test_it_collects_at_these_steps_and_at_no_other(mode, warmup, start, steps, collected):
  heap = [[i] for i in range(5000)]
  with jaxpace.Housekeeper(every=10, mode=mode, start=start, warmup=warmup) as keeper:
    assert late_collections(keeper, steps) == collected and keeper.steps == start + steps
    assert (gc.get_freeze_count() > 1000) == (mode == "frozen") and heap


@pytest.mark.parametrize("mode", MODES)
def test_hooks_run_at_their_steps_in_every_mode(mode):
  called = []
  with jaxpace.Housekeeper(every=40, mode=mode, start=30, warmup=0) as keeper:
    keeper.add(lambda: called.append(keeper.steps), every=40)
    for _ in range(160):
      keeper.step()
  assert called == [40, 80, 120, 160]



MIB = 1 << 20


def test_memory_that_grows_forces_a_collection_and_says_so_once(monkeypatch, caplog):
  resident, heap = [100 * MIB], [[i] for i in range(5000)]
  monkeypatch.setattr(housekeeper, "_LOOK_SECONDS", 0.0)
  monkeypatch.setattr(housekeeper, "resident_bytes", lambda: resident[0])
  with caplog.at_level(logging.WARNING, "jaxpace"), jaxpace.Housekeeper(
      every=10, mode="frozen", warmup=1, max_growth=10 * MIB) as keeper:
    node = Node()
    node.itself = node
    gone = weakref.ref(node)
    keeper.step()  # frozen
    del node
    gc.collect()
    resident[0] = 110 * MIB
    keeper.step()
    assert gone() is not None and keeper.forced == 0
    for grown in (111, 121, 132):  # counted from the last collection
      resident[0] = grown * MIB
      keeper.step()
      assert gone() is None and gc.get_freeze_count() > 1000 and heap
  assert keeper.forced == keeper.summary()["forced"] == 2
  assert len(caplog.records) == 1 and "11 MiB more" in caplog.text


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
    ({"mode": "best"}, "alone, aligned, frozen"), ({"every": 1}, "every=1"),
    ({"every": 2.5}, "every"), ({"start": -1}, "start=-1"), ({"warmup": -3}, "warmup"),
    ({"max_growth": 0}, "max_growth=0")])
def test_arguments_out_of_range_are_named(arguments, words):
  with pytest.raises(ValueError, match=words):
    jaxpace.Housekeeper(**arguments)


def test_hooks_that_are_none_are_refused():
  keeper = jaxpace.Housekeeper()
  with pytest.raises(TypeError, match="lambda"):
    keeper.add("save", every=3)
  with pytest.raises(ValueError, match="every=0"):
    keeper.add(print, every=0)


def test_a_child_process_leaves_the_parents_housekeeping_alone():
  with jaxpace.Housekeeper(mode="aligned", warmup=0) as keeper:
    keeper.step()
    keeper._pid = os.getpid() + 1
  assert gc.get_threshold() != (700, 10, 10) or not gc.isenabled()
  keeper._collector.restore()
  assert not housekeeper._active


def test_an_error_is_told_once_a_kind_and_counted(caplog):
  raised = iter([OSError("disk full"), OSError("again"), ValueError("other"), OSError("more")])

  def hook():
    raise next(raised)

  with caplog.at_level(logging.WARNING), jaxpace.Housekeeper() as keeper:
    keeper.add(hook, 1, name="it")
    for _ in range(4):
      keeper.step()
  assert keeper.errors == {"it": 4}
  assert [record.message.split(". Training")[0] for record in caplog.records] == [
      "Housekeeping hook 'it' raised OSError at step 1: disk full",
      "Housekeeping hook 'it' raised ValueError at step 3: other"]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_what_is_meant_to_end_the_program_passes(kind):
  def hook():
    raise kind

  with pytest.raises(kind), jaxpace.Housekeeper() as keeper:
    keeper.add(hook, 1)
    keeper.step()


def test_collections_and_checkpoints_are_in_the_trace_at_their_steps(tmp_path):
  mesh = fake.mesh()
  step, pace = fake.make_step(mesh), fake.init(mesh)
  heap = [[i] for i in range(300_000)]  # what was there before a test is kept out of collections
  with jaxpace.Recorder(tmp_path, fake.FakePaced()) as recorder, jaxpace.Housekeeper(
      every=10, mode="aligned", warmup=0) as keeper:
    keeper.add(lambda: time.sleep(0.002), every=15, name="checkpoint")
    keeper.add(lambda: time.sleep(0.003), every=25)
    for _ in range(30):
      pace = step(pace)
      keeper.step()
      recorder.record(**keeper.columns())
  rows = {row["step"]: row for row in table(tmp_path) if row["rank"] == 0}
  saved = [k for k, row in rows.items() if row["checkpoint_ns"] and row["checkpoint_ns"] >= 2e6]
  assert (saved == [14, 29]
          and [k for k, row in rows.items() if row["host_pauses_ns"] >= 3e6] == [24])
  assert {row["host_housekeeping"] for row in rows.values()} == {MODES.index("aligned")}
  usual = sorted(row["gc_ns"] for row in rows.values())[len(rows) // 2]
  # a whole heap against nothing or a few
  assert all(rows[k]["gc_ns"] > 10 * max(usual, 100_000) for k in (9, 19, 29))
  assert heap
  run = read_run(tmp_path)
  assert not run.problems and "checkpoint" in run.host_causes.columns
