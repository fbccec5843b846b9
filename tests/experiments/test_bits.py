"""Comparisons of bits and collectives: they see differences, and each of them once in small."""

import functools

import jax.numpy as jnp
import pytest

from experiments.lib import hlo
from experiments.measure import bitwise_cases, bitwise_delays, observed_trainers
from experiments.measure import observed_trainers_more as more
from experiments.measure.bitwise_cases import LAYOUTS, Case, Result, Way
from experiments.measure.observed_trainers_steps import Trainer, cookbook

pytestmark = pytest.mark.optimized(always=True)

_ALL_REDUCE = """
  %all-reduce.1 = (f32[40,6]{1,0}, /*index=1*/f32[]) all-reduce(%a, %b), channel_id=1, replica_groups={{0,1},{2,3}}, x=1
  %got = f32[] get-tuple-element(%all-reduce.1), index=1
"""  # noqa: E501


def test_collectives_of_a_program_text():
  assert hlo.collectives(_ALL_REDUCE + """
  %g = bf16[8]{0} all-gather(%x), channel_id=2, replica_groups=[1,4]<=[4], dimensions={0}
  %p = f32[3]{0} collective-permute(%y), source_target_pairs={{0,1},{1,0}}
""") == [("all-gather", "[1,4]<=[4]", ("bf16[8]",)),
         ("all-reduce", "{{0,1},{2,3}}", ("f32[40,6]", "f32[]")),
         ("collective-permute", "{{0,1},{1,0}}", ("f32[3]",))]


@pytest.mark.parametrize(("old", "new", "added", "same_but_for"), [
    ("x=1", "x=2", (), 0),
    ("f32[])", "f32[], f32[4]{0})", ("f32[4]",), 1),
    ("f32[])", "f32[], f32[4]{0}, f32[4]{0})", ("f32[4]", "f32[4]"), 2),
    ("f32[40,6]", "bf16[40,6]", (), None),
    ("{{0,1},{2,3}}", "{{0,2},{1,3}}", (), None),
    ("all-reduce(", "reduce-scatter(", (), None),
    ("%got", "%more = f32[4]{0} all-reduce(%c), replica_groups={{0,1},{2,3}}\n  %got", (), None)])
def test_changes_of_collectives_are_seen(old, new, added, same_but_for):
  changes = hlo.compare(_ALL_REDUCE, _ALL_REDUCE.replace(old, new, 1))
  if same_but_for is None:
    assert not changes.same_but_for(10)
  else:
    assert changes.added == added and changes.same_but_for(same_but_for)
    assert same_but_for == 0 or not changes.same_but_for(same_but_for - 1)


def test_one_bit_in_one_leaf_is_a_difference():
  compare = functools.partial(bitwise_cases.compare, Case("mlp", "float32", "pmap", 2), "x")
  bare = Result({"w": b"\0\1", "m": b"\2"}, "", False, True)
  assert compare(bare, bare)["bits_equal"]
  other = compare(bare, bare._replace(bits={"w": b"\0\0", "m": b"\2"}))
  assert not other["bits_equal"] and other["leaves"] == ["w"]
  assert compare(bare, bare._replace(bits={"w": b"\0\1"}))["leaves"] == ["m"]
  stuck = bare._replace(changed=False)
  assert not compare(stuck, stuck)["bits_equal"], "a state that does not move proves nothing"


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bits_in_small(layout):
  rows = bitwise_cases.run(Case("digits", "bf16-params", layout, 2),
                           [Way("auto", True, True, True)], steps=6)
  assert [row["way"] for row in rows] == ["auto, shared, delays, recorded", bitwise_cases.NULL]
  assert (rows[0]["bits_equal"] and rows[0]["hlo_equal"] and rows[0]["shared"]
          and len(rows[0]["added"]) == 1)
  assert rows[0]["compared_leaves"] >= 8 and rows[0]["collectives"] >= 1


_SOUND = {"model": "mlp", "dtype": "float32", "layout": "pmap", "ranks": 2,
          "way": "pace_early_ranks", "leaves": [], "bits_equal": True, "hlo_equal": True, "hlo": "",
          "delays": 7, "longest_delay_ms": 0.3, "collections": None}


@pytest.mark.parametrize(("change", "sound"), [
    ({}, True), ({"bits_equal": False}, False), ({"hlo_equal": False}, False),
    ({"delays": 0}, False), ({"collections": 3}, True), ({"collections": 0}, False)])
def test_equal_bits_prove_nothing_where_nothing_was_done(change, sound):
  assert bitwise_delays.sound(_SOUND | change) == sound
  rows = [_SOUND, _SOUND | {"delays": 0}, _SOUND | {"bits_equal": False, "leaves": ["b"]}]
  assert "| pace_early_ranks | 3 | 1 | 0 | 0 | 7 | 0.30 | – |" in bitwise_delays.table(rows)


@pytest.mark.long
def test_bits_under_delays_in_small():
  names = ["pace_early_ranks, aligned housekeeper", "steerable(guard(chain))"]
  assert bitwise_delays.KEEPERS.keys() <= bitwise_delays.PACERS.keys()
  rows = bitwise_delays.compare(Case("mlp", "bf16-params", "no_check_vma", 2), names, steps=60)
  assert [row["way"] for row in rows] == names and all(map(bitwise_delays.sound, rows))


@pytest.mark.long
@pytest.mark.parametrize("make", [
    # Read back, partitioned, and compiled again, 12 of its 25 arrays differed after a step.
    lambda: cookbook("float32", width=32, layers=1), lambda: more.fsdp_scan(jnp.bfloat16),
    more.manual_experts, more.experts, more.convolutions, more.tensor_dropout, more.pmap])
def test_observed_trainers_have_the_same_bits_and_no_warning(make):
  row = observed_trainers.run(make(), 3)
  assert row["different"] == {} and row["warnings"] == [] and row["bare_reasons"] == []
  assert row["executions"] == 3 and row["collectives"] and not row["untimed"]
  assert len(observed_trainers.ALL) >= 20


@pytest.mark.long
def test_a_bit_that_differs_is_counted():
  made = more.data_parallel(more.optax.sgd(0.1))
  calls = []

  def call(step, state, batch):
    state, value = made.call(step, state, batch)
    calls.append(step)
    return state, value + jnp.float32(1e-6) if len(calls) == 4 else value

  row = observed_trainers.run(Trainer(made.jitted, made.start, made.batch, call), 2)
  assert list(row["different"].values()) == [1] and row["after_one"] == 0
