"""Which loops a program has, by what it executes: made up, without devices."""

import types

import pytest

from jaxpace.record.ring import found
from jaxpace.record.ring.found import StepFinder

SECONDS = {"pretrain": 1.0, "fit": 2.0, "draw": 1.0, "burn": 1.0, "forward": 1.0, "eval_step": 1.0}
TRAIN = {"pretrain", "fit", "hessian"}


class Source:
  """Programs by name, numbered in their order."""

  def __init__(self, names):
    self.numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    self.by_number = {number: types.SimpleNamespace(program=types.SimpleNamespace(
        title=name, differentiated=name in TRAIN)) for name, number in self.numbers.items()}
    self.runs, self.told = frozenset(self.by_number), {}

  def tell_step(self, step):
    self.told = step

  def shown(self):
    return {}


class Collector:
  """Counts what it is asked to keep of each program: all from some number on."""

  buffers, under_way = 1, frozenset()

  def __init__(self, source):
    self.source, self.ran, self.kept = source, {}, {}

  def executed(self, names):
    """Numbers of the programs, and of each execution of them."""
    found = []
    for name in names:
      number = self.source.numbers[name]
      found.append((number, self.ran.get(number, 0)))
      self.ran[number] = self.ran.get(number, 0) + 1
    return found

  def seconds(self, number):
    return self.ran[number] * SECONDS.get(self.source.by_number[number].program.title, 1.0)

  def take(self, buffer, number, before):
    self.kept[number] = before


def loops_of(monkeypatch, *parts, agree=lambda found, last, before: found):
  """What is found where programs run in these loops, and each is sure as soon as it repeats; by
  looks at so many executions at a time."""
  monkeypatch.setattr(found, "_SURE_SECONDS", 0.0)
  order = [name for part in parts for name in part]
  return {at_once: seen(order, at_once, agree) for at_once in (1, 7, 1000)}


def seen(order, at_once, agree):
  source = Source(order)
  collector = Collector(source)
  finder = StepFinder(source, collector, "", agree)
  steps = []
  for at in range(0, len(order), at_once):
    steps += finder.cut(collector.executed(order[at:at + at_once]), False)
  steps += finder.cut([], True)
  return [(one["first_step"], *one["programs"]) for one in [
      *source.told["before"], source.told]], steps, collector


@pytest.mark.parametrize("parts, expected", [
    # what computes gradients follows what does, or what does not, as soon as it repeats
    ((["pretrain"] * 20, ["fit"] * 40), [(0, "pretrain"), (21, "fit")]),
    ((["pretrain"] * 900, ["fit"] * 30), [(0, "pretrain"), (901, "fit")]),
    # so does what is no less likely where nothing does
    ((["burn"] * 40, ["draw"] * 40), [(0, "burn"), (41, "draw")]),
    # an evaluation takes nobody's place, unless it lasts beyond comparison
    ((["fit"] * 50, ["forward"] * 200, ["fit"] * 50), [(0, "fit")]),
    ((["fit"] * 50, ["eval_step"] * 5000), [(0, "fit")]),
    ((["fit"] * 10, ["forward"] * 500), [(0, "fit"), (11, "forward")]),
    # what runs in between, now and then
    ((["fit"] * 50, ["hessian"] * 5) * 4, [(0, "fit")]),
])
def test_a_loop_that_follows_another_has_a_step_of_its_own(monkeypatch, parts, expected):
  found = loops_of(monkeypatch, *parts)
  assert [loops for loops, _, _ in found.values()] == [expected] * 3


@pytest.mark.parametrize("first, then", [("forward", "fit"), ("eval_step", "draw")])
def test_what_is_evaluated_at_length_before_the_first_step_takes_no_place_from_it(
    monkeypatch, first, then):
  parts = [first] * 50, [then] * 30, [first] * 90
  alone, _, together = [loops for loops, _, _ in loops_of(monkeypatch, *parts).values()]
  assert alone == [(0, first), (51, then)]
  # Where that is seen at once, what was evaluated is beside it.
  assert together == [(0, then)]


def test_a_step_that_goes_on_after_something_else_is_the_same_loop(monkeypatch):
  alone, _, together = [loops for loops, _, _ in loops_of(
      monkeypatch, ["fit"] * 40, ["hessian"] * 9, ["fit"] * 90).values()]
  # Where nothing else was seen, the other was taken for a loop.
  assert alone == [(0, "fit"), (41, "hessian"), (51, "fit")] and together == [(0, "fit")]


def test_all_of_a_loop_are_steps_and_between_two_a_number_is_left_out(monkeypatch):
  for _, steps, collector in loops_of(monkeypatch, ["pretrain"] * 20, ["fit"] * 40).values():
    told = collector.source.told
    assert [one["why"].endswith("since then") for one in (*told["before"], told)] == [False, True]
    assert [step.step for step in steps] == [*range(20), *range(21, 61)]
    assert [one.ranges[0].program for one in steps] == [0] * 20 + [1] * 40
    assert [one.ranges[0].begin for one in steps] == [*range(20), *range(40)]


def test_an_update_ends_steps_that_had_not_ended_when_they_were_found(monkeypatch):
  found = loops_of(monkeypatch, [*["fit"] * 16, "update"] * 9)
  assert found[1000][0] == [(0, "fit", "update")] and len(found[1000][1]) == 9
  for at_once in (1, 7):
    loops, steps, _ = found[at_once]
    assert loops == [(0, "fit"), (65, "fit", "update")]
    assert [step.step for step in steps] == [*range(64), *range(65, 70)]
    assert all(step.ranges[-1].program == 1 for step in steps[64:])
  # One that comes at any time ends none.
  parts = [[*["fit"] * times, "update"] for times in (16, 18, 16, 16, 17, 16, 16)]
  assert [loops for loops, _, _ in loops_of(monkeypatch, *parts).values()] == [[(0, "fit")]] * 3


def test_loops_that_alternate_are_not_cut_for_ever(monkeypatch):
  parts = (["pretrain"] * 30, ["fit"] * 30) * 50
  for at_once, (loops, steps, collector) in loops_of(monkeypatch, *parts).items():
    assert len(loops) < 6 and len(steps) > 1000
    # What was the step of another loop is beside this one.
    assert at_once == 1000 or max(collector.kept.values()) > 1000


def test_the_next_loop_begins_at_the_same_execution_whenever_a_process_hears_of_the_last(
    monkeypatch):
  told = {}

  def first(step, _last, before):
    if step is not None:
      told[before] = step
    return step

  def other(step, last, before):
    # Hears of it long after, when the next loop is under way.
    asked.append(before)
    return told.get(before) if last or len(asked) % 60 == 0 else None

  parts = ["pretrain"] * 30, ["fit"] * 30, ["draw"] * 900
  asked = []
  loops = loops_of(monkeypatch, *parts, agree=first)[1]
  late = loops_of(monkeypatch, *parts, agree=other)[1]
  assert loops[:2] == late[:2] and len(loops[0]) == 3


def test_of_what_is_beside_the_step_only_so_much_is_kept(monkeypatch):
  monkeypatch.setattr(found, "_LOOK_BACK", 64)
  [(_, _, collector), *_] = loops_of(monkeypatch, ["fit"] * 50, ["eval_step"] * 500).values()
  assert collector.kept[1] == 500 - 64
