"""The examples run as their users run them: flax and optax rely on jax's standard dtype
promotion."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True)
def standard_promotion() -> Iterator[None]:
  with jax.numpy_dtype_promotion("standard"):
    yield
