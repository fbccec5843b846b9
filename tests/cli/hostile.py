"""Changes files of a run as a bad disk, another program or somebody malicious would. Seeded: each
can be repeated."""

from __future__ import annotations

import copy
import decimal
import json
import os
import pathlib
import random
import socket

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

STAMPS = ("start_ns", "end_ns", "enter_ns", "exit_ns", "time_ns")
LONG = "7" * 400
NUMBERS = (0, -1, 1, 2**31, 2**53, 2**62, 2**63 - 1, -2**63, 2**64, 10**399, -10**399, 0.5,
           1e300, True)
TEXTS = ("", "x", "\x1b[2J\x1b]0;gone\x07", "\ud800", "\u202e", "\0", "../../etc", "a\nb",
         "x" * 100_000, "[red]r[/red]", "<script>alert(1)</script>", "NaN", "-1", "²")


def value(chance: random.Random, depth: int = 0):
  """Anything that JSON can hold, and some that it can't."""
  how = chance.randrange(9)
  if how < 2:
    return chance.choice(NUMBERS)
  if how < 4:
    return chance.choice(TEXTS)
  if how == 4:
    return chance.choice((None, False, float("nan"), float("inf"), -0.0))
  if how == 5:
    return [chance.choice(NUMBERS + TEXTS[:8])] * chance.choice((0, 1, 3, 20_000))
  if how == 6:
    return {str(i): chance.choice(NUMBERS) for i in range(chance.choice((0, 1, 3, 20_000)))}
  if how == 7:
    nested = chance.choice(NUMBERS)
    for _ in range(chance.choice((2, 30, 200, 900))):
      nested = [nested] if chance.random() < 0.5 else {"a": nested}
    return nested
  return [value(chance, depth + 1) for _ in range(3)] if depth < 3 else []


def places(document, path=()):
  """Paths of all values in a document."""
  found = [path] if path else []
  entries = document.items() if isinstance(document, dict) else (
      enumerate(document) if isinstance(document, list) else ())
  for key, entry in entries:
    found += places(entry, (*path, key))
  return found


def change_document(chance: random.Random, document):
  """Puts something else into one to three places."""
  document = copy.deepcopy(document)
  for _ in range(chance.randint(1, 3)):
    *above, last = chance.choice(places(document) or [("new",)])
    holder = document
    for key in above:
      holder = holder[key]
    if chance.random() < 0.1:
      del holder[last]
    elif chance.random() < 0.1 and isinstance(holder, dict):
      holder["new"] = value(chance)
    else:
      holder[last] = value(chance)
    if not document:
      break
  return document


def change_text(chance: random.Random, text: bytes) -> bytes:
  """What is no JSON any more, or JSON that few parsers like."""
  how = chance.randrange(8)
  if how == 0:
    return text[:chance.randrange(len(text) + 1)]
  if how == 1:
    return b"[" * 100_000
  if how == 2:
    return b'{"a":' * 100_000 + b"1" + b"}" * 100_000
  if how == 3:
    return chance.choice((b"", b"null", b"[]", b"{}", b"3", b'"run"', b"\xff\xfe\x00", b"\0" * 1000,
                          b"NaN"))
  if how == 4:
    return text.replace(b": 0", b": " + LONG.encode()).replace(b": 1", b": -" + LONG.encode())
  if how == 5:
    return text.replace(b'"', b'"\\ud800', 2 * chance.randint(0, 3))
  if how == 6:
    changed = bytearray(text)
    for _ in range(chance.randint(1, 8)):
      if changed:
        changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)
  return text + b"\n" + text


def change_json(chance: random.Random, path: pathlib.Path) -> str:
  """Changes a JSON file, or one of JSON lines."""
  text = path.read_bytes()
  if chance.random() < 0.3:
    path.write_bytes(change_text(chance, text))
    return "text"
  lines = path.suffix in (".jsonl", ".log")
  documents = [json.loads(line) for line in text.splitlines()] if lines else [json.loads(text)]
  at = chance.randrange(len(documents))
  documents[at] = change_document(chance, documents[at])
  if lines and len(documents) < 10 and len(str(documents)) < 20_000 and chance.random() < 0.3:
    documents = documents * 3_000
  path.write_text("\n".join(json.dumps(document) for document in documents))
  return "document"


