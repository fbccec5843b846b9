"""A file is the old one or the new one, and nothing else is left behind."""

import os

import pytest

from jaxpace import whole_file


def test_it_is_replaced_as_a_whole(tmp_path):
  path = tmp_path / "a.json"
  whole_file.write_text(path, "old\n")
  with whole_file.replacing(path, fsync=True) as written:
    written.write_text("new", encoding="utf-8")
    assert path.read_text() == "old\n" and written.parent == tmp_path and str(os.getpid()) in written.name
  assert path.read_text() == "new" and os.listdir(tmp_path) == ["a.json"]


@pytest.mark.parametrize("begun", [True, False])
def test_after_an_error_the_old_one_is_there_and_no_other(tmp_path, begun):
  path = tmp_path / "a.json"
  whole_file.write_text(path, "old")
  with pytest.raises(KeyboardInterrupt), whole_file.replacing(path) as written:
    if begun:
      written.write_text("half", encoding="utf-8")
    raise KeyboardInterrupt
  assert path.read_text() == "old" and os.listdir(tmp_path) == ["a.json"]


def test_where_it_can_not_be_written(tmp_path):
  with pytest.raises(FileNotFoundError):
    whole_file.write_text(tmp_path / "no such folder" / "a.json", "text")
  (tmp_path / "folder").mkdir()
  with pytest.raises(OSError):
    whole_file.write_text(tmp_path / "folder", "text")
  assert os.listdir(tmp_path) == ["folder"]
