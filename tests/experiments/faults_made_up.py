"""Specs and faults of a lab that was never run."""

from __future__ import annotations

from typing import Any

from experiments.labs.faults.scores import Injected
from experiments.labs.faults.spec import Fault, Spec


def spec_of(*faults: Fault, name: str = "in4", steps: int = 200, **more: Any) -> Spec:
  return Spec("run", name, 3, steps, 10e-3, 0.02, more.get("spinning"), more.get("misplaced"),
              faults, "twin")


def fault_of(kind: str, targets: tuple[int, ...], seconds: float, onset: int = 0,
             chance: float = 1.0) -> Fault:
  return Fault(kind, targets, seconds, onset, 200, 0.1, chance)


def one(mode: str, ranks: tuple[int, ...] = (), hosts: tuple[str, ...] = (),
        cost: float = 0.1) -> Injected:
  return Injected("kind", mode, ranks, hosts, 0, cost, cost)
