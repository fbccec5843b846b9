"""Feeds of the tests ask balancers that were compiled for a test before."""

import functools

import pytest

from jaxpace.live import speeds

_asked = functools.cache(speeds.AskedBalancer)


@pytest.fixture(autouse=True)
def _balancers_are_compiled_once(monkeypatch):
  """What asks a balancer knows nothing but how: the state is its callers'."""
  monkeypatch.setattr(speeds, "AskedBalancer", _asked)
