"""The browser that experiments and tests look at pages in: where it is, and how it starts without a
screen."""

from __future__ import annotations

import shutil

FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync")


def find() -> str | None:
  """Returns the program's path; None where there is none."""
  return (shutil.which("chromium") or shutil.which("chromium-browser")
          or shutil.which("google-chrome"))
