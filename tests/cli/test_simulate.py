"""`jaxpace simulate`, from a config file to a run directory that the other commands read."""

import errno
import json
import os

import numpy as np
import pytest

from jaxpace.cli.main import main
from jaxpace.diagnose.diagnose import diagnose
from jaxpace.record.parts import PartStore
from jaxpace.runs.reader import read_run

CONFIG = {
    "steps": 120, "fabric": {"nodes": 2, "per_node": 2, "card_rate": 1e9, "cards": 1},
    "jobs": {"only": {"forward": 5e-3, "backward": 10e-3, "gradient_bytes": 2e6,
                      "noise": {"slow": {"ranks": [3], "extra": 0.4}}}}}


@pytest.fixture
def config(tmp_path):
  path = tmp_path / "config.json"
  path.write_text(json.dumps(CONFIG))
  return path


def test_the_report_gives_back_what_was_put_in(config, tmp_path, capsys):
  assert (main(["simulate", str(config), "--output", str(tmp_path / "run"), "--json",
                str(tmp_path / "out.json")]) == 0)
  said = capsys.readouterr().out
  assert "only" in said and "Written" in said
  figures = json.loads((tmp_path / "out.json").read_text())["jobs"]["only"]
  found = diagnose(read_run(tmp_path / "run"))
  assert found.step_time.mean == pytest.approx(figures["mean"], rel=1e-3)
  assert ([f.mode for f in found.findings] == ["persistent_straggler"]
          and found.findings[0].ranks == (3,))
  # Of the step, 0.4 * 15 ms are waited by three ranks of four.
  assert found.shares["skew"] == pytest.approx(0.75 * 6e-3 / figures["mean"], abs=2e-3)
  assert found.shares["transfer"] == pytest.approx(figures["transfer"] / figures["mean"], abs=2e-3)


def test_the_same_seed_gives_the_same_bytes(config, tmp_path, capsys):
  for name in ("one", "two", "one"):  # the third time over the first
    assert main(["simulate", str(config), "--output", str(tmp_path / name)]) == 0
  files = sorted(p.relative_to(tmp_path / "one") for p in (tmp_path / "one").rglob("*.*"))
  assert any(f.suffix == ".parquet" for f in files)
  for file in files:
    assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes(), file
  assert main(["simulate", str(config), "--set", "seed=1", "--set",
               "jobs.only.noise.normal.deviation=0.1",
               "--output", str(tmp_path / "one")]) == 2  # no such section yet
  assert "there is no section jobs.only.noise.normal" in capsys.readouterr().err


def test_two_jobs_get_a_directory_each_and_a_pacer_runs(config, tmp_path, capsys):
  job = {**CONFIG["jobs"]["only"], "noise": {"slow": {"ranks": [1], "extra": 0.4}}}
  config.write_text(json.dumps({**CONFIG, "jobs": {
      "a": {**job, "nodes": [0]},
      "b": {**job, "nodes": [1], "pacer": "pace_early_ranks(window=8)"}}}))
  assert main(["simulate", str(config), "--output", str(tmp_path / "runs")]) == 0
  assert "b is paced by pace_early_ranks(window=8): mean delay" in capsys.readouterr().out
  run = read_run(tmp_path / "runs" / "b")
  assert run.ranks == 2 and np.nanmax(run.durations["delay_applied"]) > 0
  assert (main(["replay", str(tmp_path / "runs" / "b"), "--pacer", "pace_early_ranks(window=8)",
                "--as-recorded"]) == 0)
  assert "recorded delay in 100.00% of" in capsys.readouterr().out


@pytest.mark.parametrize(("arguments", "said"), [
    (["missing.py"], "there is no file missing.py"),
    (["{config}", "--set", "steps=-1"], "steps=-1 must be a whole number"),
    (["{config}", "--set", "steps"], "must be FIELD=VALUE"),
    (["{config}", "--json", "/no/such/dir/x.json"], "does not exist"),
    (["{folder}/broken.json"], "is not a JSON file"),
    (["{folder}/raises.py"], "fails: ZeroDivisionError"),
    (["{folder}/imports.py"], "needs not_there, which is not installed"),
    (["{folder}/exits.py"], "fails: SystemExit"),
    (["{config}", "--output", ""], "--output is empty"),
    (["{config}", "--set", "fabric.nodes=900000000"], "fabric.nodes=900,000,000 of per_node="),
    (["{config}", "--set", "fabric.seed=1.5"], "fabric.seed=1.5 must be a whole number"),
    (["{config}", "--output", "{folder}/broken.json"], "can't be written"),
    (["{config}", "--output", "{folder}/foreign"], "was not written by jaxpace")])
