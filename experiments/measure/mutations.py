"""Whether the tests notice when a central formula is wrong: a fixed list of mistakes, each made in
a copy of the tree.

    python -m experiments.measure.mutations                        # a quarter of an hour on two quiet cores; writes
    docs/measurements/mutations.{json,md}
    python -m experiments.measure.mutations --only=bucket,core/ --add     # those whose file has one of these in its
    path, beside what was judged before

Each mistake replaces one piece of text. The tests of that formula run in the copy, up to the first
that fails, with the selection that `make test` makes: failing, they have noticed. They run
unchanged first, since tests that fail without any mistake notice nothing: those are left out, and
named.
"""  # noqa: E501

from __future__ import annotations

import concurrent.futures
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any, NamedTuple

from absl import app, flags

from experiments.lib import measured

ROOT = pathlib.Path(__file__).parents[2]
OUT = pathlib.Path("docs/measurements/mutations.json")
SELECTION = "not long"
"""What `make test` runs."""
_COPIED = ("jaxpace", "tests", "experiments", "configs", "docs", "pyproject.toml", "setup.py",
           "Makefile", "README.md")
_TIMEOUT = 900.0


class Mutation(NamedTuple):
  """One mistake: `old`, of which there is one in the file, becomes `new`."""

  file: str  # below jaxpace/
  old: str
  new: str
  tests: tuple[str, ...]  # below tests/


def _of(file: str, tests: str, *pairs: tuple[str, str]) -> list[Mutation]:
  return [Mutation(file, old, new, tuple(tests.split())) for old, new in pairs]


