"""A file is the old one or the new one, and nothing else is left behind."""

import os
import pathlib
import shutil
import stat
import subprocess
import sys

import pytest

from jaxpace.files.folders import Folder, ForeignFileError, writing_named


def test_it_is_replaced_as_a_whole(tmp_path):
  path = tmp_path / "a.json"
  Folder(path.parent).write_text(path.name, "old\n")
  with Folder(tmp_path).replacing("a.json", fsync=True) as written:
    written.write(b"new")
    written.flush()
    assert path.read_text() == "old\n" and os.path.dirname(written.name) == str(tmp_path)
  assert path.read_text() == "new" and os.listdir(tmp_path) == ["a.json"]


@pytest.mark.parametrize("begun", [True, False])
def test_after_an_error_the_old_one_is_there_and_no_other(tmp_path, begun):
  path = tmp_path / "a.json"
  Folder(path.parent).write_text(path.name, "old")
  with pytest.raises(KeyboardInterrupt), Folder(tmp_path).replacing("a.json") as written:
    if begun:
      written.write(b"half")
    raise KeyboardInterrupt
  assert path.read_text() == "old" and os.listdir(tmp_path) == ["a.json"]


def test_where_it_can_not_be_written(tmp_path):
  with pytest.raises(FileNotFoundError):
    Folder(tmp_path / "no such folder").write_text("a.json", "text")
  (tmp_path / "folder").mkdir()
  with pytest.raises(OSError):
    Folder(tmp_path).write_text("folder", "text")
  assert os.listdir(tmp_path) == ["folder"]


def planted(kind, path, victim):
  """Puts something at `path` that isn't what it seems."""
  victim.write_text("mine")
  if kind == "link":
    path.symlink_to(victim)
  elif kind == "dangling":
    path.symlink_to(victim.with_name("not there"))
  elif kind == "second name":
    os.link(victim, path)
  elif kind == "pipe":
    os.mkfifo(path)
  elif kind == "device":
    path.symlink_to("/dev/full")


KINDS = ["link", "dangling", "second name", "pipe", "device"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_written_in_place_is_one_of_its_own(tmp_path, kind, caplog):
  path, victim = tmp_path / "note.jsonl", tmp_path / "victim"
  planted(kind, path, victim)
  Folder(tmp_path).append("note.jsonl", "one\n")
  Folder(tmp_path).append("note.jsonl", "two\n", fsync=True)
  assert path.read_text() == "one\ntwo\n" and stat.S_ISREG(path.lstat().st_mode)
  assert victim.read_text() == "mine" and not victim.with_name("not there").exists()
  assert len(caplog.records) == 1 and "it was removed, not followed" in caplog.text


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0,
                    reason="only root can give files away")
def test_somebody_elses_file_is_left_as_it_is(tmp_path):
  path = tmp_path / "note.jsonl"
  path.write_text("theirs")
  os.chown(path, 12345, 12345)
  with pytest.raises(ForeignFileError, match="belongs to another user"):
    Folder(tmp_path).append("note.jsonl", "mine")
  assert path.read_text() == "theirs" and os.listdir(tmp_path) == ["note.jsonl"]


def test_the_folders_of_a_run_are_no_links(tmp_path):
  (tmp_path / "elsewhere").mkdir()
  (tmp_path / "steps").symlink_to(tmp_path / "elsewhere")
  with pytest.raises(ForeignFileError, match="is a link"):
    Folder(tmp_path, "steps")
  for _ in range(2):
    assert Folder(tmp_path, "hosts", "more").path == tmp_path / "hosts" / "more"
  assert (tmp_path / "hosts" / "more").is_dir()


def test_a_folder_that_is_replaced_by_a_link_meanwhile_is_not_left(tmp_path):
  (tmp_path / "run" / "steps").mkdir(parents=True)
  (tmp_path / "elsewhere").mkdir()
  held = Folder(tmp_path / "run", "steps")
  held.write_text("a", "before")
  (tmp_path / "run" / "steps").rename(tmp_path / "aside")
  (tmp_path / "run" / "steps").symlink_to(tmp_path / "elsewhere")
  held.write_text("b", "one")
  held.append("c", "two")
  held.rename("a", "d")
  held.unlink("b")
  assert held.names() == ["c", "d"] == sorted(os.listdir(tmp_path / "aside"))
  assert not os.listdir(tmp_path / "elsewhere") and held.stat("c").st_size == 3
  shutil.rmtree(tmp_path / "aside")
  with pytest.raises(FileNotFoundError):
    held.write_text("e", "three")


