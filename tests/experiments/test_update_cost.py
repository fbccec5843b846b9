"""What `update` takes: the loop that is timed really runs it, and the page says what was found."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

import jaxpace
from experiments.lib import measured
from experiments.measure import update_cost
from jaxpace.core import packing


def test_every_update_of_the_loop_is_run() -> None:
  """A pacer that counts, and one that doubles the work."""
  counts = jaxpace.Pacer(lambda ranks: jnp.int32(0), lambda seen, count: (
      jaxpace.Decision(jnp.float32(1e-3), {"last": jnp.max(seen.arrivals)}), count + jnp.int32(1)))
  state, arrivals, delay, _, took = update_cost.loop(counts, 8, 50)()
  assert (int(packing.unpack(state)) == 50 and float(delay) == pytest.approx(1e-3)
          and arrivals.shape == (8,))
  assert 0 < float(took) < 0.1
  assert update_cost.loop(None, 8, 5)()[0] == ()


@pytest.mark.parametrize(("value", "verdict"), [
    ([4, 3, 5], "met"), ([9, 8, 11], "not shown"), ([30, 20, 40], "MISSED")])
def test_the_page(value: list[float], verdict: str) -> None:
  figures = {**measured.circumstances("x"), "rounds": 3, "turns": 10,
             "ranks": {"4": {"a": [1.0, 1.0, 1.0]},
                       "1024": {"a": value}},
             "sizes": {"a": update_cost.size(jaxpace.pace_early_ranks(), 4)}}
  assert figures["sizes"]["a"]["arrays"] == 16 and figures["sizes"]["a"]["kernels"] > 5
  kernels = figures["sizes"]["a"]["kernels"]
  row = (f"| `a` | 16 | {kernels} | 1.00 [1.00, 1.00] | {value[0]:.2f} [{value[1]:.2f}, "
         f"{value[2]:.2f}] | {verdict} |")
  assert row in "\n".join(update_cost.lines(figures))


def test_a_hold_is_asked_in_every_turn_of_a_pacer_that_takes_turns() -> None:
  pacer = update_cost.pacers(4)["take_turns(by='message'), its hold once"]
  state, *_ = update_cost.loop(pacer, 4, 60)()
  before, after = pacer.init(4), packing.unpack(state)
  assert int(after.mode) == int(before.mode) and bool(after.heard)


def test_what_is_not_timed_again_is_kept_and_said_to_be() -> None:
  names = list(update_cost.pacers(4))
  base = {**measured.circumstances("x"), "rounds": 3, "turns": 10}
  size = {"arrays": 1, "kernels": 2}
  before = base | {"command": "python -m x --old", "ranks": {"4": {
      names[0]: [1.0, 1.0, 1.0], "gone": [1.0, 1.0, 1.0], names[-1]: [9.0, 9.0, 9.0]}},
      "sizes": {names[0]: size, "gone": size, names[-1]: size}}
  now = base | {"ranks": {"4": {names[-1]: [2.0, 2.0, 2.0]}}, "sizes": {names[-1]: size}}
  found = update_cost.with_kept(now, before)
  assert found["ranks"]["4"] == {names[0]: [1.0, 1.0, 1.0], names[-1]: [2.0, 2.0, 2.0]}
  page = "\n".join(update_cost.lines(found))
  assert f"`{names[0]}`: of `python -m x --old`" in page and "gone" not in page
  # Timed in part once more: what was kept is still of the first run.
  again = update_cost.with_kept(now | {"command": "python -m x --newest"}, found)
  page = "\n".join(update_cost.lines(again))
  assert f"`{names[0]}`: of `python -m x --old`" in page and len(again["kept"]) == 1
  assert update_cost.with_kept(now, before | {"ranks": {"8": {}}}) == now
