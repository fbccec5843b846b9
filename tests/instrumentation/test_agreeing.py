"""Processes that agree on timestamps: all say yes, or none has them."""

import types

import pytest

from jaxpace.observation import comparing

HERE = [types.SimpleNamespace(process_index=0)]
TWO = [types.SimpleNamespace(process_index=process) for process in (0, 1)]


@pytest.fixture
def store(monkeypatch):
  """What the coordination service keeps; nobody has to wait."""
  words: dict[str, str] = {}
  for name, function in {
      "process_count": lambda: 2, "process_index": lambda: 0, "key_value_set": words.__setitem__,
      "barrier": lambda key, seconds, processes: None,
      "key_value_directory": lambda key: {k: v for k, v in words.items() if k.startswith(key)},
  }.items():
    monkeypatch.setattr(comparing.distributed, name, function)
  return words


@pytest.mark.parametrize("yes", [True, False])
def test_a_process_by_itself_asks_nobody(store, yes):
  assert comparing.all_say(yes, "alone", HERE, 1.0) is yes and not store


def test_one_no_is_a_no_of_all(store, monkeypatch):
  assert comparing.all_say(True, "both", TWO, 1.0) is True and not store
  assert comparing.all_say(False, "here", TWO, 1.0) is False and len(store) == 1
  monkeypatch.setattr(comparing.distributed, "barrier",
                      lambda key, seconds, processes: store.update({f"{key}/no/1": "1"}))
  assert comparing.all_say(True, "there", TWO, 1.0) is False


def test_where_the_others_do_not_come_the_answer_is_no(store, monkeypatch, caplog):
  def alone(key, seconds, processes):
    raise TimeoutError("process 1 did not come")

  monkeypatch.setattr(comparing.distributed, "barrier", alone)
  assert comparing.all_say(True, "late", TWO, 1.0) is False
  assert "process 1 did not come" in caplog.text
