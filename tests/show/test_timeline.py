"""Timelines: what the formats hold is what the ranks did."""

import collections
import dataclasses
import json
import os
import shutil
import stat
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpace.cli.main import main
from jaxpace.diagnose.modes.inputs import Finding
from jaxpace.runs.dense import read_bounds
from jaxpace.runs.reader import read_run
from jaxpace.runs.run import MISSING
from jaxpace.show.slices import encode_chrome, pour
from jaxpace.show.slices import text as slices_text
from jaxpace.show.timeline import build, latest
from tests.quick import examples
from tests.synthetic import synthetic_runs
from tests.synthetic.synthetic_faults import Fault
from tests.synthetic.synthetic_runs import SyntheticJob

JOB = SyntheticJob(ranks=4, steps=60, processes=2, hosts=2, noise=0.05, collectives=2,
                   late={3: 6e-3},
                delays={0: 1e-3}, faults=(Fault("pause", 20e-3, ranks=(1,), probability=0.1,
                                                mechanism="gc"),), host_columns=True)
LATE = Finding("persistent_straggler", 0.2, 0.9, (3,), ("host1",), ("it is late",), "look " * 60,
               first_step=20)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
  path = tmp_path_factory.mktemp("timeline") / "run"
  return path, synthetic_runs.write(path, JOB)


@pytest.fixture(scope="module")
def trace(written):
  run = read_run(written[0])
  timeline = build(run, read_bounds(run), (LATE,))
  return timeline, events_of(timeline)


def events_of(timeline):
  return json.loads(b"".join(encode_chrome(timeline)))["traceEvents"]


def slices(events):
  """Reads a trace as a viewer does: [((process, track), name, begin, end, depth)], flows {id:
  [(time, end?)]}."""
  heads = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
  tracks = {(e["pid"], e["tid"]): (heads[e["pid"]], e["args"]["name"])
            for e in events if e["name"] == "thread_name"}
  opened, found, flows = collections.defaultdict(list), [], collections.defaultdict(list)
  for e in events:
    begin = round(e.get("ts", 0) * 1e3)
    if e["ph"] == "X":
      track, end = tracks[e["pid"], e["tid"]], begin + round(e["dur"] * 1e3)
      stack = opened[track]
      while stack and stack[-1] <= begin:
        stack.pop()
      assert not stack or end <= stack[-1], "slices nest"
      found.append((track, e["name"], begin, end, len(stack)))
      stack.append(end)
    elif e["ph"] in "sf":
      flows[e["id"]].append((begin, e["ph"] == "f"))
  return found, flows


def test_phases_waits_and_transfers_are_those_of_the_job(written, trace):
  found, _ = slices(trace[1])
  truth = written[1]
  for rank in range(JOB.ranks):
    own = sorted((s for s in found if s[0][-1] == f"rank {rank}"), key=lambda s: s[2])
    by_step = {name: (begin, end) for _, name, begin, end, depth in own if depth == 0}
    assert list(by_step) == [f"step {k}" for k in range(JOB.steps)]
    for k in (0, 7, 59):
      begin, end = by_step[f"step {k}"]
      inside = [s for s in own if begin <= s[2] and s[3] <= end and s[4]]
      total = collections.Counter()
      for _, name, b, e, _ in inside:
        total[name.split(" (")[0]] += e - b
      expected = {"forward": truth.forward, "backward": truth.backward, "update": truth.update,
                  "delay": truth.delay}
      for name, values in expected.items():
        assert total[name] == pytest.approx(values[rank, k], abs=3_000), (rank, k, name)
      if k:
        assert total["gap"] == pytest.approx(truth.gap[rank, k], abs=3_000)
      for c in range(2):
        wait = truth.exit[c, rank, k] - truth.enter[c, rank, k]
        assert total[f"psum.{c}"] == pytest.approx(wait, abs=3_000)
      assert total["transfer"] == pytest.approx(truth.transfer[:, k].sum(), abs=5_000)
      waited = sum(v for name, v in total.items() if name.startswith("wait for rank"))
      assert (waited == pytest.approx(total["psum.0"] + total["psum.1"] - total["transfer"],
                                      abs=5_000))
      names = {name for _, name, *_ in inside if name.startswith("wait")}
      last = {f"wait for rank {truth.enter[c, :, k].argmax()}" for c in range(2)}
      assert names <= last


def test_ranks_are_where_they_were_relative_to_each_other(written, trace):
  found, _ = slices(trace[1])
  truth = written[1]
  begins = {(path[-1], name, i): begin for path, name, begin, i in (
      (path, name, begin, 0) for path, name, begin, _, depth in found if depth == 0)}
  for k in (1, 30, 59):
    shown = np.array([begins[f"rank {r}", f"step {k}", 0] for r in range(JOB.ranks)])
    real = truth.start[:, k] - truth.gap[:, k]
    assert np.abs((shown - shown[0]) - (real - real[0])).max() < 0.2e6


