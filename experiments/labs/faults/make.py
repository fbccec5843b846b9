"""Makes the runs of a plan: each layout's processes started once, a directory and a label for each
run.

    DIR/plan.json                    all specs
    DIR/fabric-<layout>.json         what its all-reduce takes on the quiet fabric, as `jaxpace bench` measures it
    DIR/<name>/label.json            what was injected, written last: a run without it is made anew
    DIR/<name>/injected/<p>.npz      what each process measured of it
    DIR/<name>/run/                  the recording, as any other
"""  # noqa: E501

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shutil
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

from experiments.labs.fabric import machine
from experiments.labs.fabric.lab import Lab
from experiments.labs.faults import cluster, truth
from experiments.labs.faults.cluster import Cluster, ClusterError, Stopped
from experiments.labs.faults.spec import NETWORK, Spec, layout
from jaxpace.hosts.launch.launcher import clear_away

LABEL, FABRIC = "label.json", "fabric-{}.json"
_TRIES = 2


def places(directory: pathlib.Path, record: Sequence[str]) -> dict[str, pathlib.Path]:
  """Where runs lie, by how they are recorded: those not by calls in a folder of that name."""
  return {way: directory if way == "calls" else directory / way for way in record}


class Made:
  """How far the making is; told to `show` after every run."""

  def __init__(self, total: int, show: Callable[[str, int, int], None]):
    self.total, self._show, self._lock = total, show, threading.Lock()
    self.done = 0
    self.failed: dict[str, str] = {}

  def one(self, name: str, failure: str | None = None) -> None:
    with self._lock:
      self.done += 1
      if failure:
        self.failed[name] = failure
      self._show(name, self.done, self.total)


def make(specs: Sequence[Spec], config: Mapping[str, Any], directory: pathlib.Path,
         show: Callable[[str, int, int], None], say: Callable[[str], None],
         record: Sequence[str] = ("calls",)) -> dict[str, str]:
  """Makes all runs that are not there yet.

  Layouts of one process and of several are made side by side. Ctrl-C, SIGTERM and SIGHUP end it:
  what is made stays, no process and no network namespace does.

  Args:
    specs: the plan, each twin before the runs that need it.
    config: as `configs/fault_lab.py` gives.
    directory: made if missing.
    show: called with a run's name, and with how many of how many are made.
    say: told, in a sentence, what can't be made.
    record: how each run is recorded, in turn: `worker.PROCESSES`.

  Returns:
    Why, by name, of each run that could not be made.
  """
  found = places(directory, record)
  for place in found.values():
    place.mkdir(parents=True, exist_ok=True)
    _write(place / "plan.json",
           {"config": _plain(config), "specs": [spec.to_json() for spec in specs]})
  if reason := machine.why_not(("cubic",)):
    say("No network namespaces: faults of links and trunks are left out, and all processes are on "
        f"one host. {reason}")
    specs = [spec for spec in specs if not any(fault.kind in NETWORK for fault in spec.faults)]
  todo = [spec for spec in specs
          if not all((place / spec.name / LABEL).exists() for place in found.values())]
  made = Made(len(specs), show)
  made.done = len(specs) - len(todo)
  if not todo:
    return {}
  mark, stop = uuid.uuid4().hex, threading.Event()
  (directory / "logs").mkdir(exist_ok=True)
  streams: list[threading.Thread] = []
  makers: list[_Maker] = []
  try:
    with _signals(), contextlib.ExitStack() as labs:
      names = list(dict.fromkeys(spec.layout for spec in todo))
      fabrics = {name: labs.enter_context(Lab(cluster.fabric(layout(name), config["trunk_mbit"])))
                 for name in names if layout(name).processes > 1 and not reason}
      for group in ([n for n in names if layout(n).processes == 1],
                    [n for n in names if layout(n).processes > 1]):
        maker = _Maker(directory, found, config, mark, stop, made, say, fabrics)
        makers.append(maker)
        streams.append(threading.Thread(target=maker.run,
                                        args=([[s for s in todo if s.layout == name]
                                               for name in group],), daemon=True))
      for stream in streams:
        stream.start()
      try:
        while any(stream.is_alive() for stream in streams):
          time.sleep(0.1)
      finally:
        stop.set()
        for stream in streams:
          stream.join(30)
  finally:
    clear_away(mark, 2.0)
  for maker in makers:
    if maker.error is not None:
      raise maker.error
  return made.failed


