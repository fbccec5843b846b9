"""Runs that grow: a synthetic run, written in detail elsewhere, whose rows are handed out part by
part."""

import json
import pathlib
import shutil
from unittest import mock

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq

from jaxpace.record import parts
from jaxpace.record.columns import Columns
from jaxpace.record.parts import PartStore
from tests.synthetic import synthetic_runs
from tests.synthetic.synthetic_runs import SyntheticJob


class Growing:
  """Writes what the ranks of each process have done up to a step, as a recorder would: small parts,
  then merged."""

  def __init__(self, directory: pathlib.Path, job: SyntheticJob, scratch: pathlib.Path, *,
               run="growing", attempt=0, first_step=0, merge_parts=4, extra=None):
    self.directory, self.job, self.run = directory, job, run
    if not (scratch / "run.json").exists():
      synthetic_runs.write(scratch, job, run=run, attempt=attempt, first_step=first_step)
    self._rows = {table: pq.read_table(scratch / table) for table in ("steps", "collectives")}
    self._upto = dict.fromkeys(range(job.processes), first_step)
    self._merge_parts, self._extra = merge_parts, extra
    self.stores = {}
    directory.mkdir(exist_ok=True)
    (directory / "process").mkdir(exist_ok=True)
    info = json.loads((scratch / "run.json").read_text()) | {"attempt": attempt}
    (directory / "run.json").write_text(json.dumps(info))
    for process in range(job.processes):
      self.heartbeat(process, scratch=scratch, attempt=attempt)
    self._scratch = scratch

  def heartbeat(self, process: int, scratch: pathlib.Path | None = None, **values) -> None:
    info = json.loads(((scratch or self._scratch) / "process" / f"{process}.json").read_text())
    info |= {"closed_cleanly": False, **values}
    (self.directory / "process" / f"{process}.json").write_text(json.dumps(info))

  def write(self, step: int, processes=None) -> None:
    """Writes a part with the rows up to before `step`."""
    for process in processes if processes is not None else range(self.job.processes):
      begin, self._upto[process] = self._upto[process], step
      for table in ("steps", "collectives"):
        rows = self._rows[table]
        own = rows.filter(pc.and_(pc.equal(rows["process"], process),
                                  pc.and_(pc.greater_equal(rows["step"], begin),
                                          pc.less(rows["step"], step))))
        columns: Columns = {}
        for name in own.column_names:
          column = own[name]
          if column.null_count == len(column):
            continue
          values = column.combine_chunks()
          if name in ("name", "axis"):
            columns[name] = np.array(values.to_pylist())
          else:
            columns[name] = np.ma.masked_array(
                pc.fill_null(values, 0).to_numpy(zero_copy_only=False),
                pc.is_null(values).to_numpy(zero_copy_only=False))
        if self._extra and table == "steps":
          columns |= self._extra(columns)
        with mock.patch.object(parts, "MERGE_PARTS", self._merge_parts):
          self.store(table, process).append(columns)

  def store(self, table: str, process: int) -> PartStore:
    key = table, process
    if key not in self.stores:
      self.stores[key] = PartStore(self.directory, table, self.run, process)
    return self.stores[key]

  def remove(self) -> None:
    shutil.rmtree(self.directory)
