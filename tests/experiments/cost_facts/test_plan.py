"""Plans: against arithmetic done here by hand, limits, and the facts they reproduce."""

import dataclasses
import doctest
import json
import math
import os
import re
import shlex
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.cost_facts import plan as plan_command
from experiments.cost_facts.plan import main
from experiments.cost_facts.planning import model
from experiments.cost_facts.planning.catalogue import DEVICES, NETWORKS
from experiments.cost_facts.planning.facts import facts
from experiments.cost_facts.planning.plan import (
  CAUSES,
  GAINS,
  PlanError,
  Setting,
  expected_maximum,
  scale,
  step,
)
from tests.multiprocess.jobs import ROOT

PAGE = ROOT / "docs" / "plan.md"
SMALL = model.Model(1e9, 24, 2048, 1024)


def setting(**more):
  values = {"model": SMALL, "device": DEVICES["a100"], "network": NETWORKS["ib-200"], "per_node": 8,
            "achieved": 1.0, "sustained": 0.4, "overlap": 0.0, "jitter": 0.0, "launch": 0.0,
            "examples": 4}
  return Setting(**{**values, **more})


def test_compute_is_flops_over_what_is_sustained():
  tokens = 4 * 1024
  expected = tokens * (6 * 1e9 + 12 * 24 * 2048 * 1024) / (0.4 * 312e12)
  alone = step(setting())
  assert (alone.seconds == pytest.approx(expected)
          and alone.parts["compute"] == pytest.approx(expected))
  assert alone.tokens_per_second == pytest.approx(tokens / expected)


@pytest.mark.parametrize(("data", "expected"), [
    (4, 2 * 3 * (3e-6 + 2e9 / 4 / 300e9)),  # a ring inside a node
    # four nodes of eight
    (32, 2 * 7 * (3e-6 + 2e9 / 8 / 300e9) + 2 * 3 * (5e-6 + 2e9 / 32 / 25e9))])
def test_gradients_go_round_rings(data, expected):
  assert step(setting(data=data)).parts["data"] == pytest.approx(expected)


def test_what_hides_behind_the_backward_pass_is_not_paid():
  open_, hidden = step(setting(data=32)), step(setting(data=32, overlap=1.0))
  assert hidden.hidden == pytest.approx(min(open_.parts["data"], 2 / 3 * open_.parts["compute"]))
  assert hidden.seconds == pytest.approx(open_.seconds - hidden.hidden)


def test_tensor_parallelism_pays_four_all_reduces_a_layer():
  split = step(setting(tensor=8, micro_batches=2))
  size = 2 * 1024 * 2048 * 2  # two examples a micro-batch
  each = 2 * 7 * (3e-6 + size / 8 / 300e9)
  assert split.parts["tensor"] == pytest.approx(4 * 24 * 2 * each)
  assert split.parts["compute"] == pytest.approx(step(setting()).parts["compute"] / 8)


def test_a_pipeline_pays_its_bubble():
  split = step(setting(pipeline=4, micro_batches=8, examples=8))
  bubble = 3 / 8 * split.parts["compute"]
  size = 1 * 1024 * 2048 * 2
  assert split.parts["pipeline"] == pytest.approx(bubble + 2 * 3 * (3e-6 + size / 300e9))


def test_tensors_pipelines_and_replicas_together():
  """Replicas of 2 x 2 devices, two to a node of eight: stages wait for their all-reduces too, and
  send half each."""
  split = step(setting(tensor=2, pipeline=2, data=16, micro_batches=4, examples=4))
  compute = 4 * 1024 * (6 * 1e9 + 12 * 24 * 2048 * 1024) / 4 / (0.4 * 312e12)
  size = 1 * 1024 * 2048 * 2
  tensor = 4 * 24 / 2 * 4 * 2 * (3e-6 + size / 2 / 300e9)
  gradients = 2e9 / 4
  assert split.parts == pytest.approx({
      "compute": compute, "skew": 0, "tensor": tensor,
      "pipeline": (compute + tensor) / 4 + 2 * (3e-6 + size / 2 / 300e9),
      "data": 2 * (3e-6 + gradients / 2 / 300e9) + 2 * 7 * (5e-6 + gradients / 16 / 25e9)})


@pytest.mark.parametrize(("precision", "each"),
                         [("bf16", 2 + 2 + 12), ("fp16", 2 + 2 + 12), ("fp32", 4 + 4 + 8)])
def test_state_is_parameters_gradients_moments_and_a_master_copy(precision, each):
  assert step(setting(precision=precision)).memory == pytest.approx(each * 1e9)


