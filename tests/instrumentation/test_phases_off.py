"""`phases=False`: timestamps at the collectives alone, the same bits, and compute in one piece."""

import pytest

from tests.instrumentation import models
from tests.instrumentation.running import mesh_of, pair

pytestmark = pytest.mark.optimized


@pytest.mark.parametrize("check_vma", [False, True])
def test_only_collectives_are_stamped_and_bits_are_the_same(check_vma):
  batches, params = models.batches(2), models.mlp_params(layers=2)
  both = pair(models.vma_step if check_vma else models.plain_step, mesh_of(data=2), params,
              batches[0], check_vma=check_vma, phases=False)
  both.check_bits(params, batches, 6)
  plan = both.paced.plan
  assert {mark.kind for mark in plan.marks} == {"start", "enter", "exit", "end"}
  assert {mark.segment for mark in plan.marks} == {"gap", "compute", "sync", "update"}
  assert (len(plan.collectives) >= 1 and not plan.overflow
          and both.paced.settings_json()["phases"] is False)
