"""Events to executions to occurrences to sums, each against what was made up or a plain loop."""

import collections

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxpace.core.ring_layout import NUMBER
from jaxpace.record.ring.executions import (
  COMPUTE,
  FORWARD,
  UPDATE,
  Splitter,
  occurrences,
  sums,
)
from tests.record.ring.programs import collective, program, programs


def fed(splitter, events):
  return splitter.feed(np.array([tag for tag, _ in events], np.uint32),
                       np.array([ns for _, ns in events], np.int64))


@given(st.data())
def test_executions_come_whole_however_the_events_are_cut(data):
  plan, ns = [], 100
  for number in range(data.draw(st.integers(0, 6))):
    kind = data.draw(st.sampled_from(["whole", "no end", "no start"]))
    # Collectives that wait for nothing may be entered before the start timestamp is written; where
    # the execution before has not ended nobody can tell whose they are.
    known = not plan or plan[-1][2][-1][0] == 1
    tags = [*(data.draw(st.lists(st.integers(2, 9), max_size=3)) if known else []),
            NUMBER, *([0] if kind != "no start" else []),
            *data.draw(st.lists(st.integers(2, 9), max_size=4)), *([1] if kind != "no end" else [])]
    events = []
    for tag in tags:
      ns += data.draw(st.integers(0, 5))
      events.append((tag, number if tag == NUMBER else ns))
    plan.append((kind == "whole", number, events))
  stray = [(5, 1), (1, 2)] if data.draw(st.booleans()) else []
  events = stray + [event for _, _, each in plan for event in each]
  splitter, at, found = Splitter(), 0, []
  while at < len(events):
    size = data.draw(st.integers(1, 6))
    got = fed(splitter, events[at:at + size])
    at += size
    assert len(got.number) == len(got.start_ns) == len(got.end_ns)
    assert (np.diff(got.of) >= 0).all() and (not got.of.size or got.of.max() < len(got.number))
    for k in range(len(got.number)):
      own = got.of == k
      found.append((int(got.number[k]), int(got.start_ns[k]), int(got.end_ns[k]),
                    list(zip(got.tag[own].tolist(), got.ns[own].tolist(), strict=True))))
  expected = [(number, min(ns for tag, ns in each if tag not in (NUMBER, 1)),
               next(ns for tag, ns in each if tag == 1),
               [event for event in each if event[0] not in (NUMBER, 0, 1)])
              for whole, number, each in plan if whole]
  assert found == expected


def test_what_was_cut_by_a_loss_is_dropped():
  splitter = Splitter()
  assert not len(fed(splitter, [(NUMBER, 0), (0, 10), (2, 11)]).number)
  splitter.lose()
  assert not len(fed(splitter, [(3, 12), (1, 13)]).number)
  assert fed(splitter, [(NUMBER, 4), (0, 20), (1, 30)]).number.tolist() == [4]


def test_what_comes_after_a_loss_may_belong_to_another_execution_until_one_begins():
  splitter = Splitter()
  splitter.lose()
  cut = fed(splitter, [(2, 9), (NUMBER, 4), (0, 20), (3, 21), (1, 30),
                       (2, 31), (NUMBER, 5), (0, 40), (1, 50)])
  assert (cut.number.tolist(), cut.of.tolist(), cut.tag.tolist(), cut.start_ns.tolist()) == (
      [4, 5], [0, 1], [3, 2], [20, 31])


def run_of(program, draw):
  """Timestamps of one execution as a device would write them, and each collective's times, by a
  plain loop."""
  marks, truth, ns = [], [], 1000
  ran = collections.Counter()

  def once(each):
    nonlocal ns
    times = []
    for tag in (each.enter_tag, each.exit_tag):
      ns += draw(st.integers(0, 20))
      marks.append((tag, ns))
      times.append(ns)
    truth.append((each.index, ran[each.index], *times))
    ran[each.index] += 1

  def body(members, depth):
    at = 0
    while at < len(members):
      loops = members[at].loops
      if len(loops) == depth:
        once(members[at])
        at += 1
        continue
      inside = [members[at]]
      while at + len(inside) < len(members) and len(members[at + len(inside)].loops) > depth:
        inside.append(members[at + len(inside)])
      trips = loops[depth].trips
      for _ in range(draw(st.integers(0, 3)) if trips is None else trips):
        body(inside, depth + 1)
      at += len(inside)

  body(list(program.collectives), 0)
  return marks, truth


