"""The pages of measurements are what their figures make."""

from __future__ import annotations

import importlib
import json
import math
import pathlib
import statistics
import sys
import traceback

import ml_collections
import numpy as np
import pytest

from experiments.lib import measured
from experiments.lib.paired import (
  Estimate,
  estimate,
  ratio_of_means,
  rounds_needed,
)

RECORDS = sorted(measured.FOLDER.glob("*.json"))


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.stem)
def test_a_record_whose_program_is_gone_names_the_commit_that_has_it(record):
  page = record.with_suffix(".md")
  commit = json.loads(record.read_text()).get("commit")
  assert (commit is None) == (measured.program(record) is not None)
  if page.exists():
    assert (f"commit `{commit}` has it" in page.read_text()) == (commit is not None)


@pytest.mark.parametrize("name", measured.PAGES)
def test_a_page_is_what_its_record_makes(name):
  record = measured.FOLDER / f"{name}.json"
  assert record.with_suffix(".md").read_text() == measured.page(record)


def test_no_path_of_this_machine_is_written_down(tmp_path):
  try:
    json.loads("{")
  except ValueError:
    said = traceback.format_exc()
  root = str(pathlib.Path(measured.__file__).parents[2])
  assert root in said and sys.base_prefix in said
  measured.write({"said": said, "folder": f"{root}/runs"}, [said], tmp_path / "figures.json")
  for name in ("figures.json", "figures.md"):
    written = (tmp_path / name).read_text()
    assert root not in written and f"{sys.base_prefix}/" not in written
    assert "tests/experiments/test_pages.py" in written and "json/decoder.py" in written


def test_a_ratio_of_means_pairs_rounds() -> None:
  rng = np.random.default_rng(0)
  base = rng.exponential(1.0, 400)
  exact = ratio_of_means(1.25 * base, base)
  assert (exact.value, exact.low, exact.high) == pytest.approx((1.25, 1.25, 1.25))
  apart = ratio_of_means(rng.permutation(base) * 1.25, base)
  assert apart.value == pytest.approx(1.25) and apart.low < 1.2 and apart.high > 1.3


def test_an_interval_is_students() -> None:
  found = estimate(np.array([1.0, 2.0, 4.0, 5.0]))
  half = 3.182446 * math.sqrt(10 / 3) / 2  # t of 3 degrees of freedom at 97.5 %, from a table
  assert (found.value, found.low, found.high) == pytest.approx((3.0, 3 - half, 3 + half), abs=1e-5)
  assert found.rounds == 4
  assert found.to_json()[0] == 3.0
  alone = estimate(np.array([2.0]))
  assert alone.value == 2.0 and alone.low == -math.inf and alone.high == math.inf


@pytest.mark.parametrize(("half", "rounds", "margin"),
                         [(0.01, 100, 0.005), (0.002, 50, 0.005), (3.7, 80, 0.5)])
def test_with_the_rounds_needed_four_runs_in_five_show_it(half: float, rounds: int,
                                                          margin: float) -> None:
  needed = rounds_needed(Estimate(0.0, -half, half), rounds, margin)
  error = half / 1.96 * (rounds / needed) ** 0.5
  shown = statistics.NormalDist(0.0, error).cdf(margin - 1.96 * error)
  assert shown == pytest.approx(0.8, abs=0.02)


CONFIGS = sorted(
    path.stem for path in (pathlib.Path(__file__).parents[2] / "configs").glob("*.py")
    if path.stem != "__init__")


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
