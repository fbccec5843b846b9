"""What commands print of a run that somebody else wrote is text: nothing in it steers the
terminal."""

import io
import json
import re
import threading

import pytest
from rich.table import Table
from rich.text import Text

from jaxpace.cli.main import main
from jaxpace.show.console import LongName, Progress, make_console, make_table
from tests.patience import awaited
from tests.synthetic import synthetic_runs
from tests.synthetic.synthetic_runs import SyntheticJob

EVIL = "ev\x1b[31mil\u202e\x9b2J[red]x[/red]:smile:"
# a table's cell, measured before, may be cut behind that
SHOWN = "ev\\x1b[31mil\\u202e\\x9b2J[red]"


@pytest.mark.parametrize("wrap", [str, Text, lambda name: Text(f"a\n{name}\nb")])
def test_names_are_text_wherever_they_stand(capsys, wrap):
  console = make_console()
  table = Table("host")
  table.add_row(wrap(EVIL))
  console.print(wrap(EVIL), table)
  said = capsys.readouterr().out
  assert said.count(SHOWN) == 2 and not set(said) & {"\x1b", "\u202e", "\x9b"}


def test_what_is_ours_is_printed_as_it_is(capsys):
  make_console().print(Text("±5 % → █▌ é\n\nend"))
  assert ([line.rstrip() for line in capsys.readouterr().out.split("\n")]
          == ["±5 % → █▌ é", "", "end", ""])


def test_what_the_terminal_lacks_is_escaped(monkeypatch):
  screen = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
  monkeypatch.setattr("sys.stdout", screen)
  make_console().print(Text("2 × node at runs/ünï"))
  screen.flush()
  assert screen.buffer.getvalue().split() == [b"2", rb"\xd7", b"node", b"at", rb"runs/\xfcn\xef"]


@pytest.mark.parametrize("columns", ["0", "00", ""])
def test_a_width_of_nothing_is_not_known(monkeypatch, capsys, columns):
  monkeypatch.setenv("COLUMNS", columns)
  make_console().print(Text("word " * 15))
  assert capsys.readouterr().out == "word " * 15 + "\n"


@pytest.mark.parametrize("command", [["report"], ["watch", "--once"]])
def test_hosts_of_a_report(tmp_path, capsys, command):
  synthetic_runs.write(tmp_path / "run",
                     SyntheticJob(ranks=2, steps=60, processes=2, hosts=2, late={1: 5e-3}))
  for process in range(2):
    path = tmp_path / "run" / "process" / f"{process}.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "hostname": EVIL}))
  assert main([command[0], str(tmp_path / "run"), *command[1:]]) == 0
  said = capsys.readouterr().out
  assert not set(said) & {"\x1b", "\u202e", "\x9b"}
  assert "ev\\x1b[31mil\\u202e" in said


@pytest.mark.parametrize("width", [40, 60, 100])
def test_a_long_name_goes_on_in_the_next_line_behind_a_separator(capsys, monkeypatch, width):
  monkeypatch.setenv("COLUMNS", str(width))
  name = "all-reduce.1 (pretraining_of_language_models_with_experts/train_step_and_eval.py:1234)"
  table = make_table("collective", "times", "transfer")
  table.add_row(LongName(name), "1", "12.0 ms")
  console = make_console()
  console.print(table)
  lines = [line.removesuffix("1    12.0 ms").rstrip()
           for line in capsys.readouterr().out.splitlines()[2:]]
  assert " ".join(lines).replace("_ ", "_").replace("/ ", "/").replace("- ", "-").strip() == name
  assert all(re.search(r"[/_-]$|\.1$|\)$", line) for line in lines), lines


def test_an_iteration_of_nested_loops_leaves_room_for_the_collective(capsys):
  table = make_table("collective", "times", "waiting", "share", "most in", "mostly for", "transfer")
  table.add_row(LongName("all-reduce (ppo.py:37)"), "16", "2.13 ms", "6.7 %",
                "iteration 0 of 4, in it iteration 0 of 4: 1.07 ms", "rank 2: 33 %", "17.5 ms")
  make_console().print(table)
  said = capsys.readouterr().out
  assert "…" not in said
  assert {"collective", "all-reduce", "(ppo.py:37)", "16", "6.7", "17.5"} <= set(said.split())


# Progress of a long report.

class Terminal(io.StringIO):
  def isatty(self):
    return True


def test_a_quick_report_and_a_pipe_see_nothing():
  quick, pipe = Terminal(), io.StringIO()
  for progress in (Progress(quick, quiet_seconds=60), Progress(pipe, quiet_seconds=0)):
    progress.counting("Reading")(1, 4)
    progress.counting("Adding up")(4, 4)
    progress.during("Compiling")
    progress.clear()
  assert quick.getvalue() == pipe.getvalue() == ""


def test_what_can_not_say_how_far_it_is_shows_its_seconds():
  stream = Terminal()
  progress = Progress(stream, quiet_seconds=0)
  progress.during("Compiling")
  assert awaited(lambda: "Compiling, 0 s" in stream.getvalue())
  progress.counting("Simulating")(1, 4)
  assert awaited(lambda: re.search("Simulating 25 %, [0-9]+ s", stream.getvalue()))
  progress.clear()
  progress.clear()
  assert stream.getvalue().endswith("\r\x1b[K")
  assert not any(thread.name == "jaxpace-progress" for thread in threading.enumerate())
