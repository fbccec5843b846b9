"""Prior and posterior of Table 1's gain: the sampler against a known posterior; the page."""

import numpy as np
import pytest

from experiments.paper import calibrate, posterior, posterior_page
from experiments.paper import world as worlds


def box(points, least):
  """Within one tolerance: 0.1 of the first coordinate and 0.4 of the second; the third is free."""
  off = np.abs(points - [0.5, 0.3, 0.5]) / [0.05, 0.2, np.inf]
  first = off[:, 0]
  return np.where(first > least, first, off.max(axis=1))


def test_the_sampler_finds_the_prior_within_a_tolerance_and_its_mass():
  found = posterior.sample(box, 3, 1000, 1.0, np.random.default_rng(0))
  assert (box(found.points, np.inf) <= 1).all() and found.tolerances[-1] == 1
  assert found.log_evidence == pytest.approx(np.log(0.1 * 0.4), abs=0.25)
  low, high = [0.45, 0.1, 0.0], [0.55, 0.5, 1.0]
  unit = (found.points - low) / np.subtract(high, low)
  assert unit.mean(axis=0) == pytest.approx(0.5, abs=0.05)
  assert unit.std(axis=0) == pytest.approx(12 ** -0.5, abs=0.03)
  assert 1 < found.ancestors <= 1000 and found.tried > 1000


def test_the_sampler_takes_the_prior_itself_where_all_of_it_fits():
  found = posterior.sample(lambda points, least: np.zeros(len(points)), 2, 400, 1.0,
                           np.random.default_rng(1), last=2)
  assert found.log_evidence == 0 and len(found.tolerances) == 1
  assert found.points.mean(axis=0) == pytest.approx(0.5, abs=0.06)


def test_some_sizes_misfit_at_most_as_much_as_all():
  random = np.random.default_rng(2)
  mean, cv = random.uniform(1, 2, (50, 5)), random.uniform(0.01, 0.3, (50, 5))
  every = calibrate.fits(mean, cv).misfit
  some = calibrate.fits(mean[:, [0, 2]], cv[:, [0, 2]], (4, 16)).misfit
  assert (some <= every + 1e-12).all()


def test_worlds_lie_in_the_box():
  made = posterior.world_at(np.array([[0.0] * 15, [1.0] * 15]))
  for name, values in made._asdict().items():
    assert np.asarray(values) == pytest.approx(worlds.BOUNDS[name])


def run_of(tolerance, gains, lost, ancestors, seed=0):
  of = {arm: {"gain": gains} for arm in ("both", "one", "first_come")}
  world = {name: sum(bounds) / 2 for name, bounds in worlds.BOUNDS.items()}
  return {"seed": seed, "tolerance": tolerance, "population": len(gains), "ancestors": ancestors,
          "tried": 100, "tolerances": [9, tolerance], "accepted": [0.5, 0.1], "log_evidence": -8.0,
          "worlds": [list((world | {"lost": one}).values()) for one in lost],
          "sizes": {str(nodes): of for nodes in worlds.NODES}}


def test_the_page_shows_the_prior_beside_the_posterior_and_says_when_it_is_no_figure():
  figures = {"command": "c", "date": "d", "load_average_at_start": 1.0, "steps": 400, "played": 2,
             "machine": {"cores": 2, "platform": "p", "jax": "j", "python": "3"},
             "fields": list(worlds.World._fields), "bounds": worlds.BOUNDS,
             "runs": [run_of(1.0, [0.3, 0.3], [0.5, 0.5], 12), run_of(None, [0, 0.2], [0, 0.5], 2),
                      run_of(2.0, [0.1, 0.2], [0.2, 0.4], 80)]}
  page = "\n".join(posterior_page.page(figures))
  assert "| 64 | +11.0 % | +1.0 .. +10.0 .. +19.0 % | 50 % |" in page
  flat = " ".join(page.split())
  assert "within 2 tolerances has a median of +15.0 % at 64 nodes" in flat
  assert flat.count("no figure to rely on") == 1 and "12 of the first draws" in flat
  assert "(rank correlation +1.00)" in flat
  assert "in the 0 worlds that lose less than 10 % the median gain is unknown" in flat
