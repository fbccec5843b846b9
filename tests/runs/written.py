"""a synthetic run on disk, and what tests of the reader do with its files."""

import pathlib

import pyarrow.parquet as pq

from tests.synthetic.synthetic_runs import SyntheticJob

JOB = SyntheticJob(ranks=4, steps=60, processes=2, noise=0.05, late={3: 5e-3})


def parts(path, table="steps"):
  return sorted((path / table).glob("*.parquet"))


def rewrite(file: pathlib.Path, change) -> None:
  pq.write_table(change(pq.read_table(file)), file)


def said(run, *words) -> bool:
  return any(all(word in problem for word in words) for problem in run.problems)
