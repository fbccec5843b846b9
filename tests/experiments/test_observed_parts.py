"""What the measurement of observing's parts makes of its figures."""

from experiments.measure import observed_parts


def test_the_table_has_each_part_and_each_call():
  row = {"case": "data parallel, scan", "marks": 20, "bare_ms": [4.0, 3.9, 4.1],
         "more_us": {name: [10.0 * place, 5.0, 95.0]
                     for place, name in enumerate(observed_parts.ARMS[1:])},
         "calls_us": {"`record()`": [70.9, 8.4]}, "thread_percent": 0.8}
  machine = {"cores": 2, "platform": "here", "jax": "0.10", "python": "3.11"}
  said = observed_parts.table({
      "command": "python", "date": "2026-11-23", "machine": machine, "load_average_at_start": 1.0,
      "devices": 2, "rounds": 3, "real_time": True, "rows": [row]})
  assert "real-time priority" in said
  assert ("| data parallel, scan | 20 | 4.0 ms | +0 [5, 95] | +10 [5, 95] | +20 [5, 95] | "
          "+30 [5, 95] | +40 [5, 95] | 0.80 % of a core |") in said
  assert said.splitlines()[-1] == "| data parallel, scan, 4.0 ms | `record()` | 70.9 | 8.4 |"


def test_calls_are_timed_behind_a_step_and_once_more():
  steps, calls = [], []
  found = observed_parts.between(lambda: steps.append(len(calls)),
                                 {"one": lambda: calls.append("one")}, times=3)
  assert steps == [0, 2, 4] and len(calls) == 6
  assert all(value >= 0 for value in found["one"]) and len(found["one"]) == 2
