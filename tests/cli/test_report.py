"""`jaxpace report` as a user meets it."""

import errno
import json
import math
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from jaxpace.cli import report as report_command
from jaxpace.cli.main import main
from jaxpace.diagnose.floor import SHARES
from jaxpace.diagnose.words.codes import Silence, Verdict
from jaxpace.diagnose.words.evidence import Evidence
from jaxpace.files.folders import Folder
from jaxpace.hang import read_rings
from jaxpace.runs import reader
from tests.hang.test_read import Directory
from tests.quick import long
from tests.synthetic import synthetic_runs
from tests.synthetic.synthetic_faults import Fault
from tests.synthetic.synthetic_runs import SyntheticJob

ROOT = pathlib.Path(__file__).parents[2]
LATE = SyntheticJob(ranks=4, steps=120, processes=4, noise=0.02, late={3: 20e-3}, compile=2.0)


@pytest.fixture(scope="module")
def late(tmp_path_factory):
  path = tmp_path_factory.mktemp("runs") / "late"
  synthetic_runs.write(path, LATE)
  return path


@pytest.fixture(scope="module")
def large(tmp_path_factory):
  path = tmp_path_factory.mktemp("runs") / "large"
  synthetic_runs.write(path,
                     SyntheticJob(ranks=200, steps=60, processes=4, noise=0.02, late={150: 20e-3}))
  return path


def report(*arguments) -> int:
  return main(["report", *map(str, arguments)])


def run_program(*arguments, **environment):
  variables = {k: v for k, v in os.environ.items()
               if k not in ("COLUMNS", "FORCE_COLOR", "NO_COLOR")}
  return subprocess.run([sys.executable, "-m", "jaxpace", "report", *map(str, arguments)],
                        capture_output=True, text=True, encoding="utf-8", cwd=ROOT,
                        env={**variables, **environment}, check=False)


def numbers(value):
  if isinstance(value, dict):
    value = list(value.values())
  if isinstance(value, list):
    for item in value:
      yield from numbers(item)
  elif isinstance(value, float):
    yield value


def test_json_has_every_key_of_the_schema(late, tmp_path, capsys):
  file = tmp_path / "report.json"
  assert report(late, "--json", file) == 0
  assert "Verdict" in capsys.readouterr().out
  document = json.loads(file.read_text())
  assert (document["schema"], document["run"], document["ranks"], document["processes"],
          document["steps"]) == (
              1, "synthetic", 4, 4, 120)
  assert document["missing"] == {"ranks": [], "steps": 0, "rank_steps": {}}
  assert set(document["step_time"]) == {"mean", "median", "p99", "cv"}
  assert tuple(document["shares"]) == SHARES
  assert sum(document["shares"].values()) == pytest.approx(1, abs=1e-6)
  (finding,) = document["findings"]
  assert set(finding) == {"mode", "share", "confidence", "ranks", "hosts", "evidence",
                          "evidence_codes", "advice", "causes", "first_step", "last_step"}
  assert ((finding["mode"], finding["ranks"], finding["hosts"])
          == ("persistent_straggler", [3], ["host1"]))
  assert 0.99 <= finding["confidence"] <= 1
  assert (set(document["what_if"]) >= {"no_skew", "no_contention", "no_runtime_jitter",
                                       "without_rank"})
  no_skew = document["what_if"]["no_skew"]
  assert no_skew["speedup"] == pytest.approx(1 / (1 - no_skew["skew"]))
  assert set(document["what_if"]["without_rank"]["3"]) == {"step_time", "speedup"}
  assert set(document["pacing"]) == {"active_share", "effect", "effect_interval", "blocks"}
  assert isinstance(document["verdict"], str) and document["verdict_code"] == Verdict.PERSISTENT
  assert (finding["evidence_codes"][0] == Evidence.LATE
          and len(finding["evidence_codes"]) == len(finding["evidence"]))
  assert len(document["note_codes"]) == len(document["notes"])
  assert document["warmup"] == [1]
  assert all(math.isfinite(x) for x in numbers(document))
  assert list(tmp_path.iterdir()) == [file]  # no temporary left


def test_dash_writes_json_and_nothing_else(late, capsys):
  assert report(late, "--json", "-") == 0
  captured = capsys.readouterr()
  assert json.loads(captured.out)["schema"] == 1
  assert captured.err == ""


def test_what_a_person_reads(late, capsys):
  assert report(late) == 0
  text = capsys.readouterr().out
  head = text[:text.index("Where the step goes")]
  assert "Look at rank 3 on host1" in " ".join(head.split())
  for word in (*SHARES, "Findings", "Who is late", "Phases", "backward", "What it would be worth",
               "Notes", "Warm-up"):
    assert word in text
  assert "\x1b" not in text


@pytest.mark.parametrize("columns", [60, 80])
def test_it_fits_the_width(late, large, columns, capsys, monkeypatch):
  monkeypatch.setenv("COLUMNS", str(columns))
  for run in (late, large):
    assert report(run) == 0
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= min(columns, 120)
    if columns >= 80:
      assert "contention" in said
      assert "…" not in said


