"""Executions made by hand, handed to the intake as if the ring's collector had read them."""

import dataclasses

import numpy as np

from jaxpace.core.observed import InstrumentedFunction
from jaxpace.record import columns
from jaxpace.record.columns import UNKNOWN, Range, StepCalls, rows
from jaxpace.record.ring.collect import Detail
from jaxpace.record.ring.executions import NOTHING, join
from jaxpace.record.ring.instrumented import InstrumentedStep
from jaxpace.record.ring.intake import Intake
from jaxpace.runs.rundir import RunIdentity

NUMBER = 7


def rows_of(plan, executions, rank=0, process=0, attempt=0, previous=None, numbers=None):
  """Rows of the tables `steps`, `collectives` and `listening` of one device's executions."""
  source = step_of(plan)
  laid_out = source.plan_of([], Detail())
  own = source.device([StepCalls(0, (Range(NUMBER, number, number + 1),), UNKNOWN, {})
                       for number in executions.number.tolist()], {NUMBER: executions}, rank)
  numbers = own.number if numbers is None else np.array(numbers, np.int64)
  tables = rows(own, columns.whose(numbers, rank, process, attempt),
                columns.ends_before(numbers, own.end_ns, previous), {},
                np.ones(len(numbers), bool), laid_out)
  return tables["steps"], tables["collectives"], tables.get("listening", {})


def step_of(plan, settings=None):
  """What is recorded of an instrumented function with this plan."""
  paced = InstrumentedFunction()
  paced.plan = dataclasses.replace(plan, program=NUMBER)
  paced.settings_json = lambda: settings or {}
  source = InstrumentedStep(paced)
  source.meet()
  return source


class _Collector:
  """Has what it is given."""

  def __init__(self, ranks):
    self.ranks, self.devices, self.buffers = list(ranks), list(ranks), len(ranks)
    self.waiting, self.fresh = {}, []

  def collect(self, programs):
    """All is there."""

  def passed(self, buffer, program):
    """Nothing came before."""
    return 0

  def take(self, buffer, program, before):
    return self.waiting.pop(buffer, NOTHING)

  def settle(self, buffers):
    """Every execution is over."""
    fresh, self.fresh = self.fresh, []
    return fresh


class Replayed:
  """The intake of an instrumented step."""

  def __init__(self, path, plan, ranks, process=0, attempt=0):
    (path / "marks").mkdir(exist_ok=True)
    source = step_of(plan)
    source.ranks = lambda collector: dict(enumerate(collector.ranks))
    self.collector = _Collector(ranks)
    self.intake = Intake(source, self.collector, path, RunIdentity("run", attempt, 0), process)
    self.intake.last = True

  def rows(self, executions, calls):
    """Rows of both tables of executions by rank, with what the loop has recorded of them."""
    ran = list(executions.values())
    for buffer, own in enumerate(ran):
      self.collector.waiting[buffer] = join([own])
    numbers = sorted({number for own in ran for number in own.number.tolist()})
    self.collector.fresh = [(NUMBER, number) for number in numbers]
    for sample, extra in calls:
      self.intake.record(sample, extra)
    self.intake.poll()
    self.tables = self.intake.take()
    return self.tables["steps"], self.tables["collectives"]
