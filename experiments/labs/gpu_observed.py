r"""What XLA makes of observed steps for eight GPUs, with no GPU there: it compiles, and nothing
runs.

    pip install "jax[cuda13]"      # in an environment of its own: it brings the compiler; a driver is not needed
    python -m experiments.labs.gpu_observed

Compiles transformer steps jitted as a whole for eight H200 of one host, as they are and with the
marks of `jaxpace.observe(step, clock="stream")`, and reads both: whether the collectives are the
same, what runs beside them, and what runs as CUDA graphs. It says nothing of time. Writes
docs/measurements/gpu_observed.json and .md. Takes some minutes.
"""  # noqa: E501

from __future__ import annotations

import collections
import pathlib
import re
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
from absl import app, flags
from jax.sharding import Mesh

from experiments.labs import gpu_compiled, gpu_schedule
from experiments.labs.gpu.observed_steps import Step, transformer
from experiments.lib import measured
from jaxpace.communication.partitioned import collectives, compiling, program
from jaxpace.communication.partitioned.text import CompiledText
from jaxpace.execution import kernels
from jaxpace.execution.native import cuda

_MODULE = "experiments.labs.gpu_observed"
STEPS: dict[str, Callable[[Mesh], Step]] = {
    "data parallel, 4x512": lambda mesh: transformer(mesh, 4, 512, fsdp=False, scan=False),
    "FSDP, scan, remat, 24x1024": lambda mesh: transformer(mesh, 24, 1024, fsdp=True, scan=True),
}
_WORK = frozenset({"fusion", "custom-call", "dot", "convolution", "while", "conditional", "copy",
                   "sort", "scatter"})
_PRODUCT = re.compile(r"gemm|cublas|dot")


def pairs(text: str) -> list[tuple[str, int, int]]:
  """Asynchronous collectives of a scheduled program.

  Returns:
    For each pair, in the order of the text: its kind, kernels between its start and its end, and
    how many of them are matrix products. Marks and copies are left out.
  """
  read = CompiledText(text)
  found, last, inside = [], "", {}
  for placed in read.run():
    one = placed.instruction
    if placed.computation != last:
      last, inside = placed.computation, {}
    if one.opcode.endswith("-start"):
      inside[one.name] = [0, 0]
    elif one.opcode.endswith("-done"):
      counts = next((inside.pop(name) for name in one.operands if name in inside), None)
      if counts is not None:
        found.append((one.opcode.removesuffix("-done"), *counts))
    elif one.opcode in _WORK and one.opcode != "copy" and not _own(one):
      for counts in inside.values():
        counts[0] += 1
        counts[1] += bool(_PRODUCT.search(one.name) or "cublas" in one.rest)
  return found


def _own(one: Any) -> bool:
  return "jaxpace" in one.rest or kernels.LANE in one.rest


def _counted(text: str) -> dict[str, int]:
  """Kernels and copies of a program, each once, however often its loop turns."""
  kinds: collections.Counter[str] = collections.Counter()
  for placed in CompiledText(text).run():
    one = placed.instruction
    if _own(one):
      kinds["wait" if "jaxpace_wait" in one.rest else "lane" if kernels.LANE in one.rest
            else "mark"] += 1
    elif one.opcode.removesuffix("-start").removesuffix("-done") == "copy":
      kinds["copy"] += not one.opcode.endswith("-done")
    elif one.opcode in _WORK:
      kinds["kernel"] += 1
  return dict(kinds)


def _compiled(step: Step, name: str, mesh: Mesh,
              marked: bool) -> tuple[str, program.Stamped | None]:
  made: list[program.Stamped | None] = []

  def handler(request: compiling.Request) -> Any:
    ranks = {device: place for place, device in enumerate(request.devices)}
    put = program.ON_STREAM
    made.append(program.stamped(request, lambda: 1, name, ranks, put) if marked else None)
    return request.compile() if made[-1] is None else made[-1].executable

  def function(state: Any, batch: Any) -> Any:
    return step.function(state, batch)

  function.__name__ = re.sub(r"\W+", "_", f"{name}_{'marked' if marked else 'bare'}")
  jitted = jax.jit(function, donate_argnums=0, out_shardings=step.out_shardings)
  with compiling.watching(handler):
    text = jitted.lower(step.state, step.batch).compile().as_text()
  return str(text), made[-1]