def kind_of_file(chance: random.Random, path: pathlib.Path) -> str:
  """Puts something that is no regular file in a file's place."""
  how = chance.choice(("fifo", "device", "directory", "dangling", "loop", "socket", "gone",
                       "empty"))
  path.unlink()
  if how == "fifo":
    os.mkfifo(path)
  elif how == "device":
    path.symlink_to("/dev/zero")
  elif how == "directory":
    path.mkdir()
  elif how == "dangling":
    path.symlink_to(path.with_name("nowhere"))
  elif how == "loop":
    path.symlink_to(path.name)
  elif how == "socket":
    here = os.getcwd()
    os.chdir(path.parent)  # a socket's path is short
    try:
      with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)
    finally:
      os.chdir(here)
  elif how == "empty":
    path.touch()
  return how


def column(chance: random.Random, name: str, rows: int):
  """Other values for a column."""
  numbers = np.random.default_rng(chance.randrange(2**32))
  how = chance.choice(("zero", "negative", "largest", "smallest", "random", "wide", "unsigned",
                       "float", "text", "null", "bool", "nested", "few", "binary", "some", "ones",
                       "nothing", "decimal", "instants"))
  made = {
      "zero": lambda: pa.array(np.zeros(rows, np.int64)),
      "negative": lambda: pa.array(-numbers.integers(1, 2**40, rows)),
      "largest": lambda: pa.array(np.full(rows, 2**63 - 1)),
      "smallest": lambda: pa.array(np.full(rows, -2**63)),
      "random": lambda: pa.array(numbers.integers(-2**63, 2**63 - 1, rows)),
      "wide": lambda: pa.array(numbers.integers(0, chance.choice((100, 10**5, 2**31, 2**62)),
                                                rows)),
      "unsigned": lambda: pa.array(numbers.integers(0, 2**64, rows, dtype=np.uint64)),
      "ones": lambda: pa.array(np.full(rows, 2**64 - 1, np.uint64)),
      "nothing": lambda: pa.nulls(rows),
      "decimal": lambda: pa.array([decimal.Decimal(1)] * rows),
      "instants": lambda: pa.array(np.zeros(rows, "datetime64[ns]")),
      "float": lambda: pa.array(chance.choice((np.full(rows, np.nan), numbers.normal(size=rows),
                                               np.full(rows, 3.0)))),
      "text": lambda: pa.array([chance.choice(TEXTS).encode("utf-8", "replace").decode()
                                for _ in range(rows)]),
      "null": lambda: pa.nulls(rows, pa.int64()),
      "bool": lambda: pa.array(numbers.integers(0, 2, rows).astype(bool)),
      "nested": lambda: pa.array([[1, 2]] * rows),
      "few": lambda: pa.array(numbers.integers(0, 3, rows)),
      "binary": lambda: pa.array([b"\xff\0"] * rows),
      "some": lambda: pa.array([100_000 if i == 0 else int(n)
                                for i, n in enumerate(numbers.integers(0, 4, rows))]),
  }[how]()
  return how, made


def change_table(chance: random.Random, table: pa.Table) -> tuple[str, pa.Table]:
  """Changes the rows or columns of a table."""
  rows = table.num_rows
  how = chance.choice(("column", "column", "column", "stamps", "twice", "many", "drop", "shuffle",
                       "none", "repeat", "names", "random rows"))
  if how == "column":
    name = chance.choice(table.column_names)
    kind, made = column(chance, name, rows)
    return f"{name} {kind}", table.set_column(table.column_names.index(name), name, made)
  if how == "stamps":
    kind = "none"
    for name in STAMPS:
      if name in table.column_names:
        kind, made = column(chance, name, rows)
        table = table.set_column(table.column_names.index(name), name, made)
    return f"stamps {kind}", table
  if how == "twice":
    name = chance.choice(table.column_names)
    return f"{name} twice", table.append_column(name, table.column(name))
  if how == "many":
    for i in range(3_000):
      table = table.append_column(f"phase_{i}_ns", pa.array(np.full(rows, i)))
    return how, table
  if how == "drop":
    name = chance.choice(table.column_names)
    return f"without {name}", table.drop_columns([name])
  if how == "names" and "name" in table.column_names:
    made = pa.array([f"\x1b[31m{i}" * 10 for i in range(rows)])
    return how, table.set_column(table.column_names.index("name"), "name", made)
  order = list(range(rows))
  if how == "repeat":
    return how, table.take(order * 20)
  if how == "none":
    return how, table.slice(0, 0)
  chance.shuffle(order)
  return ("shuffled",
          table.take(order[:chance.randint(1, rows)] if how == "random rows" and rows else order))


