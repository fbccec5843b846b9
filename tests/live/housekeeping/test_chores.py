"""What becomes of the errors of a pause."""

import logging

import pytest

from jaxpace.live.housekeeping import keeper as chores


def chore(every=10, hook=lambda: None):
  return chores.Chore("it", hook, every)


def test_an_error_is_told_once_a_kind_and_counted(caplog):
  errors, raised = (chores.Errors(),
                    iter([OSError("disk full"), OSError("again"), ValueError("other"),
                          OSError("more")]))

  def hook():
    raise next(raised)

  one = chore(1, hook)
  with caplog.at_level(logging.WARNING):
    for step in range(1, 5):
      chores.run(one, step, errors)
  assert errors.counts == {"it": 4}
  assert [record.message.split(". Training")[0] for record in caplog.records] == [
      "Housekeeping hook 'it' raised OSError at step 1: disk full",
      "Housekeeping hook 'it' raised ValueError at step 3: other"]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_what_is_meant_to_end_the_program_passes(kind):
  def hook():
    raise kind

  with pytest.raises(kind):
    chores.run(chore(hook=hook), 1, chores.Errors())
