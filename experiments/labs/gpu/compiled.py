"""What instrumenting adds to the compiled step: operations of the program, kernels and copies of
XLA's sequence."""

from __future__ import annotations

import collections
import glob
import os
import re

from experiments.labs import gpu_schedule
from experiments.labs.gpu import transformer
from experiments.labs.gpu.bench import Bench
from experiments.labs.gpu.loops import Program, instrumented
from experiments.lib import hlo

_OPERATION = re.compile(r"^\s*(?:ROOT )?%?[\w.\-]+ = .*? ([a-z][a-z0-9\-]*)\(", re.MULTILINE)


def operations(text: str) -> collections.Counter[str]:
  """Operations of a compiled program's entry computation, by kind."""
  entry = text[text.index("ENTRY "):] if "ENTRY " in text else text
  return collections.Counter(match.group(1)
                             for match in _OPERATION.finditer(entry[:entry.find("\n}")]))


def thunks(text: str) -> collections.Counter[str]:
  """XLA's sequence of thunks, as it dumps it, by kind; kernels of jaxpace apart."""
  return collections.Counter(f"{thunk.kind} of jaxpace" if "jaxpace" in thunk.name else thunk.kind
                             for thunk in gpu_schedule.sequence(text))


def outside_graphs(text: str) -> tuple[int, int]:
  """Command buffers in a sequence of thunks, and thunks of jaxpace that are in none of them."""
  found = gpu_schedule.sequence(text)
  return (sum(thunk.kind == "kCommandBuffer" for thunk in found),
          sum("jaxpace" in thunk.name and not thunk.in_graph for thunk in found))


def dumped() -> str | None:
  """The folder that XLA_FLAGS has XLA dump to."""
  match = re.search(r"--xla_dump_to=(\S+)", os.environ.get("XLA_FLAGS", ""))
  return match.group(1) if match else None


def _newest_sequence(folder: str, before: set[str]) -> str:
  """The text of the longest sequence that has been dumped since, the final one where there are
  several."""
  new = [path for path in glob.glob(os.path.join(folder, "*thunk_sequence*")) if path not in before]
  final = [path for path in new if "after_thunk_passes" in path] or new
  texts = []
  for path in final:
    with open(path) as file:
      texts.append(file.read())
  return max(texts, key=len, default="")


def run(bench: Bench) -> None:
  """Section compiled."""
  size = transformer.SIZES["2ms" if bench.size != "tiny" else "tiny"]
  folder = dumped()
  programs: dict[str, collections.Counter[str]] = {}
  sequences: dict[str, collections.Counter[str]] = {}
  texts: dict[str, str] = {}
  for arm in ("bare", *instrumented(bench)):
    before = set(glob.glob(os.path.join(folder, "*"))) if folder else set()
    texts[arm] = Program(bench, size, arm).compile()
    programs[arm] = operations(texts[arm])
    if folder:
      sequence = _newest_sequence(folder, before)
      sequences[arm] = thunks(sequence)
      buffers, outside = outside_graphs(sequence)
      bench.figure(f"{arm}: command buffers", buffers)
      if buffers and arm != "bare":
        bench.holds(f"{arm}: all kernels of jaxpace are in command buffers", not outside,
                    f"{outside} are not")
  for what, selected in (("operations", programs), ("thunks", sequences)):
    if not any(selected.values()):
      bench.note(f"No {what} could be read of what XLA dumped.")
      continue
    for arm, kinds in selected.items():
      bench.figure(f"{arm}: {what}", sum(kinds.values()))
      added = {kind: kinds[kind] - selected["bare"][kind]
               for kind in sorted({*kinds, *selected["bare"]})
               if kinds[kind] != selected["bare"][kind]}
      if arm != "bare":
        bench.figure(f"{arm}: {what} beyond bare",
                     ", ".join(f"{n:+d} {kind}" for kind, n in added.items()) or "none")
  for arm in instrumented(bench):
    compared = hlo.compare(texts["bare"], texts[arm])
    bench.holds(f"{arm}: the step's collectives are the bare one's, one operand more at most",
                compared.same_but_for(1),
                f"{len(hlo.collectives(texts['bare']))} bare, {compared.added} joined")
