"""The same jobs in SimGrid, if its Python module is there: what
`experiments.measure.message_reference` plays, by others' code.

Used by `experiments.measure.simulation_accuracy`, in a process of its own for every case, since
SimGrid has one engine a process: a case goes in as JSON on standard input, the instants at which
ranks are done come out. SimGrid is a fluid model here, too: no corrections for TCP (`CM02`, no
windows, no cross traffic), links shared max-min fairly.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from experiments.measure.message_reference import Fabric, Job, Message

_SETTINGS = ("network/model:CM02", "network/TCP-gamma:0", "network/weight-S:0",
             "network/crosstraffic:0", "network/bandwidth-factor:1", "network/latency-factor:1",
             "surf/precision:1e-12", "maxmin/precision:1e-9")


def there() -> bool:
  """Whether SimGrid can be imported."""
  return importlib.util.find_spec("simgrid") is not None


def play(fabric: Fabric, jobs: Sequence[Job]) -> list[list[dict[int, float]]]:
  """As `experiments.measure.message_reference.play`: of each job and step, when each rank was done,
  s."""
  routes = [(s, t, *fabric.route(s, t)) for s in range(fabric.ranks) for t in range(fabric.ranks)
            if s != t]
  links = {link: fabric.rate(link) for *_, path in routes for link in path}
  case = {
      "ranks": fabric.ranks,
      "links": [["/".join(map(str, link)), rate] for link, rate in links.items()],
      "routes": [[s, t, latency, ["/".join(map(str, link)) for link in path]]
                 for s, t, latency, path in routes],
      "jobs": [{"ranks": job.ranks, "rounds": job.rounds, "start": job.start,
                "compute": [[step[r] for r in job.ranks] for step in job.compute]} for job in jobs]}
  ended = subprocess.run([sys.executable, "-m", "experiments.measure.simgrid_reference"],
                         input=json.dumps(case), text=True,
                         capture_output=True, check=True)
  found = json.loads(ended.stdout.splitlines()[-1])
  return [[{int(rank): when for rank, when in step.items()} for step in job] for job in found]


def _inside(case: dict[str, Any]) -> list[list[dict[int, float]]]:
  simgrid = importlib.import_module("simgrid")
  engine = simgrid.Engine(["simgrid", "--log=root.thresh:critical",
                           *(f"--cfg={setting}" for setting in _SETTINGS)])
  zone = simgrid.NetZone.create_full_zone("fabric")
  hosts = [zone.create_host(f"rank{r}", 1e9).seal() for r in range(case["ranks"])]
  made = {name: zone.create_link(name, min(rate, 1e18)).seal() for name, rate in case["links"]}
  for source, target, latency, path in case["routes"]:
    links = [made[name] for name in path]
    if latency:
      # A link of its own that holds nothing back carries the latency of the pair.
      links.append(zone.create_link(f"latency{source}-{target}", 1e18).set_latency(latency).seal())
    zone.add_route(hosts[source].netpoint, hosts[target].netpoint, None, None,
                   [simgrid.LinkInRoute(link) for link in links], False)
  zone.seal()
  done: list[list[dict[int, float]]] = [[{} for _ in job["compute"]] for job in case["jobs"]]

  def rank_of(j: int, place: int) -> None:
    job = case["jobs"][j]
    rank = job["ranks"][place]
    rounds = [[Message(*message) for message in part if rank in message[:2]]
              for part in job["rounds"]]
    simgrid.this_actor.sleep_for(job["start"])
    for step, compute in enumerate(job["compute"]):
      simgrid.this_actor.sleep_for(compute[place])
      for part in rounds:
        # SimGrid writes what came into `places`, which must outlive the wait.
        waiting, places = [], []
        for message in part:
          box = simgrid.Mailbox.by_name(f"{j}:{message.source}:{message.target}")
          if message.source == rank:
            waiting.append(box.put_async("", round(message.bytes)))
          else:
            came, place_of_it = box.get_async()
            waiting.append(came)
            places.append(place_of_it)
        if waiting:
          simgrid.Comm.wait_all(waiting)
      done[j][step][rank] = simgrid.Engine.clock

  for j, job in enumerate(case["jobs"]):
    for place, rank in enumerate(job["ranks"]):
      simgrid.Actor.create(f"{j}:{rank}", hosts[rank], rank_of, j, place)
  engine.run()
  return done


if __name__ == "__main__":
  print(json.dumps(_inside(json.load(sys.stdin))))
