"""Which line of the calls that led to an operation a report names, and how."""

import os
import sysconfig

import pytest

from jaxpace.observation import source_lines

JAX = ("/opt/base/lib/python3.12/site-packages/jax/_src/lax/parallel.py", 7)
FLAX = ("/usr/lib/python3/dist-packages/flax/linen/linear.py", 287)
TRAINER = ("/venv/lib/python3.12/site-packages/brax/training/gradients.py", 58)
STANDARD = (os.path.join(sysconfig.get_paths()["stdlib"], "contextlib.py"), 81)


@pytest.mark.parametrize(("frames", "shown"), [
    ([JAX, FLAX, ("/home/me/job/models/layer.py", 12), ("/home/me/job/train.py", 3)],
     "models/layer.py:12"),
    ([JAX, FLAX, STANDARD, TRAINER], "flax/linen/linear.py:287"),
    ([JAX, TRAINER], "brax/training/gradients.py:58"), ([JAX], "jax/_src/lax/parallel.py:7"),
    ([JAX, STANDARD], "contextlib.py:81"), ([("/elsewhere/train.py", 9)], "train.py:9"),
    ([("/home/me/job/jaxpace/step/instrument.py", 4), ("/home/me/job/train.py", 3)], "train.py:3"),
    ([], None)])
def test_the_line_named_is_the_innermost_of_the_user_and_its_path_that_of_its_import(
    monkeypatch, frames, shown):
  monkeypatch.setattr("sys.path", ["/home/me", "/home/me/job",
                                   "/venv/lib/python3.12/site-packages"])
  assert source_lines.innermost(frames) == shown