MUTATIONS: Sequence[Mutation] = (
    *_of("core/arrivals.py", "core/test_arrivals.py",
         ("arrival = busy - delays", "arrival = busy + delays"),
         ("latest(arrivals) - arrivals, _NAN)", "arrivals - latest(arrivals), _NAN)"),
         ("jnp.maximum(delays - earliness(arrivals), _ZERO)", "jnp.maximum(delays, _ZERO)"),
         ("early = own(earliness(arrivals + delays), rank)",
          "early = own(earliness(arrivals), rank)"),
         ("jnp.maximum(waits[0] - early, _ZERO)", "jnp.maximum(waits[0], _ZERO)")),
    *_of("core/pacing.py", "core/test_pacing.py",
         ("(0 if carrier is None else carrier)", "(0 if carrier is None else carrier + 1)"),
         ("job_step_time=shared.step_time,", "job_step_time=step_time,")),
    *_of("coordination/bucket.py", "coordination/test_early_ranks.py",
         ("filled = tokens + cost * arrivals.latest(seen)",
          "filled = tokens + cost * jnp.max(seen + delays)"),
         ("jnp.minimum(tokens, _ZERO))", "tokens)"),
         ("jnp.minimum(paid, most)", "paid")),
    *_of("coordination/early_ranks.py", "coordination/test_early_ranks.py",
         ("jnp.where(state.active, _HALF * least, least)", "jnp.where(state.active, least, least)"),
         ("arrivals.greatest(mean_now) - arrivals.own(mean_now, rank))", "np.float32(np.inf))"),
         ("jnp.minimum(fill * slack, tokens)", "fill * slack")),
    *_of("coordination/sequential.py", "coordination/test_sequential.py",
         ("spread = squares + n * mean * mean + rho", "spread = squares + rho"),
         ("room = n - 2.0 * log_now", "room = n - log_now")),
    *_of("coordination/trial.py", "coordination/test_trial.py",
         ("where(on_first, first - second, second - first)", "first - second"),
         ("squares + error * (difference - mean)", "squares + error * error"),
         ("4.0 * state.tries * xp.maximum(state.tries - 1.0, 1.0))", "real(4.0 / 3.0))"),
         ("(state.into >= settle)", "(state.into >= 0)")),
    *_of("coordination/guard.py", "coordination/test_guard.py",
         ("delay = jnp.where(on, decision.delay, _ZERO)", "delay = decision.delay"),
         ("jnp.where(shared, state.before, now))", "now)")),
    *_of("execution/words.py", "execution/test_words.py",
         ("a[..., 0] + b[..., 0] + carry", "a[..., 0] + b[..., 0]"),
         ("borrow = (a[..., 1] < b[..., 1])", "borrow = (a[..., 1] <= b[..., 1])")),
    *_of("communication/gates.py", "communication/test_gates.py step/test_order.py",
         ("if index in heavy and not reads & held:", "if index in heavy and False:"),
         ("return self.flat(value) and dtype in", "return dtype in")),
    *_of("communication/phases.py", "communication/test_phases.py",
         ('if "transpose" not in opened:', "if True:"),
         ("return BACKWARD", "return FORWARD")),
    *_of("communication/sharing.py", "communication/test_sharing.py",
         ("jnp.uint32(0xFFFF0000)", "jnp.uint32(0xFF000000)"),
         (".set((index == 0).astype(jnp.float32))", ".set(jnp.float32(1 / ranks))")),
    *_of("trace/decode.py", "trace/test_decode.py",
         ("(before != steps - 1) |", "(before > steps) |"),
         ("return rows, np.where(taken, times + shift, 0), taken",
          "return rows, times + shift, taken"),
         ("int(rows[-1, ring.STEP]) - after - len(rows)", "int(rows[-1, ring.STEP]) - len(rows)")),
    *_of("diagnosis/accounting.py", "diagnosis/test_accounting.py",
         ("transfer = np.where(work.valid, work.wait, np.inf).min(axis=1)",
          "transfer = np.where(work.valid, work.wait, -np.inf).max(axis=1)"),
         ("for charged, x in zip(waiting, excess, strict=True):\n      charged += x * scale\n  "
          "transfer =",
          "for charged, x in zip(waiting, excess, strict=True):\n      charged += x\n  transfer ="),
         ("np.clip(_known(run, \"gap\", part, valid), 0.0, arrival[0] - pacing)",
          "np.clip(_known(run, \"gap\", part, valid), 0.0, arrival[0])")),
    *_of("diagnosis/lateness.py", "diagnosis/test_lateness.py",
         ("mean = np.where(eligible, whole - _typical_level(blocks, whole, "
          "selected.blocks), np.nan)",
          "mean = np.where(eligible, whole, np.nan)"),
         ("random = earliness - held.by_collective", "random = earliness"),
         ("other.lateness * HIDDEN > episode.lateness", "other.lateness > episode.lateness")),
    *_of("diagnosis/floor.py", "diagnosis/test_floor.py",
         ("return Floor(floor, quiet, transfer - quiet, source, width)",
          "return Floor(floor, quiet, transfer, source, width)"),
         ("width // 2, axis=1)[:, width // 2].min())", "0, axis=1)[:, 0].min())")),
    *_of("diagnosis/by_rank.py",
         "diagnosis/test_series.py diagnosis/test_findings.py diagnosis/test_accounting.py",
         ('"runtime": parts["runtime"] + parts["waiting_runtime"],',
          '"runtime": parts["runtime"],'),
         ('"transfer": quiet + parts["spread"],', '"transfer": quiet,')),
    *_of("diagnosis/what_if.py", "diagnosis/test_what_if.py",
         ("return np.asarray(np.where(work.valid, arrival, 0.0).sum(axis=1) / number)",
          "return _last(arrival, work.valid)"),
         ("changed[0] += left - work.runtime", "changed[0] -= work.runtime"),
         ("return Alternative(left, step_time / left",
          "return Alternative(left, left / step_time")),
    *_of("costs/alpha_beta.py", "costs/test_alpha_beta.py",
         ("return 2 * (ranks - 1), 2 * (ranks - 1) / ranks",
          "return 2 * (ranks - 1), 2 * (ranks - 1)"),
         ("2.0 if ranks > 2 else 1.0", "2.0")),
    *_of("simulation/sharing.py", "simulation/test_sharing.py",
         ("left = np.maximum(left - np.where(np.isfinite(left), taken, 0), 0)",
          "left = np.maximum(left, 0)"),
         ("near = level * np.float32(1 + 1e-6)", "near = level * np.float32(2)")),
    *_of("simulation/schedules.py", "simulation/test_schedules.py",
         ("size / 2 ** (k + 1)", "size / 2 ** k"),
         ("count - 1 - edges if count % 2 == 0", "edges if count % 2 == 0")),
    *_of("simulation/noise.py", "simulation/test_job.py",
         ("state = keep * state + jnp.sqrt(_ONE - keep * keep) * jax.random.normal(key, (ranks,), "
          "jnp.float32)",
          "state = keep * state + (_ONE - keep) * jax.random.normal(key, (ranks,), jnp.float32)"),
         ("== every - np.int32(1)", "<= np.int32(1)")),
)


class Result(NamedTuple):
  """What the tests said of a tree."""

  status: int  # pytest's
  failed: tuple[str, ...]  # tests


def copied(root: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
  """Copies what the tests need of a tree."""
  target = folder / "tree"
  target.mkdir()
  for name in _COPIED:
    source = root / name
    if source.is_dir():
      shutil.copytree(source, target / name,
                      ignore=shutil.ignore_patterns("__pycache__", "measurements"))
    elif source.exists():
      shutil.copy2(source, target / name)
  return target


def mutate(tree: pathlib.Path, mutation: Mutation) -> None:
  """Makes the mistake in a copy.

  Raises:
    ValueError: the text isn't there, or is there more than once: the list has fallen behind the
      code.
  """
  path = tree / "jaxpace" / mutation.file
  text = path.read_text()
  if text.count(mutation.old) != 1:
    raise ValueError(f"jaxpace/{mutation.file} holds {text.count(mutation.old)} times what is to "
                     f"be replaced, not once: {mutation.old!r}. Bring "
                     "experiments/measure/mutations.py up to date.")
  path.write_text(text.replace(mutation.old, mutation.new))


def tested(tree: pathlib.Path, tests: Sequence[str], flags: Sequence[str]) -> Result:
  """Runs tests in a tree."""
  environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1",
                 "JAXPACE_QUICK_TESTS": "1"}
  try:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *flags, "-q", "-p", "no:cacheprovider", "-m", SELECTION,
         *(f"tests/{name}" for name in tests)],
        cwd=tree, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        timeout=_TIMEOUT, check=False)
  except subprocess.TimeoutExpired:
    return Result(1, (f"took longer than {_TIMEOUT:.0f} s",))
  named = [line.removeprefix(kind).split(" - ")[0] for line in done.stdout.splitlines()
           for kind in ("FAILED ", "ERROR ") if line.startswith(kind)]
  return Result(done.returncode, tuple(named))


