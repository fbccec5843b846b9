"""Topology files that somebody else wrote: hostile ones are refused in a sentence, and cost neither
time nor memory."""

import os
import tracemalloc

import pytest

from jaxpace.cli.main import main
from jaxpace.hosts.locality.described import TopologyError, read_mask
from jaxpace.hosts.locality.topology_file import parse_topology
from tests.hosts.locality import topologies

LAUGHS = ('<?xml version="1.0"?><!DOCTYPE system [<!ENTITY a "haha">'
          + "".join(f'<!ENTITY {chr(98 + i)} "{f"&{chr(97 + i)};" * 10}">' for i in range(9))
          + ']><system version="1"><cpu numaid="0">&j;</cpu></system>')

HOSTILE = {
    "billion laughs": (LAUGHS.encode(), "declares entities"),
    "an entity of a file": (
        b'<!DOCTYPE system [<!ENTITY x SYSTEM "/etc/passwd">]><system>&x;</system>',
        "declares entities"),
    "a parameter entity": (b'<!DOCTYPE system [<!ENTITY % x "y">]><system/>', "declares entities"),
    "an unknown entity": (b"<system>&x;</system>", "no XML"),
    "deep": (b"<system>" + b"<pci>" * 100_000, "nested more than"),
    "wide": (b"<system>" + b"<a/>" * 1_000_000 + b"</system>", "elements"),
    "cut": (topologies.lstopo().encode()[:-200], "no XML"),
    "a zero": (b"<system>\0</system>", "no XML"),
    "another encoding": (b"<?xml version='1.0' encoding='x-none'?><system/>", "no XML"),
    "another document": (b"<svg/>",
                         "outermost element is <svg>, neither NCCL's <system> nor hwloc's "
                         "<topology>"),
    "more GPUs than a host": (
        b'<system><cpu numaid="0">' + b"".join(
            b'<pci busid="%04x:00:00.0" class="0x030200"/>'
            b'<pci busid="%04x:01:00.0" class="0x020700"/>' % (i, i)
            for i in range(30_000)) + b"</cpu></system>",
        "30,000 GPUs and 30,000 NICs: no host has"),
    "masks": (b"<topology>" + b'<object type="Group" nodeset="0x%s"/>'
              % b",".join([b"55555555"] * 400) * 8_000
              + b"</topology>", None),
    "blanks": (b" \n\t", "the file is empty"),
    "bytes": (bytes(range(256)) * 100, "no whole matrix"),
    "GPUs without end": (b"\t".join([b"GPU%d" % i for i in range(9000)]) + b"\tCPU Affinity\n" * 2,
                         "no whole matrix"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_end_in_a_sentence(name, tmp_path, capsys):
  content, sentence = HOSTILE[name]
  file = tmp_path / "x"
  file.write_bytes(content)
  status = main(["doctor", "--topology", str(file)])
  out, err = capsys.readouterr()
  if sentence is None:
    assert status == 0 and "is used: it holds no GPU and no NIC" in " ".join(out.split())
  else:
    assert status == 2 and out == "" and sentence in err and len(err.strip().splitlines()) == 1


def test_laughs_cost_no_memory():
  tracemalloc.start()
  try:
    with pytest.raises(TopologyError):
      parse_topology(LAUGHS.encode())
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
  finally:
    tracemalloc.stop()


def test_what_is_no_file_is_not_waited_for(tmp_path, capsys):
  os.mkfifo(tmp_path / "pipe")
  for path, sentence in ((tmp_path / "pipe", "a pipe or a device"),
                         ("/dev/zero", "a pipe or a device"), (tmp_path, "Is a directory")):
    assert main(["doctor", "--topology", str(path)]) == 2
    assert sentence in capsys.readouterr().err


def test_large_files_are_not_read_whole(tmp_path, capsys):
  file = tmp_path / "large.xml"
  with file.open("wb") as handle:
    handle.truncate(1 << 34)
  assert main(["doctor", "--topology", str(file)]) == 2
  assert "larger than 32 MiB" in capsys.readouterr().err


def test_neither_can_the_files_own(tmp_path, capsys):
  assert main(["doctor", "--topology", str(tmp_path / "a\x1b[31m\nb")]) == 2
  assert "a?[31m?b can't be read" in capsys.readouterr().err


def test_names_can_not_steer_a_terminal(tmp_path, capsys):
  file = tmp_path / "topo.xml"
  net = f'<net name="mlx5&#x9b;31m&#x202e;{"y" * 500}" speed="{"9" * 400}" guid="0x1"/>'
  file.write_text('<system version="1"><cpu numaid="0"><pci busid="0000:01:00.0" '
                  f'class="0x020700"><nic>{net}</nic></pci></cpu></system>')
  assert main(["doctor", "--topology", str(file), "--root", str(tmp_path)]) == 0
  out = capsys.readouterr().out
  assert ("mlx5" in out and "\x9b" not in out and "\u202e" not in out
          and "y" * 65 not in out.replace("\n", ""))


@pytest.mark.parametrize("mask, expected", [
    ("00000000,0000ffff", "0-15"), ("0x00000001,0x00000000", "32"), ("0x1,,0x1", "0,64"),
    ("0xf...f", None), ("", None), (None, None), ("f" * 9, None), ("0," * 10_000 + "1", None),
    ("0", "")])
def test_masks_of_processors(mask, expected):
  assert read_mask(mask) == expected