def test_tracks_pauses_and_findings(written, trace):
  found, _ = slices(trace[1])
  truth = written[1]
  paths = {s[0] for s in found}
  assert {("host0, process 0", "rank 1"), ("host1, process 1", "rank 3"), ("job", "steps")} <= paths
  gc = sorted((s for s in found if s[1] == "gc"), key=lambda s: s[2])
  assert {s[0][0] for s in gc} == {"host0, process 0"}
  lengths = truth.extra.shown["gc"][[0, 1]].sum(axis=0)
  assert [s[3] - s[2] for s in gc] == pytest.approx(lengths[lengths > 0] * 1e9, abs=1e4)
  (told,) = (s for s in found if s[1] == LATE.mode)
  steps = {s[1]: s for s in found if s[0][-1] == "rank 3" and s[4] == 0}
  assert steps["step 18"][3] <= told[2] <= steps["step 20"][2] and told[3] >= steps["step 59"][3]
  (notes,) = (e["args"] for e in trace[1] if e["name"] == LATE.mode)
  assert notes["evidence 1"] == "it is late" and notes["share"] == 0.2


def test_arrows_go_from_the_late_rank_forward_in_time(trace):
  timeline, parsed = trace
  _, flows = slices(parsed)
  assert len(flows) == len(timeline.flows) > JOB.steps
  assert all([end for _, end in ends] == [False, True] for ends in flows.values())
  for flow in timeline.flows[:-1]:
    source, target = (timeline.tracks[timeline.track[i]] for i in flow)
    begin, end = flow
    assert timeline.step[begin] == timeline.step[end] and source.process != target.process
  ranks = [timeline.tracks[timeline.track[begin]].name for begin, _ in timeline.flows]
  assert ranks.count("rank 3") > 0.5 * len(ranks)


def test_a_run_too_large_is_shown_from_its_end(written):
  run = read_run(written[0])
  few = latest(run, 600)
  assert few.steps[few.inside][-1] == 59 and few.inside.sum() < 20
  timeline = build(few, read_bounds(few))
  assert 0 < len(timeline.begin) <= 1200
  assert set(np.unique(timeline.step[timeline.step >= 0])) == set(few.steps[few.inside].tolist())


def test_the_command_writes_the_file_and_nothing_else(written, tmp_path, capsys):
  out = tmp_path / "b.json"
  assert main(["report", str(written[0]), "--steps", "10:30", "--chrome", str(out)]) == 0
  assert "steps 10 to 29" in capsys.readouterr().err
  found, _ = slices(json.loads(out.read_text())["traceEvents"])
  assert {s[1] for s in found if s[0][-1] == "rank 0" and s[4] == 0} == {
      f"step {k}" for k in range(10, 30)}
  assert os.listdir(tmp_path) == ["b.json"]


@pytest.mark.parametrize("option", ["--json", "--html", "--chrome"])
def test_a_pipe_or_a_device_is_written_to_and_not_replaced(written, tmp_path, option):
  """Root could put a file in the place of /dev/null, which every program of the machine reads."""
  pipe = tmp_path / "pipe"
  os.mkfifo(pipe)
  got = []
  reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()), daemon=True)
  reader.start()
  assert main(["report", str(written[0]), "--steps", "10:30", option, str(pipe)]) == 0
  reader.join(300)
  assert got and got[0].rstrip().endswith((b"}", b"</html>")), "all of it"
  assert stat.S_ISFIFO(pipe.lstat().st_mode) and os.listdir(tmp_path) == ["pipe"]


def test_foreign_names_are_text(tmp_path):
  path = tmp_path / "run"
  synthetic_runs.write(path, SyntheticJob(ranks=2, steps=30, processes=2))
  evil = '../../<script>alert(1)</script>\x1b[31m\u202e"'
  for name in ("process/0.json", "process/1.json"):
    info = json.loads((path / name).read_text())
    (path / name).write_text(json.dumps({**info, "hostname": evil}))
  info = json.loads((path / "run.json").read_text())
  info["plan"]["collectives"][0]["name"] = evil
  info["plan"]["marks"] = [{"segment": 3}, 7, {"kind": []}]
  (path / "run.json").write_text(json.dumps(info))
  before = {os.path.join(a, f) for a, _, files in os.walk(tmp_path) for f in files}
  out = tmp_path / "t.json"
  assert main(["report", str(path), "--chrome", str(out)]) == 0
  assert {os.path.join(a, f) for a, _, files in os.walk(tmp_path) for f in files} - before == {
      str(out)}
  text = out.read_text()
  names = {e["name"] for e in json.loads(text)["traceEvents"]}  # what a viewer makes of it
  assert "\x1b[31m" not in text and not any("\u202e" in name for name in names)
  assert any("<script>alert(1)</script>\\x1b[31m" in name for name in names)