def test_folders_are_let_go(tmp_path):
  before = len(os.listdir("/proc/self/fd"))
  for _ in range(20):
    Folder(tmp_path, "a", "b").write_text("c", "d")
  # Threads of other tests may open and close some.
  assert len(os.listdir("/proc/self/fd")) < before + 20


def test_a_name_that_the_user_gave_is_followed(tmp_path):
  (tmp_path / "latest.json").symlink_to("first.json")
  for text in ("one", "two"):
    with writing_named(tmp_path / "latest.json") as file:
      file.write(text.encode())
    assert (tmp_path / "latest.json").is_symlink() and (tmp_path / "first.json").read_text() == text


PROGRAM = """
import pathlib, sys
import jax, jax.numpy as jnp
import jaxpace
from jaxpace.live import control_file
from jaxpace.live.control_file import ControlRequest
directory, victims = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
victims.mkdir(); directory.mkdir(parents=True)
def plant(name):
  (directory / name).parent.mkdir(exist_ok=True)
  victim = victims / name.replace("/", "-")
  victim.write_text("mine")
  (directory / name).symlink_to(victim)
for name in (".lock", "control.applied.jsonl", "run.json", "process/0.json", "locality/0.json", "watchdog/0.jsonl",
             "links.json", "control.json"):
  plant(name)
victims.joinpath("run.json").unlink(); (directory / "run.json").unlink()   # else it is no run's directory
pacer = jaxpace.steerable(jaxpace.pace_early_ranks(window=8))
paced = jaxpace.instrument(lambda w, x: (w - jax.lax.pmean(w * x.mean(), "data")), "data", pacer, share=True)
mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
spec = jaxpace.spec(mesh)
step = jax.jit(jax.shard_map(paced, mesh=mesh, in_specs=(spec, jax.P(), jax.P("data")), out_specs=(spec, jax.P()),
                             check_vma=False))
pace, w, x = paced.init(mesh), jnp.ones(3), jnp.ones((1, 3))
control_file.write(directory / control_file.NAME, ControlRequest(enabled=False))
with jaxpace.Recorder(directory, paced) as recorder, jaxpace.Control(directory, every_seconds=0.01) as control:
  with jaxpace.Watchdog(recorder=recorder) as watchdog:
    watchdog._events.write("late", 1, {})
    for _ in range(30):
      pace = control(pace)
      pace, w = step(pace, w, x)
      recorder.record()
assert not control.request.enabled and recorder.lost["stopped"] is None, (control.request, recorder.lost)
from jaxpace.diagnose.links import ProbedLinks
from jaxpace.live.probe import write_links
import numpy
none = numpy.full((1, 1), numpy.nan)
write_links(directory, ProbedLinks(("a",), 1, none, none, (), (), 0.0, 0))
left = {victim.name: victim.read_text() for victim in victims.iterdir() if victim.read_text() != "mine"}
assert not left, left
links = [path for path in directory.rglob("*") if path.is_symlink()]
print("fine", [path.name for path in links])
"""  # noqa: E501


@pytest.mark.long
def test_links_planted_in_a_run_directory_lead_nowhere(tmp_path):
  """Every file that a job writes to its run directory, by the names that anybody can guess."""
  done = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path / "run"),
                         str(tmp_path / "victims")],
                        capture_output=True, text=True, timeout=600,
                        cwd=pathlib.Path(__file__).parents[2])
  assert (done.returncode == 0
          and done.stdout.startswith("fine []")), (done.stdout, done.stderr[-3000:])


@pytest.mark.parametrize("name", ["steps", *(pytest.param(name, marks=pytest.mark.long)
                                           for name in ("collectives", "hosts", "process"))])
def test_a_planted_folder_ends_the_recording_in_a_sentence(tmp_path, name):
  (tmp_path / "run").mkdir()
  (tmp_path / "elsewhere").mkdir()
  (tmp_path / "run" / name).symlink_to(tmp_path / "elsewhere")
  program = """
import sys
import jaxpace
paced = jaxpace.instrument(lambda x: x, "data")
with jaxpace.Recorder(sys.argv[1], paced) as recorder:
  print(recorder.recording)
"""
  done = subprocess.run([sys.executable, "-c", program, str(tmp_path / "run")], capture_output=True,
                        text=True, timeout=600, cwd=pathlib.Path(__file__).parents[2])
  assert (done.stdout == "False\n"
          and f"{name} is a link" in done.stderr), (done.stdout, done.stderr[-3000:])
  assert not os.listdir(tmp_path / "elsewhere")
