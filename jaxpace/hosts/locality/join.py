"""Joins what a topology file says with what the machine itself shows, so that the answer is never
worse for the file.

Devices are matched by their bus ids. The machine's own tree goes before the file's where it shows
switches. A guest's flat bus shows none; there the file's tree is taken, as a whole or not at all:
ways of two trees can't be compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, TypeVar

from jaxpace.hosts.locality import pci
from jaxpace.hosts.locality.described import Described, DevicePlace
from jaxpace.hosts.locality.nics import fabric_of
from jaxpace.hosts.locality.types import Gpu, Link, Nic

Card = TypeVar("Card", Gpu, Nic)


class Shown(NamedTuple):
  """What the machine shows of itself."""

  gpus: tuple[Gpu, ...] = ()
  nics: tuple[Nic, ...] = ()
  ways: Mapping[str, tuple[str, ...]] = MappingProxyType({})
  """Ways to all its PCI devices by their bus ids; empty where it hides its bus."""
  nodes: int = 0
  """NUMA nodes; 0 where it doesn't say."""


class JoinedCards(NamedTuple):
  """Cards from both sources."""

  gpus: tuple[Gpu, ...]
  nics: tuple[Nic, ...]
  distances: dict[tuple[str, str], str]
  """Distances that go before the tree's, see `nics.nearest`."""
  alone: bool = False
  """Whether the file is of another machine, and nothing of this one's cards is in here."""
  used: tuple[str, ...] = ()
  """What was taken from the file, and what was left out, in sentences."""
  ignored: str | None = None
  """Why nothing was taken from the file."""


def join(shown: Shown, described: Described, name: str) -> JoinedCards:
  """Joins a machine and a topology file.

  Args:
    shown: the machine's own cards.
    described: the file's.
    name: of the file, for sentences.
  """
  title = f"{name} ({described.form})"

  def ignore(why: str) -> JoinedCards:
    return JoinedCards(shown.gpus, shown.nics, {}, ignored=f"Nothing of {title} is used: {why}")

  if not (described.gpus or described.nics or described.unclassed):
    return ignore(
        f"it holds no GPU and no NIC{_more(described)}. Was it written where the devices could "
        "be seen?")
  if described.numbered:
    numbered = _number(shown, described)
    if isinstance(numbered, str):
      return ignore(numbered)
    described = numbered
  ids = ({gpu.pci for gpu in described.gpus} or {nic.pci for nic in described.nics if nic.pci}) | {
      place.pci for place in described.unclassed}
  own = (set(shown.ways) | {gpu.pci for gpu in shown.gpus}
         | {nic.pci for nic in shown.nics if nic.pci})
  if ids and own and not ids & own:
    if shown.gpus:
      return ignore("none of its GPUs' bus ids is one of this machine's. It is of another machine, "
                    "or of another type of virtual machine.")
    if shown.ways:
      used = (f"None of the cards in {title} is on this machine: what is shown is the machine that "
              "the file describes.", *_left_out(described, []))
      return JoinedCards(described.gpus, described.nics, dict(described.distances), alone=True,
                         used=used)
  return _Join(shown, described, title).run()


def _more(described: Described) -> str:
  others = described.others + len(described.unclassed)
  return f" ({others} other device{'s' if others > 1 else ''})" if others else ""


def _number(shown: Shown, described: Described) -> Described | str:
  """Gives the file's numbered GPUs the bus ids of this machine's, or says why not."""
  # The program that writes such files knows NVIDIA's GPUs, in the order of their bus ids.
  own = sorted(gpu.pci for gpu in shown.gpus if gpu.name and not gpu.name.startswith("AMD"))
  if not own:
    return described
  if len(own) != len(described.gpus):
    return (f"it has {len(described.gpus)} GPUs and this machine {len(own)}, and without bus ids "
            "it can't be told which is which.")
  names = {nic.name for nic in described.nics}
  rdma = {nic.name for nic in shown.nics if nic.kind != "ethernet"}
  if names and rdma and not names & rdma:
    return "none of its NICs has the name of one of this machine's."
  bus = dict(zip((gpu.pci for gpu in described.gpus), own, strict=True))
  return described._replace(
      gpus=tuple(gpu._replace(pci=bus[gpu.pci]) for gpu in described.gpus),
      distances=tuple(((bus[gpu], nic), word) for (gpu, nic), word in described.distances))


