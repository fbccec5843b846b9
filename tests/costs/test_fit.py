"""α and β come back from made-up timings; levels are found; the document is read by the
forecast."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpace.costs.alpha_beta import KINDS, coefficients
from jaxpace.costs.bench import HOST, HOSTS, PROCESS, Group, fit, levels, to_json
from jaxpace.costs.fabric_file import ALGORITHMS, quiet_seconds, read_fabric

SIZES = [1 << n for n in range(10, 25, 2)]


def timings(kind, algorithm, ranks, alpha, beta, noise=0.0, seed=0):
  random = np.random.default_rng(seed)
  a, b = coefficients(kind, algorithm, ranks)
  return [(size, tuple((a * alpha + b * size * beta) * (1 + noise * random.exponential(size=9))))
          for size in SIZES]


@given(st.sampled_from(KINDS), st.sampled_from(ALGORITHMS), st.integers(2, 64),
       st.floats(1e-7, 1e-3), st.floats(1e-12, 1e-8))
def test_exact_timings_give_alpha_and_beta(kind, algorithm, ranks, alpha, beta):
  found = fit(kind, algorithm, ranks, timings(kind, algorithm, ranks, alpha, beta))
  assert found.alpha.estimate == pytest.approx(alpha, rel=1e-3)
  assert found.beta.estimate == pytest.approx(beta, rel=1e-3)
  assert found.misfit < 1e-3


@pytest.mark.parametrize("factor", [10, 0.5])
def test_one_odd_size_bends_neither(factor):
  """A size that is too quick has the most leverage on relative errors."""
  measured = timings("all_reduce", "ring", 8, 20e-6, 1e-9, noise=0.02)
  measured[3] = measured[3][0], tuple(factor * s for s in measured[3][1])
  found = fit("all_reduce", "ring", 8, measured)
  assert found.alpha.estimate == pytest.approx(20e-6, rel=0.06)
  assert found.beta.estimate == pytest.approx(1e-9, rel=0.06)
  assert found.misfit > 0.4


def test_intervals_hold_the_truth():
  """90 % intervals hold in 80 % or more; the median of 9 exponential noises lies 0.7456 of it above
  none."""
  held, widths = 0, []
  for seed in range(60):
    cost = fit("shift", "ring", 8,
               timings("shift", "ring", 8, 20e-6, 1e-9, noise=0.1, seed=seed))
    more = 1.07456
    held += bool(cost.alpha.low <= 20e-6 * more <= cost.alpha.high)
    held += bool(cost.beta.low <= 1e-9 * more <= cost.beta.high)
    widths.append((cost.alpha.high - cost.alpha.low) / cost.alpha.estimate)
  assert held >= 0.8 * 120 and np.median(widths) < 0.4


@pytest.mark.parametrize("samples", [(0.0,), (1e-3,), (0.0, 1e-3, 2e-3)])
def test_little_gives_no_nonsense(samples):
  for sizes in ([1024], SIZES):
    cost = fit("all_reduce", "ring", 4, [(size, samples) for size in sizes])
    for value in (*cost.alpha, *cost.beta):
      assert np.isfinite(value) and value >= 0
  with pytest.raises(ValueError, match="at least one"):
    fit("all_reduce", "ring", 4, [])


@pytest.mark.parametrize(("process_of", "hosts", "expected"), [
    ([0] * 8, [1], [(PROCESS, 1, 8, 8)]),
    ([0, 1], [1, 1], [(HOST, 1, 2, 2)]),
    ([0, 1], [1, 2], [(HOSTS, 1, 2, None)]),
    ([0, 0, 1, 1], [1, 1], [(PROCESS, 2, 2, 2), (HOST, 1, 4, 4)]),
    ([0, 0, 1, 1], [1, 2], [(PROCESS, 2, 2, 2), (HOSTS, 1, 4, None)]),
    ([0, 0, 1, 1, 2, 2, 3, 3], [5, 5, 9, 9],
     [(PROCESS, 4, 2, 2), (HOST, 2, 4, 4), (HOSTS, 1, 8, None)]),
    ([0], [1], [])])
def test_levels(process_of, hosts, expected):
  found, notes = levels(process_of, hosts)
  assert ([(g.level, len(g.members), len(g.members[0]), g.ranks) for g in found] == expected
          and not notes)
  for group in found:
    assert sorted(d for m in group.members for d in m) == list(range(len(process_of)))


def test_uneven_groups_are_left_out_with_a_sentence():
  found, notes = levels([0, 0, 1], [1, 2])
  assert [g.level for g in found] == [HOSTS] and len(notes) == 2 and "1 to 2 devices" in notes[0]


def test_the_document_is_a_fabric(tmp_path):
  group = Group(HOST, ((0, 1, 2, 3),), 4)
  measured = timings("all_reduce", "ring", 4, 20e-6, 1e-9)
  document = to_json([(group, {"all_reduce": (fit("all_reduce", "ring", 4, measured), measured)})],
                     {"jax": "x"}, [])
  path = tmp_path / "bench.json"
  path.write_text(json.dumps(document, allow_nan=False))
  found = read_fabric(path)
  assert found.level(4).measured == 4 and found.level(5) is None
  assert (quiet_seconds(found, "all_reduce", 1 << 20, 4)
          == pytest.approx(6 * 20e-6 + 1.5e-9 * 2**20, rel=1e-6))
