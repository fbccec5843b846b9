"""Files that may be anything are read bounded and without waiting."""

import os
import socket

import pytest

from jaxpace.files.reading import UnreadableError, check_regular, is_regular, read_bytes, read_end


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
  assert not is_regular(path)
  for read in (read_bytes, read_end):
    with pytest.raises(OSError if kind == "socket" else UnreadableError,
                       match=None if kind == "socket" else said):
      read(path, 10)
