"""The writer's thread: when it writes."""

import types

from jaxpace.record import writer
from jaxpace.runs import rundir


def test_what_the_first_guess_takes_does_not_put_the_second_off(tmp_path, monkeypatch):
  now = 0.0

  def clock():
    return now

  def guess():
    nonlocal now
    now += 1.0

  monkeypatch.setattr(writer, "time", types.SimpleNamespace(monotonic=clock, thread_time=clock))
  intake = types.SimpleNamespace(undecided=True, guess=guess)
  written = writer.Writer(tmp_path, rundir.RunIdentity("run", 0, 0), 0, {}, None, None)
  written._write_guess(intake)
  assert written._guess_at == writer._FIRST_SECONDS
  written._write_guess(intake)
  assert written._guess_at == 1.0 + writer._GUESS_PART
  written.release()
