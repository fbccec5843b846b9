"""What instrumenting costs once: each trainer it names compiles in both ways, and the page says
both."""

import pytest

from experiments.measure import first_call


@pytest.mark.parametrize("arm", ["bare", "instrumented"])
def test_a_trainer_is_compiled(arm):
  found = first_call._compile("digits", arm)
  assert set(found) == {"trace", "lower", "compile", "cpu"} and min(found.values()) > 0


def test_the_page_says_what_was_measured():
  stages = {"trace": 1.0, "lower": 0.5, "compile": 8.5}
  figures = {"command": "python -m experiments.measure.first_call", "date": "2026-11-22",
             "load_average_at_start": 0.1,
             "machine": {"cores": 2, "platform": "Linux", "jax": "0.10.2", "python": "3.11"},
             "trainers": {"digits": {
                 "seconds": {"bare": stages, "instrumented": stages},
                 "total": {"bare": [10.0, 9.0, 11.0],
                           "instrumented": [12.0, 11.0, 13.0]},
                 "percent": [20.0, 15.0, 25.0],
                 "cpu_s": {"bare": [15.0] * 3, "instrumented": [18.0] * 3},
                 "cpu_percent": [20.0] * 3}}}
  text = "\n".join(first_call._lines(figures))
  assert "| digits | bare | 1.00 | 0.50 | 8.50 | 10.00 [9.00, 11.00] |" in text
  assert "12.00 [11.00, 13.00]" in text and "20 [15, 25]" in text
