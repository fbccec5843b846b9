"""Who is late, from made-up words."""

import hypothesis
import hypothesis.strategies as st

from jaxpace.hang import verdict
from jaxpace.hang.heartbeat import Heartbeat, LastHeartbeat, hear
from tests.lib.said import numbers

SILENCE = 1.2


def heartbeat(process, entered, completed, phase="step", *, age=5.0, excused=1e9, number=1,
              waiting=True, stack=""):
  return Heartbeat(process, f"h{process}", 100 + process, number, entered, completed, phase, age,
                   excused, waiting, stack)


def last_heartbeats(*words, silence=None):
  silence = silence or {}
  return {one.process: LastHeartbeat(one, silence.get(one.process, 0.1)) for one in words}


def judged(known, processes=2):
  return verdict.judge(known, processes, SILENCE, 0, 5.0)


def test_the_process_that_has_not_called_the_step_is_late_and_its_stack_is_told():
  known = last_heartbeats(heartbeat(0, 8, 7), heartbeat(1, 7, 7, "data", stack="File x\n  get()"),
                          heartbeat(2, 8, 7))
  found = judged(known, 3)
  assert ([(p.process, p.state, p.last_step, p.phase) for p in found.late]
          == [(1, "outside", 7, "data")])
  assert found.arrived == (0, 2) and found.step == 8
  assert [1, 1, 101, 5.1] in [numbers(line)[:4] for line in found.text().splitlines()]
  assert "    |   get()" in found.text()
  assert "have called it: processes 0, 2" in found.text()


def test_loops_that_ran_ahead_by_different_numbers_of_steps_have_all_arrived():
  found = judged(last_heartbeats(heartbeat(0, 12, 7), heartbeat(1, 9, 7),
                                 heartbeat(2, 7, 7, "between steps")), 3)
  assert [p.process for p in found.late] == [2] and found.arrived == (0, 1)


def test_what_only_counts_calls_is_corrected_by_the_one_that_has_not_called():
  found = judged(last_heartbeats(heartbeat(0, 132, 131), heartbeat(1, 100, 100, "data"),
                                 heartbeat(2, 132, 131)), 3)
  assert found.step == 101 and [(p.process, p.last_step) for p in found.late] == [(1, 100)]
  found = judged(last_heartbeats(heartbeat(0, 132, 131), heartbeat(1, 90, 90), silence={1: 3.0}))
  assert found.step == 132  # an old word says nothing of what was called since


def test_a_silent_process_is_late_wherever_it_was():
  found = judged(last_heartbeats(heartbeat(0, 8, 7), heartbeat(1, 8, 7), silence={1: 4.0}))
  assert ([(p.process, p.state, p.seconds, p.last_step) for p in found.late]
          == [(1, "silent", 4.0, 8)])
  found = judged(last_heartbeats(heartbeat(0, 8, 7), heartbeat(1, 4, 4), silence={1: 4.0}))
  assert found.late[0].last_step == 7  # its last word is old; step 7 has completed, so it was in it
  assert found.late[0].seconds == 4.0 and 1 in numbers(found.late[0].sentence())


def test_where_all_are_inside_the_step_nobody_is_blamed():
  # One that missed a heartbeat is not silent yet.
  found = judged(last_heartbeats(heartbeat(0, 8, 7), heartbeat(1, 8, 7), silence={1: 0.9}))
  assert not found.late and "All 2 processes have called it" in found.text()


def test_absent_and_left_are_told_apart():
  known = last_heartbeats(heartbeat(0, 8, 7), heartbeat(1, 7, 7, "between steps"))
  known[1] = known[1]._replace(left=True)
  found = judged(known, 3)
  assert [(p.process, p.state) for p in found.late] == [(1, "left"), (2, "absent")]
  assert found.late[0].last_step == 7 and {1, 7, 2} <= set(numbers(found.text()))


