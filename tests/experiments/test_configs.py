"""The configs load, are complete, and refuse what they do not have."""

from __future__ import annotations

import importlib
import pathlib

import ml_collections
import pytest

CONFIGS = sorted(
    path.stem for path in (pathlib.Path(__file__).parents[2] / "configs").glob("*.py")
    if path.stem != "__init__")


def test_there_are_configs() -> None:
  assert {"chars", "digits"} <= set(CONFIGS)


@pytest.mark.parametrize("name", CONFIGS)
def test_each_file_has_one_get_config_that_makes_a_new_one_each_time(name: str) -> None:
  module = importlib.import_module(f"configs.{name}")
  config = module.get_config()
  assert isinstance(config, ml_collections.ConfigDict)
  config.seed = 17
  assert module.get_config().seed != 17
  config.lock()
  with pytest.raises(AttributeError):
    config.unheard_of = 1