@given(st.data())
def test_marks_of_loops_come_back_as_the_turns_that_were_run(data):
  made = data.draw(programs())
  runs = [run_of(made, data.draw) for _ in range(data.draw(st.integers(1, 3)))]
  splitter, events = Splitter(), []
  for number, (marks, _) in enumerate(runs):
    events += [(NUMBER, number), (0, 900), *marks, (1, 10_000)]
  found = occurrences(fed(splitter, events), made.collectives)
  got = [tuple(row) for row in np.stack(
      [found.execution, found.collective, found.iteration, found.enter_ns, found.exit_ns],
      1).tolist()]
  expected = [(k, *row) for k, (_, truth) in enumerate(runs) for row in truth]
  assert sorted(got) == sorted(expected)
  assert [row[0] for row in got] == sorted(row[0] for row in got)
  assert all(a[3] <= b[3] for a, b in zip(got, got[1:], strict=False) if a[0] == b[0])


def test_a_branch_that_was_not_taken_and_a_mark_that_is_missing_leave_no_occurrence():
  made = program(collective(0), collective(1), collective(2), collective(3))
  events = [(NUMBER, 0), (0, 1), (2, 5), (3, 9), (6, 11), (9, 13), (99, 14), (1, 20)]
  found = occurrences(fed(Splitter(), events), made.collectives)
  assert ((found.collective.tolist(), found.enter_ns.tolist(), found.exit_ns.tolist())
          == ([0], [5], [9]))



def plain_sums(start, end, rows):
  """Nanosecond by nanosecond: a collective is waited for once all others that end before it have
  ended."""
  exposed = [(max([row[0]] + [other[1] for other in rows if other[1] < row[1]]), *row[1:])
             for row in rows]
  inside = [[row for row in exposed if row[0] <= t < row[1]] for t in range(start, end)]
  sync = sum(bool(each) for each in inside)
  computed = {}
  stretches, t = [], start
  while t < end:
    if inside[t - start]:
      t += 1
      continue
    begin = t
    while t < end and not inside[t - start]:
      t += 1
    stretches.append((begin, t))
  for begin, stop in stretches:
    before = max((row for row in rows if row[1] <= begin), key=lambda row: row[1], default=None)
    after = min((row for row in rows if row[1] > stop), key=lambda row: row[1], default=None)
    if before is None and after is None:
      kind = COMPUTE
    elif before is None:
      kind = FORWARD if after[2] == FORWARD else COMPUTE
    elif after is None:
      kind = UPDATE if before[2] == UPDATE else COMPUTE
    else:
      kind = before[2] if before[2] == after[2] else COMPUTE
    computed[kind] = computed.get(kind, 0) + stop - begin
  return sync, computed


@given(st.lists(st.tuples(st.integers(1, 60), st.lists(
    st.tuples(st.integers(0, 60), st.integers(1, 20), st.integers(0, 3)), max_size=6,
    unique_by=(lambda row: row[0], lambda row: row[0] + row[1]))), max_size=4))
def test_sums_are_those_of_every_single_nanosecond(executions):
  base = 10**15
  start = np.array([base + 7 * k for k in range(len(executions))], np.int64)
  end = start + np.array([length for length, _ in executions], np.int64)
  rows = [(k, *sorted((min(a, length), min(a + b, length))), phase)
          for k, (length, each) in enumerate(executions) for a, b, phase in sorted(each)
          if a < length]
  execution = np.array([row[0] for row in rows], np.int64)
  in_sync, by_phase = sums(start, end, execution,
               start[execution] + np.array([row[1] for row in rows], np.int64),
               start[execution] + np.array([row[2] for row in rows], np.int64),
               np.array([row[3] for row in rows], np.int64))
  for k, (length, _) in enumerate(executions):
    own = [row[1:] for row in rows if row[0] == k]
    sync, computed = plain_sums(0, length, own)
    assert in_sync[k] == sync
    assert in_sync[k] + np.maximum(by_phase[k], 0).sum() == length
    if len({row[1] for row in own}) == len(own):  # where several end at once, either phase is right
      assert {kind: ns for kind, ns in enumerate(by_phase[k].tolist()) if ns > 0} == {
          kind: ns for kind, ns in computed.items() if ns > 0}
