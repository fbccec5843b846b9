"""The probe on forced devices, and its document."""

import json

import jax
import numpy as np
import pytest

import jaxpace
from jaxpace.cli.main import main
from jaxpace.diagnose import links
from jaxpace.live import probe


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
  probe.write_links(tmp_path / "file", links.ProbedLinks(
      ("a", "b"), 1024, np.ones((2, 2)), np.ones((2, 2)), (), "", 1.0, 5))
  assert "not recorded" in caplog.text


@pytest.mark.parametrize("text", ["", "[]", "{", '{"schema": 9}',
                                  '{"schema": 1, "hosts": ["a"], "seconds": [[1, 2]]}',
                                  '{"schema": 1, "hosts": 3, "seconds": null, '
                                  '"median_seconds": null}'])
def test_a_document_that_is_none(tmp_path, text):
  (tmp_path / links.FILE).write_text(text)
  assert links.read_links(tmp_path) is None
