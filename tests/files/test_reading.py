"""Files that may be anything are read bounded and without waiting."""

import json
import os
import socket
from typing import NamedTuple

import numpy as np
import pytest

from jaxpace.files.plain import to_plain
from jaxpace.files.reading import UnreadableError, check_regular, read_bytes, read_end


def test_a_file_is_read_up_to_the_bytes_it_may_have_and_through_a_link(tmp_path):
  (tmp_path / "file").write_bytes(b"12345")
  (tmp_path / "link").symlink_to("file")
  for path in (tmp_path / "file", str(tmp_path / "link")):
    assert read_bytes(path, 5) == b"12345"
    with pytest.raises(UnreadableError, match="^has more than 4 bytes$"):
      read_bytes(path, 4)
  with pytest.raises(FileNotFoundError):
    read_bytes(tmp_path / "none", 4)


@pytest.mark.parametrize(("most", "end"), [(100, b"one\ntwo\nthree\n"), (14, b"one\ntwo\nthree\n"),
                                           (13, b"two\nthree\n"), (9, b"three\n"), (3, b"")])
def test_of_the_end_a_line_that_is_cut_is_left_out(tmp_path, most, end):
  path = tmp_path / "lines"
  path.write_bytes(b"one\ntwo\nthree\n")
  assert read_end(path, most) == end


@pytest.mark.parametrize(("kind", "said"), [
    ("link to a pipe", "is a FIFO"), ("folder", "is a directory"), ("device", "is a device file"),
    ("socket", "is a socket")])
def test_what_is_no_regular_file_is_refused_and_not_waited_for(tmp_path, monkeypatch, kind, said):
  path = tmp_path / "it"
  if kind == "folder":
    path.mkdir()
  elif kind == "device":
    path.symlink_to("/dev/zero")
  elif kind == "socket":
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as listening:
      listening.bind("it")
  else:
    os.mkfifo(tmp_path / "pipe")
    path.symlink_to("pipe")
  with pytest.raises(UnreadableError, match=f"^{said}, not a regular file$"):
    check_regular(path)
  for read in (read_bytes, read_end):
    with pytest.raises(OSError if kind == "socket" else UnreadableError,
                       match=None if kind == "socket" else said):
      read(path, 10)


class Pair(NamedTuple):
  one: float
  two: tuple = ()


def test_named_tuples_arrays_and_numbers_of_numpy_inside_each_other():
  value = {7: Pair(np.float32(0.5), (Pair(1, ()), None, "x")), "a": np.array([[1, 2], [3, 4]]),
           "b": np.bool_(True), "c": [np.int64(5), 1.5], "d": np.array([1.0, np.nan])}
  plain = to_plain(value)
  assert plain == {"7": {"one": 0.5, "two": [{"one": 1, "two": []}, None, "x"]},
                   "a": [[1, 2], [3, 4]], "b": True, "c": [5, 1.5], "d": [1.0, None]}
  assert json.loads(json.dumps(plain, allow_nan=False)) == plain


def test_what_is_not_finite_is_null_and_digits_round_floats_alone():
  assert to_plain([float("inf"), -np.inf, np.float32("nan"), 1 / 3, 123456789, True], 3) == [
      None, None, None, 0.333, 123456789, True]
  assert to_plain(1 / 3) == 1 / 3
