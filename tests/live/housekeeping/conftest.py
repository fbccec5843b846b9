"""Every test leaves the interpreter's garbage collector as it found it, or fails."""

import gc

import pytest

from jaxpace.live.housekeeping import keeper
from jaxpace.live.housekeeping.collector import Collector


@pytest.fixture(autouse=True)
def collector_untouched():
  gc.collect()
  before = settings()
  yield
  after = settings()
  gc.enable()
  gc.set_threshold(*before[1])
  gc.callbacks[:] = [callback for callback in gc.callbacks if callback not in after[2]]
  gc.unfreeze()
  keeper._active.clear()
  assert after == before


def settings():
  ours = [callback for callback in gc.callbacks if isinstance(getattr(callback, "__self__", None), Collector)]
  return gc.isenabled(), gc.get_threshold(), ours, gc.get_freeze_count()
