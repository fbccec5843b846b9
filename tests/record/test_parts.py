import errno
import os
import pathlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpace.files.folders import Folder
from jaxpace.record import parts
from jaxpace.record.columns import Columns
from jaxpace.runs import schema, table_reader
from tests.record import fake_step as fake
from tests.record.ring.replayed import rows_of


def columns(first: int, count: int, plan=fake.PLAN) -> Columns:
  return rows_of(plan, fake.executions(list(range(first, first + count))))[0]


def files(store: parts.PartStore) -> list[pathlib.Path]:
  """Those that a store knows of, in order."""
  return [store._folder.path / part.id.file_name for part in store._parts]


def read(paths: list[pathlib.Path]) -> list[dict]:
  return [row for path in paths for row in pq.read_table(path).to_pylist()]


@given(name=st.builds(table_reader.Part, st.from_regex(r"[0-9A-Za-z._-]{1,20}", fullmatch=True),
                      st.integers(0, 10**6), st.integers(0, 10**7), st.integers(10**7, 10**8),
                      st.just(pathlib.Path()), st.just(())))
def test_part_names_read_back(name):
  assert table_reader.parse_part_name(name.file_name) == name
  assert table_reader.parse_part_name("." + name.file_name + ".tmp") is None
  assert (table_reader.parse_part_name(name._replace(last=name.first - 1).file_name) is None
          or name.first == 0)


def test_the_schema_is_kept_and_extra_columns_follow(tmp_path):
  steps, collectives, _ = rows_of(fake.PLAN, fake.executions([1, 2]))
  for table, data in (("steps", steps), ("collectives", collectives)):
    store = parts.PartStore(tmp_path, table, "run", 0)
    store.append(data)
    found = pq.read_schema(files(store)[0])
    wanted = schema.TABLES[table]
    assert [found.field(i) for i in range(len(wanted))] == list(wanted)
    assert (found.names[len(wanted):] == (["decision_slack", "phase_my_loss_ns"] if table == "steps"
                                          else []))


def test_a_preliminary_part_gives_way_to_the_next_or_is_dropped(tmp_path):
  store = parts.PartStore(tmp_path, "steps", "run", 0)
  for count in (1, 3):
    store.append(columns(0, count), preliminary=True)
  [first] = files(store)
  store.append(columns(0, 5))
  ranks = len(read(files(store))) // 5
  assert len(files(store)) == 1 and not first.exists()
  store.append(columns(5, 2), preliminary=True)
  assert len(read(files(store))) == 7 * ranks
  store.drop_preliminary()
  store.drop_preliminary()
  assert len(read(sorted((tmp_path / "steps").iterdir()))) == 5 * ranks


@pytest.mark.long
@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=40), fan=st.integers(2, 5),
       limit=st.integers(3, 40))
def test_merging_keeps_every_row_in_order(sizes, fan, limit, tmp_path_factory):
  folder = tmp_path_factory.mktemp("merge")
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(parts, "MERGE_PARTS", fan)
    patch.setattr(parts, "MERGE_ROWS", limit)
    store, first = parts.PartStore(folder, "steps", "run", 0), 0
    for size in sizes:
      store.append(columns(first, size))
      first += size
    assert [row["step"] for row in read(files(store))] == list(range(first))
    assert sorted(p.name for p in (folder / "steps").iterdir()) == [p.name for p in files(store)]
    store.compact()
  rows = read(files(store))
  assert [row["step"] for row in rows] == list(range(first))
  assert [row["forward_ns"] for row in rows] == [200_000] * first
  assert all(pq.read_metadata(p).num_rows <= max(limit, max(sizes)) for p in files(store))
  names = [table_reader.parse_part_name(p.name) for p in files(store)]
  assert [n.first for n in names] == [0] + [n.last + 1 for n in names[:-1]]


def test_many_small_parts_become_few(tmp_path, monkeypatch):
  monkeypatch.setattr(parts, "MERGE_PARTS", 4)
  store = parts.PartStore(tmp_path, "steps", "run", 0)
  for i in range(64):
    store.append(columns(i, 1))
  names = [table_reader.parse_part_name(p.name) for p in files(store)]
  assert [(n.first, n.last) for n in names] == [(0, 63)]


def test_parts_with_different_columns_merge(tmp_path):
  store = parts.PartStore(tmp_path, "steps", "run", 0)
  store.append(columns(0, 2))
  store.append({**columns(2, 1), "host_load": np.array([1.5])})
  store.compact()
  assert [row["host_load"] for row in read(files(store))] == [None, None, 1.5]