def test_piped_it_is_100_wide_and_plain_ascii_where_the_terminal_knows_no_more(late):
  done = run_program(late, PYTHONIOENCODING="ascii", LC_ALL="C", PYTHONUTF8="0")
  assert done.returncode == 0, done.stderr
  assert max(map(len, done.stdout.splitlines())) == 100 and "\x1b" not in done.stdout
  assert "###" in done.stdout
  assert done.stdout.isascii()


def test_many_ranks_stay_readable(large, capsys):
  report(large)
  text = capsys.readouterr().out
  assert "190 more ranks" in text
  assert len(text.splitlines()) < 80
  assert "150 " in text[text.index("Who is late"):]
  report(large, "--ranks", "all")
  assert len(capsys.readouterr().out.splitlines()) > 220


def test_a_window(late, capsys, tmp_path):
  assert report(late, "--steps", "40:90", "--json", tmp_path / "r.json") == 0
  document = json.loads((tmp_path / "r.json").read_text())
  assert (document["steps"], document["window"], document["warmup"]) == (50, [40, 90], [])


@pytest.mark.parametrize(("arguments", "words"), [
    (["--steps", "5"], "is not a range of steps"), (["--steps", "9:3"], "is empty"),
    (["--steps", "-3:4"], None), (["--steps", "a:b"], "is not a range"),
    (["--ranks", "0"], "is not a number of ranks"), (["--ranks", "few"], "'all'"),
    *((["--forecast", text], "write them like 128,512,2048")
      for text in ("", "x", "0", "8,", "1.5", "99999999"))])
def test_slips_get_a_sentence_and_status_2(late, capsys, arguments, words):
  assert report(late, *arguments) == 2
  assert words is None or words in capsys.readouterr().err


def test_json_that_cannot_be_written_is_found_out_before_the_run_is_read(
    late, tmp_path, capsys, monkeypatch):
  """Some directories take no files though they look as if: /proc, a disk of another owner."""
  def refuse(self, *_, **__):
    raise FileNotFoundError(errno.ENOENT, "No such file or directory")

  monkeypatch.setattr(Folder, "open", refuse)
  monkeypatch.setattr(reader, "read_run", None)
  assert report(late, "--json", tmp_path / "r.json") == 2
  assert f"no file can be made in {tmp_path}" in capsys.readouterr().err


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
@pytest.mark.parametrize("arguments", [(), *long((("--json", "-"),))])
def test_a_full_standard_output_is_named_and_nothing_else(late, arguments):
  with open("/dev/full", "w") as full:
    done = subprocess.run([sys.executable, "-m", "jaxpace", "report", str(late), *arguments],
                          stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT, check=False)
  assert done.returncode == 2
  assert done.stderr == ("jaxpace report: standard output can't be written: No space left "
                         "on device.\n")


def test_a_closed_standard_output_is_no_reason_not_to_write_the_file(late, tmp_path):
  command = f'exec "{sys.executable}" -m jaxpace report "{late}" --json "{tmp_path / "r.json"}" >&-'
  done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True, cwd=ROOT,
                        check=False)
  assert (done.returncode, done.stderr) == (0, "")
  assert json.loads((tmp_path / "r.json").read_text())["ranks"] == 4


# `jaxpace report --forecast` as a user meets it.

@pytest.fixture(scope="module")
def run(tmp_path_factory):
  path = tmp_path_factory.mktemp("forecast") / "run"
  synthetic_runs.write(path, SyntheticJob(ranks=8, steps=300, processes=8, hosts=1, noise=0.1))
  return path


def test_text_and_json_say_the_same(run, tmp_path, capsys):
  target = tmp_path / "forecast.json"
  assert report(run, "--forecast", "8,32,4096", "--ranks-per-host", "5000", "--json", target) == 0
  text = capsys.readouterr().out
  document = json.loads(target.read_text())["forecast"]
  assert document["ranks"] == 8 and document["steps"] == 299 and document["hosts"] == 1
  same, more, far = document["forecasts"]
  assert same["step_time"]["estimate"] == pytest.approx(document["recorded"]["step_time"], rel=2e-3)
  assert more["step_time"]["low"] < more["step_time"]["estimate"] < more["step_time"]["high"]
  assert more["step_time"]["estimate"] > same["step_time"]["estimate"]
  assert far["step_time"] is None and far["silent_code"] == Silence.TOO_SHORT
  assert f"{1e3 * more['step_time']['estimate']:.1f} ms" in text and "4,096   unknown" in text
  assert ("4,096 ranks can't be forecast. The run is too short" in " ".join(text.split())
          and "silent" not in text)


def test_a_described_fabric_is_used(run, tmp_path, capsys):
  fabric = tmp_path / "fabric.json"
  fabric.write_text(
      json.dumps({"levels": [{"level": "flat", "ranks": 64, "alpha": 1e-4, "beta": 0}]}))
  assert report(run, "--forecast", "16,65", "--floor", fabric, "--json", "-") == 0
  document = json.loads(capsys.readouterr().out)["forecast"]
  near, far = document["forecasts"]
  assert (near["transfer"] == pytest.approx(2e-3 + 16e-4, rel=1e-6)
          and near["transfer_source"] == "fabric")
  assert far["silent_code"] == Silence.BEYOND_FABRIC


