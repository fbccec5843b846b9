"""What the writer's thread reads while the loop goes on."""

import jax

from jaxpace.core.observed import ObservedFunction, ObservedPlan
from jaxpace.record.ring.collect import Collector, ExecutionOrder
from jaxpace.record.ring.intake import Intake, Losses
from jaxpace.record.ring.observed import PlannedPrograms
from tests.record.ring.handmade import Handmade


def test_a_program_that_runs_first_while_the_ring_is_read_loses_nothing(tmp_path):
  step = Handmade(jax.devices()[:2])
  asked = []

  class Asked(ObservedFunction):
    """The loop compiles and runs the step just after the thread has asked what there is."""

    runs = step.runs

    @property
    def plan(self) -> ObservedPlan:
      asked.append(True)
      if len(asked) == 2:
        jax.block_until_ready(step(step.inputs()))
        return ObservedPlan()
      return ObservedPlan((step._program,) if len(asked) > 2 else ())

  collector = Collector()
  taken = Intake(PlannedPrograms([Asked()]), ExecutionOrder(collector, {}), tmp_path, "run", 0, 0,
                 Losses())
  taken.poll()
  assert len(taken.plan.collectives) == 0 and taken.over == 1
  buffers = [collector.ranks.index(rank) for rank in step._program.ranks]
  assert [collector.passed(buffer, step.number) for buffer in buffers] == [1, 1]