class _Join:
  """One join of a machine and the file that describes it."""

  def __init__(self, shown: Shown, described: Described, title: str):
    self.shown, self.described, self.title = shown, described, title
    self.gpu_of = {gpu.pci: gpu for gpu in described.gpus}
    self.pairs, self.new_nics, self.missing_nics = self._match_nics()
    self.new_gpus, self.missing_gpus = self._new_gpus()
    self.places: dict[str, DevicePlace] = {place.pci: place for place in described.unclassed}
    cards: list[Gpu | Nic] = [*described.gpus, *described.nics]
    for card in cards:
      if card.pci:
        self.places[card.pci] = DevicePlace(card.pci, card.path, card.numa_node, card.switch,
                                            card.link)

  def run(self) -> JoinedCards:
    """Joins them."""
    why = self._not_its_tree()
    if why is not None:
      self._keep_to_the_machine()
    gpus = [self._gpu(gpu, why is None) for gpu in self.shown.gpus]
    nics = [self._nic(nic, why is None) for nic in self.shown.nics]
    matched = [gpu.pci for gpu in self.shown.gpus if gpu.pci in self.places]
    placed = [nic.name for nic in self.shown.nics if self._place(nic) is not None]
    cards = (f"{_count(len(matched) + len(self.new_gpus), 'GPU')} and "
             f"{_count(len(placed) + len(self.new_nics), 'NIC')}")
    if not (matched or placed or self.new_gpus or self.new_nics):
      return JoinedCards(self.shown.gpus, self.shown.nics, {}, ignored=(
          f"Nothing of {self.title} is used: this machine shows no GPU and no NIC where the file "
          "has devices."))
    if self.shown.ways or self.shown.gpus:
      used = [
          f"Of {self.title} {cards} are on this machine. "
          f"{why or 'Their places are those of the file.'}"]
      new = [nic.name for nic in self.new_nics]
      if new:
        used.append(f"{_listed(new)} {'is' if len(new) == 1 else 'are'} known from the file only: "
                    "this machine shows no NIC of that kind.")
    else:
      used = [
          f"{cards} are as {self.title} has them: this machine shows no PCI devices to compare "
          "them with."]
    used += _left_out(self.described, [*self.missing_gpus, *self.missing_nics])
    return JoinedCards(
        tuple(sorted([*gpus, *self.new_gpus])), (*nics, *self.new_nics),
        dict(self.described.distances) if why is None else {}, used=tuple(used))

  def _match_nics(self) -> tuple[dict[str, Nic], list[Nic], list[str]]:
    """The file's NIC for each of the machine's, those to be added, and names of those that aren't
    here."""
    by_bus = {nic.pci: nic for nic in self.described.nics if nic.pci}
    by_name = {nic.name: nic for nic in self.described.nics}
    pairs: dict[str, Nic] = {}
    for nic in self.shown.nics:
      other = by_bus.get(nic.pci) if nic.pci else None
      if other is None:
        other = by_name.get(nic.name)
        # A name alone is no match where both have bus ids, and those differ.
        other = None if other is not None and other.pci and nic.pci else other
      if other is not None:
        pairs[nic.name] = other
    taken = {id(nic) for nic in pairs.values()}
    kinds = {nic.kind == "ethernet" for nic in self.shown.nics}
    new, missing = [], []
    for nic in self.described.nics:
      if id(nic) in taken:
        continue
      # A machine that shows some of its RDMA devices shows all of them; so with plain network
      # cards.
      if self.shown.ways and (nic.kind == "ethernet") in kinds:
        missing.append(nic.name)
      else:
        new.append(nic)
    return pairs, new, missing

  def _new_gpus(self) -> tuple[list[Gpu], list[str]]:
    """GPUs of the file to be added, and those that aren't here."""
    own = {gpu.pci for gpu in self.shown.gpus}
    new: list[Gpu] = []
    missing: list[Gpu] = []
    for gpu in self.described.gpus:
      if gpu.pci not in own:
        hidden = not self.shown.ways and not own
        (new if hidden or gpu.pci in self.shown.ways else missing).append(gpu)
    return new, [gpu.pci for gpu in missing]

  def _keep_to_the_machine(self) -> None:
    """Of the cards to be added, keeps those that the machine lists on its bus, where it has
    them."""
    ways = self.shown.ways
    self.missing_gpus += [gpu.pci for gpu in self.new_gpus if gpu.pci not in ways]
    self.missing_nics += [nic.name for nic in self.new_nics if nic.pci not in ways]
    self.new_gpus = [_moved(gpu, ways[gpu.pci]) for gpu in self.new_gpus if gpu.pci in ways]
    self.new_nics = [_moved(nic, ways[nic.pci]) for nic in self.new_nics if nic.pci
                     and nic.pci in ways]

  def _place(self, nic: Nic) -> DevicePlace | None:
    """The file's place of one of the machine's NICs."""
    pair = self.pairs.get(nic.name)
    if pair is not None and (pair.path or pair.numa_node is not None):
      return DevicePlace(pair.pci or "", pair.path, pair.numa_node, pair.switch, pair.link)
    return self.places.get(nic.pci) if nic.pci else None

  def _not_its_tree(self) -> str | None:
    """Why the file's tree is not taken, a sentence; None if it is."""
    shown = self.shown
    cards: list[Gpu | Nic] = [*shown.gpus, *shown.nics]
    if not any(card.path for card in shown.gpus):
      return None  # there is no other tree
    if any(card.switch for card in cards):
      return "This machine's own tree shows its switches and goes before the file's."
    for gpu in shown.gpus:
      if gpu.pci not in self.places:
        return f"The file's tree lacks GPU {gpu.pci}, so that this machine's own is taken."
    told = {nic for (_, nic), _ in self.described.distances}
    for nic in fabric_of([self._nic(nic, True) for nic in shown.nics] + self.new_nics):
      place = self._place(nic) if nic not in self.new_nics else DevicePlace(nic.pci or "", nic.path)
      if nic.pci and nic.name not in told and (place is None or not place.path):
        return f"The file's tree lacks NIC {nic.name}, so that this machine's own is taken."
    if shown.nodes > 1:
      for card in cards:
        place = self._place(card) if isinstance(card, Nic) else self.places[card.pci]
        if (place and None not in (place.numa_node, card.numa_node)
            and place.numa_node != card.numa_node):
          return (f"They disagree on the NUMA node of {card.pci} ({card.numa_node} here, "
                  f"{place.numa_node} there), so that this machine's own tree is taken.")
    return None

  def _gpu(self, gpu: Gpu, tree: bool) -> Gpu:
    place, other = self.places.get(gpu.pci), self.gpu_of.get(gpu.pci)
    if other is not None:
      gpu = gpu._replace(
          nvlinks=other.nvlinks if gpu.nvlinks is None else gpu.nvlinks,
          xgmi_links=other.xgmi_links if gpu.xgmi_links is None else gpu.xgmi_links,
          interconnect=gpu.interconnect or other.interconnect, name=gpu.name or other.name)
    return _placed(gpu, place, tree)

  def _nic(self, nic: Nic, tree: bool) -> Nic:
    pair = self.pairs.get(nic.name)
    if pair is not None:
      nic = nic._replace(rate_gbps=nic.rate_gbps or pair.rate_gbps, pci=nic.pci or pair.pci)
    return _placed(nic, self._place(nic), tree)


