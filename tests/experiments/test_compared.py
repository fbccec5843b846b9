"""Two judgements side by side: every difference is listed, and nothing else."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

from experiments.labs import compared
from experiments.lib import measured


def row(name: str, *found: dict[str, Any]) -> dict[str, Any]:
  return {"name": name, "injected": [], "found": {"all": list(found), "bare": []}}


def finding(mode: str, share: float = 0.1, ranks: tuple[int, ...] = (),
            hosts: tuple[str, ...] = ()) -> dict[str, Any]:
  return {"mode": mode, "share": share, "confidence": 0.99, "ranks": list(ranks),
          "hosts": list(hosts)}


def test_each_kind_of_difference_is_listed_once() -> None:
  old = {name: row(name, one) for name, one in {
      "same": finding("locality", 0.1, (1, 2)), "turned": finding("locality", 0.1, (1, 2)),
      "missed": finding("locality"), "blamed": finding("locality", 0.1, (1,)),
      "share": finding("locality", 0.1), "near": finding("locality", 0.1),
      "gone": finding("locality")}.items()}
  new = {name: row(name, *ones) for name, ones in {
      "same": [finding("locality", 0.1, (1, 2))], "turned": [finding("locality", 0.1, (2, 1))],
      "missed": [], "blamed": [finding("locality", 0.1, (2,))],
      "share": [finding("locality", 0.102)],
      "near": [finding("locality", 0.1005), finding("runtime_jitter")], "late": []}.items()}
  found = compared.compare(old, new)
  assert [(entry["run"], entry["mode"], entry["what"]) for entry in found["differences"]] == [
      ("blamed", "locality", "blame"), ("missed", "locality", "only old"),
      ("near", "runtime_jitter", "only new"), ("share", "locality", "share")]
  assert (found["runs"], found["only_old"], found["only_new"]) == (6, ["gone"], ["late"])
  assert found["ways"]["all"]["largest_difference_of_shares"] == pytest.approx(0.002)
  assert found["ways"]["all"]["findings_old"] == 6 and found["ways"]["counters"]["runs"] == 0
  figures = {**measured.circumstances("experiments.labs.compared"), "note": "a word",
             "compared": {"Seed 7": found}}
  page = "\n".join(compared.page(figures))
  assert "## Seed 7" in page and "10.00 %, ranks [1] []" in page and "a word" in page


def test_files_of_both_kinds_are_read(tmp_path: pathlib.Path) -> None:
  rows = [row("a"), row("b")]
  for name, document in (("new.json", rows), ("old.json", {"judged": {}, "runs": rows})):
    (tmp_path / name).write_text(json.dumps(document))
    assert compared.read(tmp_path / name) == {"a": rows[0], "b": rows[1]}
  (tmp_path / "no.json").write_text(json.dumps({"judged": {}}))
  with pytest.raises(ValueError, match="holds no judged runs"):
    compared.read(tmp_path / "no.json")
