"""Progress and metrics: what is printed, what is kept, how far the host may run ahead."""

from __future__ import annotations

import pathlib
import types

import jax.numpy as jnp
import pytest

from experiments.examples import metrics


def test_lines_come_every_so_often_with_the_time_a_step_took(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch) -> None:
  clock = iter([100.0, 103.0, 103.4, 104.0])
  monkeypatch.setattr(metrics, "time", types.SimpleNamespace(monotonic=lambda: next(clock)))
  with metrics.Writer(str(tmp_path), log_every=4) as writer:
    for step in range(1, 10):
      writer.write_scalars(step, {"loss": 1 / step})
  lines = capsys.readouterr().out.splitlines()
  assert [line.split()[1] for line in lines] == ["1", "4", "8"]
  assert "compiled and run in 3.0 s" in lines[0]
  assert "step_time_ms 133.3" in lines[1]  # 0.4 s for three steps
  assert "step_time_ms 150" in lines[2]  # 0.6 s for four
  assert "loss 0.125" in lines[2]


def test_the_host_waits_for_the_step_eight_before(tmp_path: pathlib.Path,
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
  waited: list[int] = []
  monkeypatch.setattr(metrics, "jax", types.SimpleNamespace(
      process_index=lambda: 1,
      block_until_ready=lambda scalars: waited.append(int(scalars["step"]))))
  with metrics.Writer(str(tmp_path), log_every=100) as writer:
    for step in range(1, 13):
      writer.write_scalars(step, {"step": jnp.int32(step)})
  assert waited == [1, 2, 3, 4]
  assert metrics.IN_FLIGHT == 8