def test_jitter_pays_for_the_slowest():
  jittery = step(setting(data=64, jitter=0.05))
  assert jittery.parts["skew"] == pytest.approx(0.05 * 2.344 * jittery.parts["compute"], rel=1e-3)


@pytest.mark.parametrize("count", [3, 64, 500])
def test_the_expected_maximum_is_that_of_draws(count):
  drawn = np.random.default_rng(0).normal(size=(20_000, count)).max(axis=1)
  assert (expected_maximum(count) == pytest.approx(drawn.mean(),
                                                   abs=4 * drawn.std() / math.sqrt(len(drawn))))


@given(data=st.sampled_from([1, 2, 8, 64, 1024]), tensor=st.sampled_from([1, 2, 8]),
       pipeline=st.sampled_from([1, 2, 8]), overlap=st.floats(0, 1), jitter=st.floats(0, 0.3))
def test_parts_add_up_and_nothing_is_negative(data, tensor, pipeline, overlap, jitter):
  made = step(setting(data=data, tensor=tensor, pipeline=pipeline, overlap=overlap, jitter=jitter,
                      micro_batches=4, examples=4))
  assert set(made.parts) == set(CAUSES) and sum(made.parts.values()) == pytest.approx(made.seconds)
  assert min(made.parts.values()) >= 0 and made.devices == data * tensor * pipeline


def test_the_knee_is_where_doubling_stops_paying():
  """A batch that is divided: compute halves with each doubling, the ring does not."""
  job = setting(examples=None, global_examples=1024, per_node=1)
  scaling = scale(job, [2**k for k in range(11)])
  rates = [s.tokens_per_second for s in scaling.steps]
  assert scaling.knee is not None
  at = [s.devices for s in scaling.steps].index(scaling.knee)
  assert (rates[at + 1] / rates[at] < GAINS
          <= min(b / a for a, b in zip(rates[:at], rates[1:at + 1], strict=True)))
  assert all(a >= b for a, b in zip(scaling.efficiency, scaling.efficiency[1:], strict=False))
  assert scale(setting(), [1, 2, 4]).knee is None


def test_the_knee_goes_by_doublings_however_far_apart_the_sizes_are():
  """Four times the devices are two doublings: 1.5 twice over, 2.25 times the throughput."""
  job = setting(examples=None, global_examples=1024, per_node=1)
  gains = {}
  for replicas in (1, 4, 16, 64, 256):
    found = scale(job, [replicas, 4 * replicas])
    gains[replicas] = found.steps[1].tokens_per_second / found.steps[0].tokens_per_second
    assert (found.knee == replicas) == (gains[replicas] < 2.25) and found.knee in (None, replicas)
  assert any(1.5 < gain < 2.25 for gain in gains.values()) and max(gains.values()) > 2.25


def test_memory_says_what_does_not_fit():
  assert not step(setting(model=model.shaped(10e9))).fits  # 16 bytes a parameter
  assert step(setting(model=model.shaped(10e9), tensor=4)).memory == pytest.approx(40e9)


@pytest.mark.parametrize(("change", "said"), [
    ({"data": 0}, "data=0 must be a whole number"),
    ({"tensor": 4096}, "tensor=4096 must be at most"),
    ({"pipeline": 25}, "pipeline=25 has more stages"),
    ({"overlap": 1.5}, "overlap=1.5 must be a number from 0 to 1"),
    ({"precision": "int8"}, "precision='int8' must be one of"),
    ({"examples": -1}, "must be above 0"), ({"jitter": math.nan}, "jitter=nan"),
    ({"global_examples": 8}, "one of the two"), ({"pipeline": 4, "micro_batches": 9, "examples": 8},
                                                 "micro_batches=9 must be at most examples=8")])
def test_impossible_settings_are_named(change, said):
  with pytest.raises(PlanError, match=said):
    setting(**change)


def test_the_facts_agree_or_say_why_not():
  found = {fact.about: fact for fact in facts()}
  assert len(found) == 15
  for fact in found.values():
    assert fact.agrees or fact.note
  assert (found["gradient all-reduce of 10 B parameters, at least"].found
          == pytest.approx(2 * 511 / 512 * 0.4, rel=0.01))
  assert {f.about for f in found.values() if not f.agrees} == {
      "on-chip against network bandwidth", "OPT-175B on 992 A100",
      "TPU v4 pod's bisection against InfiniBand"}


