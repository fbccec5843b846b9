"""How often a diagnosis of the fault lab was right, against counts by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from experiments.labs.faults import scores, tables
from experiments.labs.faults.scores import Found, Injected, Judged
from experiments.labs.faults.spec import AMPLIFICATION, LOCALITY, MODES, RUNTIME, STRAGGLER
from tests.experiments.faults_made_up import one


def run_of(name: str, injected: tuple[Injected, ...], found: tuple[Found, ...],
           layout_: str = "4x1", **more: Any
           ) -> Judged:
  return Judged(name, layout_, 4, not injected, injected, found, more.pop("shares", {}), **more)


def told(mode: str, ranks: tuple[int, ...] = (), hosts: tuple[str, ...] = (),
         share: float = 0.1) -> Found:
  return Found(mode, share, 0.99, ranks, hosts)


def test_f1_and_confusion_count_each_mode() -> None:
  runs = [run_of("a", (one(STRAGGLER, (1,)),), (told(STRAGGLER, (1,)),)),
          run_of("b", (one(STRAGGLER, (1,)),), (told(RUNTIME),)),
          run_of("c", (one(STRAGGLER, (1,)), one(AMPLIFICATION)),
                 (told(AMPLIFICATION), told(STRAGGLER, (1,)))),
          run_of("d", (), ()), run_of("e", (), (told(AMPLIFICATION),)),
          run_of("cheap", (one(RUNTIME, cost=0.01),), (told(STRAGGLER, (2,)),)),
          dataclasses.replace(run_of("reference", (), (told(STRAGGLER, (2,)),)), control=False)]
  modes = scores.by_mode(runs)
  assert {m: (e["right"], e["missed"], e["false"]) for m, e in modes.items()} == {
      STRAGGLER: (2, 1, 0), AMPLIFICATION: (1, 0, 1), RUNTIME: (0, 0, 1), LOCALITY: (0, 0, 0),
      "fabric_contention": (0, 0, 0)}
  assert (modes[STRAGGLER]["f1"] == pytest.approx(0.8)
          and modes[AMPLIFICATION]["f1"] == pytest.approx(2 / 3))
  assert scores.macro_f1(modes) == pytest.approx((0.8 + 2 / 3 + 0) / 3)
  table = scores.confusion(runs)
  assert table[STRAGGLER][STRAGGLER] == 2 and table[STRAGGLER][RUNTIME] == 1
  assert table["healthy"] == {**dict.fromkeys(MODES, 0), AMPLIFICATION: 1, "healthy": 1}
  assert sum(sum(row.values()) for row in table.values()) == 6


@pytest.mark.parametrize(("ranks", "hosts", "right"), [
    ((2, 3), ("h1",), True), ((), ("h1",), True), ((2,), ("h1",), True), ((2, 3), (), True),
    ((2,), (), False), ((1, 2, 3), ("h1",), False), ((), ("h0",), False), ((), (), False)])
def test_blame_is_exact_and_names_nobody_innocent(ranks: tuple[int, ...], hosts: tuple[str, ...],
                                                  right: bool) -> None:
  run = run_of("a", (one(STRAGGLER, (2, 3), ("h1",)),), (told(STRAGGLER, ranks, hosts),), "2x2")
  assert scores.blame(run, run.injected[0]) is right


def test_errors_of_shares_and_what_if_and_detection() -> None:
  runs = [run_of("a", (one(STRAGGLER, (1,)), one(LOCALITY, (2,))),
                 (told(STRAGGLER, (1,), share=0.2),
                  told(LOCALITY, (2,), share=0.1)),
                 shares={"chronic": 0.27}, what_if=(1.02, 1.0, 0.99), detected={0: 12, 1: None}),
          run_of("b", (one(STRAGGLER, (1,)),), (), shares={"chronic": 0.3}, detected={0: 40})]
  runs[0] = dataclasses.replace(runs[0], untouched=-0.03)
  summary = scores.summary(runs)
  assert summary["share_error_points"]["chronic"]["median_abs"] == pytest.approx(3)
  assert summary["share_error_points"]["chronic"]["number"] == 1
  truth_error = summary["contention_truth_error_points"]
  assert (truth_error["number"], truth_error["median_abs"], truth_error["bias"]) == (1, 3, -3)
  assert summary["what_if_error_percent"]["twin"]["max_abs"] == pytest.approx(2)
  assert (summary["what_if_error_percent"]["same_run"]["max_abs"]
          == pytest.approx(100 * (1.02 / 0.99 - 1)))
  (kind,) = summary["what_if_error_by_kind"]
  assert kind == runs[0].injected[0].kind
  assert (summary["what_if_error_by_kind"][kind]["twin"]
          == summary["what_if_error_percent"]["twin"])
  assert summary["detection"] == {
      "faults": 3, "detected": 2, "within_30": 1, "noticed_within_30": 0, "median": 26.0,
      "p95": 38.6, "false_alarms_in_controls": 0, "of_disturbances": 0, "steps_of_controls": 0,
      "disturbed_stretches": 0.0, "by_kind": {"kind": [12, 40, None]}}
  fading = {(row["from"], row["to"]): (row["runs"], row["found"]) for row in summary["fading"]}
  assert fading[0.1, 0.2] == (1, 0)
  assert "missed" in scores.misjudged(runs)[0] and len(scores.misjudged(runs)) == 1
  figures: dict[str, Any] = {"judged": {"all": summary}, "command": "x", "date": "y",
                             "load_average_at_start": 0.1,
                             "machine": {"cores": 2, "platform": "p", "jax": "j", "python": "3"},
                             "made": {"load": [0.1, 0.2, 0.3], "seed": 1}, "note": "a word",
                             "misjudged": ["a"]}
  page = "\n".join(tables.markdown(figures))
  assert ("truth says of runs with an untouched network, points: median, 95 % | 3.00, "
          "3.00 (n=1)") in page
  assert "median 0.2" in page and "1 of 3" in page and "–" in page
  assert (tables.figures_table(figures["judged"]).row_count
          == len(tables.figures_table(figures["judged"]).rows))
