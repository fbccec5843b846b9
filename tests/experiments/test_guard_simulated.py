"""The simulation of the guard: its noise, and its figures against a plain loop."""

import numpy as np
import pytest

from experiments.measure import guard_simulated
from experiments.measure.guard_simulated import Cell
from tests.coordination.test_guard import GUARDED, run


@pytest.mark.parametrize("noise", guard_simulated.NOISES)
def test_noise_has_the_mean_and_variation_it_is_said_to_have(noise):
  made = guard_simulated.NOISES[noise](np.random.default_rng(1), 4000, 60, 0.1)
  assert made.shape == (4000, 60)
  assert made.mean() == pytest.approx(1, abs=0.01)
  assert made.std() == pytest.approx(0.1, rel=0.25)
  if noise == "correlated":
    away = made - 1
    assert np.mean(away[1:] * away[:-1]) / np.mean(away**2) == pytest.approx(0.5, abs=0.03)


@pytest.mark.long
def test_a_run_is_that_of_a_plain_loop():
  """Regret, steps with pacing and the first decision, of the run whose coins are those of an
  untouched guard."""
  cell = Cell("normal", 0.1, -0.1)
  found = guard_simulated.play(cell, 2, (1000,), seed=3)
  noise = cell.generate(1000, 2, 3)[:, 0]

  # a first step, whose time is never known, and then those of the simulation
  def times(step, delays):
    return np.append(1.0, noise)[step] * (0.9 if delays[0] > 0 else 1.0) if step <= 1000 else None

  applied, _, _ = run(GUARDED, times, ranks=1)
  on = applied[1:, 0] > 0
  start, advance = guard_simulated.machine()
  carry = advance(start(2), cell.generate(1000, 2, 3), np.float32(-0.1))
  assert float(carry["on"][0]) == on.sum()
  assert float(carry["lost_off"][0]) == pytest.approx(0.1 * noise[~on].sum(), rel=1e-4)
  assert found["regret"]["1000"]["mean"] == pytest.approx(np.mean(carry["lost_off"]))
  assert found["ever"]["kept"] == 1 and found["wrong"] == 0


def test_a_page_is_written_of_it():
  cells = [{**guard_simulated.play(Cell("heavy", 0.05, effect), 2, (1000,)), "guard": "default"}
           for effect in (0.0, 0.3)]
  figures = {"command": "c", "date": "d",
             "machine": {"cores": 1, "platform": "p", "jax": "j", "python": "3"},
             "load_average_at_start": 0.0, "null_steps": 1000, "null": cells[:1],
             "effects": cells[1:], "summary": guard_simulated.summary(cells[:1], cells[1:])}
  text = "\n".join(guard_simulated.page(figures))
  assert "target 100: met" in text and "| heavy | 0.05 | default | 2 |" in text