@pytest.mark.parametrize("deleted", [0, 1, 2])
def test_a_crash_between_rename_and_delete_loses_and_doubles_nothing(
    tmp_path, monkeypatch, deleted):
  """The merged part has its name; only `deleted` of three sources are gone when the process
  dies."""
  store = parts.PartStore(tmp_path, "steps", "run", 0)
  for i in range(3):
    store.append(columns(2 * i, 2))
  unlink, count = Folder.unlink, []

  def dying(folder, name):
    if len(count) == deleted:
      raise KeyboardInterrupt
    count.append(name)
    unlink(folder, name)

  with monkeypatch.context() as patch:
    patch.setattr(Folder, "unlink", dying)
    with pytest.raises(KeyboardInterrupt):
      store.compact()
  left = [table_reader.parse_part_name(p.name) for p in sorted((tmp_path / "steps").iterdir())]
  whole = [n for n in left if (n.first, n.last) == (0, 2)]
  assert len(whole) == 1 and len(left) == 1 + 3 - deleted
  again = parts.PartStore(tmp_path, "steps", "run", 0)
  again.append(columns(6, 1))
  assert [row["step"] for row in read(files(again))] == list(range(7))
  assert len(list((tmp_path / "steps").iterdir())) == 2


def test_a_crash_while_writing_leaves_the_sources(tmp_path, monkeypatch):
  store = parts.PartStore(tmp_path, "steps", "run", 0)
  store.append(columns(0, 2))
  store.append(columns(2, 2))

  def torn(_table, file, **_options):
    file.write(b"PAR1 half a file")
    raise OSError(errno.ENOSPC, "No space left on device")

  monkeypatch.setattr(pq, "write_table", torn)
  with pytest.raises(OSError, match="No space"):
    store.compact()
  assert [row["step"] for row in read(sorted((tmp_path / "steps").iterdir()))] == [0, 1, 2, 3]


def test_leftover_temporary_files_and_damaged_parts_on_resume(tmp_path):
  store = parts.PartStore(tmp_path, "steps", "run", 0)
  store.append(columns(0, 2))
  folder = tmp_path / "steps"
  (folder / ".run-p00000.000001-000001.parquet.tmp").write_bytes(b"x")
  (folder / ".run-p00001.000001-000001.parquet.tmp").write_bytes(b"another process's")
  damaged = folder / table_reader.Part("run", 0, 1, 1).file_name
  damaged.write_bytes(b"not parquet")
  again = parts.PartStore(tmp_path, "steps", "run", 0)
  again.append(columns(2, 1))
  again.compact()
  assert damaged.read_bytes() == b"not parquet"
  assert ([p.name for p in folder.iterdir() if p.name.startswith(".")]
          == [".run-p00001.000001-000001.parquet.tmp"])
  assert [row["step"] for p in files(again) if p != damaged for row in read([p])] == [0, 1, 2]


def test_nothing_is_written_for_no_rows(tmp_path):
  store = parts.PartStore(tmp_path, "steps", "run", 0)
  store.append({})
  store.append(columns(0, 0))
  store.compact()
  assert files(store) == []


def test_a_damaged_part_is_left_out_of_the_merge_and_nothing_else_is_lost(
    tmp_path, caplog, monkeypatch):
  monkeypatch.setattr(parts, "MERGE_PARTS", 8)
  store = parts.PartStore(tmp_path, "steps", "run", 0)
  for i in range(4):
    store.append(columns(i, 1))
  damaged = files(store)[2]
  content = bytearray(damaged.read_bytes())
  content[4:60] = bytes(56)  # pages; the footer still tells its rows
  damaged.write_bytes(content)
  for i in range(4, 20):
    store.append(columns(i, 1))
  store.compact()
  assert damaged.read_bytes() == content
  assert caplog.text.count("can't be read any more") == 1
  assert damaged.name in caplog.text
  assert ([row["step"] for row in read([path for path in files(store) if path != damaged])]
          == [0, 1, *range(3, 20)])
  found = table_reader.outermost(table_reader.list_parts(tmp_path / "steps")[0])
  assert damaged in [part.path for part in found]  # not hidden inside another's range
  assert not any(part.inside for part in found)


@pytest.mark.parametrize("how", ["gone", "fifo", "other columns"])
def test_whatever_lies_in_a_parts_place_the_recording_goes_on(tmp_path, monkeypatch, how):
  monkeypatch.setattr(parts, "MERGE_PARTS", 4)
  store = parts.PartStore(tmp_path, "steps", "run", 0)
  for i in range(3):
    store.append(columns(i, 1))
  path = files(store)[1]
  path.unlink()
  if how == "fifo":
    os.mkfifo(path)
  if how == "other columns":
    pq.write_table(pa.table({"step": ["a"], "rank": [[1]]}), path)
  for i in range(3, 9):
    store.append(columns(i, 1))
  store.compact()
  left = [file for file in files(store) if file != path]
  assert [row["step"] for row in read(left)] == [0, *range(2, 9)]
