"""The `jaxpace` command: help, version, slips, and what it does not import."""

import io
import os
import subprocess
import sys
import types

import pytest

from jaxpace.cli import main as cli
from tests.multiprocess.jobs import ROOT, clean_environment
from tests.synthetic import synthetic_runs
from tests.synthetic.synthetic_runs import SyntheticJob


def run(*arguments, **kwargs):
  return subprocess.run([sys.executable, "-m", "jaxpace", *arguments], cwd=ROOT,
                        capture_output=True, text=True, check=False, **kwargs)


def test_no_arguments_and_help_print_the_commands(capsys):
  assert cli.main([]) == 0
  bare = capsys.readouterr().out
  assert cli.main(["--help"]) == 0
  assert capsys.readouterr().out == bare
  assert "compare" in bare and "report" in bare and "usage: jaxpace" in bare


def test_the_package_is_the_command():
  done = run("--version")
  assert (done.returncode, done.stdout) == (0, f"jaxpace {cli.version()}\n")


@pytest.mark.parametrize(("arguments", "words"), [
    (["rnu"], "unknown command 'rnu'; did you mean `jaxpace run`?"),
    (["frobnicate"], f"unknown command 'frobnicate'; there are: {', '.join(cli.COMMANDS)}."),
    (["--frobnicate"], "unknown option '--frobnicate'")])
def test_an_unknown_command_is_one_sentence_and_status_2(capsys, arguments, words):
  assert cli.main(arguments) == 2
  captured = capsys.readouterr()
  assert captured.out == "" and words in captured.err and captured.err.count("\n") == 1


@pytest.mark.parametrize(("arguments", "words"), [
    ([], "no command after `--`"),
    (["--nproc", "0", "--", "true"], "must be at least 1, not 0"),
    (["--nproc", "two", "--", "true"], "'two' is not a whole number"),
    (["--nproc", "2"], "no command after `--`"), (["--nproc", "2", "--"], "no command after `--`"),
    (["--nproc", "2", "--", "no-such-program"], "'no-such-program' was not found in PATH"),
    (["--nproc", "2", "--", "./no/such.py"], "./no/such.py does not exist"),
    (["--nproc", "2", "--", "{tmp}/plain.py"], "is not executable; did you mean `-- python"),
    (["--nproc", "2", "--", "{tmp}"], "is a directory"),
    (["--nproc", "2", "--grace", "-1", "--", "true"], "at least 0"),
    (["--nproc", "2", "--grace", "nan", "--", "true"], "finite"),
    (["--nproc", "2", "--devices-per-process", "0", "--", "true"], "at least 1"),
    (["--nproc", "2", "--logs", "{tmp}/plain.py", "--", "true"],
     "--logs takes a directory, but {tmp}/plain.py is a"),
    (["--nproc", "2", "--logs", "{tmp}/plain.py/a", "--", "true"],
     "--logs takes a directory, but {tmp}/plain.py/a "),
    (["--nproc", "2", "--logs", "/proc/none", "--", "true"],
     "/proc/none can't be used (No such file or directory): give another with --logs DIR"),
    (["--nproc", "1", "--out", "", "--", "true"], "'' names no directory; is a variable of")])
def test_slips_of_run_are_one_sentence_and_status_2(tmp_path, capsys, arguments, words):
  (tmp_path / "plain.py").touch()
  arguments = [argument.replace("{tmp}", str(tmp_path)) for argument in arguments]
  logs = [] if "--logs" in arguments else ["--logs", str(tmp_path / "logs")]
  assert cli.main(["run", "--no-record", *logs, *arguments]) == 2
  said = capsys.readouterr()
  assert said.out == "" and words.replace("{tmp}", str(tmp_path)) in said.err


@pytest.mark.parametrize(("arguments", "words"), [
    (["report", "RUN", "--steps", "-5:10"], "argument --steps: write --steps=-5:10, or it is"),
    (["control", "RUN", "--max-delay", "-5ms"], "write --max-delay=-5ms, or it is"),
    (["report", "RUN", "--steps"], "argument --steps: expected one argument"),
    (["run", "--grace", "5", "--", "true"], "--grace is about the processes that jaxpace run"),
    (["report", "RUN", "--series"], "--series goes into the JSON: give --json FILE as well."),
    (["report", "RUN", "--algorithm", "ring"], "are about a forecast: give --forecast N,M"),
    (["report", "RUN", "--ranks-per-host", "4"], "are about a forecast: give --forecast N,M")])
def test_what_would_do_nothing_or_other_than_meant_is_said(capsys, arguments, words):
  assert cli.main(arguments) == 2
  said = capsys.readouterr()
  assert said.out == "" and words in said.err