def test_the_waiting_note_holds():
  """"For jitter of 4 to 8 %; at 1 % it is 3 %": the note's own figures."""
  def cost(jitter):
    return jitter * expected_maximum(512) / (1 + jitter * expected_maximum(512))

  assert 0.10 < cost(0.04) < cost(0.08) < 0.20 and cost(0.01) == pytest.approx(0.03, abs=0.001)


def test_the_command_prints_and_writes(capsys, tmp_path):
  file = tmp_path / "plan.json"
  assert (main(["--parameters", "1e9", "--devices", "48", "--global-examples", "512", "--json",
                str(file)]) == 0)
  said = capsys.readouterr().out
  assert "efficiency" in said and "assumptions, not measurements" in said
  steps = json.loads(file.read_text())["steps"]
  assert [s["devices"] for s in steps] == [1, 2, 4, 8, 16, 32, 48]
  assert all(sum(s["shares"].values()) == pytest.approx(1) for s in steps)
  assert main(["--facts", "--json", "-"]) == 0
  assert len(json.loads(capsys.readouterr().out)["facts"]) == 15
  assert main(["--facts"]) == 0
  assert "DEPARTS" in capsys.readouterr().out


def examples(text):
  command = "python -m experiments.cost_facts.plan --"
  lines = text.replace("\\\n", "").splitlines()
  return [shlex.split(line)[3:] for line in lines if line.strip().startswith(command)]


def test_the_examples_are_of_jobs_that_fit(capsys):
  shown = [*examples(plan_command.EPILOG), *examples(PAGE.read_text())]
  assert len(shown) >= 4
  for arguments in shown:
    assert main(arguments) == 0
    assert "does not fit" not in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["--parameters", "175e9", "--devices", "4096"],
                                       ["--parameters", "70e9", "--device", "tpu-v4"]])
def test_what_does_not_fit_is_told_what_would(arguments, capsys):
  assert main([*arguments]) == 0
  said = re.search(r"does not fit: .* It would with ([^;]*);", capsys.readouterr().out)
  assert main([*arguments, *said[1].split()]) == 0
  assert "does not fit" not in capsys.readouterr().out


@pytest.mark.parametrize(("number", "said"), [
    ("10e9", "10 billion"), ("175e9", "175 billion"), ("1.3e9", "1.3 billion"),
    ("350e6", "350 million"), ("1e12", "1 trillion"), ("999.9e6", "1 billion"),
    ("123456", "123,456")])
def test_parameters_are_written_as_people_say_them(number, said, capsys):
  assert main(["--parameters", number]) == 0
  assert capsys.readouterr().out.startswith(f"{said} parameters, ")


@pytest.mark.parametrize(("arguments", "said"), [
    (["--tensor", "16", "--devices", "8"], "at least tensor x pipeline = 16"),
    (["--tensor", "0"], "tensor=0 must be a whole number from 1"),
    (["--parameters", "-5"], "parameters=-5.0"), (["--parameters", "nan"], "parameters=nan"),
    (["--sustained", "2"], "sustained=2.0"), (["--examples", "0"], "examples=0.0 must be a number"),
    (["--json", "/no/such/x.json"], "does not exist")])
def test_slips_get_a_sentence(arguments, said, capsys):
  assert main([*arguments]) == 2
  streams = capsys.readouterr()
  assert said in streams.err and "Traceback" not in streams.err


def test_the_page_is_right():
  results = doctest.testfile(str(PAGE), module_relative=False)
  assert results.attempted >= 3 and results.failed == 0
  for device in DEVICES.values():
    assert f"| {device.name} |" in PAGE.read_text()
  for network in NETWORKS:
    assert f"`{network}`" in PAGE.read_text()


def test_a_usual_shape_has_the_parameters():
  made = model.shaped(10e9)
  assert 12 * made.layers * made.hidden**2 == pytest.approx(10e9, rel=0.01)
  assert model.shaped(10e9, hidden=5120).layers == round(10e9 / (12 * 5120**2))
  assert dataclasses.replace(setting(), data=2).devices == 2


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
@pytest.mark.parametrize(("command", "held_back"),
                         [("help", True), ("help", False), ("--version", True)])
def test_a_full_disk_behind_standard_output_is_a_sentence(command, held_back):
  variables = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
  with open("/dev/full", "w", encoding="utf-8") as full:
    done = subprocess.run([sys.executable, *([] if held_back else ["-u"]), "-m", "jaxpace",
                           command], stdout=full,
                          stderr=subprocess.PIPE, text=True, check=False, cwd=ROOT, env=variables)
  assert (done.returncode == 2 and "standard output can't be written" in done.stderr
          and "Traceback" not in done.stderr)
