"""The Python stack of the loop's thread, read by another thread."""

from __future__ import annotations

import os
import sys
import traceback
from types import FrameType

_JAX = f"{os.sep}jax{os.sep}_src{os.sep}"
"""In the path of every file of JAX itself, wherever it is installed."""


def of_thread(identity: int, characters: int) -> str:
  """Returns a thread's Python stack, outermost call first; where it is too long, its innermost
  calls.

  Args:
    identity: of the thread, as `threading.get_ident` gives it.
    characters: longest text to return.
  """
  frame = sys._current_frames().get(identity)
  if frame is None:
    return "the thread has ended"
  text = "".join(traceback.format_list([call for call in traceback.extract_stack(frame)
                                        # the import system, runpy
                                        if not call.filename.startswith("<frozen ")]))
  if len(text) > characters:
    text = "...\n" + text[len(text) - characters + 4:]
  return text.rstrip("\n")


def compiles(identity: int) -> bool:
  """Whether a thread is in the middle of tracing or compiling for JAX, as its stack tells.

  A running program shows no frames of JAX below the call, or those of a wait; a program in the
  making shows those of its compiler or its tracer.
  """
  frame: FrameType | None = sys._current_frames().get(identity)
  while frame is not None:
    code = frame.f_code
    if _JAX in code.co_filename and ("compile" in code.co_name or "trace_to_jaxpr" in code.co_name):
      return True
    frame = frame.f_back
  return False
