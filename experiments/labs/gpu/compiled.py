r"""What XLA makes of steps for eight GPUs, with no GPU there: it compiles, and nothing runs.

    pip install "jax[cuda13]"      # in an environment of its own; it brings the compiler, a driver is not needed
    python -m experiments.labs.gpu.compiled

Compiles steps for eight H200 of one host. Steps jitted as a whole get timestamps as under `jaxpace
run`: each collective must have its two, and all else stay. Instrumented steps are read in the order
of their schedule, beside the bare step: what comes to them, whether timestamps stand where they
must, whether collectives are the same and start as early. It says nothing of time. Adds to --out
what this jax makes of them; takes some minutes.
"""  # noqa: E501

from __future__ import annotations

import collections
import json
import os
import pathlib
import re
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jax.sharding import Mesh, PartitionSpec

import jaxpace
from experiments.labs.gpu import transformer
from experiments.labs.gpu.compiled_steps import OBSERVED, RANKS, gpus, placed
from experiments.labs.gpu.whole_loop import host_operations
from experiments.lib import measured
from jaxpace.core.observed import KINDS
from jaxpace.observation.clocks.native.library import MARK
from jaxpace.observation.partitioned import collectives, gpu_thunks, wire

P = PartitionSpec
_MODULE = "experiments.labs.gpu.compiled"

PACERS: dict[str, Callable[[], Any]] = {
    "recording": lambda: None,
    "early": jaxpace.pace_early_ranks,
    "guarded": lambda: jaxpace.guard(jaxpace.pace_early_ranks()),
    "chain": lambda: jaxpace.chain(jaxpace.guard(jaxpace.pace_early_ranks()),
                                   jaxpace.interleave_jobs()),
}


def _without(thunks: Sequence[bytes]) -> list[bytes]:
  """Thunks without timestamps, in the lists in them, too."""
  def in_list(sequence: bytes) -> bytes:
    inner = _without(wire.every(wire.read(sequence), 1))
    return wire.written([wire.text(1, thunk) for thunk in inner])

  kept = []
  for thunk in thunks:
    parts = wire.read(thunk)
    if not gpu_thunks._name(parts).startswith(MARK):
      for path in gpu_thunks._LISTS:
        parts = wire.changed(parts, path, in_list)
      kept.append(wire.written(parts))
  return kept


def _program(data: bytes) -> tuple[list[bytes], list[wire.Field]]:
  """The thunks of what an executable's `serialize()` returned, and the program's other fields."""
  length, begin = wire.varint(data, 0)
  rest = data[begin + length:]
  inner = (next(filter(gpu_thunks.is_records, gpu_thunks.read_records(rest)))
           if gpu_thunks.is_records(rest) else wire.first(wire.read(rest), 1))
  fields = wire.read(gpu_thunks.read_records(inner)[-1])
  return wire.every(fields, 13), [field for field in fields if field.number != 13]


def observed(name: str) -> dict[str, Any]:
  """A step with timestamps, beside what it was."""
  step = OBSERVED[name]()
  executable = jax.jit(step.function, donate_argnums=0, out_shardings=step.out_shardings).lower(
      step.state, step.batch).compile().runtime_executable()
  module = bytes(executable.hlo_modules()[0].as_serialized_hlo_module_proto())
  found = collectives.found_in(collectives.Program(module), RANKS)
  before = bytes(executable.serialize())
  began = time.monotonic()
  after, tags = gpu_thunks.timestamped(before, 1, {one.name for one in found})
  taken = time.monotonic() - began
  (was, others), (now, others_now) = _program(before), _program(after)
  marked = re.findall(rb"jaxpace_mark\.(\d+)", b"".join(now))
  timed = {tag for each in tags.values() for tag in each}
  wrong = [] if _without(now) == was and others == others_now else ["more than timestamps differ"]
  if len(timed) != len(found):
    wrong.append(f"{len(timed)} of {len(found)} collectives have timestamps")
  return {"step": name, "jax": jax.__version__, "problems": wrong,
          "collectives": dict(collections.Counter(one.kind for one in found)),
          "in_loops": sum(bool(one.loops) for one in found),
          "in_branches": sum(one.conditional for one in found),
          "timestamps": len(set(marked)), "bytes": len(before), "seconds": round(taken, 3)}


