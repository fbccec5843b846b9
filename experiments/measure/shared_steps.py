"""Work shared by the ranks' measured speeds in a step that is jitted as a whole, net of everything:
against the untouched job, in blocks that take turns.

    python -m experiments.measure.shared_steps --real_time
    python -m experiments.measure.shared_steps --work=quota --params=fsdp --starts=2
    python -m experiments.measure.shared_steps --work=quota --ranks=8 --slow=2,5 --neighbours=1

Four gloo processes of one device, or `--ranks`, run 32 micro-batches in a step of four layers under
scan and `jax.checkpoint`. Arms: the untouched job (a scan of its own over even counts, loading of
its own, nothing of jaxpace); the same again (A/A); the same loop by `jaxpace.accumulate`, even;
that observed; shared by speed; that under the guard; shared by speed of batches that its own loader
lays out (`fetch=True`); the best counts, by hand and not observed.

`--work=sleep`: a micro-batch sleeps for 4 ms, on a slow rank longer, so ranks share no processor.
`--work=quota`: it computes, and the processes have 8/5 of a processor together by quotas of their
control groups (version 1, for which it takes the right to), a slow one less. `--slow` names the
slow ranks, the last by default; `--neighbours` other programs that compute all the while. Writes
docs/measurements/shared_steps.json and .md; with `--add` the starts go beside those of the file.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import logging
import os
import pathlib
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpace
from experiments.lib import measured, paired

TOTAL, LAYERS, EXAMPLES = 32, 4, 4096
SIZES = {"sleep": (8, 64), "quota": (64, 256)}
"""Examples of a micro-batch, and width of a layer."""
BLOCK = 8
NOT_SHARED = ("untouched", "again", "even", "observed", "by_hand")
SLEEPS = 4e-3
"""s of a micro-batch on a healthy rank."""
PERIOD, QUOTA = 10_000, 16_000
"""us, of a control group, and of all of them."""
GROUPS = pathlib.Path("/sys/fs/cgroup/cpu")


def best_counts(slowness: np.ndarray) -> np.ndarray:
  """[R] int32: counts that end earliest where ranks are so much slower, [R]."""
  counts = np.zeros(len(slowness), np.int32)
  for _ in range(TOTAL):
    counts[np.argmin((counts + 1) * slowness)] += 1
  return counts


class Job:
  """A train step and what it runs on, in each of its forms."""

  def __init__(self, params: str, work: str):
    """Makes parameters and data; compiles nothing."""
    self.size, width = SIZES[work]
    self.ranks = jax.device_count()
    self.own, self.room = TOTAL // self.ranks, 2 * (TOTAL // self.ranks)
    self.mesh = jax.make_mesh((self.ranks,), ("data",), axis_types=(AxisType.Auto,))
    rng = np.random.default_rng(0)
    self.source = {"x": rng.standard_normal((EXAMPLES, width), np.float32)}
    self.rank, self.sleeps = jax.process_index(), work == "sleep"
    self.split = NamedSharding(self.mesh, P("data"))
    self.layout = NamedSharding(self.mesh, P(None, "data") if params == "fsdp" else P())
    weights = 0.1 * rng.standard_normal((LAYERS, width, width), np.float32)
    self.params = jax.make_array_from_callback(weights.shape, self.layout,
                                               lambda place: weights[place])
    self.slowness = np.ones(self.ranks)

  def loss_fn(self, seconds: Any) -> Callable[..., Any]:
    """Layers in a scan, each of them computed again in the backward pass."""
    def loss(weights: Any, batch: Any) -> Any:
      x = batch["x"]
      if self.sleeps:
        x = jaxpace.delay(x, seconds[jax.lax.axis_index("data")])
      @jax.checkpoint
      def layer(h: Any, w: Any) -> Any:
        return jnp.tanh(h @ w), None
      out, _ = jax.lax.scan(layer, x, weights)
      return jnp.sum((out - x) ** 2), jnp.float32(x.shape[0])
    return loss

  def untouched(self) -> Callable[..., Any]:
    """The trainer's own: a scan over as many micro-batches as the batch has."""
    def train(weights: Any, batch: Any, seconds: Any) -> Any:
      def each(weights: Any, batch: Any, seconds: Any) -> Any:
        def turn(sums: Any, one: Any) -> Any:
          (loss, n), grads = jax.value_and_grad(self.loss_fn(seconds), has_aux=True)(weights, one)
          return jax.tree.map(jnp.add, sums, (loss, n, grads)), None
        zero = jnp.float32(0)
        sums, _ = jax.lax.scan(turn, (zero, zero, jnp.zeros_like(weights)), batch)
        loss, n, grads = jax.lax.psum(sums, "data")
        return loss / n, grads / n
      loss, grads = jax.shard_map(each, mesh=self.mesh, in_specs=(P(), P("data"), P()),
                                  out_specs=P(), check_vma=False)(weights, batch, seconds)
      return jax.lax.with_sharding_constraint(weights - 1e-3 * grads, self.layout), loss
    return jax.jit(train)

  def counted(self, fetch: bool = False) -> Callable[..., Any]:
    """The same with counts."""
    def train(weights: Any, batch: Any, counts: Any, seconds: Any) -> Any:
      loss, grads = jaxpace.accumulate(self.loss_fn(seconds), weights, batch, counts,
                                       mesh=self.mesh, fetch=fetch)
      return jax.lax.with_sharding_constraint(weights - 1e-3 * grads, self.layout), loss
    return jax.jit(train)

  def seconds(self) -> np.ndarray:
    """[R] float32 s that a micro-batch sleeps."""
    return np.float32(SLEEPS) * self.slowness.astype(np.float32)

  def load(self, step: int, room: int) -> Any:
    """What a trainer does by itself: as many examples in turn for each rank."""
    own = self.own * self.size
    first = (step * TOTAL * self.size + self.rank * own) % EXAMPLES
    def laid_out(leaf: np.ndarray) -> Any:
      rows = np.zeros((room, self.size, *leaf.shape[1:]), leaf.dtype)
      rows[:own // self.size] = leaf[first:first + own].reshape(-1, self.size, *leaf.shape[1:])
      return jax.make_array_from_process_local_data(self.split, rows)
    return jax.tree.map(laid_out, self.source)

  def feed(self, name: str) -> Any:
    """Even counts to begin with."""
    data: dict[str, Any] = {} if name == "fetched" else {"examples": EXAMPLES, "size": self.size}
    if name == "guarded":
      data["balancer"] = jaxpace.guard(jaxpace.share_by_speed(TOTAL, self.room))
    return jaxpace.shares(self.mesh, total_micro_batches=TOTAL, **data)


def ahead(batches: Iterator[Any]) -> Iterator[Any]:
  """The same, loaded by a thread up to two steps ahead."""
  loaded: queue.Queue[Any] = queue.Queue(2)

  def load() -> None:
    for batch in batches:
      loaded.put(batch)

  threading.Thread(target=load, daemon=True).start()
  return iter(loaded.get, None)


def scene(job: Job, rounds: int, warm_up: int, parts: dict[str, Any], loader: bool, seed: int
          ) -> dict[str, Any]:
  """All arms on ranks of one speed: seconds of a step, [rounds] by arm; what the counts did."""
  feeds = {name: job.feed(name) for name in parts if name not in NOT_SHARED}
  by_hand, even = best_counts(job.slowness), np.full(job.ranks, job.own, np.int32)
  ran: dict[str, list[list[int]]] = {name: [] for name in feeds}
  def batches(name: str) -> Iterator[tuple[Any, ...]]:
    for step in itertools.count():
      if name in feeds:
        share = feeds[name].next(parts[name])
        batch = share.batch(job.source) if share.numbers else job.load(step, job.own)
        yield batch, share.counts
      elif name in ("untouched", "again"):
        yield (job.load(step, job.own),)
      else:
        yield job.load(step, job.room), by_hand if name == "by_hand" else even

  loaded = {name: ahead(batches(name)) if loader else batches(name) for name in parts}

  def once(name: str) -> None:
    given = next(loaded[name])
    if name in feeds:
      ran[name].append(given[1].tolist())
    job.params, _ = parts[name](job.params, *given, job.seconds())

  def block(name: str) -> Callable[[], float]:
    def timed() -> float:
      start = time.perf_counter()
      for _ in range(BLOCK):
        once(name)
      jax.block_until_ready(job.params)
      return (time.perf_counter() - start) / BLOCK
    return timed

  for name in parts:
    for _ in range(warm_up // BLOCK if name in feeds else 1):
      block(name)()
  gc.collect()
  found = paired.interleave({name: block(name) for name in parts}, rounds, seed)
  return {"seconds": {name: values.tolist() for name, values in found.items()},
          "by_hand": by_hand.tolist(), "counts": {name: each[-1] for name, each in ran.items()},
          "changed_at": {name: [at for at in range(1, len(each)) if each[at] != each[at - 1]]
                         for name, each in ran.items()}}


def work(its: Any) -> None:
  """One process of the job."""
  job = Job(its.params, its.work)
  bare = {"untouched": job.untouched, "again": job.untouched, "even": job.counted,
          "by_hand": job.counted}
  parts = {name: bare[name]() if name in bare else jaxpace.observe(job.counted(name == "fetched"))
           for name in its.arms}
  scenes = {}
  for slower in map(float, its.slower):
    job.slowness[[int(rank) for rank in its.slow or [job.ranks - 1]]] = slower
    if its.work == "quota":
      _quota(job.rank).write_text(str(int(QUOTA / job.ranks / job.slowness[job.rank])))
    scenes[f"{slower:g}"] = found = scene(
        job, its.rounds, its.warm_up, parts, its.loader, its.seed)
    if job.rank == 0:
      print(f"{slower:g}", {name: round(1e3 * float(np.mean(each)), 2)
                            for name, each in found["seconds"].items()},
            found["counts"], found["changed_at"], file=sys.stderr, flush=True)
  if job.rank == 0:
    pathlib.Path(its.worker).write_text(json.dumps(scenes))


def rounds_of(starts: list[dict[str, Any]], slower: str, arm: str) -> np.ndarray:
  """Seconds of a step, by round, of all starts together.

  The first round of a start is left out: its first block waits until the slow rank, too, has
  collected garbage, which moved the untouched job against itself by up to 8 %.
  """
  return np.concatenate([start[slower]["seconds"][arm][1:] for start in starts])


def judge(starts: list[dict[str, Any]]) -> dict[str, Any]:
  """By how much slower the last rank is: the arms against the untouched job."""
  judged: dict[str, Any] = {}
  for slower in starts[0]:
    each = {name: rounds_of(starts, slower, name) for name in starts[0][slower]["seconds"]}
    base = each["untouched"]
    entry: dict[str, Any] = {"untouched_ms": 1e3 * float(base.mean()), "percent": {}}
    for name in each:
      if name != "untouched":
        change = paired.ratio_of_means(each[name], base)
        entry["percent"][name] = [float(f"{100 * (x - 1):.4g}")
                                  for x in (change.value, change.low, change.high)]
    if "by_hand" in each and float(slower) > 1:
      saved = base - each["by_hand"]
      entry["recovered"] = {
          name: [float(f"{100 * x:.4g}") for x in (found.value, found.low, found.high)]
          for name in each if name not in NOT_SHARED
          for found in [paired.ratio_of_means(base - each[name], saved)]}
    judged[slower] = entry
  return judged


def lines(figures: dict[str, Any]) -> list[str]:
  """The figures as a page."""
  page = measured.introduction("Work shared by speed, net of everything", figures)
  page += [line for one in figures.get("added", []) for line in (
      f"Starts were added on {one['date']}: `{one['command']}`.", "")]
  ranks, slow = figures.get("ranks", 4), figures.get("slow")
  who = f"rank{'s' * (len(slow) > 1)} {', '.join(slow)}" if slow else "the last rank"
  what = (f"sleeps for 4 ms, on {who} longer" if figures["work"] == "sleep" else
          f"computes, in {'2/5' if ranks == 4 else f'{8 / 5 / ranks:g}'} of a processor by quota, "
          f"{who}{chr(39)}s in less")
  kept = "split over the data axis" if figures["params"] == "fsdp" else "on every rank"
  beside = figures.get("neighbours", 0)
  others = f" Beside them {beside} other program(s) computed all the while." if beside else ""
  loads = " A thread loads batches ahead, in all arms." if figures.get("loader") else ""
  page += [f"{'Four' if ranks == 4 else ranks} gloo processes of one device"
           f"{measured.priority(figures)}.{others} A step jitted as a "
           f"whole runs 32 micro-batches through four layers under scan and `jax.checkpoint`; each "
           f"micro-batch {what}. Parameters are {kept}.{loads} {len(figures['starts'])} starts of "
           f"{figures['rounds']} rounds, the first of each left out, after "
           f"{figures.get('warm_up', 72)} steps of the shared arms; in each every arm runs a block "
           f"of {BLOCK} steps, in random order. Change of the mean step against the untouched job, "
           "which has nothing of jaxpace: %, with 95 % intervals over rounds.", ""]
  names = {"again": "untouched again (A/A)", "even": "even, by `accumulate`",
           "observed": "that, observed", "shared": "shared by speed",
           "guarded": "that, guarded", "fetched": "shared, its own loader",
           "by_hand": "best counts by hand"}
  judged, starts = figures["judged"], figures["starts"]
  slower = f"{who if slow else 'last rank'} slower"
  ran = [name for name in names if name in next(iter(judged.values()))["percent"]]
  page += measured.table(
      [slower, "untouched, ms", *(names[name] for name in ran)],
      [[f"{by} times" if float(by) > 1 else "not", entry["untouched_ms"],
        *(_interval(entry["percent"][name]) for name in ran)] for by, entry in judged.items()])
  some = [name for name in ran if name not in NOT_SHARED]
  page += ["Of what the best counts by hand save, %; the counts at the end, and the steps at which "
           "they changed, in the first start:", ""]
  page += measured.table(
      [slower, *(names[name] for name in some), "counts", "changed at", "by hand",
       *(["starts with a change by step 40"] if len(starts) > 1 else [])],
      [[f"{by} times" if float(by) > 1 else "not",
        *(_interval(entry["recovered"][name], "") if "recovered" in entry else None
          for name in some),
        ", ".join(map(str, first["counts"][some[0]])),
        ", ".join(map(str, first["changed_at"][some[0]])) or None,
        ", ".join(map(str, first["by_hand"])),
        *([sum(min(start[by]["changed_at"][some[0]], default=41) <= 40 for start in starts)]
          if len(starts) > 1 else [])]
       for by, entry in judged.items() for first in [starts[0][by]]])
  return page


def _interval(value: list[float], sign: str = "+") -> str:
  return f"{value[0]:{sign}.1f} [{value[1]:.1f}, {value[2]:.1f}]"


def _quota(rank: int) -> pathlib.Path:
  return GROUPS / f"shared{rank}" / "cpu.cfs_quota_us"


@contextlib.contextmanager
def surroundings(quotas: bool, ranks: int, neighbours: int) -> Iterator[None]:
  """A control group for each process, and other programs that compute; gone at the end."""
  groups = [GROUPS / f"shared{rank}" for rank in range(ranks)] if quotas else []
  for group in groups:
    group.mkdir(exist_ok=True)
    (group / "cpu.cfs_period_us").write_text(str(PERIOD))
    (group / "cpu.cfs_quota_us").write_text(str(QUOTA // ranks))
    (group / "cpu.shares").write_text("100000")
  others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(neighbours)]
  try:
    yield
  finally:
    for other in others:
      other.kill()
      other.wait()
    for group in groups:
      with contextlib.suppress(OSError):
        group.rmdir()


def main(_: list[str]) -> None:
  its = flags.FLAGS
  logging.getLogger("jax").setLevel(logging.WARNING)
  if its.worker:
    place = jaxpace.distributed.place_from_environment(os.environ)
    assert place is not None, "started by jaxpace run"
    if its.work == "quota":
      (GROUPS / f"shared{place.index}" / "cgroup.procs").write_text(str(os.getpid()))
    allowed = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {allowed[place.index % len(allowed)]})
    measured.take_priority()
    jaxpace.distributed.initialize()
    work(its)
    return
  asked = {name: getattr(its, name) for name in (
      "real_time", "work", "params", "rounds", "warm_up", "loader", "ranks", "slow",
      "neighbours")}
  figures = measured.circumstances("experiments.measure.shared_steps") | asked
  out, starts = pathlib.Path(its.out), []
  if its.add and out.exists():
    earlier = json.loads(out.read_text())
    if any(earlier.get(name, False) != value for name, value in asked.items()) or [
        *earlier["starts"][0]] != [f"{float(by):g}" for by in its.slower]:
      raise SystemExit(f"{out} was measured with other settings: its starts can't be added to.")
    earlier.setdefault("added", []).append({name: figures[name] for name in ("command", "date")})
    figures, starts = earlier, earlier["starts"]
  for _ in range(its.starts):
    with (tempfile.TemporaryDirectory() as root,
          surroundings(its.work == "quota", its.ranks, its.neighbours)):
      target = os.path.join(root, "found.json")
      subprocess.run(
          [sys.executable, "-m", "jaxpace", "run", "--no-record", "--nproc", str(its.ranks),
           "--logs", os.path.join(root, "logs"), "--", sys.executable, "-m",
           "experiments.measure.shared_steps", f"--worker={target}",
           f"--seed={len(starts) + 1}", *sys.argv[1:]], check=True)
      starts.append(json.loads(pathlib.Path(target).read_text()))
    # After each start: what was measured is kept, whatever ends the next one.
    figures |= {"starts": starts, "judged": judge(starts)}
    measured.write(figures, lines(figures), out)


def define_flags() -> None:
  """Defines this program's flags."""
  measured.define_flags("shared_steps", 12, "Blocks of each arm in a start; the first counts not.")
  measured.define_priority_flag()
  flags.DEFINE_integer("warm_up", 72, "Steps that shared arms run before.", lower_bound=BLOCK)
  flags.DEFINE_bool("loader", False, "Whether a thread loads batches ahead, in all arms.")
  flags.DEFINE_integer("starts", 1, "Starts of the job.", lower_bound=1)
  flags.DEFINE_bool("add", False, "Add starts to those that the file has, of the same settings.")
  flags.DEFINE_integer("ranks", 4, "Processes of one device.", lower_bound=2)
  flags.DEFINE_list("slow", [], "Which ranks are slow; the last one where none is named.")
  flags.DEFINE_integer("neighbours", 0, "Other programs that compute all the while.", lower_bound=0)
  flags.DEFINE_list("slower", ["1", "1.2", "1.5", "2", "3"], "How much slower a slow rank is.")
  flags.DEFINE_enum("work", "sleep", list(SIZES), "What a micro-batch does.")
  flags.DEFINE_enum("params", "replicated", ["replicated", "fsdp"], "How they are laid out.")
  flags.DEFINE_list("arms", ["untouched", "again", "even", "observed", "shared", "fetched",
                             "by_hand"], "Which arms.")
  flags.DEFINE_integer("seed", 1, "Internal: of the order of arms.")
  flags.DEFINE_string("worker", "", "Internal: file for process 0's figures.")


if __name__ == "__main__":
  define_flags()
  app.run(main)