def test_long_names_are_cut_and_what_a_finding_advises_is_not(trace):
  assert slices_text("n" * 200) == "n" * 200 and slices_text("n" * 5000) == "n" * 199 + "…"
  (notes,) = (e["args"] for e in trace[1] if e["name"] == LATE.mode)
  assert notes["advice"] == LATE.advice


@settings(max_examples=examples(40), deadline=None)
@given(free=st.lists(st.integers(0, 10**8), min_size=1, max_size=4),
       shares=st.lists(st.floats(0, 1), min_size=1,
                       max_size=5))
def test_poured_phases_lie_in_order_without_overlap_and_lose_nothing(free, shares):
  total = sum(free)
  phases = [np.array([int(share / max(sum(shares), 1) * total)]) for share in shares]
  poured = np.zeros(len(phases))
  at = [0] * len(free)
  for interval, phase, begin, end in pour(np.array(free)[:, None], phases):
    assert at[interval] <= begin[0] <= end[0] <= free[interval]
    at[interval] = int(end[0])
    poured[phase] += end[0] - begin[0]
  # edges snap to collectives within 2 µs
  assert np.abs(poured - [p[0] for p in phases]).max() <= 4_000


def assert_sound(timeline):
  """Slices of a track rise and nest; arrows go forward; all are written."""
  opened = collections.defaultdict(list)
  for track, begin, end in zip(timeline.track, timeline.begin, timeline.end, strict=True):
    stack = opened[track]
    while stack and stack[-1] <= begin:
      stack.pop()
    assert begin < end and (not stack or end <= stack[-1])
    stack.append(end)
  assert all(timeline.begin[a] <= timeline.begin[b] for a, b in timeline.flows)
  kinds = collections.Counter(event["ph"] for event in events_of(timeline))
  assert kinds["X"] == len(timeline.begin) and kinds["s"] == kinds["f"] == len(timeline.flows)


def sound_timeline(path):
  run = read_run(path)
  timeline = build(run, read_bounds(run))
  assert_sound(timeline)
  return timeline


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), share=st.sampled_from([0.0, 0.02, 0.3, 1.0]))
def test_damaged_stamps_leave_a_sound_timeline(written, seed, share):
  run = read_run(written[0], window=(20, 40))
  random = np.random.default_rng(seed)

  def damaged(times):
    wrong = random.choice([MISSING, 0, -5, np.iinfo(np.int64).max, 10**15, 1 << 60, MISSING + 1],
                          times.shape)
    return np.where(random.random(times.shape) < share, wrong, times)

  bounds = tuple(map(damaged, read_bounds(run)))
  bad = random.random(run.attempt.shape) < share
  durations = {name: np.where(bad, random.choice(np.array([np.nan, np.inf, -1, 1e30], np.float32),
                                                 bad.shape), values)
               for name, values in run.durations.items()}
  run = dataclasses.replace(run, durations=durations, collectives=tuple(
      dataclasses.replace(c, enter_ns=damaged(c.enter_ns), exit_ns=damaged(c.exit_ns))
      for c in run.collectives))
  assert_sound(build(run, bounds, (LATE,)))


@pytest.mark.parametrize("job", [
    SyntheticJob(ranks=1, steps=5, processes=1), SyntheticJob(ranks=2, steps=2, processes=2),
    SyntheticJob(ranks=2, steps=40,
              collectives=4)])
def test_small_runs(tmp_path, job):
  synthetic_runs.write(tmp_path, job)
  timeline = sound_timeline(tmp_path)
  assert ({f"rank {r}" for r in range(job.ranks)}
          <= {timeline.tracks[t].name for t in timeline.track})


@pytest.mark.parametrize("table", ["steps", "collectives"])
def test_a_run_of_one_table(tmp_path, table):
  synthetic_runs.write(tmp_path, SyntheticJob(ranks=2, steps=30))
  shutil.rmtree(tmp_path / table)
  timeline = sound_timeline(tmp_path)
  names = {timeline.names[n].split(" (")[0] for n in timeline.name}
  assert ("psum" in names, "forward" in names) == (table == "steps", table == "collectives")


def test_restarted_ranks_are_shown_once_a_step(tmp_path):
  synthetic_runs.write(tmp_path, SyntheticJob(ranks=2, steps=40))
  synthetic_runs.write(tmp_path, SyntheticJob(ranks=2, steps=20), attempt=1, first_step=30,
                     origins=[5, 10**14])
  timeline = sound_timeline(tmp_path)
  own = [timeline.step[i] for i in range(len(timeline.begin))
         if timeline.names[timeline.name[i]].startswith("step")
         and timeline.tracks[timeline.track[i]].name == "rank 1"]
  assert own == list(range(50))