# Instrumented steps.


_OWN = re.compile(rb"jaxpace_(stamp|delay|hold|note)")
_NO_WORK = {"parameter", "constant", "bitcast", "get-tuple-element", "tuple", "after-all"}


def schedule(module: bytes) -> list[str]:
  """What a compiled program does, in order: "stamp", "delay", "hold" and "note" of jaxpace, "copy",
  "start" and "done" of a collective, "product", "branch", "kernel"."""
  program = collectives.Program(module)
  run = [placed for placed in program.run() if placed.opcode not in _NO_WORK]
  # What is started on another stream goes by the name of its start, and is there already.
  started = {placed.name for placed in run if placed.opcode == "async-start"}
  return [kind for placed in run if placed.opcode == "async-start" or placed.name not in started
          for kind in _kinds(placed, wire.written(placed.instruction)
                             + program._config(placed.instruction))]


def _kinds(placed: collectives.Placed, said: bytes) -> list[str]:
  opcode, name = placed.opcode, placed.name
  if opcode == "custom-call" and (own := _OWN.search(said)):
    return [own[1].decode()]
  if opcode in KINDS:
    return ["start", "done"]
  if opcode.endswith(("-start", "-done")) and not opcode.startswith("copy"):
    return [opcode.rpartition("-")[2]]
  if opcode in ("while", "conditional"):
    return ["branch"]
  if opcode.startswith(("copy", "slice", "dynamic-slice")) or name.startswith("wrapped_slice"):
    return [] if opcode == "copy-done" else ["copy"]
  return ["product" if "gemm" in name or b"cublas" in said or b"nested_gemm" in said
          or opcode == "dot" else "kernel"]


def starts(kinds: Sequence[str]) -> list[float]:
  """For each collective, the share of the step's matrix products that are scheduled before it."""
  products = np.cumsum([kind == "product" for kind in kinds])
  return [round(float(done / max(products[-1], 1)), 4)
          for kind, done in zip(kinds, products, strict=True) if kind == "start"]


def beside(kinds: Sequence[str]) -> int:
  """Kernels and products that are scheduled while a collective is under way."""
  under_way = np.cumsum([(kind == "start") - (kind == "done") for kind in kinds])
  return sum(kind in ("kernel", "product") and bool(running)
             for kind, running in zip(kinds, under_way, strict=True))


def problems(kinds: Sequence[str], delayed: bool, host: Sequence[str] = ()) -> list[str]:
  """What is out of order: a timestamp that would tell a lie, a delay that would come too late.
  `host` is what goes through the host."""
  places = collections.defaultdict(list)
  for place, kind in enumerate(kinds):
    places["stamp" if kind == "delay" else kind].append(place)
  stamps, products, begun, done = (places[kind] for kind in ("stamp", "product", "start", "done"))
  if not (stamps and products and begun):
    return ["no timestamps, no matrix products or no collectives"]
  wrong = {
      "a matrix product is scheduled before the first timestamp": stamps[0] > products[0],
      "the delay is not the first timestamp": delayed and kinds[stamps[0]] != "delay",
      "no timestamp between the last matrix product and the start of the last collective":
          not any(products[-1] < stamp < begun[-1] for stamp in stamps),
      "no timestamp after the last collective but the one at the end of the step":
          not any(stamp > done[-1] for stamp in stamps[:-1]),
      "it has branches or goes to the host": bool(places["branch"] or host)}
  return [what for what, is_so in wrong.items() if is_so]