class _Maker:
  """Makes the runs of some layouts, one after the other, on a thread that outlives what it
  starts."""

  def __init__(self, directory: pathlib.Path, places: Mapping[str, pathlib.Path],
               config: Mapping[str, Any], mark: str, stop: threading.Event, made: Made,
               say: Callable[[str], None], fabrics: Mapping[str, Lab]):
    self.directory, self.config, self.mark, self.stop = directory, config, mark, stop
    self.places, self.made, self.say, self.fabrics = places, made, say, fabrics
    self.error: Exception | None = None
    """What ended the thread before its time; nothing that a process of the lab can do."""

  def run(self, layouts: Sequence[Sequence[Spec]]) -> None:
    try:
      for specs in layouts:
        self._layout(list(specs))
    except Stopped:
      pass
    except Exception as error:
      self.error = error

  def _layout(self, left: list[Spec]) -> None:
    """Makes all runs of a layout. One that fails twice is left out, and those that need it as their
    twin fail, too."""
    for _ in range(_TRIES * len(left)):
      if not left:
        return
      try:
        self._with_one_cluster(left)
      except (ClusterError, machine.LabError, OSError) as error:
        self.say(str(error))
        place = self.directory / left[0].name
        if (place / "failed").exists():
          self.made.one(left.pop(0).name, str(error))
        else:
          place.mkdir(exist_ok=True)
          (place / "failed").write_text(str(error))

  def _with_one_cluster(self, left: list[Spec]) -> None:
    """Makes runs until all are made or something fails; takes those that are made out of `left`."""
    shape = layout(left[0].layout)
    setting = {"gradient_kb": self.config["gradient_kb"],
               "hosts_seconds": self.config["hosts_seconds"],
               "steps": max(spec.steps for spec in left), "bench": None,
               "observed": bool(self.config.get("observed")), "record": list(self.places)}
    fabric = self.directory / FABRIC.format(shape.name)
    if shape.processes > 1 and not setting["observed"] and not fabric.exists():
      setting["bench"] = str(fabric)
    started = Cluster(shape, setting, self.directory / "logs", self.fabrics.get(shape.name),
                      self.mark, self.stop)
    try:
      started.wait()
      while left:
        for way, place in self.places.items():
          if fabric.exists() and not (place / fabric.name).exists():
            shutil.copy(fabric, place)
          self._one(started, left[0], place, way)
        self.made.one(left.pop(0).name)
    finally:
      started.close()

  def _one(self, started: Cluster, spec: Spec, directory: pathlib.Path, way: str) -> None:
    place = directory / spec.name
    failed_before = (place / "failed").exists()
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    if failed_before:
      (place / "failed").touch()
    load = os.getloadavg()[0]
    found = started.run(spec, place, way)
    if found["stopped"]:
      raise ClusterError(f"{spec.name} was not recorded: {found['stopped']}")
    # load average before and after
    made = {"outside": found["outside"], "load": [load, os.getloadavg()[0]]}
    _write(place / LABEL, label(directory, spec) | made)


def label(directory: pathlib.Path, spec: Spec) -> dict[str, Any]:
  """What is true of a run, from what was injected and measured; its twin must have been made.

  Raises:
    OSError: what was measured of either is missing.
  """
  measured = truth.read(directory / spec.name, spec)
  twin = truth.read(directory / spec.twin, spec) if spec.twin else None
  found = truth.truth(spec, measured, twin)
  blamed = [fault for fault in found.faults if fault.ranks or fault.hosts]
  return {"spec": spec.to_json(), "family": spec.family, "modes": list(spec.modes),
          "ranks": sorted({rank for fault in blamed for rank in fault.ranks}),
          "hosts": sorted({host for fault in blamed for host in fault.hosts}),
          "onset": min((fault.onset for fault in found.faults), default=None),
          "truth": found.to_json()}


@contextlib.contextmanager
def _signals() -> Iterator[None]:
  """Makes signals that would end the program at once end it by an exception."""
  def leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)

  before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
  try:
    yield
  finally:
    for number, handler in before.items():
      signal.signal(number, handler)


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
  return {name: _plain(value) if hasattr(value, "items") else value
          for name, value in config.items()}


def _write(path: pathlib.Path, document: Any) -> None:
  """Writes a JSON file whole or not at all."""
  new = path.with_name(path.name + ".new")
  new.write_text(json.dumps(document, indent=1) + "\n")
  new.replace(path)