def test_an_excuse_counts_only_from_those_that_are_heard():
  busy = heartbeat(1, 7, 7, "checkpoint", excused=0.0)
  assert verdict.excused(last_heartbeats(heartbeat(0, 8, 7), busy), SILENCE) == 0
  assert verdict.excused(last_heartbeats(heartbeat(0, 8, 7), busy, silence={1: 3.0}), SILENCE) > 1e8
  after = last_heartbeats(heartbeat(0, 8, 7), heartbeat(1, 7, 7, excused=2.0), silence={1: 0.5})
  assert verdict.excused(after, SILENCE) == 2.5


def test_one_process_speaks_the_lowest_that_waits_too():
  known = last_heartbeats(heartbeat(0, 8, 7), heartbeat(1, 8, 7), heartbeat(2, 8, 7))
  assert verdict.speaker(known, SILENCE, 2) == 0
  known[0] = known[0]._replace(silence=9.0)
  assert verdict.speaker(known, SILENCE, 2) == 1
  known[1] = known[1]._replace(heartbeat=known[1].heartbeat._replace(waiting=False))
  assert verdict.speaker(known, SILENCE, 2) == 2


def test_without_the_store_process_0_is_named_with_what_was_heard_of_it():
  own = LastHeartbeat(heartbeat(2, 8, 7), 0.0)
  found = verdict.without_service({0: LastHeartbeat(heartbeat(0, 7, 7, "data"), 6.0)}, own, 5.0)
  assert [(p.process, p.state, p.last_step) for p in found.late] == [(0, "service", 7)]
  assert "coordination service, which lives in it" in found.text()
  (unheard,) = verdict.without_service({}, own, 5.0).late
  assert (unheard.process, unheard.state, unheard.last_step) == (0, "service", 7)


def test_silence_is_counted_from_the_last_new_word_and_a_word_taken_back_means_left():
  heard = hear({}, [heartbeat(0, 1, 0, number=1), heartbeat(1, 1, 0, number=1)], 10.0)
  heard = hear(heard, [heartbeat(0, 1, 0, number=2), heartbeat(1, 1, 0, number=1)], 11.0)
  assert [since for _, since, _ in heard.values()] == [11.0, 10.0] and not heard[1][2]
  heard = hear(heard, [heartbeat(0, 1, 0, number=3)], 13.0)
  assert heard[1][1:] == (10.0, True)
  # restarted
  again = heartbeat(1, 0, 0, number=1)._replace(pid=7)
  heard = hear(heard, [heartbeat(0, 1, 0, number=3), again], 14.0)
  assert heard[1] == (again, 14.0, False)


@hypothesis.given(st.integers(0, 9999), st.integers(0), st.text(max_size=50), st.floats(0, 1e9),
                  st.booleans())
def test_words_survive_the_store(process, entered, text, age, waiting):
  one = heartbeat(process, entered, 0, text, age=age, waiting=waiting, stack=text)
  assert Heartbeat.from_text(one.to_text()) == one


@hypothesis.given(st.text(max_size=80))
def test_anything_else_in_the_store_is_no_word(text):
  assert Heartbeat.from_text(text) is None
  assert Heartbeat.from_text('["a", 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]') is None


def test_what_heartbeats_cannot_tell_apart_is_named_together():
  own = heartbeat(0, 8, 7)
  left = last_heartbeats(own, heartbeat(1, 7, 7)._replace(left=True))
  left[1] = left[1]._replace(left=True)
  called = judged(last_heartbeats(own, heartbeat(1, 8, 7))).text()
  silent = judged(last_heartbeats(own, heartbeat(1, 8, 7), silence={1: 30.0})).text()
  ended = judged(left).text()
  waits = judged(last_heartbeats(own, heartbeat(1, 7, 7, "data", age=30.0))).text()
  assert all(words in silent for words in ("stands still", "swapped out", "has ended",
                                           "can't be reached", "native code"))
  assert all(words in called for words in ("device", "network", "function of the host",
                                           "takes this long"))
  assert "its loop has ended, or an error left it" in ended
  # Since when it has waited for data, nobody knows: only since when no step has completed.
  assert "is waiting for data, and has completed no step for 30.1 s" in waits
  others = (judged(last_heartbeats(own)), verdict.without_service({}, LastHeartbeat(own, 0.0), 5.0))
  for text in (called, silent, ended, waits, *(found.text() for found in others)):
    assert "hangs" not in text and "is late" not in text