_COMPUTATION = re.compile(r"^%(?P<name>[\w.\-]+) (?P<body>\(.*?\) -> .*? \{\n.*?^\})",
                          re.MULTILINE | re.DOTALL)
_NAME = re.compile(r"%[\w.\-]+|(?<=[(,] )\w[\w.]*(?=: )|(?<=\()\w[\w.]*(?=: )")
_ARITHMETIC = re.compile(
    r" (?:add|subtract|multiply|divide|dot|reduce|negate|power|rsqrt|exponential|log|tanh)\(")
_METADATA = re.compile(r", metadata=\{[^}]*\}|, backend_config=\{.*?\}(?=\n)")


def kernels(text: str) -> collections.Counter[str]:
  """What each fused kernel of a compiled program's text that calculates computes, without the names
  in it, and how often. With an operand more in a collective, its buffer is cut elsewhere: what only
  cuts, joins or moves is left out."""
  bodies = {match["name"]: _nameless(match["body"]) for match in _COMPUTATION.finditer(text)}
  called = re.findall(r" fusion\(.*?calls=%([\w.\-]+)", text[text.index("\nENTRY "):])
  return collections.Counter(bodies[name] for name in called if _ARITHMETIC.search(bodies[name]))


def _nameless(body: str) -> str:
  names: dict[str, str] = {}
  return _NAME.sub(lambda match: names.setdefault(match[0], f"%{len(names)}"),
                   _METADATA.sub("", body))


def instrumented(size: str) -> list[dict[str, Any]]:
  """A transformer's step, bare and with each pacer."""
  mesh, own = gpus("data"), transformer.SIZES[size]
  step = transformer.train_step(own)
  state = placed(jax.eval_shape(lambda: jax.tree.map(jnp.asarray, transformer.fresh(own))), mesh,
                  P())
  batch = placed(jax.ShapeDtypeStruct((own.batch * RANKS, own.sequence + 1), jnp.int32), mesh,
                  P("data"))
  bare = _compiled(step, (state, batch), (P(), P("data")), P(), mesh)
  rows = []
  for pacer, make in PACERS.items():
    paced, spec = jaxpace.instrument(step, "data", make(), clock="stream"), jaxpace.spec(mesh)
    one = _compiled(paced, (paced.abstract(mesh), state, batch), (spec, P(), P("data")),
                    (spec, P()), mesh)
    rows.append(_beside(f"{size} {pacer}", bare, one, pacer != "recording"))
  return rows


def _compiled(step: Callable[..., Any], arguments: tuple[Any, ...], specs: Any, results: Any,
              mesh: Mesh) -> tuple[list[str], collections.Counter[str], int, list[str]]:
  """(its schedule, its kernels, bytes in its collectives, what goes through the host)."""
  mapped = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=results, check_vma=False)
  compiled = jax.jit(mapped, donate_argnums=tuple(range(len(arguments) - 1))).lower(
      *arguments).compile()
  module = bytes(compiled.runtime_executable().hlo_modules()[0].as_serialized_hlo_module_proto())
  found = collectives.found_in(collectives.Program(module), RANKS)
  text = str(compiled.as_text())
  return schedule(module), kernels(text), sum(one.bytes for one in found), host_operations(text)


def _beside(name: str, bare: tuple[Any, ...], one: tuple[Any, ...], delayed: bool
            ) -> dict[str, Any]:
  (before, own, reduced, _), (after, others, reduced_now, host) = bare, one
  was, now = collections.Counter(before), collections.Counter(after)
  began, begin, wrong = starts(before), starts(after), problems(after, delayed, host)
  if np.mean(begin) > np.mean(began) + 0.05:
    wrong.append("collectives start later")
  return {"step": name, "jax": jax.__version__, "problems": wrong,
          "collectives": [was["start"], now["start"]], "bytes_more": reduced_now - reduced,
          "starts": [began, begin], "beside": [beside(before), beside(after)],
          "copies_added": now["copy"] - was["copy"],
          "kernels_added": len(after) - now["copy"] - len(before) + was["copy"],
          "timestamps": now["stamp"] + now["delay"] + now["note"], "holds": now["hold"],
          "kernels_calculating": own.total(), "changed": (own - others).total()}


