"""Exporters: figures against the rows, bounded labels, trouble that stops nobody."""

import contextlib
import gzip
import json
import logging
import re
import socket
import subprocess
import sys
import threading
import urllib.request

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families as parse

from jaxpace.record.exporting import Feed
from jaxpace.record.recorder import Recorder
from jaxpace.show import exporters as series
from jaxpace.show.exporters import OpenTelemetry, Prometheus, Scalars, TensorBoard
from jaxpace.show.figures import figures
from tests.multiprocess.jobs import ROOT
from tests.record import fake_step as fake
from tests.record.recording import assert_complete, one_warning, train

STEPS = 40


class Kept:
  """Keeps what it is given, and from which thread."""

  def __init__(self):
    self.rows, self.threads, self.closed = [], set(), 0

  def export(self, steps, collectives):
    self.rows.append((steps, collectives))
    self.threads.add(threading.current_thread().name)

  def close(self):
    self.closed += 1


def synthetic(ranks=2, steps=3, process=0, first=0, **more):
  """Rows of a process whose ranks take rank + 1 ms forward and wait 4 - rank ms in each of two
  collectives."""
  step, rank = np.tile(np.arange(first, first + steps), ranks), np.repeat(np.arange(ranks), steps)
  size, origin = len(step), 3 * 10**15
  start = origin + step * 20_000_000
  gap = np.ma.masked_array(np.full(size, 1_000_000), step == 0)
  columns = {"step": step, "rank": rank.astype(np.int32),
             "process": np.full(size, process, np.int32), "attempt": np.zeros(size, np.int32),
             "start_ns": start, "end_ns": start + 19_000_000, "gap_ns": gap,
             "forward_ns": (rank + 1) * 1_000_000, "delay_applied_ns": np.full(size, 500_000),
             "gc_ns": np.full(size, 2_000_000), "nivcsw": np.full(size, 3),
             "decision_slack": step * 0.5, **more}
  enter = np.tile(start + 5_000_000, 2)
  both = {name: np.tile(columns[name], 2) for name in ("step", "rank", "process", "attempt")}
  return columns, {**both, "collective": np.repeat([0, 1], size),
                   "name": np.repeat(["a", "b"], size), "enter_ns": enter,
                   "exit_ns": enter + (4 - both["rank"]) * 1_000_000}


def samples(exporter):
  from prometheus_client import generate_latest
  return {(s.name, tuple(sorted(s.labels.items()))): s.value
          for family in parse(generate_latest(exporter.registry).decode()) for s in family.samples}


def test_figures_are_sums_of_the_rows():
  found = figures(*synthetic())
  assert found.steps == {0: 3, 1: 3} and found.last_step == 2
  assert found.step_seconds[1] == pytest.approx([0.02, 0.02])  # the first step's gap is not known
  assert found.phases == pytest.approx(
      {(0, "forward"): 3e-3, (1, "forward"): 6e-3, (0, "delay"): 1.5e-3, (1, "delay"): 1.5e-3,
       (0, "gap"): 2e-3, (1, "gap"): 2e-3})
  assert (found.waits == pytest.approx({(0, "a"): 12e-3, (0, "b"): 12e-3, (1, "a"): 9e-3,
                                        (1, "b"): 9e-3}))
  assert found.host == pytest.approx({"gc": 6e-3})  # of the process, once
  assert (found.switches, found.decisions) == (9, {"slack": 1.0})


def test_rows_with_nothing_known_give_nothing_made_up():
  nothing = np.ma.masked_all(6, np.int64)
  found = figures(*synthetic(gc_ns=nothing, nivcsw=nothing, forward_ns=nothing))
  assert (found.host == {} and found.switches is None
          and not any(name == "forward" for _, name in found.phases))
  assert figures({"step": np.zeros(0)}, {}) is None


def test_prometheus_counts_on_over_batches():
  exporter = Prometheus(textfile="unused.prom")
  exporter._take(figures(*synthetic()))
  exporter._take(figures(*synthetic(first=3)))
  found = samples(exporter)
  assert found["jaxpace_steps_total", (("rank", "1"),)] == 6
  assert (found["jaxpace_wait_seconds_total", (("collective", "a"), ("rank", "0"))]
          == pytest.approx(24e-3))
  assert (found["jaxpace_phase_seconds_total", (("phase", "forward"), ("rank", "1"))]
          == pytest.approx(12e-3))
  assert found["jaxpace_step_seconds_count", (("rank", "0"),)] == 5
  assert found["jaxpace_step_seconds_bucket", (("le", "0.01"), ("rank", "0"))] == 0
  assert found["jaxpace_step_seconds_bucket", (("le", "0.03"), ("rank", "0"))] == 5
  assert (found["jaxpace_host_seconds_total", (("cause", "gc"), ("process", "0"))]
          == pytest.approx(12e-3))
  assert found["jaxpace_last_step", (("process", "0"),)] == 5
  assert found["jaxpace_decision", (("name", "slack"), ("process", "0"))] == 2.5