def judged(root: pathlib.Path, mutation: Mutation | None, tests: Sequence[str],
           flags: Sequence[str] = ()) -> Result:
  """Runs tests in a copy of a tree, with a mistake or without."""
  with tempfile.TemporaryDirectory() as folder:
    tree = copied(root, pathlib.Path(folder))
    if mutation is not None:
      mutate(tree, mutation)
    return tested(tree, tests, flags)


def measure(root: pathlib.Path, mutations: Sequence[Mutation], jobs: int) -> dict[str, Any]:
  """Makes every mistake, `jobs` at a time.

  Raises:
    ValueError: pytest could not run the tests, or a mistake can't be made.
  """
  groups = sorted({mutation.tests for mutation in mutations})
  rows = []
  with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
    unchanged = dict(zip(groups, pool.map(lambda tests: _answer(judged(root, None, tests)), groups),
                         strict=True))
    found = pool.map(lambda mutation: _answer(judged(root, mutation, mutation.tests, (
        "-x", *(f"--deselect={test}" for test in unchanged[mutation.tests].failed)))), mutations)
    say = measured.progress("mistakes", len(mutations))
    for done, (mutation, result) in enumerate(zip(mutations, found, strict=True)):
      rows.append({"file": mutation.file, "old": mutation.old, "new": mutation.new,
                   "tests": list(mutation.tests), "noticed": result.status != 0,
                   "by": result.failed[0] if result.failed else ""})
      say(done + 1)
  left_out = sorted({test for result in unchanged.values() for test in result.failed})
  return {"selection": SELECTION, "mistakes": len(rows),
          "noticed": sum(row["noticed"] for row in rows), "left_out": left_out, "rows": rows}


def _answer(result: Result) -> Result:
  """0 is that nothing failed, 1 a test, 2 an import; anything else says nothing of the tests."""
  if result.status not in (0, 1, 2):
    raise ValueError(
        f"pytest ended with {result.status}: a file of tests in MUTATIONS may be gone or "
        "hold none.")
  return result


def added(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
  """What was judged before, and now: of a mistake judged twice, as it was now; in the order of
  `MUTATIONS`.

  Mistakes that are no longer in the list are left out.
  """
  judged_ = {(row["file"], row["old"]): row for row in (*before["rows"], *now["rows"])}
  rows = [judged_[key] for key in ((mutation.file, mutation.old) for mutation in MUTATIONS)
          if key in judged_]
  return now | {"rows": rows, "mistakes": len(rows), "noticed": sum(row["noticed"] for row in rows),
                "left_out": sorted({*before["left_out"], *now["left_out"]})}


def lines(figures: dict[str, Any]) -> list[str]:
  """The figures as a page."""
  page = measured.introduction("Whether the tests notice mistakes in the central formulas", figures)
  page += [f"**{figures['noticed']} of {figures['mistakes']}** mistakes are noticed by the tests "
           "of their formula, in the selection that `make test` runs.", ""]
  if figures["left_out"]:
    page += [
        "Left out, since they failed without any mistake: "
        f"{', '.join(map(_code, figures['left_out']))}.", ""]
  short = {id(row): row["by"].split("::", 1)[-1] for row in figures["rows"]}
  return page + measured.table(
      ["formula", "was", "becomes", "noticed by"],
      [[row["file"], _code(row["old"]), _code(row["new"]),
        _code(short[id(row)]) if row["noticed"] else "**nothing**"]
       for row in figures["rows"]])


def _code(text: str) -> str:
  line = " ".join(text.split()).replace("|", "\\|")
  return f"`{line if len(line) <= 72 else line[:71] + '…'}`"


def main(_: list[str]) -> None:
  its = flags.FLAGS
  chosen = [mutation for mutation in MUTATIONS if not its.only
            or any(part in mutation.file for part in its.only)]
  figures = (measured.circumstances("experiments.measure.mutations")
             | measure(pathlib.Path(its.tree), chosen, its.jobs))
  out = pathlib.Path(its.out)
  if its.add and out.exists():
    figures = added(json.loads(out.read_text()), figures)
  measured.write(figures, lines(figures), out)


if __name__ == "__main__":
  flags.DEFINE_list("only", "", "Only mistakes in files whose path has one of these in it.")
  flags.DEFINE_bool("add", False, "Keep what --out holds of other mistakes: the list in pieces.")
  flags.DEFINE_string("tree", str(ROOT), "The tree to test.")
  flags.DEFINE_integer("jobs", os.cpu_count() or 1, "Mistakes at a time.", lower_bound=1)
  flags.DEFINE_string("out", str(OUT), "Where to write.")
  app.run(main)
