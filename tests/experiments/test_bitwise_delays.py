"""The comparison of bits under every pacer: what it counts as sound, and one small case with real
delays."""

from __future__ import annotations

import pytest

from experiments.measure import bitwise_delays
from experiments.measure.bitwise_cases import Case

_GOOD = {"model": "mlp", "dtype": "float32", "layout": "pmap", "ranks": 2,
         "way": "pace_early_ranks", "leaves": [], "bits_equal": True, "hlo_equal": True, "hlo": "",
         "delays": 7, "longest_delay_ms": 0.3, "collections": None}


@pytest.mark.parametrize(("change", "sound"), [
    ({}, True), ({"bits_equal": False}, False), ({"hlo_equal": False}, False),
    ({"delays": 0}, False), ({"collections": 3}, True), ({"collections": 0}, False)])
def test_equal_bits_prove_nothing_where_nothing_was_done(change: dict[str, object],
                                                         sound: bool) -> None:
  assert bitwise_delays.sound(_GOOD | change) == sound


def test_the_table() -> None:
  rows = [_GOOD, _GOOD | {"delays": 0}, _GOOD | {"bits_equal": False, "leaves": ["b"]}]
  assert "| pace_early_ranks | 3 | 1 | 0 | 0 | 7 | 0.30 | – |" in bitwise_delays.table(rows)


def test_every_housekeeper_is_of_a_pacer_here() -> None:
  assert bitwise_delays.KEEPERS.keys() <= bitwise_delays.PACERS.keys()


@pytest.mark.long
def test_a_small_case() -> None:
  names = ["pace_early_ranks, aligned housekeeper", "steerable(guard(chain))"]
  rows = bitwise_delays.compare(Case("mlp", "bf16-params", "no_check_vma", 2), names, steps=60)
  assert [row["way"] for row in rows] == names
  assert all(bitwise_delays.sound(row) for row in rows)
