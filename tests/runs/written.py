"""a synthetic run on disk, and what tests of the reader do with its files."""

import pathlib

import pyarrow as pa
import pyarrow.parquet as pq

from tests.synthetic.synthetic_runs import SyntheticJob

JOB = SyntheticJob(ranks=4, steps=60, processes=2, noise=0.05, late={3: 5e-3})


def parts(path, table="steps"):
  return sorted((path / table).glob("*.parquet"))


def both(path):
  return [*parts(path), *parts(path, "collectives")]


def replace(files, column, change) -> None:
  """In each of these files, what `change` makes of the values of a column."""
  for file in files:
    rewrite(file, lambda t: t.set_column(t.schema.get_field_index(column), column,
                                         pa.array(change(t[column].to_numpy()))))


def rewrite(file: pathlib.Path, change) -> None:
  pq.write_table(change(pq.read_table(file)), file)


def said(run, *words) -> bool:
  return any(all(word in problem for word in words) for problem in run.problems)
