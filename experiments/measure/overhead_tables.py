"""The figures of `experiments.measure.overhead` as Markdown."""

from __future__ import annotations

from typing import Any

from experiments.lib import measured

_PIECES = {
    "stamp_and_hold_native_us": "native stamp, with the value it holds back",
    "stamp_and_hold_callback_us": "callback stamp, with the value it holds back",
    "upkeep_us":
    "a whole step\'s stamps, ring and arrivals (native), beside a bare step of nothing but its "
    "all-reduce",
    "record_us": "`Recorder.record` on the training thread, a step",
}


def lines(figures: dict[str, Any]) -> list[str]:
  """Renders what has been measured; parts that have not been are left out."""
  text = measured.introduction("What being measured costs", figures)
  text += ["Alternatives take turns in one run, in an order drawn anew each round; differences and "
           "ratios are of the same round. `bare again` is the A/A control: the same bare step a "
           "second time.", ""]
  if "alone" in figures:
    text += ["## Each piece alone", "", _about(figures, "alone"), ""]
    text += measured.table(["piece", "µs"],
                           [[name, _interval(figures["alone"][key])]
                            for key, name in _PIECES.items()])
  if "steps" in figures:
    text += ["## Whole steps, one device, recording on, no pacer, arrivals not "
             "shared", "", _about(figures, "steps"), ""]
    text += ["The allocator keeps its memory here (`experiments.lib.measured.keep_memory`). Left "
             "to itself, glibc's gives the temporary buffers of a step back to the system and "
             "takes them anew in some starts of a program, bare or instrumented: 2,000 page faults "
             "and 3 to 7 ms a step.", ""]
    text += measured.table(
        ["bare step, ms", "bare again, %", "native, %", "native, µs a step",
         "native, `phases=False`, %", "µs a step", "callback, %", "callback, µs a step",
         "page faults a step: bare, native"],
        [[_interval(entry["bare_ms"]), *(_interval(entry[key]) for key in (
            "bare_again_percent", "native_percent", "native_extra_us", "native_no_phases_percent",
            "native_no_phases_extra_us", "callback_percent", "callback_extra_us")), _faults(entry)]
         for entry in figures["steps"].values()])
  if "where" in figures:
    text += _where(figures["where"], _about(figures, "where"))
  if "dispatch" in figures:
    text += ["## Dispatch", "",
             "How long the call of a step holds the training thread. The three take turns, call by "
             "call. (Measured one after the other, as they were before, a bare step took 51 ms and "
             "one with callbacks 34: that compares the machine at two times, and says nothing of "
             "callbacks.)",
             _about(figures, "dispatch"), ""]
    text += measured.table(["step", "call returns after, ms", "step takes, ms", "above bare, %"],
                           [[name, _interval(entry["call_ms"]), _interval(entry["step_ms"]),
                             _interval(entry["step_percent"])]
                            for name, entry in figures["dispatch"].items()])
  if "processes" in figures:
    text += ["## Several gloo processes, native clock", "",
             "The difference between `share` and `no sharing` is what the ranks\' arrivals cost in "
             "the all-reduce.", _about(figures, "processes"),
             ""]
    text += measured.table(
        ["processes", "bare step, ms", "bare again, µs", "no sharing, µs", "share, µs"],
        [[count, *(_interval(entry[key]) for key in
                   ("bare_ms", "bare_again_extra_us", "share_none_extra_us", "share_extra_us"))]
         for count, entry in figures["processes"].items()])
  return text


def _about(figures: dict[str, Any], part: str) -> str:
  """What the intervals of a part are, and of another run than the page's, which."""
  made = figures.get("parts", {}).get(part, {})
  run = (
      f" Of a run of its own: `{made['command']}`, {made['date']}, load average {made['load']:g}."
      if made else "")
  return measured.about_intervals(made.get("intervals"), made.get("rounds")) + run


def _where(sizes: dict[str, Any], about: str) -> list[str]:
  text = ["## Where it goes", "", about, "",
          "One device, native clock, arrivals not shared; each arm adds something to the one "
          "before. More wall time than CPU time is overlap lost: a kernel waits while the other "
          "core is idle. The recorder's threads run beside all arms alike, so no row holds them.",
          ""]
  for entry in sizes.values():
    title = f"arm, bare step {_interval(entry['bare_ms'])} ms"
    text += measured.table([title, "wall, µs a step", "%", "CPU, µs a step"],
                           [[name,
                             *(_interval(arm[key]) for key in ("wall_us", "percent", "cpu_us"))]
                            for name, arm in entry["arms"].items()])
  threads = [f"{name} {us:g}" for entry in sizes.values()
             for name, us in entry["threads_us_a_second"].items()]
  return [*text, f"CPU time of one recorder's threads, µs in a second: {', '.join(threads)}.", ""]


def _faults(entry: dict[str, Any]) -> str | None:
  faults = entry.get("faults")
  return faults and f"{faults['bare']:.3g}, {faults['native']:.3g}"


def _interval(values: list[float]) -> str:
  value, low, high = values
  return f"{value:.3g} [{low:.3g}, {high:.3g}]"
