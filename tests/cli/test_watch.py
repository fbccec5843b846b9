"""`jaxpace watch` as a user meets it: mistakes, a picture, lines in a pipe, a terminal that changes
its size."""

import os
import shutil
import signal
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxpace.cli.main import main
from jaxpace.diagnose.follower import Follower
from jaxpace.show import watch as live
from tests.cli.terminal import Terminal
from tests.lib.said import numbers
from tests.multiprocess.jobs import ROOT
from tests.patience import awaited
from tests.show.growing import Growing
from tests.synthetic import synthetic_runs
from tests.synthetic.synthetic_runs import SyntheticJob

JOB = SyntheticJob(ranks=4, steps=120, processes=2, noise=0.02, late={3: 5e-3})


@pytest.fixture
def growing(tmp_path):
  growing = Growing(tmp_path / "run", JOB, tmp_path / "elsewhere" / "whole")
  growing.write(60)
  return growing


@pytest.mark.parametrize("make, says", [
    (lambda path: path / "no" / "such", "no directory"),
    (lambda path: path / "run" / "run.json", "Give its directory"),
    (lambda path: path / "run" / "steps", "is a part of a run"), (lambda path: path, "holds one")])
def test_a_mistake_is_a_sentence(growing, tmp_path, capsys, make, says):
  assert main(["watch", str(make(tmp_path)), "--once"]) == 2
  said = capsys.readouterr()
  assert said.err.startswith("jaxpace watch: ") and says in said.err
  assert len(said.err.splitlines()) == 1 and not said.out


@pytest.mark.parametrize("options", [("--every", "0"), ("--every", "nan"), ("--steps", "3"),
                                     ("--steps", "1e3")])
def test_arguments_out_of_range(growing, capsys, options):
  assert main(["watch", str(growing.directory), *options]) == 2
  assert options[1] in capsys.readouterr().err.splitlines()[-1]


def test_once_prints_the_whole_picture(growing, capsys, monkeypatch):
  monkeypatch.setenv("COLUMNS", "90")
  monkeypatch.setenv("LINES", "10")
  assert main(["watch", str(growing.directory), "--once", "--steps", "20"]) == 0
  text = capsys.readouterr().out
  assert "steps 40 to 59" in text and "Who is late" in text and "host1" in text
  assert max(map(len, text.splitlines())) <= 90 and "\x1b" not in text


class Ended(Exception):
  pass


def test_a_pipe_gets_a_line_a_refresh(tmp_path, capsys):
  """From before the job begins, on."""
  path, looks = tmp_path / "run", iter(range(100))
  grown = []

  def sleep(seconds):
    look = next(looks)
    if look == 0:
      grown.append(Growing(path, JOB, tmp_path / "whole"))
    elif look < 4:
      grown[0].write(30 * look)
    else:
      raise Ended

  with pytest.raises(Ended):
    live.in_lines(Follower(path, 20), 1.0, sleep)
  said = capsys.readouterr().out.splitlines()
  assert numbers(said[0]) == [] and numbers(said[1]) == [2]
  assert [line.split(";")[0] for line in said[2:]] == ["step 29", "step 59", "step 89"]
  assert all("latest rank 3 on host1" in line for line in said[2:])


def test_a_pipe_ends_with_the_run(growing, capsys):
  looks = iter(range(10))

  def sleep(seconds):
    if next(looks) == 1:
      for process in range(JOB.processes):
        growing.heartbeat(process, closed_cleanly=True)

  live.in_lines(Follower(growing.directory), 1.0, sleep)
  said = capsys.readouterr().out.splitlines()
  assert len(said) == 3 and "has ended" in said[-1] and "has ended" not in said[0]


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs pseudo-terminals")
def test_a_real_terminal_and_ctrl_c(growing):
  command = [sys.executable, "-m", "jaxpace", "watch", str(growing.directory), "--every", "60"]
  with Terminal(command, columns=100, lines=40, cwd=ROOT) as terminal:
    process, shown = terminal.process, terminal.shown

    def wait_until(condition):
      awaited(lambda: condition() or process.poll() is not None)
      assert condition(), bytes(shown)

    def heights():
      """Rows of each picture that is complete."""
      return [picture.count(b"\n") + 1 for picture in shown.split(b"\x1b[H")[1:-1]]

    wait_until(lambda: b"Who is late" in shown and 40 in heights())
    assert 20 not in heights()
    terminal.resize(60, 20)
    wait_until(lambda: 20 in heights())  # a minute before the next look
    process.send_signal(signal.SIGINT)
    assert process.wait(300) == 130
    terminal.read_on(10)
    assert b"Traceback" not in shown and b"\x1b[?1049l" in shown


def test_files_of_other_names_are_named(tmp_path, capsys):
  synthetic_runs.write(tmp_path / "run", synthetic_runs.SyntheticJob(steps=30))
  for table in ("steps", "collectives"):
    for at, file in enumerate(sorted((tmp_path / "run" / table).glob("*.parquet"))):
      file.rename(file.with_name(f"part-{at}.parquet"))
  shutil.rmtree(tmp_path / "run" / "process")
  assert main(["watch", str(tmp_path / "run"), "--once"]) == 0
  said = " ".join(capsys.readouterr().out.split())
  assert "2 files in 'collectives' left out (part-0.parquet, part-1.parquet)" in said
  assert "waiting for the job to start" not in said


def test_rows_of_attempts_that_never_came_to_collectives_are_waited_for(tmp_path, capsys):
  """Steps of a newer attempt than any collective's: nobody's place in it is known yet."""
  synthetic_runs.write(tmp_path / "run", synthetic_runs.SyntheticJob(steps=30))
  for file in (tmp_path / "run" / "steps").glob("*.parquet"):
    table = pq.read_table(file)
    pq.write_table(table.set_column(table.column_names.index("attempt"), "attempt",
                                    pa.array(np.full(len(table), 2, np.int32))), file)
  assert main(["watch", str(tmp_path / "run"), "--once"]) == 0