def test_a_fabric_that_is_no_file_is_not_waited_for(run, tmp_path, capsys):
  os.mkfifo(tmp_path / "fabric.json")
  assert report(run, "--floor", tmp_path / "fabric.json") == 2
  assert "is a FIFO, not a regular file" in capsys.readouterr().err


# `jaxpace report` of a job that hangs or was killed in a hang: the first cause from the files
# alone.

ENDED = "What the job waited for last"
"""The section of a job that no longer writes."""


@pytest.fixture(autouse=True)
def nobody_writes(monkeypatch):
  """The made-up processes write nothing, however long their rings are watched."""
  monkeypatch.setattr(read_rings, "WATCHED_SECONDS", 0.01)


def shown(capsys):
  out, err = capsys.readouterr()
  return " ".join(out.replace("│", " ").split()), err


def test_a_job_that_hung_before_any_row_was_written_is_told_from_its_rings(tmp_path, capsys):
  (tmp_path / "run").mkdir()
  Directory(tmp_path / "run", at=(4, 0))
  assert main(["report", str(tmp_path / "run"), "--json", str(tmp_path / "report.json")]) == 0
  words, errors = shown(capsys)
  document = json.loads((tmp_path / "report.json").read_text())
  cause, = document["hang"]["causes"]
  assert (cause["code"], cause["ranks"]) == ("absent", [3]) and errors
  assert "all-reduce.0 (model.py:10)" in words
  assert cause["sentences"] and all(sentence in words for sentence in cause["sentences"])
  assert document["run"] == "run" and document["problems"]


def test_a_recorded_run_that_was_killed_in_a_hang_says_so_above_its_report(tmp_path, capsys):
  run, report = tmp_path / "run", tmp_path / "report.json"
  synthetic_runs.write(run, SyntheticJob(ranks=4, steps=120, processes=4, noise=0.02))
  assert main(["report", str(run), "--json", str(report)]) == 0
  words, _ = shown(capsys)
  assert ENDED not in words and json.loads(report.read_text())["hang"] is None
  job = Directory(run, run="synthetic")
  for process in range(4):
    job.process(process, wall=0)
  assert (main(["report", str(run), "--json", str(report), "--html", str(tmp_path / "report.html")])
          == 0)
  words, _ = shown(capsys)
  document = json.loads(report.read_text())
  assert ENDED in words
  assert all(sentence in words for sentence in document["hang"]["causes"][0]["sentences"])
  assert document["hang"]["causes"][0]["code"] == "absent" and document["steps"] == 120
  assert document["hang"]["running"] is False and document["verdict_code"] == "healthy"
  assert ENDED in (tmp_path / "report.html").read_text()
  shutil.rmtree(run / "marks")
  assert main(["report", str(run), "--json", str(report)]) == 0
  assert json.loads(report.read_text())["hang"] is None


def test_without_rings_there_is_no_more_to_say_than_before(tmp_path, capsys):
  (tmp_path / "run").mkdir()
  Directory(tmp_path / "run")
  shutil.rmtree(tmp_path / "run" / "marks")
  assert main(["report", str(tmp_path / "run")]) == 2
  assert "without a single recorded step" in shown(capsys)[1]


@pytest.mark.parametrize("seconds, most, asked, window", [
    (20e-3, None, ":", "0:90"), (20e-3, 200, ":", "40:90"), (20e-3, None, "50:300", "50:90"),
    (0.0, None, ":", None)])
def test_who_is_late_in_another_loop_is_said_in_the_words_of_a_report_on_it(
    tmp_path, monkeypatch, seconds, most, asked, window):
  late = Fault("compute", seconds, (3,), end=90 / 400)
  synthetic_runs.write(tmp_path / "run", SyntheticJob(
      ranks=4, steps=400, processes=4, noise=0.02, faults=(late,)))
  info = json.loads((tmp_path / "run/run.json").read_text())
  info["settings"] = {"step": {"programs": ["fit"], "trains": True, "first_step": 91, "before": [
      {"programs": ["pretrain"], "trains": True, "first_step": 0}]}}
  (tmp_path / "run/run.json").write_text(json.dumps(info))
  monkeypatch.setattr(report_command, "_MOST_ROWS", most or report_command._MOST_ROWS)

  def said(*options):
    assert report(tmp_path / "run", "--json", tmp_path / "said.json", *options) == 0
    return json.loads((tmp_path / "said.json").read_text())

  document = said("--steps", asked)
  assert document["verdict_code"] == "healthy" and document["first_step"] == 91
  notes = dict(zip(document["note_codes"], document["notes"], strict=True))
  assert "it also ran pretrain" in notes["other_loops"]
  assert ("late_in_loop" in notes) == (window is not None)
  if window is not None:
    verdict = said("--steps", window)["verdict"]
    assert notes["late_in_loop"] == (f"In the loop of pretrain, {verdict[0].lower()}{verdict[1:]} "
                                     f"`--steps {window}` says more.")