def test_label_sets_are_bounded_and_nothing_is_lost():
  exporter = Prometheus(textfile="unused.prom")
  steps, collectives = synthetic(ranks=100, steps=2)
  names = np.array([f'"evil\n{{}}\\{i}' for i in range(len(collectives["name"]))])
  more = {f"phase_p{i}_ns": np.full(200, 1_000_000) for i in range(50)}
  decisions = {f"decision_d{i}": np.ones(200) for i in range(80)}
  exporter._take(figures({**steps, **more, **decisions}, {**collectives, "name": names}))
  found = samples(exporter)  # parses, so it is escaped
  ranks = {dict(labels)["rank"] for _, labels in found if "rank" in dict(labels)}
  assert len(ranks) == 65 and "other" in ranks
  assert len({dict(labels)["phase"] for _, labels in found if "phase" in dict(labels)}) == 17
  assert (len({dict(labels)["collective"] for _, labels in found if "collective" in dict(labels)})
          == 33)
  assert len([key for key in found if key[0] == "jaxpace_decision"]) == 32
  assert sum(v for (name, _), v in found.items() if name == "jaxpace_steps_total") == 200


def test_recorder_feeds_prometheus_file_and_endpoint(tmp_path):
  exporter, kept = Prometheus(port=0, textfile=tmp_path / "metrics" / "jaxpace.prom"), Kept()
  seen = {}

  class Scrape(Kept):
    def close(self):  # before the endpoint closes: exporters close in their order
      assert exporter._server.server_address[0] == "127.0.0.1"
      seen["text"] = urllib.request.urlopen(f"http://127.0.0.1:{exporter.port}/metrics",
                                            timeout=300).read().decode()

  with Recorder(tmp_path / "run", fake.FakePaced(),
                exporters=[Scrape(), exporter, kept]) as recorder:
    train(recorder, STEPS)
  assert_complete(tmp_path / "run", range(STEPS))
  file = (tmp_path / "metrics" / "jaxpace-0.prom").read_text()
  assert [p.name for p in (tmp_path / "metrics").iterdir()] == ["jaxpace-0.prom"]
  for text in (seen["text"], file):
    found = {(s.name, s.labels.get("rank"), s.labels.get("collective")): s.value
             for family in parse(text) for s in family.samples}
    assert found["jaxpace_steps_total", "7", None] == STEPS
    assert (found["jaxpace_wait_seconds_total", "3", "psum.grads"]
            == pytest.approx(STEPS * fake.DURATIONS[5] * 1e-9))
  assert kept.closed == 1 and kept.threads == {"jaxpace-exporters"}
  assert sum(len(steps["step"]) for steps, _ in kept.rows) == 8 * STEPS
  with pytest.raises(OSError):
    urllib.request.urlopen(f"http://127.0.0.1:{exporter.port}/metrics", timeout=1)


IDLE = """
import pathlib, resource, sys, threading, time, urllib.request
from jaxpace.show.exporters import Prometheus
from jaxpace.record.recorder import Recorder
from tests.record import fake_step as fake
from tests.record.recording import assert_complete
# Of the process's own files some sixty are open: a client that took the rest would end the recording.
resource.setrlimit(resource.RLIMIT_NOFILE, (128, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
directory, many = sys.argv[1], int(sys.argv[2])
exporter = Prometheus(port=0)

class Strangers:
  def export(self, steps, collectives):
    if exporter.port and not hasattr(self, "said"):
      print("PORT", exporter.port, flush=True)
      assert sys.stdin.readline() == "connected\\n"
      self.said = urllib.request.urlopen(f"http://127.0.0.1:{exporter.port}/metrics", timeout=300).read().decode()
      self.threads = threading.active_count()
      self.files = len(list(pathlib.Path("/proc/self/fd").iterdir()))

strangers = Strangers()
strangers.close = lambda: None
with Recorder(directory, fake.FakePaced(), exporters=[exporter, strangers]) as recorder:
  mesh = fake.mesh()
  step, pace, steps, left = fake.make_step(mesh), fake.init(mesh), 0, 100
  while left:
    pace, steps = step(pace), steps + 1
    recorder.record()
    time.sleep(0.01)
    left -= hasattr(strangers, "files")
assert recorder.lost["stopped"] is None, recorder.lost
assert_complete(pathlib.Path(directory), range(steps))
assert 'jaxpace_steps_total{rank="0"}' in strangers.said
print("FINE", strangers.threads, strangers.files, flush=True)
"""  # noqa: E501