def _moved(card: Card, path: tuple[str, ...]) -> Card:
  return card._replace(path=path, switch=pci.switch_of(path))


def _placed(card: Card, place: DevicePlace | None, tree: bool) -> Card:
  """A card where the file puts it, or, without its tree, with what the file adds to its own
  place."""
  if place is None:
    # One kind of way, so that all cards can be compared.
    return card._replace(path=(), switch=None) if tree else card
  link = _join_link(card.link, place.link)
  if tree:
    node = card.numa_node if place.numa_node is None else place.numa_node
    return card._replace(numa_node=node, path=place.path, switch=place.switch, link=link)
  return card._replace(numa_node=place.numa_node if card.numa_node is None else card.numa_node,
                       link=link)


def _join_link(known: Link, described: Link) -> Link:
  """A file's link is what was negotiated; what the device and the slot could do only sysfs
  knows."""
  return known._replace(speed=known.speed or described.speed, width=known.width or described.width)


def _left_out(described: Described, missing: Sequence[str]) -> list[str]:
  """Sentences about what of the file is not used."""
  found = [*described.notes]
  if missing:
    found.append(f"Left out, as this machine has none such: {_listed(missing)}.")
  parts = []
  if described.others:
    verb = "is" if described.others == 1 else "are"
    parts.append(f"{_count(described.others, 'device')} that {verb} neither GPU nor NIC")
  if described.unreadable:
    parts.append(f"{_count(described.unreadable, 'device')} without a bus id that can be read")
  if parts:
    found.append(f"Left out of the file: {' and '.join(parts)}.")
  return found


def _count(number: int, noun: str) -> str:
  return f"{number} {noun}{'' if number == 1 else 's'}"


def _listed(names: Sequence[str]) -> str:
  return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
