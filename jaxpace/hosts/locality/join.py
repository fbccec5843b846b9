"""Joins what a topology file says with what the machine itself shows, so that the answer is never
worse for the file.

Devices are matched by their bus ids. The machine's own tree goes before the file's where it shows
switches. A guest's flat bus shows none; there the file's tree is taken if it has a place for each
of the machine's cards, else not at all: ways of two trees can't be compared.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

from jaxpace.hosts.locality.nics import fabric_of
from jaxpace.hosts.locality.topology_file import Described, DevicePlace
from jaxpace.hosts.locality.types import Gpu, Nic

Card = TypeVar("Card", Gpu, Nic)


class JoinedCards(NamedTuple):
  """Cards from both sources."""

  gpus: tuple[Gpu, ...]
  nics: tuple[Nic, ...]
  distances: dict[tuple[str, str], str] = {}  # noqa: RUF012 - never written
  """Distances that go before the tree's, see `nics.nearest`."""
  alone: bool = False
  """Whether the cards are the file's alone, and this is another machine."""
  used: str | None = None
  """What was taken from the file, in a sentence."""
  ignored: str | None = None
  """Why nothing was taken from the file."""


def join(gpus: tuple[Gpu, ...], nics: tuple[Nic, ...], described: Described, name: str,
         nodes: int = 0) -> JoinedCards:
  """Joins a machine and a topology file.

  Args:
    gpus: the machine's own.
    nics: the machine's own.
    described: what the file says.
    name: of the file, for sentences.
    nodes: NUMA nodes that the machine shows; where it is one, the file's go before it.
  """
  title = f"{name} ({described.form})"
  if not gpus and (described.gpus or described.nics):
    return JoinedCards(described.gpus, described.nics, dict(described.distances), alone=True, used=(
        f"This machine shows no GPU: what is shown is the machine that {title} describes."))
  described, why = _matched(gpus, nics, described)
  if why:
    return JoinedCards(gpus, nics, ignored=f"Nothing of {title} is used: {why}")
  places = _places(nics, described)
  tree, why = _takes_tree(gpus, nics, described, places, nodes)
  known = {gpu.pci: gpu for gpu in described.gpus}
  rates = {nic.name: nic.rate_gbps for nic in described.nics}
  return JoinedCards(
      tuple(_placed(_with_links(gpu, known.get(gpu.pci)), places.get(gpu.pci), tree)
            for gpu in gpus),
      tuple(_placed(nic._replace(rate_gbps=nic.rate_gbps or rates.get(nic.name)),
                    places.get(nic.name), tree) for nic in nics),
      dict(described.distances) if tree else {},
      used=f"Of {title} {sum(gpu.pci in places for gpu in gpus)} GPUs and "
           f"{sum(nic.name in places for nic in nics)} NICs are on this machine. {why}")


def _matched(gpus: tuple[Gpu, ...], nics: tuple[Nic, ...],
             described: Described) -> tuple[Described, str | None]:
  """The file's cards by the bus ids of this machine's, and why they are no cards of it, if so."""
  if not (described.gpus or described.nics or described.unclassed):
    return described, ("it holds no GPU and no NIC. Was it written where the devices could be "
                       "seen?")
  if described.numbered:
    # The program that writes such files knows NVIDIA's GPUs, in the order of their bus ids.
    own = sorted(gpu.pci for gpu in gpus if not (gpu.name or "").startswith("AMD"))
    if len(own) != len(described.gpus):
      return described, (f"it has {len(described.gpus)} GPUs and this machine {len(own)}, and "
                         "without bus ids nothing says which is which.")
    if described.nics and not {nic.name for nic in described.nics} & {nic.name for nic in nics}:
      return described, "none of its NICs has the name of one of this machine's."
    bus = dict(zip((gpu.pci for gpu in described.gpus), own, strict=True))
    return described._replace(
        gpus=tuple(gpu._replace(pci=bus[gpu.pci]) for gpu in described.gpus),
        distances=tuple(((bus[gpu], nic), word)
                        for (gpu, nic), word in described.distances)), None
  ids = {gpu.pci for gpu in described.gpus} | {place.pci for place in described.unclassed}
  if ids and not ids & {gpu.pci for gpu in gpus}:
    return described, ("none of its GPUs' bus ids is one of this machine's. It is of another "
                       "machine, or of another type of virtual machine.")
  return described, None


def _places(nics: tuple[Nic, ...], described: Described) -> dict[str, DevicePlace]:
  """Places by the bus ids of GPUs and the names of the machine's NICs."""
  cards: list[Gpu | Nic] = [*described.gpus, *described.nics]
  places = {place.pci: place for place in described.unclassed}
  places |= {card.pci: DevicePlace(card.pci, card.path, card.numa_node, card.switch, card.link)
             for card in cards if card.pci}
  by_name = {nic.name: DevicePlace("", nic.path, nic.numa_node, nic.switch, nic.link)
             for nic in described.nics if not nic.pci}
  for nic in nics:
    place = places.get(nic.pci or "") or by_name.get(nic.name)
    if place:
      places[nic.name] = place
  return places


def _takes_tree(gpus: tuple[Gpu, ...], nics: tuple[Nic, ...], described: Described,
                places: dict[str, DevicePlace], nodes: int) -> tuple[bool, str]:
  """Whether the file's tree takes the place of the machine's own, and a sentence."""
  known = {nic for (_, nic), _ in described.distances}
  if any(gpu.switch for gpu in gpus) or any(nic.switch for nic in nics):
    return False, "This machine's own tree shows its switches and goes before the file's."
  lacking = [*(f"GPU {gpu.pci}" for gpu in gpus if gpu.pci not in places),
             *(f"NIC {nic.name}" for nic in fabric_of(nics)
               if nic.name not in places and nic.name not in known)]
  if lacking:
    return False, f"The file's tree lacks {lacking[0]}, so that this machine's own is taken."
  for key, node in [*((gpu.pci, gpu.numa_node) for gpu in gpus),
                    *((nic.name, nic.numa_node) for nic in nics)]:
    other = places[key].numa_node if key in places else None
    if nodes > 1 and None not in (node, other) and node != other:
      return False, (f"They disagree on the NUMA node of {key} ({node} here, {other} there), so "
                     "that this machine's own tree is taken.")
  return True, "Their places are those of the file."


def _with_links(gpu: Gpu, other: Gpu | None) -> Gpu:
  """A GPU with what the file knows of it beside its place."""
  if other is None:
    return gpu
  return gpu._replace(nvlinks=other.nvlinks if gpu.nvlinks is None else gpu.nvlinks,
                      interconnect=gpu.interconnect or other.interconnect)


def _placed(card: Card, place: DevicePlace | None, tree: bool) -> Card:
  """A card where the file puts it, or, without its tree, with what the file adds to its own
  place."""
  if place is None:
    # One kind of way, so that all cards can be compared.
    return card._replace(path=(), switch=None) if tree else card
  first, second = (place, card) if tree else (card, place)
  node = second.numa_node if first.numa_node is None else first.numa_node
  # What was negotiated; what the device and the slot could do only sysfs knows.
  link = card.link._replace(speed=card.link.speed or place.link.speed,
                            width=card.link.width or place.link.width)
  if tree:
    card = card._replace(path=place.path, switch=place.switch)
  return card._replace(numa_node=node, link=link)
