"""The whole loop on the device: no host callback and no copy to the host within the steps, by trace
and by program."""

from __future__ import annotations

import re

from experiments.labs.gpu import transformer
from experiments.labs.gpu.bench import Bench
from experiments.labs.gpu.loops import Loop, Program, instrumented, marked
from experiments.labs.gpu.traced import Seen, trace

_FROM_HOST_SIDE = re.compile(
    r'custom_call_target="[^"]*callback[^"]*"|'
    r'= [^=]* (?:infeed|outfeed|send|recv|send-done|recv-done)\(|S\(5\)')


def host_operations(text: str) -> list[str]:
  """What of a compiled program's text goes through the host: callbacks, feeds, sends, host memory
  (S(5))."""
  return sorted({found.group(0)[-60:] for found in _FROM_HOST_SIDE.finditer(text)})


def run(bench: Bench) -> None:
  """Section whole_loop. Bare steps are looked at first: what the runtime does for them is not
  jaxpace's doing."""
  size = transformer.SIZES["2ms" if bench.size != "tiny" else "tiny"]
  steps = bench.times(20, 20, 3)
  bare: Seen | None = None
  for arm in ("bare", *instrumented(bench), *marked(bench)):
    program = Program(bench, size, arm)
    ways = host_operations(program.compile())
    bench.holds(f"{arm}: nothing in the compiled step goes through the host", not ways,
                ", ".join(ways) or "nothing")
    seen = _traced(Loop(program), steps)
    _report(bench, arm, seen, bare, steps)
    bare = bare or seen
  assert bare is not None
  _controls(bench, size, steps, bare)


def _traced(loop: Loop, steps: int) -> Seen:
  return trace(lambda: [loop.call() for _ in range(steps)])


def _report(bench: Bench, arm: str, seen: Seen, bare: Seen | None, steps: int) -> None:
  if bench.platform != "cpu":
    bench.holds(f"{arm}: the trace shows the GPU's kernels", bool(seen.kernels),
                f"{len(seen.kernels)} names")
  copies, known = sum(seen.to_host.values()), sum(bare.to_host.values()) if bare else 0
  callbacks = sorted({*seen.callbacks} - ({*bare.callbacks} if bare else set()))
  if bare is None:
    bench.figure(f"bare: copies to the host within {steps} steps", str(seen.to_host or "none"))
    bench.figure(f"bare: what is called callback within {steps} steps",
                 ", ".join(seen.callbacks) or "none")
  else:
    bench.holds(f"{arm}: no copy to the host within {steps} steps", copies <= known,
                f"{seen.to_host or 'none'}, bare {bare.to_host or 'none'}")
    bench.holds(f"{arm}: no host callback within {steps} steps", not callbacks,
                ", ".join(callbacks) or "none")
  total, own = (sum(times for name, (_, times) in seen.kernels.items() if mine in name)
                for mine in ("", "jaxpace"))
  count, ours = (sum(n for name, (n, _) in seen.kernels.items() if mine in name)
                 for mine in ("", "jaxpace"))
  bench.figure(f"{arm}: kernels and copies on the streams, a step", count / steps)
  bench.figure(f"{arm}: of them jaxpace's by name", ours / steps)
  bench.figure(f"{arm}: time in all of them, a step", total * 1e-3 / steps, "us")
  bench.figure(f"{arm}: time in jaxpace's by name, a step", own * 1e-3 / steps, "us")
  bench.figure(f"{arm}: CUDA graphs launched, a step", seen.graphs / steps)
  if bare is not None:
    bench.holds(f"{arm}: the step is not cut into more CUDA graphs", seen.graphs <= bare.graphs,
                f"{seen.graphs}, bare {bare.graphs}")
  bench.raw[arm] = {name: [n, round(times)] for name, (n, times) in sorted(
      seen.kernels.items(), key=lambda item: -item[1][1])[:40]}


def _controls(bench: Bench, size: transformer.Size, steps: int, bare: Seen) -> None:
  """That this way of looking finds what it looks for, where it is known to be."""
  if bench.platform != "cpu":
    loop = Loop(Program(bench, size, "bare"))
    seen = trace(lambda: [float(loop.call()) for _ in range(steps)])
    bench.holds("control: a loss fetched each step is seen as copies to the host",
                sum(seen.to_host.values()) >= sum(bare.to_host.values()) + steps,
                str(seen.to_host or "none"))
  program = Program(bench, size, "stamped", "callback")
  ways = host_operations(program.compile())
  bench.holds("control: host callbacks are seen in the compiled step", bool(ways),
              ", ".join(ways) or "nothing")
  seen = _traced(Loop(program), steps)
  found = sorted({*seen.callbacks} - {*bare.callbacks})
  bench.holds("control: host callbacks are seen in a trace", bool(found),
              ", ".join(found)[:300] or "none")
