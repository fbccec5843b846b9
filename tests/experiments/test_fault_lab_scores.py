"""How often a diagnosis of the fault lab was right, against counts by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from experiments.labs.faults import scores
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
