"""Profiler traces, made up: planes, lines and events as `jax.profiler.ProfileData` gives them."""

from types import SimpleNamespace

import numpy as np
import pytest

from jaxpace.record.profiler import timestamps
from jaxpace.record.profiler.executions import (
  ANCHOR,
  Execution,
  ProfileError,
  executions,
  is_collective,
  operations,
)
from tests.record.ring.replayed import rows_of

SHIFT = 5_000_000_000_000


def event(name, begin, duration, **stats):
  return SimpleNamespace(name=name, start_ns=float(begin), duration_ns=float(duration),
                         stats=list(stats.items()))


def op(name, run, device, begin, duration, program="jit_step"):
  return event(name, begin, duration, hlo_op=name, hlo_module=program, run_id=run,
               device_ordinal=device)


def profile(*events, anchor=True):
  anchors = [event(f"{ANCHOR}{SHIFT + 1000}", 1000, 5)] if anchor else []
  return SimpleNamespace(
      planes=[SimpleNamespace(lines=[SimpleNamespace(events=[*anchors, *events])])])


def step(run, device, begin, late=0):
  return [op("fusion.1", run, device, begin, 100),
          op("all-reduce.3", run, device, begin + 100 + late, 400 - late),
          op("copy", run, device, begin + 500, 50)]


def in_trace(execution):
  """Its collectives, ns of the trace."""
  return {name: (enter - SHIFT, leave - SHIFT)
          for name, (enter, leave) in execution.collectives.items()}


def test_executions_by_device_in_order_on_the_hosts_clock():
  events = [*step(-7, 1, 20_000, late=300), *step(-8, 0, 10_000), *step(-8, 1, 10_000, late=300),
            *step(-7, 0, 20_000), event("Rendezvous", 0, 1),
            op("fusion", 1, 0, 0, 90_000, program="jit_other")]
  program, by_device = executions(operations(profile(*events)), 2)
  assert program == "jit_step" and sorted(by_device) == [0, 1]
  assert by_device[1] == [
      Execution(k, k + 550, {"all-reduce.3": (k + 400, k + 500)})
      for k in (SHIFT + 10_000, SHIFT + 20_000)]


def test_what_begins_after_the_session_does_not_count():
  found = operations(profile(*step(1, 0, 0), *step(2, 0, 1000), *step(3, 0, 2000)))
  own = executions(found, 2, SHIFT + 1999)[1][0]
  assert [one.begin_ns - SHIFT for one in own] == [0, 1000]


def test_what_is_lacking_is_said():
  with pytest.raises(ProfileError, match="mark of the host's clock"):
    operations(profile(anchor=False))
  with pytest.raises(ProfileError, match="has a collective"):
    executions([one for one in operations(profile(*step(1, 0, 0))) if one.name == "copy"], 1)
  with pytest.raises(ProfileError, match="ran 3 times on device 0 in 2 steps"):
    executions(operations(profile(*step(1, 0, 0), *step(2, 0, 1000), *step(3, 0, 2000))), 2)


def test_several_executions_of_a_program_make_one_step():
  found = operations(profile(*(e for k in range(4) for e in step(k, 0, 1000 * k))))
  _, by_device = executions(found, 2)
  assert ([sorted(one.collectives) for one in by_device[0]]
          == [["all-reduce.3", "all-reduce.3#1"]] * 2)
  assert by_device[0][1].begin_ns == SHIFT + 2000 and by_device[0][1].end_ns == SHIFT + 3550


def test_a_start_and_its_done_are_one_collective():
  found = operations(profile(op("all-gather-start.1", 1, 0, 10, 5),
                             op("all-gather-done.1", 1, 0, 80, 20)))
  assert in_trace(executions(found, 1)[1][0][0]) == {"all-gather.1": (10, 100)}
  assert is_collective("collective-permute.12") and not is_collective("all-reduce-fusion")


def test_turns_of_a_loop_are_told_apart():
  def turn(k, begin):
    return [op("fusion.2", 1, 0, begin, 30), op("all-reduce.5", 1, 0, begin + 30, 10)]
  found = operations(profile(op("while.1", 1, 0, 0, 120), *turn(2, 80), *turn(0, 0), *turn(1, 40),
                             op("all-reduce.7", 1, 0, 130, 5)))
  only = executions(found, 1)[1][0][0]
  assert in_trace(only) == {"all-reduce.5": (30, 40), "all-reduce.5@1": (70, 80),
                              "all-reduce.5@2": (110, 120), "all-reduce.7": (130, 135)}
  plan = timestamps.plan("p", timestamps.group([only]), "data", 1)
  assert [c.name for c in plan.collectives] == list(only.collectives)
  assert {c.primitives for c in plan.collectives} == {("all-reduce",)}


