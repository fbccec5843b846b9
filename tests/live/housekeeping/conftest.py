"""Every test leaves the interpreter's garbage collector as it found it, or fails."""

import gc

import pytest

from jaxpace.live.housekeeping import keeper
from jaxpace.live.housekeeping.collector import GarbageCollector

_frozen = gc.get_freeze_count


@pytest.fixture(autouse=True, scope="module")
def out_of_the_way():
  """Freezes what the files before have left, on top of what was imported."""
  gc.collect()
  gc.freeze()


@pytest.fixture(autouse=True)
def collector_untouched(monkeypatch, usual_collector):
  """What the tests before have left is kept out of collections, which would look at half a million
  objects each time.

  It is not counted as frozen, so that nothing seems so at first, as in a job.
  """
  if not _frozen():
    gc.collect()
    gc.freeze()
  base = _frozen()
  monkeypatch.setattr(gc, "get_freeze_count", lambda: max(0, _frozen() - base))
  gc.collect()
  before = settings()
  yield
  after = settings()
  gc.enable()
  gc.set_threshold(*before[1])
  gc.callbacks[:] = [callback for callback in gc.callbacks if callback not in after[2]]
  if after[3]:
    gc.unfreeze()
  keeper._active.clear()
  assert after == before


def settings():
  ours = [callback for callback in gc.callbacks
          if isinstance(getattr(callback, "__self__", None), GarbageCollector)]
  return gc.isenabled(), gc.get_threshold(), ours, gc.get_freeze_count()
