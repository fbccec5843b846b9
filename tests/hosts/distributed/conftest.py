"""A dictionary in the place of the coordination service."""

import threading

import pytest

from jaxpace.hosts.distributed import rounds


class Store:
  """The words of a job of two processes."""

  def __init__(self):
    self.words, self.changed, self.asked = {}, threading.Condition(), []

  def set(self, key, value, overwrite=False):
    with self.changed:
      assert overwrite or key not in self.words
      self.words[key] = value
      self.changed.notify_all()

  def get(self, key, timeout):
    self.asked.append(timeout)
    with self.changed:
      if not self.changed.wait_for(lambda: key in self.words, timeout):
        raise TimeoutError
      return self.words[key]

  def delete(self, key):
    with self.changed:
      self.words.pop(key, None)

  def directory(self, name):
    with self.changed:
      return {key: word for key, word in self.words.items() if key.startswith(name)}


@pytest.fixture
def store(monkeypatch):
  made = Store()
  monkeypatch.setattr(rounds, "_SLICE_SECONDS", 0.02)
  monkeypatch.setattr(rounds, "process_count", lambda: 2)
  for name in ("get", "set", "delete", "directory"):
    monkeypatch.setattr(rounds, f"key_value_{name}", getattr(made, name))
  return made