# What is written.


def _rows(path: pathlib.Path) -> dict[str, list[dict[str, Any]]]:
  """What was found by other versions before."""
  there = json.loads(path.read_text()) if path.exists() else {}
  return {kind: [row for row in there.get(kind, ()) if row["jax"] != jax.__version__]
          for kind in ("observed", "instrumented")}


def _span(shares: list[float]) -> str:
  return f"{min(shares):.0%} to {max(shares):.0%}, mean {np.mean(shares):.0%}"


def lines(figures: dict[str, Any]) -> list[str]:
  """The page."""
  page = measured.introduction("Steps compiled for eight GPUs", figures)
  page += ["Compiled for eight H200 of one host by XLA's GPU compiler; nothing ran, and nothing "
           "here is a time but that of putting timestamps in.", "",
           "## Steps jitted as a whole", "",
           "With timestamps as under `jaxpace run`: two at each collective, one at the start, one "
           "at the end. All else of the program was compared, thunk by thunk.", ""]
  page += measured.table(
      ("step", "jax", "collectives", "in loops", "in branches", "timestamps", "kB, put in within",
       "wrong"),
      [[row["step"], row["jax"],
        ", ".join(f"{count} {kind}" for kind, count in sorted(row["collectives"].items())),
        row["in_loops"], row["in_branches"], row["timestamps"],
        f"{row['bytes'] / 1e3:.0f}, {row['seconds']:.2f} s",
        "; ".join(row["problems"]) or "nothing"]
       for row in figures["observed"]])
  page += ["## Instrumented steps", "", "Transformers with Adam, data parallel, beside the bare "
           "step; in the order of XLA's schedule.", ""]
  page += measured.table(
      ("step", "jax", "kernels added", "of them timestamps", "holds", "copies added",
       "kernels that calculate, changed", "collectives", "bytes more in them",
       "start after, of the products", "bare", "kernels beside them, bare", "wrong"),
      [[row["step"], row["jax"], row["kernels_added"], row["timestamps"], row["holds"],
        row["copies_added"], f"{row['changed']} of {row['kernels_calculating']}",
        "{}, {}".format(*row["collectives"]), row["bytes_more"], _span(row["starts"][1]),
        _span(row["starts"][0]), "{1}, {0}".format(*row["beside"]),
        "; ".join(row["problems"]) or "nothing"]
       for row in figures["instrumented"]])
  return page


def main(_: list[str]) -> None:
  out = pathlib.Path(flags.FLAGS.out)
  rows = _rows(out)
  for name in OBSERVED:
    print(f"  jitted: {name}", file=sys.stderr, flush=True)
    rows["observed"].append(observed(name))
  for size in ("2ms", "20ms"):
    print(f"  instrumented: {size}", file=sys.stderr, flush=True)
    rows["instrumented"] += instrumented(size)
  figures = measured.circumstances(_MODULE) | {
      kind: sorted(found, key=lambda row: row["jax"]) for kind, found in rows.items()}
  measured.write(figures, lines(figures), out)
  wrong = [f"{row['step']}: {row['problems'][0]}" for found in rows.values() for row in found
           if row["problems"]]
  if wrong:
    raise SystemExit(f"Not as it should be: {'; '.join(wrong)}.")


if __name__ == "__main__":
  # Where no GPU is, kernels can't be timed to choose among them.
  os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0".strip()
  jax.config.update("jax_platforms", "cpu")
  flags.DEFINE_string("out", "docs/measurements/gpu_compiled.json",
                      "File to which what this jax makes of the steps is added.")
  app.run(main)
