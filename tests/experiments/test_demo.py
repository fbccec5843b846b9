"""The demo's verdict on itself: what it calls right, and what wrong."""

from __future__ import annotations

from typing import Any

from experiments.examples import demo


def report(late: dict[int, float], mode: str = demo.STRAGGLER) -> dict[str, Any]:
  rows = [{"rank": rank, "lateness": late.get(rank, 1e-4 * rank)} for rank in range(4)]
  findings = [{"mode": mode, "ranks": sorted(late)}] if late else []
  return {"findings": findings, "per_rank": rows, "step_time": {"mean": 0.030}}


def test_the_late_rank_named_is_right() -> None:
  line, wrong = demo.judge(report({2: 0.0147}), 0.97, 2, 0.015, 0.95)
  assert line == "late: injected: rank 2, 15.0 ms; found: rank 2, 14.7 ms"
  assert not wrong


def test_another_rank_named_or_none_is_wrong() -> None:
  for late in ({1: 0.0147}, {}, {1: 0.02, 2: 0.015}):
    _, wrong = demo.judge(report(late), 0.97, 2, 0.015, 0.95)
    assert len(wrong) == 1 and "rank 2 was made late" in wrong[0]


def test_a_healthy_job_must_be_called_healthy() -> None:
  line, wrong = demo.judge(report({}), 0.97, None, 0.0, 0.95)
  assert line == "late: injected: nobody; found: nobody" and not wrong
  assert "finds rank 3 late by 33%" in demo.judge(report({3: 0.01}), 0.97, None, 0.0, 0.95)[1][0]
  line, wrong = demo.judge(report({3: 0.002}), 0.97, None, 0.0, 0.95)
  assert line.endswith("found: rank 3, 2.0 ms") and not wrong, ("told, but no alarm: processes "
                                                                "take turns at the cores")