def change_part(chance: random.Random, files: list[pathlib.Path]) -> str:
  """Changes one part, or all of a table."""
  if chance.random() < 0.25:
    path = files[0]
    changed = bytearray(path.read_bytes())
    if chance.random() < 0.3:
      del changed[chance.randrange(len(changed)):]
    for _ in range(chance.randint(1, 8)):
      at = len(changed) - 1 - chance.randrange(min(len(changed), 3_000)) if changed else 0
      changed[at:at + 1] = bytes([chance.randrange(256)])
    path.write_bytes(changed)
    return "bytes"
  state = chance.getstate()
  said = ""
  for path in files:
    chance.setstate(state)  # the same to all
    said, table = change_table(chance, pq.read_table(path))
    pq.write_table(table, path)
  return said


def change_bytes(chance: random.Random, path: pathlib.Path) -> str:
  """Changes a file of no format that is known here: some bytes, most often of its beginning, or
  where it ends."""
  changed = bytearray(path.read_bytes())
  how = chance.choice(("flipped", "flipped", "cut", "twice", "zeros", "words"))
  if how == "cut":
    del changed[chance.randrange(len(changed) + 1):]
  elif how == "twice":
    changed = changed * 2
  elif how == "zeros":
    at = chance.randrange(len(changed) + 1)
    changed[at:at + 4096] = bytes(4096)
  elif how == "words":
    for _ in range(chance.randint(1, 4)):
      at = 4 * chance.randrange(len(changed) // 4 + 1)
      changed[at:at + 4] = chance.choice((b"\xff" * 4, b"\0" * 4, b"\1\0\0\0", b"\0\0\0\x80"))
  for _ in range(chance.randint(1, 20) if how == "flipped" else 0):
    if changed:
      at = chance.randrange(min(len(changed), chance.choice((400, 9000, len(changed)))))
      changed[at] ^= 1 << chance.randrange(8)
  path.write_bytes(changed)
  return how


def damage(chance: random.Random, run: pathlib.Path, inputs: bool = False) -> list[str]:
  """Does one to three things to the files of a run, or to its `inputs`; says which."""
  said = []
  root = run / "inputs" if inputs else run
  for _ in range(chance.randint(1, 3)):
    files = sorted(path for path in root.rglob("*") if path.is_file() and not path.is_symlink()
                   and (inputs or run / "inputs" not in path.parents))
    groups = sorted({(path.parent, path.suffix) for path in files}, key=str)
    folder, suffix = chance.choice(groups)
    own = [path for path in files if (path.parent, path.suffix) == (folder, suffix)]
    path = chance.choice(own)
    name = str(path.relative_to(run))
    try:
      if chance.random() < 0.12:
        said.append(f"{name}: {kind_of_file(chance, path)}")
      elif suffix == ".parquet":
        said.append(f"{name}: {change_part(chance, own if chance.random() < 0.5 else [path])}")
      elif suffix in (".json", ".jsonl", ".log") and chance.random() < 0.9:
        said.append(f"{name}: {change_json(chance, path)}")
      else:
        said.append(f"{name}: {change_bytes(chance, path)}")
    except (OSError, ValueError, TypeError, LookupError, RecursionError,
            pa.ArrowException) as error:
      # damaged before: once is enough
      said.append(f"{name}: damaged twice ({type(error).__name__})")
  return said
