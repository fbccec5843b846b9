"""What a recording around whatever trains says, and to whom."""

import errno
import logging
import os
import shlex
import signal

import jax
import jax.numpy as jnp
import pytest

import jaxpace
from jaxpace.observation import everywhere
from jaxpace.observation.clocks import host_ring
from jaxpace.record import observed
from jaxpace.record.writer import Writer
from jaxpace.runs.reader import read_run
from tests.patience import awaited
from tests.record.unnamed_step import STEPS, arrays, rows_written, train


def test_the_command_that_shows_a_run_can_be_pasted(tmp_path):
  said, run = [], tmp_path / "a run; $x"
  with jaxpace.observed(run, say=said.append):
    train()
  assert shlex.split(said[-1])[-3:] == ["jaxpace", "report", str(run)]


@pytest.mark.parametrize("name", ["JAX_NUM_PROCESSES", "SLURM_STEP_NUM_TASKS",
                                  "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_a_process_of_a_job_that_it_has_not_joined_is_told_so(tmp_path, monkeypatch, name):
  said = []
  for count in ("", "1", "2"):
    monkeypatch.setenv(name, count)
    with jaxpace.observed(tmp_path / "run", say=said.append):
      pass
  assert all(sentence.startswith("Nothing was recorded: no program") for sentence in said)
  assert ["distributed.initialize()" in sentence for sentence in said] == [False, False, True]


def test_a_program_without_standard_error_gets_no_sentence_on_its_output(monkeypatch, capsys):
  monkeypatch.setattr(observed.sys, "stderr", None)
  observed._print("The step is sgd.")
  assert capsys.readouterr().out == ""


@pytest.mark.parametrize("own", [True, False])
def test_a_sentence_that_nobody_can_read_does_not_change_how_the_program_ends(monkeypatch, own):
  class Refusing:
    def write(self, text):
      raise RuntimeError("not from a thread")

    def flush(self):
      pass

  reader, broken = os.pipe()
  os.close(reader)
  errors = open(broken, "w") if own else Refusing()  # noqa: SIM115
  monkeypatch.setattr(observed.sys, "stderr", errors)
  monkeypatch.setattr(observed.sys, "__stderr__", errors if own else None)
  before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
  try:
    observed._print("The step is sgd.")
  finally:
    signal.signal(signal.SIGPIPE, before)
  if own:
    errors.close()  # Raises where anything is left to be written.


def test_a_run_that_can_not_be_made_is_one_sentence(tmp_path, monkeypatch, caplog):
  def full(writer):
    raise OSError(errno.ENOSPC, "No space left on device")

  monkeypatch.setattr(Writer, "start", full)
  with jaxpace.observed(tmp_path / "run"):
    train()
  (sentence,) = (r.message for r in caplog.records if r.levelno >= logging.WARNING)
  assert sentence.startswith("Not recording, training goes on: ")


def test_a_block_that_is_entered_again_says_that_it_records_nothing(tmp_path):
  said = []
  once = jaxpace.observed(tmp_path / "run", say=said.append)
  with once:
    train()
  with once:
    train()
  assert "records once" in said[-1] and len(read_run(tmp_path / "run").steps) == STEPS


def test_without_collectives_nothing_is_touched_and_that_is_said(tmp_path, caplog):
  with jaxpace.observed(tmp_path / "run") as inside:
    jax.jit(lambda x: x * 3)(jnp.ones(5)).block_until_ready()
  assert not (tmp_path / "run").exists()
  assert "no program with collectives" in caplog.text and not inside.step


def test_of_a_process_beside_one_that_is_recorded_it_is_said_whose_steps_are_missing(tmp_path,
                                                                                     caplog):
  with jaxpace.observed(tmp_path):
    train()
  with jaxpace.observed(tmp_path):
    pass
  assert "Nothing of this process was recorded: no program" in caplog.text


def test_where_no_program_matches_the_pattern_those_that_ran_are_named(tmp_path):
  said = []
  with jaxpace.observed(tmp_path, match="train*", say=said.append):
    train()
  assert f"{tmp_path} has no steps" in said[-1]
  assert "whose name matches 'train*' ran three times" in said[-1] and "were: sgd, eval" in said[-1]


def test_of_a_run_that_was_moved_no_command_is_said_that_can_not_show_it(tmp_path):
  said, run = [], tmp_path / "run"
  with jaxpace.observed(run, say=said.append):
    train()
    assert awaited(lambda: rows_written(run) == 4 * STEPS)
    run.rename(tmp_path / "moved")
  assert said[-1] == f"Recorded {STEPS} steps in {run}, which was moved or deleted meanwhile."
  assert len(read_run(tmp_path / "moved").steps) == STEPS


def test_nothing_is_said_to_be_recorded_for_the_reason_that_was_said_before(tmp_path, monkeypatch,
                                                                             caplog):
  def left(reason):
    caplog.clear()
    with jaxpace.observed(tmp_path / "run"):
      jax.jit(lambda w, x: (x @ w).sum() * len(reason))(*arrays())
    return [record.message for record in caplog.records]

  monkeypatch.setattr(everywhere, "_compiled", [].__getitem__)
  said = left("first")
  assert len(said) == 2 and "runs unmodified and is not recorded" in said[0]
  assert said[1] == ("Nothing was recorded: every program with collectives over several devices "
                     "ran unmodified, for the reasons above.")
  monkeypatch.setattr(host_ring, "unavailable", lambda: "There is no clock.")
  assert left("no clock") == ["Nothing is recorded: There is no clock."]
  assert not (tmp_path / "run").exists()


def test_what_says_a_sentence_may_fail(tmp_path):
  def say(sentence):
    raise BrokenPipeError(sentence)

  with jaxpace.observed(tmp_path / "run", say=say) as inside:
    train()
    inside._programs.say("Something.")
  assert len(read_run(tmp_path / "run").steps) == STEPS
  with jaxpace.observed(tmp_path / "none", say=say):
    pass


def test_warnings_say_whose_they_are_where_a_program_keeps_no_log(monkeypatch, capsys):
  handler, log = observed._Unheard(), logging.getLogger("jaxpace")
  monkeypatch.setattr(log, "handlers", [handler])
  monkeypatch.setattr(logging.getLogger(), "handlers", [])
  log.warning("It is %d o'clock.", 5)
  assert capsys.readouterr().err == "jaxpace: It is 5 o'clock.\n"
  monkeypatch.setattr(logging.getLogger(), "handlers", [logging.NullHandler()])
  log.warning("It is late.")
  assert capsys.readouterr().err == ""


def test_nothing_is_recorded_while_jit_is_disabled(tmp_path, caplog):
  with jax.disable_jit(), jaxpace.observed(tmp_path / "run"):
    train(2)
  assert "jax_disable_jit" in caplog.text and not (tmp_path / "run").exists()
