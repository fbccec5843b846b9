"""The fault lab's pure parts against truth worked out by hand, its judge on made-up runs, and one tiny lab for real."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs import fault_lab
from experiments.faults import cluster, judge, make, outside, places, plan, scores, tables, truth
from experiments.faults.schedule import schedule
from experiments.faults.scores import Found, Injected, Judged
from experiments.faults.spec import AMPLIFICATION, LOCALITY, MODES, RUNTIME, STRAGGLER, Fault, Spec, from_json, layout
from jaxpace.locality.concerns import WARNING, find_concerns
from jaxpace.locality.types import Device, Locality
from jaxpace.trace import synthetic, synthetic_faults
from jaxpace.trace.reader import read_run
from jaxpace.trace.synthetic import Job


@pytest.fixture(scope="module")
def specs() -> list[Spec]:
  return plan.plan(fault_lab.get_config())


def test_the_default_plan_is_large_enough_and_says_twice_the_same(specs: list[Spec]) -> None:
  assert sum(bool(spec.faults) for spec in specs) >= 200
  assert sum("healthy" in spec.name for spec in specs) >= 150
  assert len({spec.name for spec in specs}) == len(specs)
  assert {mode for spec in specs for mode in spec.modes} == set(MODES)
  assert {fault.onset > 0 for spec in specs for fault in spec.faults} == {True, False}
  assert sum(len(spec.faults) == 2 for spec in specs) >= 20
  assert plan.plan(fault_lab.get_config()) == specs


def test_every_run_with_a_fault_comes_after_a_twin_that_works_alike(specs: list[Spec]) -> None:
  seen: dict[str, Spec] = {}
  for spec in specs:
    if spec.faults:
      assert spec.twin is not None
      twin = seen[spec.twin]
      assert not twin.faults and twin.layout == spec.layout
      both = schedule(twin), schedule(spec)
      np.testing.assert_array_equal(both[0].work, both[1].work)
      np.testing.assert_array_equal(both[0].spin, both[1].spin)
      assert twin.misplaced == spec.misplaced
    seen[spec.name] = spec
    kinds = {fault.kind for fault in spec.faults}
    assert "hog" not in kinds or spec.spinning is not None
    assert not kinds & {"misplaced", "misplaced_link"} or spec.misplaced
    struck = {rank for fault in spec.faults if "misplaced" not in fault.kind for rank in truth.blamed(spec, fault)[0]}
    assert not struck & set(spec.misplaced or ()) or kinds == {"checkpointing"}  # that's process 0, wherever it is


def test_specs_survive_json(specs: list[Spec]) -> None:
  assert [from_json(json.loads(json.dumps(spec.to_json()))) for spec in specs] == specs


def test_layouts() -> None:
  assert (layout("4x1").processes, layout("2x2").ranks, layout("in8").devices) == (4, 4, 8)
  assert layout("2x2").ranks_of(1) == (2, 3) and layout("2x2").process_of(3) == 1
  for name in ("in1", "8", "1x4", "4x", "x4", ""):
    with pytest.raises(ValueError, match="no layout"):
      layout(name)


def spec_of(*faults: Fault, name: str = "in4", steps: int = 200, **more: Any) -> Spec:
  return Spec("run", name, 3, steps, 10e-3, 0.02, more.get("spinning"), more.get("misplaced"), faults, "twin")


def fault_of(kind: str, targets: tuple[int, ...], seconds: float, onset: int = 0, chance: float = 1.0) -> Fault:
  return Fault(kind, targets, seconds, onset, 200, 0.1, chance)


def test_schedules_hold_what_the_faults_say() -> None:
  late = schedule(spec_of(fault_of("straggler", (1, 2), 3e-3, onset=80))).extra
  np.testing.assert_allclose(late[1:3, 80:], 3e-3, rtol=1e-6)
  assert not late[:, :80].any() and not late[[0, 3]].any()
  turns = schedule(spec_of(fault_of("rotating", (), 4e-3))).extra
  assert ((turns > 0).sum(axis=0) == 1).all() and len(set(turns.argmax(axis=0))) == 4
  both = schedule(spec_of(fault_of("rotating", (), 4e-3), fault_of("rotating", (), 4e-3))).extra
  assert (np.count_nonzero(both, axis=0) == 2).sum() > 100  # two faults are drawn apart
  unequal = schedule(spec_of(fault_of("imbalance", (), 2e-3))).extra.astype(np.float64)
  assert (unequal.max(axis=0) - unequal.mean(axis=0)).mean() == pytest.approx(2e-3, rel=1e-5)
  saved = schedule(spec_of(fault_of("checkpointing", (0,), 0.1, chance=25.0), name="4x1")).pause["checkpoint"]
  assert np.flatnonzero(saved[0]).tolist() == list(range(24, 200, 25)) and not saved[1:].any()
  paused = schedule(spec_of(fault_of("collecting", (2, 3), 0.02, chance=0.1, onset=50), name="4x1")).pause["gc"]
  assert not paused[:2].any() and not paused[:, :50].any() and 15 < (paused > 0).sum() < 50


def test_a_spinning_rank_sleeps_less_by_what_it_computes() -> None:
  plain, spun = schedule(spec_of()), schedule(spec_of(spinning=2))
  np.testing.assert_allclose(spun.work + spun.spin, plain.work, rtol=1e-6)
  assert spun.spin[2].min() > 0 and not spun.spin[[0, 1, 3]].any()


def by_hand(inside: np.ndarray, pauses: np.ndarray) -> dict[str, float]:
  """The accounting, step by step and rank by rank."""
  ranks, steps = inside.shape
  waited = {"work": 0.0, "pause": 0.0}
  for k in range(steps):
    busy = [inside[r, k] + pauses[r, k] for r in range(ranks)]
    last = max(range(ranks), key=lambda r: busy[r])
    for r in range(ranks):
      work = max(inside[last, k] - inside[r, k], 0)
      pause = max(pauses[last, k] - pauses[r, k], 0)
      if work + pause > 0:
        waited["work"] += (busy[last] - busy[r]) * work / (work + pause)
        waited["pause"] += (busy[last] - busy[r]) * pause / (work + pause)
  means = [sum(inside[r]) / steps for r in range(ranks)]
  chronic = max(means) - sum(means) / ranks
  skew = waited["work"] / ranks / steps
  chronic = min(chronic, skew)
  return {"chronic": chronic, "wandering": skew - chronic,
          "runtime": waited["pause"] / ranks / steps + sum(map(sum, pauses)) / ranks / steps}


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 5), st.integers(1, 12))
def test_truth_accounts_as_by_hand(seed: int, ranks: int, steps: int) -> None:
  rng = np.random.default_rng(seed)
  inside = rng.gamma(4.0, 1.0, (ranks, steps)) + 3.0 * (np.arange(ranks) == 0)[:, None]
  pauses = np.where(rng.random((ranks, steps)) < 0.3, rng.random((ranks, steps)) * 5, 0.0)
  found = truth.accounting(inside, pauses)
  for group, seconds in by_hand(inside, pauses).items():
    assert found[group] == pytest.approx(seconds, abs=1e-9)
  busy = inside + pauses
  assert sum(found.values()) == pytest.approx((busy.max(axis=0) - busy.mean(axis=0)).mean() + pauses.mean())


def measured(spec: Spec, transfer: float = 1e-3) -> truth.Measured:
  """What perfect injectors would measure."""
  todo = schedule(spec)
  inside = (todo.work + todo.spin + todo.extra).astype(float)
  pause = {cause: np.repeat(values, layout(spec.layout).devices, axis=0).astype(float)
           for cause, values in todo.pause.items()}
  step = (inside + sum(pause.values(), np.zeros_like(inside))).max(axis=0) + transfer
  step[0] = np.nan
  return truth.Measured((todo.work + todo.spin).astype(float), todo.extra.astype(float), todo.spin.astype(float), pause,
                        step)


def test_truth_of_a_straggler_and_of_a_pause() -> None:
  spec = dataclasses.replace(spec_of(fault_of("straggler", (1,), 5e-3, onset=100)), jitter=0.0)
  twin = dataclasses.replace(spec, faults=(), twin=None)
  found = truth.truth(spec, measured(spec), measured(twin))
  part = 100 / 199  # the first step has none before it
  mean = 11e-3 + part * 5e-3
  assert found.step_time == pytest.approx(mean, rel=1e-6)
  assert found.shares["chronic"] == pytest.approx(part * 5e-3 * 3 / 4 / mean, rel=1e-5)
  assert found.shares["wandering"] == pytest.approx(0, abs=1e-6)
  fault, = found.faults
  assert (fault.ranks, fault.hosts, fault.onset) == ((1,), (), 100)
  assert fault.cost == pytest.approx(part * 5e-3 / mean, rel=1e-5)
  assert fault.cost_active == pytest.approx(5 / 16, rel=1e-5)

  spec = dataclasses.replace(spec_of(fault_of("loading", (1,), 30e-3, chance=0.1), name="2x2"), jitter=0.0)
  found = truth.truth(spec, measured(spec), measured(twin))
  struck = (measured(spec).pause["data"][2, 1:] > 0).mean()
  assert found.shares["runtime"] == pytest.approx(struck * 30e-3 / found.step_time, rel=1e-5)
  assert found.faults[0].ranks == (2, 3) and found.faults[0].hosts == ("h1",)
  assert found.faults[0].cost == pytest.approx(found.shares["runtime"], rel=1e-5)


def test_truth_tells_two_faults_of_one_step_apart() -> None:
  spec = dataclasses.replace(spec_of(fault_of("straggler", (0,), 6e-3), fault_of("rotating", (), 3e-3)), jitter=0.0)
  found = truth.truth(spec, measured(spec), measured(dataclasses.replace(spec, faults=())))
  straggler, rotating = found.faults
  often = (schedule(spec_of(fault_of("straggler", (0,), 0.0), fault_of("rotating", (), 3e-3))).extra[0, 1:] > 0).mean()
  # Without the straggler a step waits 3 ms for someone; without the rotating one it waits 6 ms for rank 0.
  assert straggler.cost * found.step_time == pytest.approx(3e-3 + often * 3e-3, rel=1e-4)
  assert rotating.cost * found.step_time == pytest.approx(often * 3e-3, rel=1e-4)


def test_truth_of_the_network_is_what_exceeds_the_twin() -> None:
  spec = spec_of(fault_of("link", (3,), 40.0, onset=100), name="4x1")
  twin = dataclasses.replace(spec, faults=(), twin=None)
  slow = measured(spec)
  slow.step[100:] += 7e-3
  found = truth.truth(spec, slow, measured(twin))
  assert found.shares["contention"] == pytest.approx(7e-3 * 0.5 / found.step_time, rel=1e-6)
  assert found.faults[0].cost_active == pytest.approx(7e-3 / np.mean(slow.step[100:]), rel=1e-6)
  assert found.faults[0].hosts == ("h3",)
  assert truth.blamed(spec, fault_of("trunk", (), 1.0)) == ((), ())


def test_truth_of_a_stopped_process_is_what_its_sleep_took_too_long() -> None:
  spec = spec_of(fault_of("stopped", (1,), 20e-3), name="4x1")
  twin, found = measured(dataclasses.replace(spec, faults=())), measured(spec)
  found.over[1, ::2] += 8e-3
  found.work[1, ::2] += 8e-3
  found.step[2::2] = (found.work + found.extra).max(axis=0)[2::2] + 1e-3
  struck = truth.truth(spec, found, twin).faults[0]
  assert struck.ranks == (1,) and struck.seconds == pytest.approx(8e-3 * 99 / 199, rel=1e-3)
  assert struck.cost == pytest.approx(8e-3 / 2 / np.nanmean(found.step), rel=0.05)


def run_of(name: str, injected: tuple[Injected, ...], found: tuple[Found, ...], layout_: str = "4x1", **more: Any
           ) -> Judged:
  return Judged(name, layout_, 4, not injected, injected, found, more.pop("shares", {}), **more)


def one(mode: str, ranks: tuple[int, ...] = (), hosts: tuple[str, ...] = (), cost: float = 0.1) -> Injected:
  return Injected("kind", mode, ranks, hosts, 0, cost, cost)


def told(mode: str, ranks: tuple[int, ...] = (), hosts: tuple[str, ...] = (), share: float = 0.1) -> Found:
  return Found(mode, share, 0.99, ranks, hosts)


def test_f1_and_confusion_count_each_mode() -> None:
  runs = [run_of("a", (one(STRAGGLER, (1,)),), (told(STRAGGLER, (1,)),)),
          run_of("b", (one(STRAGGLER, (1,)),), (told(RUNTIME),)),
          run_of("c", (one(STRAGGLER, (1,)), one(AMPLIFICATION)), (told(AMPLIFICATION), told(STRAGGLER, (1,)))),
          run_of("d", (), ()), run_of("e", (), (told(AMPLIFICATION),)),
          run_of("cheap", (one(RUNTIME, cost=0.01),), (told(STRAGGLER, (2,)),)),
          dataclasses.replace(run_of("reference", (), (told(STRAGGLER, (2,)),)), control=False)]
  modes = scores.by_mode(runs)
  assert {m: (e["right"], e["missed"], e["false"]) for m, e in modes.items()} == {
      STRAGGLER: (2, 1, 0), AMPLIFICATION: (1, 0, 1), RUNTIME: (0, 0, 1), LOCALITY: (0, 0, 0),
      "fabric_contention": (0, 0, 0)}
  assert modes[STRAGGLER]["f1"] == pytest.approx(0.8) and modes[AMPLIFICATION]["f1"] == pytest.approx(2 / 3)
  assert scores.macro_f1(modes) == pytest.approx((0.8 + 2 / 3 + 0) / 3)
  table = scores.confusion(runs)
  assert table[STRAGGLER][STRAGGLER] == 2 and table[STRAGGLER][RUNTIME] == 1
  assert table["healthy"] == {**dict.fromkeys(MODES, 0), AMPLIFICATION: 1, "healthy": 1}
  assert sum(sum(row.values()) for row in table.values()) == 6


@pytest.mark.parametrize(("ranks", "hosts", "right"), [
    ((2, 3), ("h1",), True), ((), ("h1",), True), ((2,), ("h1",), True), ((2, 3), (), True), ((2,), (), False),
    ((1, 2, 3), ("h1",), False), ((), ("h0",), False), ((), (), False)])
def test_blame_is_exact_and_names_nobody_innocent(ranks: tuple[int, ...], hosts: tuple[str, ...], right: bool) -> None:
  run = run_of("a", (one(STRAGGLER, (2, 3), ("h1",)),), (told(STRAGGLER, ranks, hosts),), "2x2")
  assert scores.blame(run, run.injected[0]) is right


def test_blame_counts_what_was_missed_and_leaves_out_where_nobody_is_to_blame() -> None:
  runs = [run_of("a", (one(STRAGGLER, (2,)),), ()), run_of("b", (one(AMPLIFICATION),), (told(AMPLIFICATION),)),
          run_of("c", (one(STRAGGLER, (2,)),), (told(STRAGGLER, (2,)),))]
  assert scores.blame_accuracy(runs) == (1, 2)


def test_who_is_wrongly_blamed() -> None:
  assert scores.wrongly_blamed(run_of("a", (), (told(STRAGGLER, (1,)),)))
  assert scores.wrongly_blamed(run_of("a", (), (told(AMPLIFICATION, (), ("h1",)),)))
  assert not scores.wrongly_blamed(run_of("a", (), (told(RUNTIME, (0, 1, 2, 3), ("h0", "h1", "h2", "h3")),)))
  assert not scores.wrongly_blamed(run_of("a", (), (told(RUNTIME, (), ("here",)),), "in4"))  # the only host
  assert scores.wrongly_blamed(run_of("a", (one(AMPLIFICATION),), (told(AMPLIFICATION, (3,)),)))
  assert not scores.wrongly_blamed(run_of("a", (one(STRAGGLER, (1,)),), (told(STRAGGLER, (2,)),)))


def test_errors_of_shares_and_what_if_and_detection() -> None:
  runs = [run_of("a", (one(STRAGGLER, (1,)), one(LOCALITY, (2,))), (told(STRAGGLER, (1,), share=0.2),
                                                                 told(LOCALITY, (2,), share=0.1)),
                 shares={"chronic": 0.27}, what_if=(1.02, 1.0, 0.99), detected={0: 12, 1: None}),
          run_of("b", (one(STRAGGLER, (1,)),), (), shares={"chronic": 0.3}, detected={0: 40})]
  summary = scores.summary(runs)
  assert summary["share_error_points"]["chronic"]["median_abs"] == pytest.approx(3)
  assert summary["share_error_points"]["chronic"]["number"] == 1
  assert summary["what_if_error_percent"]["twin"]["max_abs"] == pytest.approx(2)
  assert summary["what_if_error_percent"]["same_run"]["max_abs"] == pytest.approx(100 * (1.02 / 0.99 - 1))
  assert summary["detection"] == {
      "faults": 3, "detected": 2, "within_30": 1, "noticed_within_30": 0, "median": 26.0, "p95": 38.6,
      "false_alarms_in_controls": 0, "by_kind": {"kind": [12, 40, None]}}
  fading = {(row["from"], row["to"]): (row["runs"], row["found"]) for row in summary["fading"]}
  assert fading[0.1, 0.2] == (1, 0)
  assert "missed" in scores.misjudged(runs)[0] and len(scores.misjudged(runs)) == 1
  figures: dict[str, Any] = {"judged": {"all": summary}, "command": "x", "date": "y", "load_average_at_start": 0.1,
             "machine": {"cores": 2, "platform": "p", "jax": "j", "python": "3"},
             "made": {"load": [0.1, 0.2, 0.3], "seed": 1}, "note": "a word", "misjudged": ["a"]}
  page = "\n".join(tables.markdown(figures))
  assert "median 0.2" in page and "1 of 3" in page and "–" in page
  assert tables.figures_table(figures["judged"]).row_count == len(tables.figures_table(figures["judged"]).rows)


def test_the_share_of_a_misplaced_link_is_compared_with_what_the_network_did() -> None:
  link = dataclasses.replace(one(LOCALITY, (2,)), kind="misplaced_link")
  run = run_of("a", (link,), (told(LOCALITY, (2,), share=0.2),), shares={"contention": 0.19, "chronic": 0.0})
  errors = scores.share_errors([run])
  assert errors["contention"] == pytest.approx([1]) and not errors["chronic"].size


def test_the_fixture_of_places_says_who_is_misplaced() -> None:
  known = Locality(process=0, hostname="h0", devices=tuple(Device(id=i) for i in range(4)))
  found = places.place(known, (4, 5, 6, 7), (6,))
  assert [gpu.nic_distance for gpu in found.gpus] == ["PIX", "PIX", "SYS", "PIX"]
  assert [device.gpu for device in found.devices] == [gpu.pci for gpu in found.gpus]
  assert len({nic.pci for nic in found.nics} | {gpu.pci for gpu in found.gpus}) == 8
  wrong = [concern for concern in find_concerns(found) if concern.level == WARNING]
  assert wrong and all(found.gpus[2].pci in concern.sentence or "mlx5_2" in concern.sentence for concern in wrong)
  assert not [c for c in find_concerns(places.place(known, (4, 5, 6, 7), ())) if c.level == WARNING]


def write_run(root: pathlib.Path, spec: Spec, job: Job) -> None:
  """A run of the lab as it would have been made, had the synthetic job run in it."""
  found = synthetic.write(root / spec.name / "run", job)
  todo = schedule(spec)
  (root / spec.name / "injected").mkdir()
  np.savez(root / spec.name / "injected" / "0.npz", ranks=np.arange(4), work=todo.work, spin=todo.spin,
           extra=todo.extra, work_asked=todo.work, spin_asked=todo.spin, extra_asked=todo.extra, began_ns=0,
           ends_ns=found.end[0])
  label = {**make.label(root, spec), "load": [1.0, 2.0]}
  (root / spec.name / make.LABEL).write_text(json.dumps(label))


def test_the_judge_reads_labelled_runs(tmp_path: pathlib.Path) -> None:
  job = Job(ranks=4, steps=200, processes=1, hosts=1, forward=10e-3, backward=0.0, update=0.0, noise=0.02)
  twin = dataclasses.replace(spec_of(), name="in4-healthy-000", twin=None)
  late = dataclasses.replace(spec_of(fault_of("straggler", (2,), 6e-3)), name="in4-001-straggler", twin=twin.name)
  write_run(tmp_path, twin, job)
  write_run(tmp_path, late, dataclasses.replace(job, late={2: 6e-3}))
  ready = judge.labelled(tmp_path)
  assert [one.spec for one in ready] == [late, twin]
  done: list[tuple[int, int]] = []
  judged = judge.judge(ready, lambda *now: done.append(now))
  assert set(judged) == set(judge.WAYS)
  for fault, healthy in judged.values():
    assert [finding.mode for finding in fault.found] == [STRAGGLER] and scores.blame(fault, fault.injected[0]) is True
    assert healthy.control and not healthy.found
    assert fault.what_if is not None and fault.what_if[0] == pytest.approx(fault.what_if[1], rel=0.02)
    error, = scores.share_errors([fault])["chronic"]
    assert abs(error) < 2
    assert not healthy.false_alarms and not fault.detected
  assert done[-1] == (2, 2)
  assert [one.spec.name for one in judge.labelled(tmp_path, ["healthy"])] == [twin.name]
  with pytest.raises(ValueError, match="no run with a label of that name"):
    judge.labelled(tmp_path, ["nothing"])


def test_detection_is_counted_from_onset_and_takes_the_right_rank_only(tmp_path: pathlib.Path) -> None:
  struck = synthetic_faults.Fault("compute", 6e-3, (2,), begin=0.5)
  synthetic.write(tmp_path, Job(ranks=4, steps=240, processes=1, hosts=1, noise=0.02, faults=(struck,)))
  run = read_run(tmp_path)
  injected = dataclasses.replace(one(STRAGGLER, (2,)), onset=120)
  found, noticed, early = judge.detection(run, [injected])
  assert early == 0 and noticed == found and found[0] is not None and 0 < found[0] <= 30
  late = dataclasses.replace(injected, onset=110)
  assert judge.detection(run, [late])[0] == {0: found[0] + 10}
  assert judge.detection(run, [dataclasses.replace(injected, ranks=(1,))])[0] == {0: None}
  assert judge.detection(run, [dataclasses.replace(injected, mode=RUNTIME)])[:2] == ({0: None}, found)
  assert judge.detection(run, [dataclasses.replace(injected, onset=0)])[0] == {}
  assert judge.detection(run, [])[2] == 1  # nothing was injected, so it would be a false alarm


def test_a_stopped_process_is_stopped_and_goes_on() -> None:
  sleeper = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
  state = pathlib.Path(f"/proc/{sleeper.pid}/stat")
  seen = set()
  try:
    with outside.stopped(sleeper.pid, 0.02, 0.02, 0) as done:
      until = time.monotonic() + 10
      while "T" not in seen and time.monotonic() < until:
        seen.add(state.read_text().rpartition(")")[2].split()[0])
        time.sleep(0.002)
      while not done and time.monotonic() < until:
        time.sleep(0.002)
    assert "T" in seen and done[0][1] - done[0][0] >= 20_000_000
    assert state.read_text().rpartition(")")[2].split()[0] in "SR"
  finally:
    sleeper.kill()
    sleeper.wait()


def tiny(steps: int = 30) -> Any:
  config = fault_lab.get_config()
  config.steps.in2, config.work_ms.in2, config.rest_ms.in2 = steps, 2.0, 1.0
  config.healthy = {"in2": 1}
  config.severities = (0.5,)
  return config


def test_a_tiny_lab_is_made_and_goes_on_where_it_was_stopped(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
                                                            ) -> None:
  specs = [spec for spec in plan.plan(tiny()) if not spec.faults or spec.faults[0].kind == "straggler"]
  shown: list[tuple[str, int, int]] = []
  monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "")
  failed = make.make(specs, tiny(), tmp_path, lambda *now: shown.append(now), lambda sentence: None)
  assert not failed and [done for _, done, _ in shown] == list(range(1, len(specs) + 1))
  label = json.loads((tmp_path / specs[1].name / make.LABEL).read_text())
  assert label["modes"] == [STRAGGLER] and label["ranks"] == list(specs[1].faults[0].targets)
  slept = truth.read(tmp_path / specs[1].name, specs[1])
  onset, late = specs[1].faults[0].onset, specs[1].faults[0].targets[0]
  assert (slept.extra[late, onset:] >= 0.99 * specs[1].faults[0].seconds).all() and not slept.extra[1 - late].any()
  assert judge.judge(judge.labelled(tmp_path), lambda *now: None)["all"][0].trouble == ""

  def never(*arguments: Any) -> None:
    raise AssertionError("nothing is left to be made")

  monkeypatch.setattr(make, "Cluster", never)
  assert make.make(specs, tiny(), tmp_path, lambda *now: None, lambda sentence: None) == {}


def test_a_run_that_fails_twice_is_left_out_and_the_others_are_made(tmp_path: pathlib.Path,
                                                                    monkeypatch: pytest.MonkeyPatch) -> None:
  started: list[str] = []

  class Fake:
    def __init__(self, *arguments: Any):
      started.append("cluster")

    def wait(self) -> None:
      pass

    def run(self, spec: Spec, directory: pathlib.Path) -> dict[str, Any]:
      if spec.name.endswith("rotating"):
        raise cluster.ClusterError("it fell over")
      return {"stopped": None, "outside": {}}

    def close(self) -> None:
      pass

  monkeypatch.setattr(make, "Cluster", Fake)
  monkeypatch.setattr(make, "label", lambda directory, spec: {})
  specs = plan.plan(tiny())
  said: list[str] = []
  failed = make.make(specs, tiny(), tmp_path, lambda *now: None, said.append)
  wrong = [spec.name for spec in specs if spec.name.endswith("rotating")]
  assert wrong and sorted(failed) == sorted(wrong) and "it fell over" in said
  assert len(started) == 1 + 2 * len(wrong)
  assert all((tmp_path / spec.name / make.LABEL).exists() == (spec.name not in wrong) for spec in specs)
  monkeypatch.setattr(make, "label", lambda directory, spec: 1 / 0)
  with pytest.raises(ZeroDivisionError):
    make.make([specs[0]], tiny(), tmp_path / "other", lambda *now: None, said.append)


def test_a_cluster_that_ends_says_its_last_words(tmp_path: pathlib.Path) -> None:
  broken = cluster.Cluster(layout("in2"), {"gradient_kb": 1.0, "hosts_seconds": 1.0, "steps": "none"}, tmp_path, None,
                           "mark", threading.Event())
  try:
    with pytest.raises(cluster.ClusterError, match="Process 0 of in2 ended. Its last words: .*Error"):
      broken.wait()
  finally:
    broken.close()
