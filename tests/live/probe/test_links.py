"""The probe on forced devices, its document, and the one that probes by itself."""

import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpace
from jaxpace.cli.main import main
from jaxpace.core import ring
from jaxpace.core.recordable import Recordable
from jaxpace.live.probe import on_contention
from jaxpace.live.profiler import stamps
from jaxpace.live.profiler.executions import Execution
from jaxpace.trace import links
from tests.lib.said import numbers


@pytest.fixture(scope="module")
def probed(tmp_path_factory):
  directory = tmp_path_factory.mktemp("links")
  seen = []
  found = jaxpace.probe_links(directory, message_bytes=4096, repeats=2, devices=jax.devices()[:3],
                              progress=lambda done, of: seen.append((done, of)))
  return directory, found, seen


def test_every_pair_is_measured_and_read_back(probed):
  directory, found, seen = probed
  assert seen == [(k, 6) for k in range(1, 7)]
  assert np.isfinite(found.seconds).sum() == 6 and np.isnan(np.diag(found.seconds)).all()
  assert (found.seconds[np.isfinite(found.seconds)] > 0).all()
  assert (found.median_seconds >= found.seconds)[np.isfinite(found.seconds)].all()
  assert len(set(found.hosts)) == 3 and found.hosts[0].endswith("/0")
  again = links.read_links(directory)
  assert again is not None and again.to_json() == found.to_json()
  json.loads((directory / links.FILE).read_text(), parse_constant=pytest.fail)
  assert "6 pairs, 4.1 KB each" in found.text()


def test_time_is_up(tmp_path):
  found = jaxpace.probe_links(message_bytes=1024, repeats=1, seconds=1e-9,
                              devices=jax.devices()[:3])
  assert np.isnan(found.seconds).all() and "not measured in time" in found.cannot_tell


def test_slips_are_said(tmp_path, capsys, caplog):
  for wrong in ({"message_bytes": 10}, {"repeats": 0}, {"seconds": float("nan")}):
    with pytest.raises(ValueError, match="message_bytes="):
      jaxpace.probe_links(**wrong)
  with pytest.raises(ValueError, match="one process with one device"):
    jaxpace.probe_links(devices=jax.devices()[:1])
  assert main(["bench", "--links", "--kib", "0"]) == 2
  assert "jaxpace bench: message_bytes=0" in capsys.readouterr().err
  (tmp_path / "file").write_text("")
  links.write_links(tmp_path / "file", _links(np.ones((2, 2))))
  assert "not recorded" in caplog.text


def _links(seconds):
  return links.ProbedLinks(("a", "b"), 1024, seconds, seconds, (), "", 1.0, 5)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"schema": 9}',
                                  '{"schema": 1, "hosts": ["a"], "seconds": [[1, 2]]}',
                                  '{"schema": 1, "hosts": 3, "seconds": null, '
                                  '"median_seconds": null}'])
def test_a_document_that_is_none(tmp_path, text):
  (tmp_path / links.FILE).write_text(text)
  assert links.read_links(tmp_path) is None


def _pace(mesh, plan, groups, transfers, first):
  """Rings of 4 ranks whose shortest waits are `transfers`; rank r waits r ms longer."""
  rings = []
  for r in range(4):
    steps = [Execution(10**9 * (k + 1), 10**9 * (k + 1) + 9 * 10**7, {"all-reduce.1": (
        10**9 * (k + 1) + 10**6, 10**9 * (k + 1) + 10**6 + round(1e9 * transfer) + r * 10**6)})
        for k, transfer in enumerate(transfers)]
    rings.append(stamps.rows(steps, groups, first))
  rows = np.stack(rings)
  assert rows.shape[-1] == ring.STAMPS + 2 * len(plan.marks)
  return SimpleNamespace(ring=jax.device_put(rows, NamedSharding(mesh, P("data"))), rank=None)


def test_it_probes_when_transfers_have_become_slow_and_rests_then(monkeypatch, caplog):
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("data",), axis_types=(AxisType.Auto,))
  groups = (("all-reduce.1",),)
  paced = Recordable()
  paced.plan = stamps.plan("jit_step", groups, "data", 4)
  calls = []

  def probe(directory, **options):
    calls.append((directory, options))
    return _links(np.ones((2, 2)))

  monkeypatch.setattr(on_contention, "probe_links", probe)
  prober = jaxpace.ProbeOnContention("where", paced, every=2, above=1.5, most=2, repeats=3)
  healthy, slow = [_pace(mesh, paced.plan, groups, [t] * 12, 0) for t in (4e-3, 8e-3)]
  assert [prober.step(healthy) for _ in range(4)] == [None] * 4
  assert prober.step(slow) is None and prober.step(slow) is not None  # every second step only
  assert calls == [("where", {"repeats": 3})] and 2.0 in numbers(caplog.text)
  assert [prober.step(slow) for _ in range(20)] == [None] * 20
  assert ([prober.step(slow) is not None for _ in range(6)]
          == [False, True, False, False, False, False])
  assert [prober.step(slow) for _ in range(30)] == [None] * 30  # two at most
  few = _pace(mesh, paced.plan, groups, [90e-3] * 3, 0)
  assert jaxpace.ProbeOnContention(None, paced, every=1, floor=1e-3).step(few) is None
  with pytest.raises(ValueError, match="above=1"):
    jaxpace.ProbeOnContention(None, paced, above=1)