def test_slips_get_a_sentence(config, tmp_path, capsys, arguments, said):
  (tmp_path / "broken.json").write_text("{")
  (tmp_path / "raises.py").write_text("def get_config():\n  return 1 / 0\n")
  (tmp_path / "imports.py").write_text("import not_there\n")
  (tmp_path / "exits.py").write_text("def get_config():\n  raise SystemExit(3)\n")
  (tmp_path / "foreign").mkdir()
  (tmp_path / "foreign" / "run.json").write_text('{"of": "something else"}')
  status = main(["simulate", *(a.format(config=config, folder=tmp_path) for a in arguments)])
  streams = capsys.readouterr()
  assert status == 2 and said in streams.err and "Traceback" not in streams.err
  assert (tmp_path / "foreign" / "run.json").read_text() == '{"of": "something else"}'


def files(folder):
  return {path for path in folder.rglob("*") if path.is_file()}


def test_a_job_that_cannot_be_written_leaves_nothing_of_the_others(config, tmp_path, capsys):
  only = CONFIG["jobs"]["only"]
  config.write_text(json.dumps({**CONFIG, "jobs": {
      name: {**only, "nodes": [node], "noise": {}} for node, name in enumerate("ab")}}))
  (tmp_path / "runs" / "b").mkdir(parents=True)
  (tmp_path / "runs" / "b" / "run.json").write_text("{}")
  before = files(tmp_path)
  assert main(["simulate", str(config), "--output", str(tmp_path / "runs")]) == 2
  assert "was not written by jaxpace" in capsys.readouterr().err
  assert files(tmp_path) == before and not (tmp_path / "runs" / "a").exists()


def test_a_full_disk_leaves_nothing_half_written_and_what_was_there(
    config, tmp_path, capsys, monkeypatch):
  (tmp_path / "run").mkdir()
  (tmp_path / "run" / "fabric.json").write_text('{"kind": "jaxpace bench"}')
  before = files(tmp_path)

  def full(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  with monkeypatch.context() as patched:
    patched.setattr(PartStore, "compact", full)  # when all parts are written
    assert main(["simulate", str(config), "--output", str(tmp_path / "run")]) == 2
  assert "No space left on device" in capsys.readouterr().err
  assert files(tmp_path) == before
  assert main(["simulate", str(config), "--output", str(tmp_path / "run")]) == 0
  assert (tmp_path / "run" / "fabric.json").read_text() == '{"kind": "jaxpace bench"}'


@pytest.mark.long
def test_the_config_in_the_repository_runs(tmp_path, capsys):
  assert main(["simulate", "configs/simulate.py", "--set", "steps=20", "--json", "-"]) == 0
  assert set(json.loads(capsys.readouterr().out)["jobs"]) == {"a", "b"}


@pytest.mark.parametrize("pacer", [
    "os:system('touch {sentinel}')", "evil:pacer", "chain(os:system('touch {sentinel}'))",
    "__import__('os').system('touch {sentinel}')", "open('{sentinel}', 'w')",
    "chain.__globals__['sys']"])
@pytest.mark.parametrize("by", ["file", "--set"])
def test_a_config_is_data_nothing_in_it_is_run(config, tmp_path, monkeypatch, capsys, pacer, by):
  """A job's pacer such as "os:system('...')" ran its command before it was refused."""
  sentinel = tmp_path / "sentinel"
  (tmp_path / "evil.py").write_text(f"open({str(sentinel)!r}, 'w').close()")
  monkeypatch.chdir(tmp_path)
  monkeypatch.syspath_prepend(str(tmp_path))
  text = pacer.format(sentinel=sentinel)
  changed = ["--set", f"jobs.only.pacer={text}"]
  if by == "file":
    config.write_text(json.dumps({**CONFIG,
                                  "jobs": {"only": {**CONFIG["jobs"]["only"], "pacer": text}}}))
    changed = []
  assert main(["simulate", str(config), *changed]) == 2
  assert (capsys.readouterr().err.startswith("jaxpace simulate: jobs.only.pacer")
          and not sentinel.exists())


def test_a_python_config_may_name_a_pacer_of_ones_own(tmp_path, monkeypatch, capsys):
  (tmp_path / "simulate_pacers.py").write_text(
      "import jaxpace\ndef own(window=16):\n  return jaxpace.pace_early_ranks(window=window)\n")
  (tmp_path / "config.py").write_text(f"def get_config():\n  return {CONFIG!r}\n")
  monkeypatch.chdir(tmp_path)
  monkeypatch.syspath_prepend(str(tmp_path))
  for given in ("simulate_pacers:own", "simulate_pacers:own(window=8)"):
    assert main(["simulate", "config.py", "--set", f"jobs.only.pacer={given}"]) == 0
    assert f"only is paced by {given}" in capsys.readouterr().out
  assert main(["simulate", "config.py", "--set", "jobs.only.pacer=simulate_pacers:other"]) == 2
  assert "can't be imported" in capsys.readouterr().err