@pytest.mark.parametrize("options", [(), ("--nproc", "2", "--logs", "{tmp}/logs")])
def test_what_the_system_cannot_start_is_a_sentence(tmp_path, options):
  (tmp_path / "noformat").write_bytes(b"\x00\x01")
  (tmp_path / "noformat").chmod(0o755)
  done = run("run", "--no-record", *(option.replace("{tmp}", str(tmp_path)) for option in options),
             "--", str(tmp_path / "noformat"))
  assert (done.returncode, done.stdout) == (2, "")
  assert "Exec format error" in done.stderr and "Traceback" not in done.stderr


def test_options_of_the_script_are_the_scripts(tmp_path):
  done = run("run", "--no-record", "--nproc", "1", "--logs", str(tmp_path), "--", "echo", "--nproc",
             "7", "--", "--help")
  assert done.stdout == "--nproc 7 -- --help\n"
  done = run("run", "--no-record", "--nproc", "1", "--logs", str(tmp_path), "echo", "no dashes",
             "--", "-h")
  assert done.stdout == "no dashes -- -h\n"


def test_a_subcommand_gets_its_arguments_and_gives_the_status(monkeypatch, capsys):
  seen = []
  module = types.ModuleType("jaxpace.cli.try")
  module.add_arguments = lambda parser: parser.add_argument("run")
  module.run = lambda args: seen.append(args.run) or 5
  monkeypatch.setitem(sys.modules, module.__name__, module)
  monkeypatch.setitem(cli.COMMANDS, "try", "try it")
  assert cli.main(["try", "runs/a"]) == 5 and seen == ["runs/a"]
  assert cli.main(["try"]) == 2 and "usage: jaxpace try" in capsys.readouterr().err
  assert cli.main(["try", "--help"]) == 0
  assert cli.main(["--help"]) == 0 and "try it" in capsys.readouterr().out


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_help_fits_into_a_terminal(capsys, monkeypatch, command):
  monkeypatch.setenv("COLUMNS", "80")
  assert cli.main([command, "--help"]) == 0
  assert max(map(len, capsys.readouterr().out.splitlines())) <= 120


@pytest.fixture
def unread():
  """A pipe that nobody reads."""
  read, write = os.pipe()
  os.close(read)
  yield write
  os.close(write)


def test_a_reader_that_leaves_early_is_no_error(unread):
  done = subprocess.run([sys.executable, "-m", "jaxpace", "--help"], cwd=ROOT, stdout=unread,
                        stderr=subprocess.PIPE, text=True, check=False)
  assert done.returncode == 141 and done.stderr == ""


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_run_starts_its_command_whatever_the_shell_has_closed(tmp_path, closed):
  command = f"{sys.executable} -m jaxpace run --no-record -- touch {tmp_path}/there {closed}"
  assert subprocess.run(command, cwd=ROOT, shell=True, check=False).returncode == 0
  assert (tmp_path / "there").exists()


@pytest.mark.parametrize("arguments, status", [
    (["frobnicate"], 2), (["run", "--no-record", "-n", "1", "--", "sh", "-c", "exit 7"], 7)])
def test_sentences_that_can_not_be_written_change_nothing(tmp_path, unread, arguments, status):
  done = subprocess.run([sys.executable, "-m", "jaxpace", *arguments], cwd=tmp_path, stderr=unread,
                        env=clean_environment(), check=False)
  assert done.returncode == status


def test_an_interrupt_is_no_traceback(monkeypatch):
  monkeypatch.setattr(cli, "_dispatch", lambda argv: (_ for _ in ()).throw(KeyboardInterrupt))
  monkeypatch.setattr(sys, "stdout", io.StringIO())
  assert cli.main(["run"]) == 130


# What commands import: help waits for no library, and a small run is reported on in less time than
# JAX takes to be imported.

_SLOW = {"jax", "numpy", "pyarrow", "rich"}
_NOT_NEEDED = {"jax", "jaxlib", "scipy", "optax", "absl", "matplotlib", "pandas",
               "pyarrow.compute", "pyarrow.dataset", "numpy.random"}


def test_commands_import_no_library_that_they_do_not_use(tmp_path):
  run = tmp_path / "run"
  synthetic_runs.write(run, SyntheticJob(ranks=2, steps=30, collectives=2, host_columns=True))
  said = subprocess.run(
      [sys.executable, "-c", f"""
import sys
from jaxpace.cli.main import main
for argv in (["--help"], ["run", "--help"], ["replay", "--help"],
             ["control", {str(run)!r}, "--off"]):
  assert main(argv) == 0
  assert not {_SLOW!r} & set(sys.modules), argv
assert main(["report", {str(run)!r}]) == 0
assert main(["watch", {str(run)!r}, "--once"]) == 0
print(*sys.modules, sep=",", file=sys.stderr, flush=True)
assert main(["doctor"]) == 0 and "jax" not in sys.modules
"""], capture_output=True, text=True, check=True)
  loaded = set(said.stderr.splitlines()[-1].split(","))
  assert {"numpy", "pyarrow.parquet", "rich"} <= loaded
  assert not loaded & _NOT_NEEDED
