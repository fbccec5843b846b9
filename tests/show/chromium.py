"""The browser that tests look at pages in: where it is, and how it starts without a screen."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync")


def find() -> str | None:
  """Returns the program's path; None where there is none."""
  return (shutil.which("chromium") or shutil.which("chromium-browser")
          or shutil.which("google-chrome"))


def needed() -> list[pytest.MarkDecorator]:
  """The marks of a file of tests that open a browser."""
  return [pytest.mark.long,
          pytest.mark.skipif(find() is None, reason="needs Chromium (on Debian: apt install "
                             "chromium)"),
          pytest.mark.skipif(importlib.util.find_spec("playwright") is None,
                             reason="needs playwright (extra 'test')")]


@contextlib.contextmanager
def opened() -> Iterator[Any]:
  """A browser without a window."""
  from playwright.sync_api import sync_playwright
  with sync_playwright() as playwright:
    browser = playwright.chromium.launch(executable_path=find(), args=list(FLAGS))
    yield browser
    browser.close()
