"""Profiler traces, made up: planes, lines and events as `jax.profiler.ProfileData` gives them."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from jaxpace.core.observed import ObservedFunction, ObservedPlan
from jaxpace.record import traces as trace
from jaxpace.record.columns import UNKNOWN, Range, StepCalls
from jaxpace.record.profiler import _ProfiledIntake
from jaxpace.record.ring.observed import PlannedPrograms
from jaxpace.record.traces import (
  ANCHOR,
  Execution,
  ProfileError,
  executions,
  is_collective,
  operations,
)

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


def test_a_trace_that_lacks_executions_is_told_so():
  # As jax 0.11 writes it of an H200.
  kernel = event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 100, 50, hlo_op="all-reduce.12",
                 hlo_module="jit_train_step", program_id=132280, correlation_id=21)
  with pytest.raises(ProfileError, match="which execution they belong to"):
    operations(profile(kernel))


def in_trace(execution):
  """Its collectives, ns of the trace."""
  return {name: [(enter - SHIFT, leave - SHIFT) for enter, leave in times]
          for name, times in execution.collectives.items()}


def tables(ran, numbers, each=1, rank=3):
  """Rows of both tables of one device's executions, `each` of which are a step."""
  function = ObservedFunction()
  one = trace.program(7, "jit_step", trace.iterations(ran), "data", range(4))
  function.plan = ObservedPlan((one,))
  intake = _ProfiledIntake(0, 0, PlannedPrograms([function]))
  intake.ready.append((
      [StepCalls(number, (Range(7, at * each, (at + 1) * each),), UNKNOWN, {})
       for at, number in enumerate(numbers)], {rank: {7: trace.events(ran, one)}}))
  intake.poll()
  made = intake.take()
  return made["steps"], made.get("collectives", {}), intake.plan


def test_executions_by_device_in_order_on_the_hosts_clock():
  events = [*step(-7, 1, 20_000, late=300), *step(-8, 0, 10_000), *step(-8, 1, 10_000, late=300),
            *step(-7, 0, 20_000), event("Rendezvous", 0, 1),
            op("fusion", 1, 0, 0, 90_000, program="jit_other")]
  program, by_device = executions(operations(profile(*events)), 2)
  assert program == "jit_step" and sorted(by_device) == [0, 1]
  assert by_device[1] == [
      Execution(k, k + 550, {"all-reduce.3": [(k + 400, k + 500)]})
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
  steps, waits, plan = tables(by_device[0], [0, 1], each=2)
  assert [entry["name"] for entry in plan.collectives] == ["all-reduce.3", "all-reduce.3#1"]
  assert waits["name"].tolist() == ["all-reduce.3", "all-reduce.3#1"] * 2
  assert (steps["start_ns"] - SHIFT).tolist() == [0, 2000]
  assert (steps["end_ns"] - SHIFT).tolist() == [1550, 3550]
  with pytest.raises(ProfileError, match="ran 2 times on device 1 in 2 steps"):
    executions([*found, *operations(profile(*step(1, 1, 0), *step(2, 1, 1000)))], 2)


def test_turns_of_a_loop_are_told_apart():
  def turn(k, begin):
    return [op("fusion.2", 1, 0, begin, 30), op("all-reduce.5", 1, 0, begin + 30, 10)]
  found = operations(profile(op("while.1", 1, 0, 0, 120), *turn(2, 80), *turn(0, 0), *turn(1, 40),
                             op("all-reduce.7", 1, 0, 130, 5)))
  only = executions(found, 1)[1][0][0]
  assert in_trace(only) == {"all-reduce.5": [(30, 40), (70, 80), (110, 120)],
                            "all-reduce.7": [(130, 135)]}
  _, waits, plan = tables([only], [0])
  assert waits["name"].tolist() == ["all-reduce.5", "all-reduce.5@1", "all-reduce.5@2",
                                    "all-reduce.7"]
  assert {tuple(entry["primitives"]) for entry in plan.collectives} == {("all-reduce",)}


def test_starts_and_dones_of_a_loop_are_paired_turn_by_turn():
  found = operations(profile(*(op(f"all-gather-{half}.1", 1, 0, 100 * turn + at, 10)
                               for turn in range(3) for half, at in (("start", 0), ("done", 50)))))
  assert in_trace(executions(found, 1)[1][0][0]) == {
      "all-gather.1": [(0, 60), (100, 160), (200, 260)]}
  assert is_collective("collective-permute.12") and not is_collective("all-reduce-fusion")


def test_a_loop_that_turns_more_often_in_some_steps_keeps_its_order():
  def one(turns):
    return Execution(0, 100 + 20 * turns, {
        "all-reduce.1": [(10 + 20 * k, 14 + 20 * k) for k in range(turns)],
        "all-reduce.2": [(20 * turns + 10, 20 * turns + 15)]})
  assert trace.iterations([one(2), one(5), one(3)]) == {"all-reduce.1": 5, "all-reduce.2": 1}
  later = trace.program(7, "p", {"all-reduce.1": 2, "all-reduce.2": 1}, "data", range(1))
  assert len(trace.events([one(5)], later).tag) == 12, "sums count those without slots"


def test_rows_are_those_of_an_observed_step_and_overlapping_waits_count_once():
  begin = SHIFT + (1 << 33)
  ran = [Execution(begin + k, begin + k + 900,
                   {"all-reduce.1": [(begin + k + 100, begin + k + 300)],
                    "all-reduce.2": [(begin + k + 200, begin + k + 700)]})
         for k in (0, 2000)]
  columns, collectives, plan = tables(ran, [50, 51])
  assert (columns["step"].tolist() == [50, 51]
          and columns["start_ns"].tolist() == [begin, begin + 2000])
  assert columns["sync_ns"].tolist() == [600, 600] and columns["compute_ns"].tolist() == [300, 300]
  assert columns["gap_ns"].tolist() == [None, 1100] and columns["forward_ns"].mask.all()
  assert (collectives["enter_ns"] - begin).tolist() == [100, 200, 2100, 2200]
  assert (collectives["exit_ns"] - begin).tolist() == [300, 700, 2300, 2700]
  assert collectives["bytes"].mask.all() and set(collectives["rank"]) == {3}
  assert (plan.clock, plan.axis, plan.ranks) == ("profiler", "data", 4)


def test_a_collective_that_did_not_run_has_no_row():
  steps, collectives, _ = tables([Execution(10, 90, {"all-reduce.1": [(20, 30)]}),
                                  Execution(110, 190, {})], [0, 1])
  assert steps["step"].tolist() == [0, 1] and collectives["step"].tolist() == [0]


def test_devices_are_numbered_by_id_or_on_their_host():
  local, everyone = [(2048, 0), (2049, 1)], [0, 1, 2048, 2049]
  assert trace.ranks_of([2049, 2048], local, everyone) == {2049: 3, 2048: 2}
  assert trace.ranks_of([0, 1], local, everyone) == {0: 2, 1: 3}
  assert trace.ranks_of([7], local, everyone) == {}


@pytest.mark.long
def test_traces_can_be_read_where_warnings_are_errors():
  code = ("import gc, warnings; from jaxpace.record import traces; warnings.simplefilter('error'); "
          "traces.make_types(); gc.collect(); profile = traces.jax.profiler.ProfileData; "
          "events = traces._events(profile.from_serialized_xspace(traces._LEAST)); "
          "assert [dict(event.stats) for event in events] == [{'a': 1}]")
  assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