def test_starts_and_dones_of_a_loop_are_paired_turn_by_turn():
  found = operations(profile(*(op(f"all-gather-{half}.1", 1, 0, 100 * turn + at, 10)
                               for turn in range(3) for half, at in (("start", 0), ("done", 50)))))
  assert in_trace(executions(found, 1)[1][0][0]) == {
      "all-gather.1": (0, 60), "all-gather.1@1": (100, 160), "all-gather.1@2": (200, 260)}


def test_more_turns_than_there_is_room_for_are_put_together_and_that_is_said():
  only = Execution(0, 4000, {f"all-reduce.1@{k}": (10 * k, 10 * k + 4)
                             for k in range(timestamps.MAX_SLOTS + 44)})
  groups = timestamps.group([only])
  assert len(groups) == timestamps.MAX_SLOTS and sum(map(len, groups)) == timestamps.MAX_SLOTS + 44
  assert timestamps.between([only], groups) == pytest.approx(44 * 6 / 4000)
  assert timestamps.between([only], tuple((name,) for name in only.collectives)) == 0
  notices = timestamps.plan("p", groups, "data", 1, ["so it is"]).notices
  assert notices[1:] == ("so it is",)


def test_a_loop_that_turns_more_often_in_some_steps_keeps_its_order():
  def one(turns):
    own = {f"all-reduce.1@{k}": (10 + 20 * k, 14 + 20 * k) for k in range(turns)}
    return Execution(0, 100 + 20 * turns,
                     {**own, "all-reduce.2": (20 * turns + 10, 20 * turns + 15)})
  groups = timestamps.group([one(2), one(5), one(3)])
  assert groups == (*((f"all-reduce.1@{k}",) for k in range(5)), ("all-reduce.2",))


def test_slots_are_collectives_that_run_at_once_and_no_more_than_there_is_room_for():
  def one(shift):
    return Execution(shift, shift + 1000,
                     {"a": (shift + 10, shift + 50), "b": (shift + 40, shift + 60),
                      "c": (shift + 70, shift + 90), "d": (shift + 500, shift + 600)})
  assert timestamps.group([one(0), one(7000)]) == (("a", "b"), ("c",), ("d",))
  assert timestamps.group([one(0), one(7000)], most=2) == (("a", "b", "c"), ("d",))


def test_rows_decode_to_the_tables_they_came_from():
  begin = SHIFT + (1 << 33)
  steps = [Execution(begin + k, begin + k + 900,
                     {"all-reduce.1": (begin + k + 100, begin + k + 300),
                      "all-reduce.2": (begin + k + 200, begin + k + 700)})
           for k in (0, 2000)]
  groups = timestamps.group(steps)
  plan = timestamps.plan("jit_step", groups, "data", 4)
  columns, collectives, _ = rows_of(plan, timestamps.events(steps, groups), 3, numbers=[50, 51])
  assert (columns["step"].tolist() == [50, 51]
          and columns["start_ns"].tolist() == [begin, begin + 2000])
  assert columns["sync_ns"].tolist() == [600, 600] and columns["compute_ns"].tolist() == [300, 300]
  assert columns["gap_ns"].tolist() == [None, 1100] and columns["delay_ns"].mask.all()
  assert (collectives["enter_ns"] - begin).tolist() == [100, 2100]
  assert (collectives["exit_ns"] - begin).tolist() == [700, 2700]
  assert collectives["bytes"].mask.all() and set(collectives["rank"]) == {3}
  assert "forward_ns" not in columns


def test_a_collective_that_did_not_run_is_null():
  steps = [Execution(10, 90, {"all-reduce.1": (20, 30)}), Execution(110, 190, {})]
  groups = timestamps.group(steps)
  _, collectives, _ = rows_of(timestamps.plan("p", groups, "data", 1),
                              timestamps.events(steps, groups), numbers=[0, 1])
  assert np.ma.getmaskarray(collectives["enter_ns"]).tolist() == [False, True]


def test_devices_are_numbered_by_id_or_on_their_host():
  local, everyone = [(2048, 0), (2049, 1)], [0, 1, 2048, 2049]
  assert timestamps.ranks_of([2049, 2048], local, everyone) == {2049: 3, 2048: 2}
  assert timestamps.ranks_of([0, 1], local, everyone) == {0: 2, 1: 3}
  assert timestamps.ranks_of([7], local, everyone) == {}
