"""The stream of alarms in made-up jobs: faults cost what they say, and the page holds every
figure."""

import numpy as np
import pytest

from experiments.lib import measured
from experiments.measure import stream_alarms


@pytest.mark.parametrize("fault", stream_alarms.FAULTS)
def test_a_fault_costs_what_it_says(fault):
  size, cost = 6000, 0.06
  plain, struck = (stream_alarms.made_up(8, size, "normal", 3, name, cost)
                   for name in (None, fault))
  begin = stream_alarms._ONSET
  assert np.array_equal(plain.step[:begin], struck.step[:begin])
  saved = 1 - plain.step[begin:].mean() / struck.step[begin:].mean()
  assert saved == pytest.approx(cost, abs=0.015)


def test_the_page_holds_every_figure(tmp_path, monkeypatch):
  monkeypatch.setattr(stream_alarms, "NOISES", ("normal",))
  monkeypatch.setattr(stream_alarms, "RANKS", (4,))
  monkeypatch.setattr(stream_alarms, "FAULTS", (stream_alarms.LATE,))
  figures = stream_alarms.measure(300, 1, 0.1)
  page = stream_alarms.page({**measured.circumstances("experiments.measure.stream_alarms"),
                             **figures})
  assert figures["healthy"][0]["alarms"] == 0
  assert figures["delays"][0]["within_30"] == 1
  assert "| 4 | normal | 300 | 0 | 0 | 0 |" in page
