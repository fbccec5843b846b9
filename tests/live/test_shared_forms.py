"""Shares by speed of steps as people write them, none of which is written for jaxpace."""

import jax
import pytest

from tests.live import shared_forms

pytestmark = pytest.mark.optimized


@pytest.mark.parametrize("name", shared_forms.FORMS)
def test_any_form_shares_its_work_and_even_counts_leave_its_bits(name):
  # As optax and flax's nnx are written.
  with jax.numpy_dtype_promotion("standard"):
    shared_forms.check(name)
