"""The probe on forced devices, its document, and the one that probes by itself."""

import dataclasses
import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpace
from jaxpace.cli.main import main
from jaxpace.core.marks import STEP_VALUE, stamp_tags
from jaxpace.core.recordable import Stamped
from jaxpace.execution import marks
from jaxpace.live.probe import on_contention
from jaxpace.live.profiler import stamps
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


def _write(plan, transfers):
  """Steps of 4 ranks whose shortest waits are `transfers`; rank r waits r ms longer. Returns the
  state after them."""
  tags = stamp_tags(plan.marks)
  for r in range(4):
    for k, transfer in enumerate(transfers):
      begin = 10**9 * (k + 1)
      times = (begin, begin + 10**6, begin + 10**6 + round(1e9 * transfer) + r * 10**6,
               begin + 9 * 10**7)
      for tag, time in zip((tags[0], STEP_VALUE, *tags[1:]), (times[0], k, *times[1:]),
                           strict=True):
        marks.record(plan.program, r, tag, time)
  return SimpleNamespace(step=jnp.int32(len(transfers)))


def test_it_probes_when_transfers_have_become_slow_and_rests_then(monkeypatch, caplog):
  paced = Stamped()
  paced.number = marks.next_program()
  marks.tell_places(paced.number, [device.id for device in jax.devices()[:4]])
  paced.plan = dataclasses.replace(stamps.plan("jit_step", (("all-reduce.1",),), "data", 4),
                                   program=paced.number)
  calls = []

  def probe(directory, **options):
    calls.append((directory, options))
    return _links(np.ones((2, 2)))

  monkeypatch.setattr(on_contention, "probe_links", probe)
  prober = jaxpace.ProbeOnContention("where", paced, every=2, above=1.5, most=2, repeats=3)

  def steps(transfer, number, of=prober):
    return [of.step(_write(paced.plan, [transfer] * 12)) for _ in range(number)]

  assert steps(4e-3, 4) == [None] * 4
  first, second = steps(8e-3, 2)  # every second step only
  assert first is None and second is not None
  assert calls == [("where", {"repeats": 3})] and 2.0 in numbers(caplog.text)
  assert steps(8e-3, 20) == [None] * 20
  assert ([found is not None for found in steps(8e-3, 6)]
          == [False, True, False, False, False, False])
  assert steps(8e-3, 30) == [None] * 30  # two at most
  other = jaxpace.ProbeOnContention(None, paced, every=1, floor=1e-3)
  assert other.step(_write(paced.plan, [90e-3] * 3)) is None
  with pytest.raises(ValueError, match="above=1"):
    jaxpace.ProbeOnContention(None, paced, above=1)
