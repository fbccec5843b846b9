"""Every test leaves the interpreter's garbage collector as it found it, or fails."""

import gc

import pytest

from jaxpace.live import housekeeper
from jaxpace.live.housekeeper import GarbageCollector


class Freezer:
  """Freezes for a test on top of what the tests before have left, a million objects, which are kept
  out of its collections and not counted as frozen: nothing seems so at first, as in a job.

  The interpreter counts frozen objects by going from each to the next: that took longer than most
  tests, so they are counted here, when they are frozen.
  """

  def __init__(self):
    self._freeze, self._unfreeze = gc.freeze, gc.unfreeze
    self.hidden, self.count = False, 0

  def hide(self):
    """Puts out of the way what is there before a test begins."""
    if not self.hidden:
      self._freeze()
    self.hidden, self.count = True, 0

  def freeze(self):
    # Those that are frozen already are not among them.
    self.count += len(gc.get_objects())
    self._freeze()

  def unfreeze(self):
    # The interpreter can't tell ours from those before: the next collection looks at all.
    self._unfreeze()
    self.hidden, self.count = False, 0


_freezer = Freezer()


@pytest.fixture(autouse=True, scope="module")
def out_of_the_way():
  """Freezes what the files before have left, on top of what was imported."""
  gc.collect()
  _freezer.hidden = False
  _freezer.hide()


@pytest.fixture(autouse=True)
def collector_untouched(monkeypatch, usual_collector):
  """The collector has its usual settings, and nothing is frozen but by the test."""
  monkeypatch.setattr(gc, "get_freeze_count", lambda: _freezer.count)
  monkeypatch.setattr(gc, "freeze", _freezer.freeze)
  monkeypatch.setattr(gc, "unfreeze", _freezer.unfreeze)
  _freezer.hide()
  gc.collect()
  before = settings()
  yield
  after = settings()
  gc.enable()
  gc.set_threshold(*before[1])
  gc.callbacks[:] = [callback for callback in gc.callbacks if callback not in after[2]]
  if after[3]:
    gc.unfreeze()
  housekeeper._active.clear()
  assert after == before


def settings():
  ours = [callback for callback in gc.callbacks
          if isinstance(getattr(callback, "__self__", None), GarbageCollector)]
  return gc.isenabled(), gc.get_threshold(), ours, gc.get_freeze_count()
