"""`jaxpace replay` as a user meets it, and the expressions that name a pacer."""

import json
import os
import subprocess
import sys

import pytest

from jaxpace.cli import pacer_expression
from jaxpace.cli.main import main
from jaxpace.core.types import Pacer
from tests.multiprocess.jobs import ROOT
from tests.synthetic import synthetic_runs
from tests.synthetic.synthetic_runs import SyntheticJob

OWN = """
import jax.numpy as jnp
import jaxpace

def last(seconds=1e-3, rank=2):
  def update(seen, state):
    return jaxpace.Decision(jnp.where(seen.rank == rank, jnp.float32(seconds), jnp.float32(0)), {}), state
  return jaxpace.Pacer(lambda ranks: (), update)

def listens(times, seconds):
  def hold(moment, state):
    return jaxpace.Hold(jnp.float32(seconds), moment.listened < times), state
  return last(0.0)._replace(hold=hold)

made = last(2e-3)
broken = jaxpace.Pacer(lambda ranks: (), lambda seen, state: (jnp.float32(0), state))
"""  # noqa: E501


@pytest.fixture
def run(tmp_path):
  synthetic_runs.write(tmp_path / "run",
                       SyntheticJob(ranks=3, steps=80, noise=0.01, late={2: 10e-3}))
  (tmp_path / "my_pacers.py").write_text(OWN)
  return tmp_path / "run"


def replay(*arguments) -> int:
  return main(["replay", *map(str, arguments)])


def test_text_and_json_say_the_same_and_what_cannot_be_known(run, tmp_path, capsys):
  target = tmp_path / "replay.json"
  assert replay(run, "--pacer", "pace_early_ranks(window=8, cost=0.1)", "--json", target) == 0
  text = capsys.readouterr().out
  document = json.loads(target.read_text())
  assert document["ranks"] == 3 and document["steps"] == 79 and document["agreement"] is None
  assert document["active_share"] > 0.5 and document["delay"]["by_rank"]["0"]["mean"] > 1e-3
  assert document["delay"]["by_rank"]["2"] == {"mean": 0.0, "active_share": 0.0}
  assert (document["step_time"]["with"] >= document["step_time"]["without"]
          == document["step_time"]["recorded"])
  assert document["change"] == pytest.approx(document["cost"]["share"], abs=1e-9)
  assert (f"{document['step_time']['with'] * 1e3:.3f} ms" in text
          and "pace_early_ranks(window=8, cost=0.1)" in text)
  assert all(sentence in text for sentence in document["cannot_know"])
  said = " ".join(document["cannot_know"])
  assert all(word in said for word in ("cannot gain", "poll", "other jobs", "Pauses", "GPU"))
  assert any("not shared when this was recorded" in note for note in document["notes"])


@pytest.mark.long
def test_a_module_of_the_users_own_in_a_process_of_its_own(run, tmp_path):
  environment = {**os.environ, "PYTHONPATH": str(ROOT)}
  command = ["replay", str(run), "--pacer-from", "my_pacers:last(2e-3)", "--json", "-"]
  done = subprocess.run([sys.executable, "-m", "jaxpace", *command], cwd=tmp_path,
                        env=environment, capture_output=True, text=True, check=True)
  document = json.loads(done.stdout)
  assert document["cost"]["total"] == pytest.approx(2e-3 * document["steps"], rel=1e-4)


