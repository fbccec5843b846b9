"""The cost of collectives against the design's formulas, and files that are no fabric."""

import json
import math

import pytest

from jaxpace.costs import fabric_file as fabric
from jaxpace.costs.alpha_beta import coefficients
from jaxpace.costs.fabric_file import quiet_seconds, read_fabric
from jaxpace.runs.run import RunError
from tests.diagnose.traces import make_run
from tests.synthetic import synthetic_runs


@pytest.mark.parametrize("p", [2, 8, 96])
@pytest.mark.parametrize("m", [0, 4096, 2e8])
def test_formulas(p, m):
  alpha, beta = 7e-6, 3e-10

  def seconds(kind, algorithm):
    a, b = coefficients(kind, algorithm, p)
    return a * alpha + b * m * beta

  assert seconds("all_reduce", "ring") == pytest.approx(2 * (p - 1) * (alpha + m * beta / p))
  # with two ranks half of the bytes go each way
  levels, sent = math.floor(math.log2(p)), 2 if p > 2 else 1
  folded = 2 if p == 96 else 0
  assert seconds("all_reduce", "doubling") == pytest.approx((levels + folded) * (alpha + m * beta))
  assert seconds("all_reduce", "tree") == pytest.approx(2 * levels * alpha + sent * m * beta)
  halves = seconds("reduce_scatter", "ring") + seconds("all_gather", "ring")
  assert halves == pytest.approx(seconds("all_reduce", "ring"))
  halving = seconds("reduce_scatter", "tree") + seconds("all_gather", "tree")  # Rabenseifner
  assert halving == pytest.approx(2 * math.ceil(math.log2(p)) * alpha + 2 * (p - 1) / p * m * beta)
  assert seconds("shift", "ring") == pytest.approx(alpha + m * beta)
  assert coefficients("all_reduce", "ring", 1) == (0, 0)


def test_a_described_fabric_and_a_measured_one(tmp_path):
  path = tmp_path / "fabric.json"
  points = [{"bytes": 1000, "seconds": 1e-3}, {"bytes": 100_000, "seconds": 1e-1}]
  path.write_text(json.dumps({"schema": 1, "levels": [
      {"level": "all", "ranks": None, "alpha": 1e-5, "beta": 1e-9, "algorithm": "tree"},
      {"level": "host", "ranks": 8, "measured": 8, "collectives": {"all_reduce": {
          "alpha": {"estimate": 2e-6, "low": 1e-6, "high": 3e-6}, "beta": 0, "points": points}}}]}))
  found = read_fabric(path)
  assert [level.name for level in found.levels] == ["host", "all"]
  assert found.level(8).name == "host" and found.level(9).name == "all"
  # halfway on logarithmic scales
  assert quiet_seconds(found, "all_reduce", 10_000, 8) == pytest.approx(1e-2)
  # not as measured: by the formula
  assert quiet_seconds(found, "all_reduce", 10_000, 4) == pytest.approx(6 * 2e-6)
  assert quiet_seconds(found, "all_reduce", 10, 8) == pytest.approx(14 * 2e-6)
  assert quiet_seconds(found, "all_gather", 10, 8) is None
  assert quiet_seconds(found, "all_reduce", 1000, 16) == pytest.approx(8e-5 + 2e-6)
  assert found.levels[0].costs["all_reduce"].alpha.deviation == pytest.approx(2e-6 / 3.29, rel=1e-3)


@pytest.mark.parametrize(("text", "words"), [
    (None, "no such file"), ("{", "not JSON"), ("[]", "holds no object"),
    ("{}", "no fabric: it takes"),
    ('{"levels": []}', "length >= 1: it takes a list of levels"),
    ('{"levels": [3]}', "no fabric: it takes"),
    ('{"levels": [{"ranks": -1, "alpha": 1, "beta": 1}]}', "`int` >= 1 for ranks: a whole number"),
    ('{"levels": [{"ranks": 2, "alpha": 1}]}', "Expected `float`, got `null` for beta: seconds a"),
    ('{"levels": [{"alpha": NaN, "beta": 1}]}', "`float`, got `str` for alpha: seconds, from 0. d"),
    ('{"levels": [{"alpha": 1, "beta": -1}]}', "Expected `float` >= 0.0 for beta: seconds a byte"),
    ('{"levels": [{"alpha": 1, "beta": 1, "algorithm": "magic"}]}', "algorithm: ring or tree or d"),
    ('{"levels": [{"collectives": {}}]}', "Expected `float`, got `null` for alpha"),
    ('{"levels": [{"collectives": 3}]}', "no fabric: it takes"),
    ('{"levels": [{"collectives": {"all_reduce": 3}}]}', "no fabric: it takes"),
    ('{"schema": 9, "levels": [{}]}', "newer jaxpace"), ("\x00\xff", "not JSON")])
def test_what_is_no_fabric_is_a_sentence(tmp_path, text, words):
  path = tmp_path / "fabric.json"
  if text is not None:
    path.write_bytes(text.encode("latin-1"))
  with pytest.raises(RunError, match=words):
    read_fabric(path)


def test_kinds():
  assert ({fabric.kind_of(n) for n in ("psum", "pmean", "gradients", "psum_invariant")}
          == {"all_reduce"})
  truth = synthetic_runs.simulate(synthetic_runs.SyntheticJob(steps=5))
  run = make_run(truth.enter, truth.exit)
  assert fabric.kind_in(run, run.collectives[0]) == "all_reduce"
  run.info["plan"] = {"collectives": [{"slot": 0, "primitives": ["reduce_scatter"]}]}
  assert fabric.kind_in(run, run.collectives[0]) == "reduce_scatter"
  assert (fabric.kind_of("reduce_scatter") == "reduce_scatter"
          and fabric.kind_of("all_gather") == "all_gather")
