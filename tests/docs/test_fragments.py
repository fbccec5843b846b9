"""Python of the pages without prompts: fragments of a training script, each run with what stands
around it there."""

from __future__ import annotations

import contextlib
import logging
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import jaxpace
from jaxpace.record.recording import Recording
from tests.docs.blocks import Block, written

NOT_RUN = {
    "def features(rows)": "a script that hangs: tests/multiprocess/test_hang.py runs it",
    "distributed.initialize()":
    "comes before devices are used; tests/multiprocess starts jobs with it in every way",
    "distributed.initialize()  ": "a script: tests/docs/test_five_minutes.py runs it",
    "source = batches(300)": "the other loop of that script, run there",
    "links = jaxpace.probe_links": "takes seconds; tests/live measures links",
}
"""Words of fragments that are checked for names and arguments alone, and why."""
COSTLY = ("docs/how_to/slow_host.md", "docs/how_to/control.md")
"""Pages whose fragments compile for seconds."""
P = jax.P


def train_step(state: Any, batch: Any) -> Any:
  """What a device does, in all pages: `(state, batch) -> (state, metrics)`."""
  return observed_step(state, batch, lambda value: jax.lax.pmean(value, "data"))


def observed_step(state: Any, batch: Any, shared: Any = lambda value: value) -> Any:
  """What a step that is jitted as a whole does: no collective is written in it."""
  def loss_of(weights: Any) -> Any:
    return jnp.mean((batch["x"] @ weights - batch["y"]) ** 2)

  loss, gradient = shared(jax.value_and_grad(loss_of)(state["weights"]))
  return {"weights": state["weights"] - 0.1 * gradient}, {"loss": loss}


class Nothing:
  """Stands for a checkpoint manager or a writer of the reader's."""

  def __getattr__(self, name: str) -> Any:
    return lambda *_, **__: None


def compiled(paced: Any, mesh: Any) -> Any:
  spec = jaxpace.spec(mesh)
  return jax.jit(jax.shard_map(paced, mesh=mesh, in_specs=(spec, P(), P("data")),
                               out_specs=(spec, P()), check_vma=False))


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
  """What a training script holds when its loop begins, on two devices."""
  mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2],
                       axis_types=(jax.sharding.AxisType.Auto,))
  paced, spec = jaxpace.instrument(train_step, axis_name="data"), jaxpace.spec(mesh)
  step = compiled(paced, mesh)
  batch = {"x": jnp.ones((4, 3)), "y": jnp.ones((4, 2))}
  return {"jax": jax, "jnp": jnp, "np": np, "jaxpace": jaxpace, "ocp": ocp, "zlib": zlib, "P": P,
          "mesh": mesh, "train_step": train_step, "paced": paced, "spec": spec, "step": step,
          "state": {"weights": jnp.zeros((3, 2))}, "batch": batch, "config": {"steps": 3},
          "workdir": "runs/demo", "job_name": "a", "k": 3, "path": None, "manager": Nothing(),
          "writer": Nothing(), "time_to_save": True, "save": lambda state: None,
          "give_way": jaxpace.pace_early_ranks}


def run(block: Block, script: dict[str, Any], folder: Any) -> dict[str, Any]:
  """Runs a fragment in a folder of its own; returns the script's names after it."""
  names = {**script, "path": folder / "checkpoints", "pace": script["paced"].init(script["mesh"]),
           "batches": [script["batch"]] * 3}
  if "next(batches)" in block.text:
    names["batches"] = iter(names["batches"])
  if 'axes=["data"]' in block.text:
    names["mesh"] = jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices()[:4],
                                  axis_types=(jax.sharding.AxisType.Auto,) * 2)
  if "ProfiledRecorder" in block.text:  # a step that is plain jit, over sharded arrays
    names["train_step"] = lambda state, batch: (state,
                                                {"loss": jnp.mean(batch["x"] @ state["weights"])})
  if "jaxpace.observe(" in block.text:  # plain jit as well, and its collectives are timed
    names["train_step"] = observed_step
    names["state"] = jax.device_put(jax.tree.map(np.array, script["state"]),
                                    jax.NamedSharding(script["mesh"], P()))
    names["batch"] = jax.device_put(script["batch"], jax.NamedSharding(script["mesh"], P("data")))
    names["batches"] = [names["batch"]] * 3
  if block.page == "docs/how_to/control.md" and "orbax" in block.text:
    names["pace"], _ = script["step"](names["pace"], names["state"], script["batch"])
  if block.page == "docs/how_to/slow_host.md":
    names |= of_a_slow_host(script["mesh"])
  with contextlib.chdir(folder), contextlib.ExitStack() as stack:
    if "recorder." in block.text and "Recorder(" not in block.text:
      names["recorder"] = stack.enter_context(jaxpace.Recorder("runs/demo", names["paced"]))
    # A restart is between the lines: by then what was saved is on disk.
    text = block.text.replace("  # after a restart",
                              "  manager.wait_until_finished()  # after a restart")
    before, dots, after = text.partition("\n...\n")
    exec(compile(before, block.where, "exec"), names)
    if dots:  # where the step is made as on every page
      names.update(step=compiled(names["paced"], script["mesh"]),
                   pace=names["paced"].init(script["mesh"]))
      exec(compile(after, block.where, "exec"), names)
    if isinstance(names.get("recorder"), Recording):
      names["recorder"].close()
  return names


def of_a_slow_host(mesh: Any) -> dict[str, Any]:
  """What the page on it leaves to the reader: data, a model's losses, an update."""
  source = [np.full(3, number, np.float32) for number in range(64)]
  feed = jaxpace.shares(mesh, examples=len(source), size=8, total_micro_batches=32, capacity=16)

  def per_token_losses(weights: Any, rows: Any) -> Any:
    return jnp.square(rows @ weights), jnp.ones((rows.shape[0], weights.shape[1]))

  batch = jax.device_put(np.ones((64, 3), np.float32), jax.NamedSharding(mesh, P("data")))
  return {"source": source, "steps": 3, "batches": [batch] * 3,
          "mean_loss": lambda weights, rows: jnp.mean(jnp.square(rows @ weights)),
          "feed": feed, "share": feed.share(0, np.array([16, 16])),
          "examples": iter(source * 4), "lengths": [1, 2, 4, 5], "ranks": 2,
          "state": jnp.zeros((3, 2)), "per_token_losses": per_token_losses,
          "update": lambda state, grads: state - 0.1 * grads}


RUN = [block for block in written("python")
       if not block.prompts and not any(words in block.text for words in NOT_RUN)]


def test_most_fragments_are_run():
  assert len(RUN) >= 15
  for words in NOT_RUN:
    assert any(words in block.text
               for block in written("python")), f"no page has {words!r} any more"


@pytest.mark.parametrize("block", [
    pytest.param(block, marks=pytest.mark.long) if block.page in COSTLY else block
    for block in RUN], ids=lambda block: block.where)
def test_a_fragment_runs(block, script, tmp_path, caplog):
  with caplog.at_level(logging.WARNING), jax.numpy_dtype_promotion("standard"):
    names = run(block, script, tmp_path)
  if "instrument(" in block.text and "recorder.record(" in block.text:
    assert int(names["pace"].step[0]) == 3
    assert list((tmp_path / "runs" / "demo" / "steps").glob("*.parquet"))
  if "pacer=pacer" in block.text:
    assert names["paced"].init(script["mesh"]).pacer is not None
  assert not [said for said in caplog.records if said.name.startswith("jaxpace")
              and said.levelno > logging.INFO]
