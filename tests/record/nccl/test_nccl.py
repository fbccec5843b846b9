"""Dumps of NCCL's Inspector, by hand from its documentation: read, and made into a run that tells
what was put in."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpace.cli.main import main
from jaxpace.diagnose.diagnose import diagnose
from jaxpace.files import UserError
from jaxpace.record.nccl_dumps import Record, members, read_dumps, streams
from jaxpace.record.nccl_run import convert
from jaxpace.runs.reader import read_run
from tests.record.nccl.dumps import Job, batches, line

PLAIN = """{
  "header": {
    "id": "0x1234",
    "rank": 2,
    "n_ranks": 8,
    "nnodes": 1
  },
  "metadata": {
    "inspector_output_format_version": "v4.0",
    "dump_timestamp_us": 1748030377748202,
    "hostname": "node-1",
    "pid": 1639
  },
  "coll_perf": {
    "coll": "AllReduce",
    "coll_sn": 1407,
    "coll_msg_size_bytes": 1024,
    "coll_exec_time_us": 61974,
    "coll_algobw_gbs": 277.2,
    "coll_busbw_gbs": 485.1
  }
}
"""


def read(tmp_path, text):
  (tmp_path / "dump.log").write_text(text)
  return read_dumps([tmp_path])


def test_objects_over_several_lines_and_in_one_are_read(tmp_path):
  found = read(tmp_path, PLAIN + line("0x1", 1, 2, "AllGather", 5, 64, 1000, 1500) + "\n" + PLAIN)
  assert (found.records[0] == Record("0x1234", 2, 8, "node-1", 1639, "AllReduce", 1407, 1024,
                                     None, None))
  assert found.records[1] == Record("0x1", 1, 2, "a", 1, "AllGather", 5, 64, 1000, 1500)
  assert (len(found.records), found.files, found.damaged) == (3, 1, 0)


def test_sends_are_counted_and_damage_is_left_out(tmp_path):
  good = line("0x1", 0, 2, "AllReduce", 1, 64, 1000, 1500)
  send = json.dumps({"header": {"id": "0x1"}, "p2p_perf": {"p2p": "Send"}})
  bad = good.replace('"rank": 0', '"rank": 2')
  found = read(tmp_path, "\n".join(["[", good + ",", send, bad, good[:100], "", "7", good]))
  assert (len(found.records), found.others, found.damaged) == (2, 1, 3)


def test_what_a_marker_says_is_said_of_the_objects_that_follow_it(tmp_path):
  """Format v4.3: 4,800 records of which none has a header of its own."""
  job = Job(steps=300)
  plain = read_dumps([job.write(tmp_path / "plain")])
  job.lines = {rank: batches(lines) for rank, lines in job.lines.items()}
  found = read_dumps([job.write(tmp_path / "batched")])
  assert len(found.records) >= 4800 and sorted(found.records) == sorted(plain.records)
  assert (found.damaged, found.orphans, found.overwritten) == (0, 0, 0) and found.others > 0


def test_objects_whose_marker_is_missing_belong_to_nobody(tmp_path):
  lines = batches(Job(steps=2).lines[0], size=4)
  marks = [i for i, text in enumerate(lines) if "dump_stats" in text]
  # Four collectives and a proxy's record follow the second marker.
  for change in (lines[marks[1]][:40], ""):
    found = read(tmp_path, "\n".join([*lines[:marks[1]], change, *lines[marks[1] + 1:]]))
    assert (found.orphans, found.damaged) == (5, bool(change))
    assert len(found.records) == len(Job(steps=2).lines[0]) - 4
  # A record that is damaged takes its place in the batch.
  found = read(tmp_path, "\n".join([*lines[:2], lines[2][:40], *lines[3:]]))
  assert (found.orphans, found.damaged) == (0, 1)
  with pytest.raises(UserError, match="without the marker"):
    convert(read(tmp_path, "\n".join(text for text in lines if "dump_stats" not in text)),
            tmp_path / "run")


def test_what_nccl_lost_is_said(tmp_path):
  job = Job()
  job.lines = {rank: [text.replace('"coll_dropped_since_last_dump": 0',
                                   '"coll_dropped_since_last_dump": 3', 1)
                      for text in batches(lines)] for rank, lines in job.lines.items()}
  found = read_dumps([job.write(tmp_path / "dumps")])
  markers = sum("dump_stats" in text for lines in job.lines.values() for text in lines)
  said = " ".join(convert(found, tmp_path / "run")[1])
  assert f"NCCL lost {3 * markers:,} collectives" in said


def test_how_ranks_are_numbered_is_said(tmp_path):
  job = Job(start=False)
  said = convert(read_dumps([job.write(tmp_path / "dumps")]), tmp_path / "run")[1]
  assert said[0].startswith("Ranks are numbered as in communicator 0xw")
  # Without a communicator of all, as where only groups of a mesh were dumped.
  job.lines = {rank: [text for text in lines if '"0xw"' not in text]
               for rank, lines in job.lines.items()}
  said = convert(read_dumps([job.write(tmp_path / "groups")]), tmp_path / "other")[1]
  assert "numbered anew" in said[0] and "0xt0: 0 to 1; 0xt1: 2 to 3" in said[0]


@given(st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), max_size=12),
       st.integers(0, 4000))
def test_any_damage_is_read_as_far_as_it_goes(tmp_path_factory, damage, length):
  path = tmp_path_factory.mktemp("nccl") / "0.log"
  data = bytearray("\n".join(Job(steps=2).lines[0]).encode())
  for at, byte in damage:
    data[at % len(data)] = byte
  path.write_bytes(data[:length])
  for record in read_dumps([path]).records:
    assert (0 <= record.rank < record.ranks
            and (record.enter_us is None or record.enter_us <= record.exit_us))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  folder = tmp_path_factory.mktemp("nccl")
  job = Job()
  made = convert(read_dumps([job.write(folder / "dumps")]), folder / "run")
  return job, made, read_run(folder / "run")


def test_every_time_comes_back_in_its_step_and_slot(run):
  job, made, recorded = run
  assert (made[0].size, len(made[0].slots), len(made[0].step)) == ((4, 60), 4, 4 * 60 * 4)
  assert ([c.name for c in recorded.collectives] == ["AllReduce.0", "AllReduce.1", "AllReduce.2",
                                                     "AllReduce.3"])
  assert [c.bytes for c in recorded.collectives] == [4096, 4097, 4098, 1 << 20]
  for slot, collective in enumerate(recorded.collectives):
    for rank in range(4):
      truth = np.array([job.truth[rank, step, slot] for step in range(60)])
      np.testing.assert_array_equal(collective.enter_ns[rank], truth[:, 0])
      np.testing.assert_array_equal(collective.exit_ns[rank], truth[:, 1])
  groups = [None if c.rank_groups is None else c.rank_groups.groups.tolist()
            for c in recorded.collectives]
  assert groups == [[0, 0, 1, 1]] * 3 + [None]
  assert [p.host for p in recorded.processes] == ["a", "a", "b", "b"]


def test_the_late_rank_is_found_and_what_the_dumps_lack_is_said(run):
  _, made, recorded = run
  found = diagnose(recorded)
  assert found.findings[0].mode == "persistent_straggler" and found.findings[0].ranks == (3,)
  said = " ".join(made[1])
  # A broadcast and an all-reduce of four ranks before the loop; only the former is of a kind of its
  # own.
  assert "are left out: 1 kind." in said and "8 records of before the first step" in said
  assert any("pattern of collectives" in note for note in found.notes)


def test_lost_records_are_missing_rows_not_shifted_ones(tmp_path):
  job = Job(start=False)
  for rank, lines in job.lines.items():
    job.lines[rank] = [text for i, text in enumerate(lines) if (i * 7 + rank) % 11]
  made, _ = convert(read_dumps([job.write(tmp_path / "dumps")]), tmp_path / "run")
  recorded = read_run(tmp_path / "run")
  assert made.size[1] == 60 and 0 < len(made.step) < 4 * 60 * 4
  for slot, collective in enumerate(recorded.collectives):
    for rank in range(4):
      for step in range(60):
        enter = collective.enter_ns[rank, step]
        assert enter < 0 or enter == job.truth[rank, step, slot][0]


def test_dumps_without_times_make_no_run(tmp_path, capsys):
  folder = Job(verbose=False, start=False).write(tmp_path / "dumps")
  assert main(["read-nccl", str(folder), "--to", str(tmp_path / "run")]) == 2
  assert "set NCCL_INSPECTOR_DUMP_VERBOSE=1" in capsys.readouterr().err
  assert not (tmp_path / "run").exists()


def alike(number, ranks=2, size=64, comm="0x1"):
  return [Record(comm, rank, ranks, "a", rank, "AllReduce", i, size, 1000 * i, 1000 * i + 10)
          for i in range(number) for rank in range(ranks)]


def test_collectives_that_look_alike_need_the_users_word():
  found, said = streams(alike(120))
  assert found[0].steps == 120 and "--collectives-per-step" in said[0]
  found, said = streams(alike(120), 12)
  assert (found[0].steps, found[0].period, said) == (10, 12, [])
  with pytest.raises(UserError, match="at least three"):
    streams(alike(2))
  pairs = [record._replace(bytes=record.number % 2) for record in alike(120)]
  with pytest.raises(UserError, match="don't fit"):
    streams(pairs, 3)


@given(st.lists(st.integers(1, 3), min_size=1, max_size=6), st.integers(3, 9), st.integers(0, 5))
def test_the_smallest_pattern_that_holds_for_most_is_the_step(pattern, repeats, prelude):
  sizes = [100 + i for i in range(prelude)] + pattern * repeats
  n = len(sizes)
  records = [Record("0x1", 0, 2, "a", 0, "AllReduce", i, size, i, i)
             for i, size in enumerate(sizes)]

  def holds(period):
    begin = next(b for b in range(n)
                 if all(sizes[i] == sizes[i + period] for i in range(b, n - period)))
    return begin if n - begin >= max(3 * period, n / 2) else None
  period, begin = next(((p, holds(p)) for p in range(1, n // 3 + 1) if holds(p) is not None),
                       (None, None))
  if period is None:
    with pytest.raises(UserError):
      streams(records)
    return
  found, _ = streams(records)
  assert (found[0].period, found[0].begin, found[0].steps) == (period, begin, (n - begin) // period)


def test_a_process_with_several_gpus_keeps_its_largest_communicator():
  world = [Record("0xw", rank, 4, "a", rank // 2, "AllReduce", 0, 1, 1, 2)
           for rank in range(4)]
  inner = [Record("0xt", rank, 2, "a", 0, "AllReduce", 0, 1, 1, 2) for rank in range(2)]
  who = members(world + inner)
  assert (who.dropped == ("0xt",)
          and who.process == {0: ("a", 0), 1: ("a", 0), 2: ("a", 1), 3: ("a", 1)})
  # A GPU each: all are told apart.
  single = [record._replace(pid=record.rank) for record in world]
  who = members(single + [Record("0xt", rank, 2, "a", rank + 2, "AllReduce", 0, 1, 1, 2)
                          for rank in range(2)])
  assert who.dropped == () and who.ranks["0xt", 0] == 2 and who.ranks["0xt", 1] == 3


def test_the_command_writes_a_run_that_is_reported_on(tmp_path, capsys):
  folder = Job().write(tmp_path / "dumps")
  assert main(["read-nccl", str(folder), "--to", str(tmp_path / "run")]) == 0
  assert "4 ranks, 60 steps of 4 collectives" in capsys.readouterr().out
  assert main(["report", str(tmp_path / "run"), "--json", str(tmp_path / "report.json")]) == 0
  assert json.loads((tmp_path / "report.json").read_text())["findings"][0]["ranks"] == [3]
  assert main(["read-nccl", str(folder), "--to", str(tmp_path / "run")]) == 0


@pytest.mark.parametrize("arguments, said", [
    (["nowhere", "--to", "run"], "nothing can be read"),
    (["empty", "--to", "run"], "No record of NCCL"),
    (["empty", "--to", "run", "--collectives-per-step", "0"], "must be at least 1")])
def test_slips_get_a_sentence(tmp_path, monkeypatch, capsys, arguments, said):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "empty").mkdir()
  assert main(["read-nccl", *arguments]) == 2
  assert said in capsys.readouterr().err
