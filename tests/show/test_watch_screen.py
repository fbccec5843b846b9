"""The live view as it is drawn: on any width and height, whatever names the run holds."""

import io

import numpy as np
import pytest
from rich.console import Console

from jaxpace.core.words import Sentence
from jaxpace.diagnose.alive import Alert
from jaxpace.diagnose.follower import LateRank, Numbers, Snapshot
from jaxpace.diagnose.pacing import GuardEstimate
from jaxpace.diagnose.selected_steps import StepTime
from jaxpace.show import watch as live
from jaxpace.show.watch import Screen, binned, sparkline

EVIL = "h\x1b[2J[red]\x07\u202eab\r\nc\x9b1m"
SHARES = {"compute": 0.5, "skew": 0.25, "transfer": 0.125, "contention": 0.0, "runtime": 0.125,
          "pacing": 0.0}


def numbers(ranks=1024, host="host7", **values):
  late = tuple(LateRank(rank, host, 3e-3 / (rank + 1), 0.5, 0.08 / (rank + 1))
               for rank in range(min(ranks, 64)))
  return Numbers(101, 300, 200, 0, StepTime(40e-3, 39e-3, 55e-3, 0.1),
                 np.linspace(36e-3, 44e-3, 200), SHARES, late, (), values.get("delayed", 0.0),
                 values.get("guard", GuardEstimate(None, None, None, 0)), np.array([2e-3]))


def look(**values):
  base = Snapshot("runs/demo", "20261121T000000-0b58106e", 1, 1024, 128, 128,
                  Sentence("running", "Running."), 12345, 1.2,
                  numbers(),
                  (Alert("Step 200: rank 3 is late, by 9 % of the step, since about step 190.",
                        False),), (), ("1 rank recorded nothing in the steps shown: 9.",))
  return base._replace(**values)


def draw(view, width, height, encoding="utf-8"):
  raw = io.BytesIO()
  file = io.TextIOWrapper(raw, encoding=encoding, newline="")
  console = Console(file=file, width=width, height=height, force_terminal=False, highlight=False,
                    legacy_windows=False)
  console.print(Screen(view, 1.7e9, False))
  file.flush()
  return raw.getvalue().decode(encoding).splitlines()


@pytest.mark.parametrize("width", [20, 40, 80, 200])
@pytest.mark.parametrize("height", [8, 16, 24, 60])
def test_it_fits_any_terminal(width, height):
  rows = draw(look(), width, height)
  assert len(rows) <= height and max(map(len, rows)) <= min(width, 120)
  text = " ".join(" ".join(rows).split())
  assert "12,345" in text and "Running." in text
  if height >= 24 and width >= 40:
    assert "Step time" in text and "compute" in text and "rank 3 is late" in text


def test_what_matters_is_all_there_where_there_is_room():
  text = "\n".join(draw(look(), 100, 60))
  for words in (
      "1,024 ranks, 128 processes, 128 hosts, attempt 2, step 12,345, newest rows 1.2 s old",
      "40.0 ms", "median 39.0 ms", "36.1 to 44.0 ms", "50.0 %", "25.0 %", "host7", "3.00 ms",
      "8.0 %", "Pacing  none", "Step 200: rank 3 is late", "1 rank recorded nothing"):
    assert words in text, words
  assert text.count("host7") == 8


def test_bars_are_as_long_as_their_shares():
  rows = {row.split()[0]: row.count("█") for row in draw(look(), 100, 60)
          if row.strip().split()[:1] and
          row.split()[0] in SHARES}
  assert (rows["compute"] == 20 and rows["skew"] == 10 and rows["transfer"] == 5
          and rows["pacing"] == 0)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_a_terminal_without_unicode_can_show_it(encoding):
  rows = draw(look(path="runs/dé\udc80mo"), 80, 60, encoding)
  assert "compute" in "\n".join(rows) and "runs/d" in rows[0]


@pytest.mark.parametrize("width", [40, 80, 200])
def test_names_are_text(width):
  view = look(path=EVIL, run=EVIL, numbers=numbers(host=EVIL),
              state=Sentence("dead", f"Process 1 ({EVIL}) is silent."),
              alerts=(Alert(EVIL, False), ),
              events=(Alert(EVIL, False, 0.0), ), notes=(EVIL, ))
  for text in ("\n".join(draw(view, width, 100)), live.line(view, [EVIL])):
    assert not [c for c in text if not c.isprintable() and c != "\n"]
    if width > 40:
      assert text.count(r"\x1b[2J[red]\x07\u202eab\r\nc\x9b1m") >= 3
  assert "\n" not in live.line(view, [EVIL])


def test_sparklines():
  assert sparkline(np.array([]), 5) == sparkline(np.full(4, np.nan), 5) == ""
  assert sparkline(np.full(9, 3.0), 5) == "▁▁▁▁▁"
  assert sparkline(np.array([1.0, 2.0]), 50) == "▁█"
  assert (binned(np.array([1.0, 3.0, np.nan, np.nan, 5.0, np.nan]), 3)
          == pytest.approx([2.0, np.nan, 5.0], nan_ok=True))


def test_a_line_holds_what_the_screen_does_and_news_come_once():
  view = look(numbers=numbers(delayed=0.1, guard=GuardEstimate(True, -0.031, None, 3)))
  said = live.line(view, list(live.sentences(view)))
  assert said == (
      "step 12,345 (attempt 2); 40.0 ms per step (median 39.0 ms, 99th percentile 55.0 ms); "
      "compute 50.0 %, skew 25.0 %, transfer 12.5 %, contention 0.0 %, runtime 12.5 %, pacing 0.0 "
      "%; latest rank 0 on host7 by 3.00 ms; guard on, effect -3.1 %; rows 1.2 s old. Step 200: "
      "rank 3 is late, by 9 % of the step, since about step 190. 1 rank recorded nothing in the "
      "steps shown: 9.")
  assert list(live.sentences(view._replace(events=view.alerts))) == list(live.sentences(view))
  waiting = look(numbers=None, step=-1, age=None, state=Sentence("waiting", "Nothing yet."))
  assert live.line(waiting, []) == "Nothing yet."
