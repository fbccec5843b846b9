"""One host's link slowed, for real: four processes on four hosts of the fabric lab, and what
`jaxpace probe` says.

    python -m experiments.labs.fabric.slow_link                     # about five minutes; needs root, as the lab does
    python -m experiments.labs.fabric.slow_link --only=sends --repeats=1

Each repetition builds a lab, slows one way or both ways of one host's link (another host each
time), probes, and removes it. Writes docs/measurements/link_probe.json and the table of it,
link_probe.md.
"""  # noqa: E501

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

from absl import app, flags

from configs import fabric
from experiments.labs.fabric import commands, jobs, machine
from experiments.labs.fabric.lab import Lab
from experiments.lib import measured
from jaxpace.live.probe.links import read_links

HOSTS = ("a0", "a1", "a2", "a3")
LINK_MBIT = 400.0
KINDS = {"both ways": "host", "sends": "sender", "receives": "receiver", "healthy": ""}
"""What is slowed, and the kind of culprit that is the right answer."""
_ROOT = pathlib.Path(__file__).resolve().parents[3]
_PROBE_SECONDS = 180


def slow_down(lab: Lab, host: str, what: str, mbit: float) -> None:
  """Slows what a host sends, receives, or both."""
  ways = {"sends": [(host, "eth0")], "receives": [(commands.FABRIC, f"h-{host}")]}
  ways["both ways"] = ways["sends"] + ways["receives"]
  for place, interface in ways[what]:
    machine.run(["tc", "-n", commands.namespace(lab.name, place), "qdisc", "replace", "dev",
                 interface, "root", "handle", "1:", "tbf", "rate", f"{round(1e6 * mbit)}bit",
                 "burst", "16000b", "limit", "128000b"])


def run(what: str, host: str, ratio: float) -> dict[str, Any]:
  """Probes one lab; returns what was said.

  Args:
    what: a key of `KINDS`.
    host: one of `HOSTS`.
    ratio: how many times as slow its link is.
  """
  config = fabric.get_config()
  with config.unlocked():
    config.racks, config.jobs = (HOSTS,), {"a": HOSTS}
    config.link_mbit, config.trunk_mbit = LINK_MBIT, 0.0
  with tempfile.TemporaryDirectory() as root, Lab(config) as lab:
    if what != "healthy":
      slow_down(lab, host, what, LINK_MBIT / ratio)
    processes = [
        lab.popen(name, [sys.executable, "-m", "jaxpace", "probe", "--run", root], cwd=_ROOT,
                  env=jobs.environment(lab.topology, "a", index, os.environ),
                  stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for index, name in enumerate(HOSTS)]
    for process in processes:
      process.wait(timeout=_PROBE_SECONDS)
    links = read_links(root)
  if links is None:
    return {"what": what, "host": host, "ratio": ratio, "right": False,
            "said": "the probe left nothing"}
  right = (not links.culprits if what == "healthy" else
           [(c.kind, c.hosts) for c in links.culprits] == [(KINDS[what], (host,))])
  return {"what": what, "host": host, "ratio": ratio, "right": right, "said": links.text(),
          "links": links.to_json()}


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"Not an option: {argv[1]}.")
  if reason := machine.why_not(("cubic",)):
    sys.exit(reason)
  figures = measured.circumstances("experiments.labs.fabric.slow_link")
  rows = []
  for what in [_ONLY.value] if _ONLY.value else KINDS:
    for ratio in (1.0,) if what == "healthy" else tuple(float(r) for r in _RATIOS.value):
      for repeat in range(_REPEATS.value):
        rows.append(run(what, HOSTS[repeat % len(HOSTS)], ratio))
        print(f"{what} {ratio:g}: {'right' if rows[-1]['right'] else 'WRONG'}: {rows[-1]['said']}",
              flush=True)
  if _ONLY.value:
    return
  figures["rows"] = rows
  cells = sorted({(row["what"], row["ratio"]) for row in rows})
  table = measured.table(
      ("what is slowed", "times as slow", "right answers", "probe took, s, at most"),
      [(what, ratio, f"{sum(r['right'] for r in own)} of {len(own)}",
        max((r["links"]["taken_seconds"] for r in own if "links" in r), default=None))
       for what, ratio in cells
       for own in [[r for r in rows if (r["what"], r["ratio"]) == (what, ratio)]]])
  lines = [*measured.introduction("The link probe on a host whose link is slow", figures),
           f"Four hosts, links of {LINK_MBIT:g} Mbit/s (tc tbf), messages of 1 MiB, 10 repeats. "
           "Right: that host, that way, and nothing else; of healthy labs: nothing.", "", *table]
  measured.write(figures, lines, pathlib.Path(_OUT.value))


_ONLY = flags.DEFINE_enum("only", None, list(KINDS), "Only this; nothing is written.")
_RATIOS = flags.DEFINE_list("ratios", ["2", "4"], "How many times as slow the link is.")
_REPEATS = flags.DEFINE_integer("repeats", 4, "Labs of each kind and ratio.", lower_bound=1)
_OUT = flags.DEFINE_string("out", "docs/measurements/link_probe.json", "Where the figures go.")

if __name__ == "__main__":
  app.run(main)