def test_a_pacer_that_listens_where_nothing_was_heard(run, tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(run.parent)
  target = tmp_path / "replay.json"
  assert replay(run, "--pacer-from", "my_pacers:listens(1, 5e-4)", "--json", target) == 0
  text, document = capsys.readouterr().out, json.loads(target.read_text())
  held, steps = document["held"], document["steps"]
  assert (held["listened"], held["unanswered"], held["on_record"]) == (steps, steps, 0)
  assert held["mean"] == pytest.approx(1e-3) and held["active_share"] == 1
  assert held["cost"]["total"] == pytest.approx(5e-4 * steps), "the first half hides behind compute"
  assert document["change"] == pytest.approx(held["cost"]["share"]) and held["agreement"] is None
  assert f"listened {steps:,} times, {steps:,} of them with no reading on record" in text
  assert "Nothing was heard on record" in text and "holding collectives back helps" in text
  assert replay(run, "--pacer-from", "my_pacers:listens(1, 5e-4)", "--as-recorded") == 0
  assert "only its update ran" in capsys.readouterr().out


def test_as_recorded_compares_with_the_recorded_delays(run, monkeypatch, capsys):
  monkeypatch.chdir(run.parent)
  assert replay(run, "--pacer-from", "my_pacers:made", "--as-recorded") == 0
  assert "66.67% of 237 cases" in capsys.readouterr().out


@pytest.mark.parametrize(("pacer", "words"), [
    ("pace_erly()", "no pacer 'pace_erly'; there are: chain"),
    ("__import__('os')", "no pacer '__import__'"),
    ("pace_early_ranks(window=3)", "window=3 must be"),
    ("pace_early_ranks(windw=3)", "unexpected keyword argument 'windw'"),
    ("pace_early_ranks(window=64", "is not an expression"),
    ("pace_early_ranks(window=2**99)", "can't be used here"),
    ("(lambda: 0)()", "can't be used here"),
    ("pace_early_ranks.__globals__", "can't be used here"),
    ("chain(*[1])", "* and **"),
    ("3", "makes a int, not a Pacer"),
    ("os:getcwd", "would import a module"),
    ("only_ranks(pace_early_ranks(), range(10**9))", "can't be used here"),
    ("only_ranks(pace_early_ranks(), range(1000000000000))", "more ranks than there can be"),
    ("(" * 5000 + ")" * 5000, "is not an expression"),
    ("+" + "-" * 9000 + "1", "nested too deeply"),
    ("chain(" * 1400 + ")" * 1400, "is not an expression"), ("1" * 20000, "has 20,000 characters"),
    ("only_ranks(pace_early_ranks(), [9])", "given rank 9"),
    # About a module of one's own, too.
    *((f"from:{pacer}", words) for pacer, words in (
        ("no_such_module:pacer", "No module named 'no_such_module'"),
        ("os:getcwd", "makes a str, not a Pacer"),
        ("my_pacers:broken", "must return (Decision, state)"),
        ("my_pacers:last(rate=open)", "no pacer 'open'"),
        ("my_pacers:last(" + "-" * 5000 + "1)", "nested too deeply"),
        ("pace_early_ranks()", "takes MODULE:ATTRIBUTE"))),
    # And about what shares work.
    *((f"balancer:{balancer}", words) for balancer, words in (
        ("pace_early_ranks()", "makes a Pacer, not a Balancer"),
        ("share_by_speed(total_micro_batches=24, capacity=4)", "capacity=4 is too small: 3 ranks"),
        ("share_by_speed(total_micro_batches=0, capacity=4)", "total_micro_batches=0 must be")))])
def test_slips_are_one_sentence_and_status_2(run, monkeypatch, capsys, pacer, words):
  monkeypatch.chdir(run.parent)
  options = {"from": "--pacer-from", "balancer": "--balancer"}
  kind, _, rest = pacer.partition(":")
  option, given = (options[kind], rest) if kind in options else ("--pacer", pacer)
  assert replay(run, f"{option}={given}") == 2
  captured = capsys.readouterr()
  assert len(captured.err) < 1000
  assert (captured.out == "" and words in captured.err
          and captured.err.startswith("jaxpace replay: "))


def test_without_the_switch_nothing_is_imported(run, monkeypatch, capsys):
  (run.parent / "evil.py").write_text("open('sentinel', 'w').close()")
  monkeypatch.chdir(run.parent)
  monkeypatch.syspath_prepend(str(run.parent))
  assert replay(run, "--pacer", "evil:pacer") == 2
  assert "--pacer-from" in capsys.readouterr().err and not (run.parent / "sentinel").exists()


def test_a_rank_that_was_never_recorded_is_said(run, capsys):
  for path in run.glob("*/synthetic-p00001*"):
    path.unlink()
  assert replay(run, "--pacer", "pace_early_ranks(window=8)") == 0
  out = capsys.readouterr().out
  assert "Rank 2 was never recorded" in out and "No rank is ever delayed" in out


@pytest.mark.parametrize("text", [
    "pace_early_ranks", "pace_early_ranks()", "jaxpace.pace_early_ranks(window=16)",
    "chain(pace_early_ranks, limit(pace_early_ranks(threshold=0.1), 5e-3))",
    "only_ranks(pace_early_ranks(), range(0, 8))", "only_ranks(pace_early_ranks(), [0, +1])"])
def test_expressions(text):
  assert isinstance(pacer_expression.make(text), Pacer)


def test_work_shared_by_speed(run, tmp_path, capsys):
  """Ranks of 20, 20 and 30 ms: even counts wait for 30; 8 micro-batches each, moved, end at about
  23."""
  target = tmp_path / "shared.json"
  assert (replay(run, "--balancer", "share_by_speed(total_micro_batches=24, capacity=16)", "--json",
                 target) == 0)
  text, document = capsys.readouterr().out, json.loads(target.read_text())
  assert document["ranks"] == 3 and sum(document["counts"]) == 24 and document["counts"][2] < 8
  assert 1.05 < document["speedup"] == pytest.approx(
      document["step_time"]["recorded"] / document["step_time"]["with"])
  assert f"work shared by speed   {document['step_time']['with'] * 1e3:10.3f} ms" in text
  assert all(line in text for line in document["cannot_know"]) and 1 <= document["changes"] <= 3