def row(name: str, step: Step, mesh: Mesh, folder: pathlib.Path) -> dict[str, Any]:
  """A step without marks and with them, side by side."""
  figures: dict[str, Any] = {"step": name}
  texts = {}
  for marked in (False, True):
    began = time.monotonic()
    text, made = _compiled(step, name, mesh, marked)
    texts[marked] = text
    arm = "marked" if marked else "bare"
    seen = pairs(text)
    module = "jit_" + re.sub(r"\W+", "_", f"{name}_{arm}")
    sequence = _sequence(folder, module)
    found = collectives.found_in(text, mesh.size)
    figures[arm] = {
        "seconds": round(time.monotonic() - began, 1), "collectives": dict(collections.Counter(
            one.kind for one in found)),
        "pairs": len(seen), "beside": sum(kernels_ for _, kernels_, _ in seen),
        "products_beside": sum(products for _, _, products in seen), "counted": _counted(text),
        "graphs": sum(one.kind == "kCommandBuffer" for one in sequence),
        "in_graphs": sum(one.in_graph for one in sequence),
        "marks_in_graphs": sum(one.in_graph and "jaxpace_mark" in one.name for one in sequence),
        "marks_outside": sum(not one.in_graph and "jaxpace_mark" in one.name for one in sequence)}
    if made is not None:
      observed = made.program
      figures |= {"differences": list(made.differences), "notices": list(observed.notices),
                  "unstamped": len(observed.unstamped), "marks_a_step": observed.marks,
                  "timed": len(observed.collectives)}
  figures["changed"] = gpu_schedule.changed(texts[False], texts[True])
  return figures


def _sequence(folder: pathlib.Path, module: str) -> list[gpu_schedule.Thunk]:
  files = sorted(folder.glob(f"*{module}.thunk_sequence_after_thunk_passes.txt")) or sorted(
      folder.glob(f"*{module}.thunk_sequence.txt"))
  return gpu_schedule.sequence(files[-1].read_text()) if files else []


def measure(mesh: Mesh, folder: pathlib.Path) -> list[dict[str, Any]]:
  """All steps.

  Raises:
    SystemExit: the library that marks on GPUs need was not built.
  """
  if reason := cuda.unavailable():
    raise SystemExit(reason)
  rows = []
  for name, make in STEPS.items():
    if flags.FLAGS.only and flags.FLAGS.only not in name:
      continue
    print(f"  observed: {name}", file=sys.stderr, flush=True)
    rows.append(row(name, make(mesh), mesh, folder))
  return rows


HEADER = ["observed step", "collectives", "timed", "marks a step", "in the program",
          "of them in CUDA graphs", "other kernels added", "copies added", "asynchronous pairs",
          "kernels beside them", "products beside them", "CUDA graphs",
          "kernels that calculate, changed", "collectives that differ", "compiled in"]


def cells(one: dict[str, Any]) -> list[Any]:
  """A row of the table of `HEADER`."""
  bare, marked = one["bare"], one["marked"]
  before, after = bare["counted"], marked["counted"]
  both = lambda key: f"{bare[key]}, {marked[key]}"  # noqa: E731
  return [one["step"],
          ", ".join(f"{count} {kind}" for kind, count in sorted(marked["collectives"].items())),
          one["timed"], one["marks_a_step"], after.get("mark", 0),
          f"{marked['marks_in_graphs']} of {marked['marks_in_graphs'] + marked['marks_outside']}",
          after.get("kernel", 0) - before.get("kernel", 0),
          after.get("copy", 0) - before.get("copy", 0), both("pairs"), both("beside"),
          both("products_beside"), both("graphs"), one["changed"],
          "; ".join(one["differences"]) or "none", f"{bare['seconds']} s, {marked['seconds']} s"]


def wrong(rows: list[dict[str, Any]]) -> list[str]:
  """Steps whose collectives differ, or whose marks are not all there."""
  return [one["step"] for one in rows if one["differences"] or one["unstamped"]
          or one["bare"]["collectives"] != one["marked"]["collectives"]]


def define_flags() -> None:
  flags.DEFINE_string("only", "", "Compiles only the steps whose names have this in them.")
  flags.DEFINE_string("out", "docs/measurements/gpu_observed.json",
                      "File the figures are written to.")


def _lines(figures: dict[str, Any]) -> list[str]:
  lines = measured.introduction("Observed steps, compiled for eight GPUs", figures)
  lines += ["Plain `jit`, compiled for eight H200 of one host by XLA's GPU compiler as it is and "
            "with the marks of `jaxpace.observe(step, clock=\"stream\")`; nothing ran, and nothing "
            "here is a time but that of compiling. Where two numbers stand, the first is of the "
            "step as it was. Kernels of a loop count once; marks a step count every turn. Beside: "
            "scheduled between start and end of an asynchronous collective, marks and copies left "
            "out. A step whose collectives differ runs without marks, unless `different` says "
            "otherwise.", ""]
  lines += measured.table(HEADER, [cells(one) for one in figures["steps"]])
  lines += [f"- {one['step']}: {notice}" for one in figures["steps"] for notice in one["notices"]]
  return lines


def main(_: list[str]) -> None:
  with gpu_compiled.dumped(_MODULE) as folder:
    figures = {**measured.circumstances(_MODULE),
               "steps": measure(gpu_compiled.mesh_of_gpus(), folder)}
  measured.write(figures, _lines(figures), pathlib.Path(flags.FLAGS.out))
  if wrong(figures["steps"]):
    raise SystemExit(f"Not as it should be: {'; '.join(wrong(figures['steps']))}.")


if __name__ == "__main__":
  define_flags()
  app.run(main)