@pytest.mark.long
def test_idle_connections_take_neither_the_endpoint_nor_the_recording(tmp_path):
  """1,010 connections that said nothing took the process's descriptors, and a thread each; the
  recording ended."""
  process = subprocess.Popen([sys.executable, "-c", IDLE, str(tmp_path / "run"), "1010"], cwd=ROOT,
                             text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE)
  idle = []
  try:
    port = int(process.stdout.readline().split()[1])
    for number in range(1010):
      idle.append(socket.create_connection(("127.0.0.1", port), timeout=300))
      if number % 3 == 1:
        with contextlib.suppress(OSError):  # hung up on already
          idle[-1].sendall(b"GET /metrics HTTP/1.1\r\nX-")
    out, err = process.communicate("connected\n", timeout=600)
  finally:
    for connection in idle:
      connection.close()
    process.kill()
    process.communicate()
  assert process.returncode == 0, err[-3000:]
  word, threads, files = out.split()
  assert word == "FINE" and int(threads) < 40 and int(files) < 100


def test_the_endpoint_answers_what_is_asked_and_drops_the_rest(monkeypatch):
  monkeypatch.setattr(series._Handler, "timeout", 300.0)
  exporter = Prometheus(port=0)
  exporter.export(*synthetic())

  def ask(request, slowly=False):
    with socket.create_connection(("127.0.0.1", exporter.port), timeout=300) as client:
      for piece in [request[i:i + 7] for i in range(0, len(request), 7)] if slowly else [request]:
        client.sendall(piece)
      found = b""
      with contextlib.suppress(ConnectionResetError):
        while piece := client.recv(1 << 16):
          found += piece
      return found
  try:
    for slowly in (False, True):
      assert b'jaxpace_steps_total{rank="0"} 3.0' in ask(
          b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n", slowly)
    text = ask(
        b"GET /metrics HTTP/1.1\r\nAccept: application/openmetrics-text; version=1.0.0\r\n\r\n")
    assert b"Content-Type: application/openmetrics-text" in text and text.endswith(b"# EOF\n")
    packed = ask(b"GET / HTTP/1.1\r\nAccept-Encoding: gzip\r\n\r\n").partition(b"\r\n\r\n")[2]
    assert b"jaxpace_steps_total" in gzip.decompress(packed)
    assert ask(b"POST / HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.0 405")
    assert b"400" in ask(b"nonsense\r\n\r\n")
    assert b"414" in ask(b"x" * 70_000)
  finally:
    exporter.close()
  with pytest.raises(OSError):
    socket.create_connection(("127.0.0.1", exporter.port), timeout=1)


def test_who_says_nothing_is_hung_up_on(monkeypatch):
  monkeypatch.setattr(series._Handler, "timeout", 0.2)
  exporter = Prometheus(port=0)
  exporter.export(*synthetic())
  try:
    with socket.create_connection(("127.0.0.1", exporter.port), timeout=300) as client:
      client.sendall(b"GET")
      assert client.recv(1) == b""
  finally:
    exporter.close()


def test_an_exporter_that_fails_is_one_warning_and_the_run_is_whole(tmp_path, caplog):
  class Broken(Kept):
    def export(self, steps, collectives):
      super().export(steps, collectives)
      raise RuntimeError("no route to host")

  broken, kept = Broken(), Kept()
  with Recorder(tmp_path, fake.FakePaced(), exporters=[broken, kept]) as recorder:
    train(recorder, STEPS)
  assert_complete(tmp_path, range(STEPS))
  one_warning(caplog,
              "Broken stopped, training and recording go on: RuntimeError: no route to host")
  assert len(broken.rows) == 1 and not broken.closed and kept.closed == 1


def test_an_exporter_that_hangs_holds_up_nobody(caplog):
  release = threading.Event()

  class Hanging(Kept):
    def export(self, steps, collectives):
      release.wait(300)

  feed = Feed([Hanging()])
  feed.start()
  rows = synthetic()
  putting = threading.Thread(target=lambda: [feed.put(*rows) for _ in range(40)], daemon=True)
  putting.start()
  putting.join(300)
  assert not putting.is_alive() and feed.lost >= 40 - 16 - 1
  closing = threading.Thread(target=lambda: feed.close(0.1), daemon=True)
  closing.start()
  closing.join(300)
  assert not closing.is_alive()
  release.set()
  warnings = [r.message for r in caplog.records if r.levelno >= logging.WARNING]
  assert len(warnings) == 2 and "slower" in warnings[0] and "not finished" in warnings[1]


def test_scalars_are_means_a_step_of_process_0_only():
  written = []

  class Writer:
    def write_scalars(self, step, scalars):
      written.append((step, scalars))

  exporter = Scalars(Writer())
  exporter.export(*synthetic(process=1))
  assert not written
  exporter.export(*synthetic())
  ((step, scalars),) = written
  assert step == 2 and scalars == pytest.approx({
      "jaxpace/step_ms": 20.0, "jaxpace/forward_ms": 1.5, "jaxpace/gap_ms": 4 / 6,
      "jaxpace/delay_ms": 0.5, "jaxpace/wait_ms": 7.0, "jaxpace/gc_ms": 2.0,
      "jaxpace/decision/slack": 1.0})


def test_tensorboard_files_hold_the_scalars(tmp_path):
  exporter = TensorBoard(tmp_path / "tb")
  exporter.export(*synthetic(process=1))
  assert not (tmp_path / "tb").exists()
  exporter.export(*synthetic())
  exporter.close()
  (file,) = (tmp_path / "tb").iterdir()
  assert b"jaxpace/wait_ms" in file.read_bytes()


def test_opentelemetry_gets_the_same_figures():
  from opentelemetry.sdk.metrics import MeterProvider
  from opentelemetry.sdk.metrics.export import InMemoryMetricReader

  reader = InMemoryMetricReader()
  provider = MeterProvider([reader])
  exporter = OpenTelemetry(provider.get_meter("test"))
  exporter.export(*synthetic())
  exporter.export(*synthetic(first=3))
  exporter.export(*synthetic(ranks=100, steps=1, first=6))
  data = reader.get_metrics_data().resource_metrics[0].scope_metrics[0].metrics
  found = {(metric.name, tuple(sorted(point.attributes.items()))): point for metric in data
           for point in metric.data.data_points}
  assert found["jaxpace.steps", (("rank", "1"),)].value == 7
  assert found["jaxpace.steps", (("rank", "other"),)].value == 36
  assert (found["jaxpace.wait.time", (("collective", "a"), ("rank", "0"))].value
          == pytest.approx(28e-3))
  assert (found["jaxpace.phase.time", (("phase", "forward"), ("rank", "1"))].value
          == pytest.approx(14e-3))
  assert found["jaxpace.step.duration", (("rank", "0"),)].count == 6
  assert found["jaxpace.step.duration", (("rank", "0"),)].sum == pytest.approx(0.12)
  assert found["jaxpace.host.time", (("cause", "gc"), ("process", 0))].value == pytest.approx(14e-3)
  assert found["jaxpace.last_step", (("process", 0),)].value == 6
  assert found["jaxpace.decision", (("name", "slack"), ("process", 0))].value == 3.0
  exporter.close()
  provider.shutdown()


@pytest.mark.parametrize("wrong", [Prometheus, object(), print])
def test_what_is_no_exporter_is_refused_at_once(tmp_path, wrong):
  with pytest.raises(TypeError, match="exporters takes objects"):
    Recorder(tmp_path, fake.FakePaced(), exporters=[wrong])


def test_mistakes_are_named():
  with pytest.raises(ValueError, match="exports nowhere"):
    Prometheus()
  for port in (70000, -1, "9400", 80.5, True):
    with pytest.raises(ValueError, match=f"port={port!r} is not a TCP port"):
      Prometheus(port=port)
  with pytest.raises(TypeError, match="write_scalars"):
    Scalars(object())


def test_the_dashboard_asks_for_what_is_exported():
  exporter = Prometheus(textfile="unused.prom")
  exporter._take(figures(*synthetic()))
  exported = {}
  for name, labels in samples(exporter):
    exported.setdefault(name, set()).update(dict(labels))
  dashboard = json.loads((ROOT / "docs" / "grafana.json").read_text())
  queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
  legends = [target["legendFormat"] for panel in dashboard["panels"] for target in panel["targets"]]
  queries += [v["query"] for v in dashboard["templating"]["list"] if v["type"] == "query"]
  asked = set()
  for query, legend in zip(queries, [*legends, ""], strict=True):
    names = set(re.findall(r"jaxpace_\w+", query))
    assert names and names <= set(exported), query
    labels = set().union(*(exported[name] for name in names))
    used = {label for matcher in re.findall(r"\{([^}]*)\}", query)
            for label in re.findall(r"(\w+)[=!]", matcher)}
    grouped = {g.strip() for group in re.findall(r"by \(([^)]*)\)", query)
               for g in group.split(",")}
    assert used - {"job"} | grouped <= labels, query  # Prometheus itself adds `job`
    assert set(re.findall(r"\{\{(\w+)\}\}", legend)) <= grouped, legend
    assert query.count("(") == query.count(")")
    asked |= {re.sub("_(bucket|sum|count|total)$", "", name) for name in names}
  assert asked == {re.sub("_(bucket|sum|count|total|created)$", "", name) for name in exported}
