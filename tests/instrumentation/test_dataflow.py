"""What each timestamp waits for, and what waits for it, by the dataflow of the rewritten step.

On CPU nothing else orders a compiled step, and a small one runs in order anyway: times would show
nothing.
"""

import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Literal
from jax.sharding import PartitionSpec as P

from jaxpace.core import pace
from jaxpace.core.varying import vary, varying
from jaxpace.instrumentation import program, rewrite, script
from jaxpace.observation.clocks import Clock, words
from tests.instrumentation.running import mesh_of

ARGUMENTS = {"v": jnp.ones((8, 8)), "w": jnp.ones((8, 8))}, jnp.ones((4, 8))


def loss(params, x):
  # Rematerialized: what the backward pass starts from is then in memory, and a boundary before it
  # can be held.
  return jax.checkpoint(
      lambda params: jnp.sum(jnp.square(jnp.tanh(x @ params["w"]) @ params["v"])))(params)


def one_sum(params, x):
  value, grads = jax.lax.pmean(jax.value_and_grad(loss)(params, x), "data")
  return jax.tree.map(lambda p, g: p - g, params, grads), value


def with_a_norm(params, x):
  def normed(params, x):
    hidden = x @ params["w"]
    return loss(params, hidden - jax.lax.pmean(jnp.mean(hidden, axis=0), "data"))

  value, grads = jax.lax.pmean(jax.value_and_grad(normed)(params, x), "data")
  return jax.tree.map(lambda p, g: p - g, params, grads), value


def sharpness_aware(params, x):
  grads = jax.lax.pmean(jax.grad(loss)(params, x), "data")
  return one_sum(jax.tree.map(lambda p, g: p + g, params, grads), x)


def matrices(how):
  """A step whose only flat operand is the loss; its gradients go through something more before they
  are averaged."""
  def step(params, x):
    def loss(params):
      return jnp.sum(jnp.square(jnp.tanh(x @ params["w"]) @ params["v"]))

    wrap = {"jit": jax.jit, "remat": jax.checkpoint}.get(how, lambda function: function)
    value, grads = jax.value_and_grad(wrap(loss))(params)
    if how == "decay":
      grads = jax.tree.map(lambda g, p: g + jnp.float32(0.1) * p, grads, params)
    elif how == "clip":
      norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(grads)))
      grads = jax.tree.map(lambda g: g / norm, grads)
    elif how == "cast":
      grads = jax.tree.map(lambda g: g.astype(jnp.bfloat16), grads)
    value, grads = jax.lax.pmean((value, grads), "data")
    return jax.tree.map(lambda p, g: p - g.astype(p.dtype), params, grads), value

  return step


@pytest.mark.parametrize("how", ["jit", "remat", "decay", "clip", "cast"])
def test_an_entry_waits_for_gradients_that_are_more_than_a_product(how):
  marks, timestamps, _, behind = rewritten(matrices(how), delayed=False)
  (enter,) = [timestamp for mark,
              timestamp in zip(marks, timestamps, strict=True) if mark.kind == "enter"]
  assert count(behind(enter), PRODUCTS) == count(behind(timestamps[-1]), PRODUCTS) >= 2


STEPS = [one_sum, with_a_norm, sharpness_aware]


@jax.jit
def _timestamp(previous, *after, event=None):
  return words.zero()  # typed as the same everywhere, as all clocks' timestamps are


@jax.jit
def _hold(timestamp, values):
  return values


def _delay(seconds, limit, previous, *after, events=None):
  begun = _timestamp(previous, *after)
  return begun, _timestamp(begun, seconds)


CLOCK = Clock("fake", None, str, _timestamp, _delay, _hold, lambda chain, *_: chain,
              lambda rank: None)


def rewritten(step, delayed, share=False, check_vma=False, notices=None, **axes):
  """The rewritten step with a clock of two calls that the tracer keeps apart.

  Returns:
    The timestamps; the variable of each one's timestamp; those of the step's own results; and all
    variables that a variable depends on, itself among them, each with the equation that made it.
  """
  kept = SimpleNamespace()

  arguments = jax.tree.map(lambda leaf: leaf.astype(getattr(step, "dtype", leaf.dtype)), ARGUMENTS)

  def trace(params, x, seconds, last_exit):
    leaves, tree = jax.tree.flatten((params, x))
    flat = program.flatten(
        jax.make_jaxpr(lambda *leaves: jax.tree.leaves(step(*tree.unflatten(leaves))))(*leaves),
        ("data",))
    written = script.write_script(flat, ("data",), slots=16, delayed=delayed)
    one = pace.fresh(2, 16, None)._replace(last_exit=last_exit, delay=seconds)
    taken = rewrite.Evaluation(written, CLOCK, one, jnp.int32(0), None,
                               delay_limit=1.0 if delayed else None,
                               carrier=written.carrier if share else None)
    outputs = taken.run(leaves)
    kept.marks, kept.results = written.marks, len(outputs)
    if notices is not None:
      notices.extend(written.notices)
    assert {varying(timestamp) for timestamp in taken.timestamps} == {varying(last_exit)}
    arrivals = vary(taken.shared.arrivals, varying(last_exit)) if share else None
    return outputs, taken.timestamps, arrivals

  # The state is each device's own, the parameters are the same everywhere: what is tracked differs
  # most.
  own = P(tuple(axes or ["data"]))
  whole = jax.make_jaxpr(jax.shard_map(trace, mesh=mesh_of(**(axes or {"data": 2})),
                                       in_specs=(P(), P("data"), P(), own),
                                       out_specs=(P(), own, own), check_vma=check_vma))(
      *arguments, jnp.float32(0), jnp.zeros((2 * 2 ** len(axes or ["data"]),), jnp.uint32))
  (mapped,) = [eqn for eqn in whole.jaxpr.eqns if eqn.primitive.name == "shard_map"]
  jaxpr = getattr(mapped.params["jaxpr"], "jaxpr", mapped.params["jaxpr"])
  maker = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}

  def behind(var):
    found, waiting = {}, [var]
    while waiting:
      value = waiting.pop()
      if isinstance(value, Literal) or value in found:
        continue
      found[value] = maker.get(value)
      waiting += maker[value].invars if value in maker else []
    return found

  def untyped(var):
    equation = maker.get(var)
    return (equation.invars[0] if equation is not None
            and equation.primitive.name in ("pvary", "pcast") else var)

  end = kept.results + len(kept.marks)
  timestamps = [untyped(var) for var in jaxpr.outvars[kept.results:end]]
  assert len(timestamps) == len(kept.marks)
  return kept.marks, timestamps, [*jaxpr.outvars[:kept.results], *jaxpr.outvars[end:]], behind


PRODUCTS = {"dot_general", "checkpoint", "remat", "remat2", "loss"}
SUMS = {"psum", "psum_invariant"}


def count(values, names):
  """Number of equations of these names among those that made the values."""
  return len({id(equation) for equation in values.values() if equation is not None
              and name_of(equation) in names})


def name_of(equation):
  """Name of its primitive; of the function, where that is a compiled call."""
  return (equation.params["name"] if equation.primitive.name in ("jit", "pjit")
          else equation.primitive.name)


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("step", STEPS)
def test_stamps_are_chained(step, delayed):
  """An exit comes after its collective and a boundary after its phase; all others after the
  timestamp before them, too."""
  marks, timestamps, _, behind = rewritten(step, delayed)
  assert len(set(timestamps)) == len(marks) > 4
  for (a, earlier), (b, later) in itertools.pairwise(zip(marks, timestamps, strict=True)):
    if b.kind not in ("exit", "phase"):
      assert earlier in behind(later), f"{b.kind} after {b.segment} does not wait for {a.kind}"
  for mark, timestamp in zip(marks, timestamps, strict=True):
    if mark.kind == "phase" and "enter" not in {m.kind for m in marks[:marks.index(mark)]}:
      assert timestamps[0] in behind(timestamp)


@pytest.mark.parametrize("step", STEPS)
def test_what_boundaries_entries_and_exits_wait_for(step):
  marks, timestamps, _, behind = rewritten(step, delayed=False)
  done = [count(behind(timestamp), PRODUCTS) for timestamp in timestamps]
  sums = [count(behind(timestamp), SUMS) for timestamp in timestamps]
  boundaries = [i for i, mark in enumerate(marks) if mark.kind == "phase"]
  assert boundaries
  for i in boundaries:
    assert done[i] > done[i - 1], f"{marks[i].segment} is not waited for"
  assert done[boundaries[-1]] >= 2  # the forward pass's products
  for i, mark in enumerate(marks):
    if mark.kind == "exit":
      assert sums[i] > sums[i - 1]
  last_enter = max(i for i, mark in enumerate(marks) if mark.kind == "enter")
  assert done[last_enter] == done[-1], "the last sum is entered before all gradients are there"


def halves(params, x):
  """Nothing that is summed may be held back: XLA would convert it otherwise than it does."""
  grads = jax.lax.psum(jax.grad(lambda params: loss(params, x).astype(jnp.bfloat16))(params),
                       "data")
  return jax.tree.map(lambda p, g: p - g, params, grads)


halves.dtype = jnp.bfloat16


LAYOUTS = {"one axis": {}, "two axes": {"data": 2, "model": 2}}


@pytest.mark.parametrize("check_vma", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize("layout, share", [("one axis", False), ("two axes", True)])
@pytest.mark.parametrize("step", [*STEPS, halves])
def test_a_sum_comes_after_its_entry_stamp_and_before_its_exit_stamp(
    step, share, layout, check_vma):
  """Under `check_vma` JAX has summed the gradients already that the steps average: one more
  collective."""
  notices = []
  marks, timestamps, results, behind = rewritten(step, False, share, check_vma, notices=notices,
                                             **LAYOUTS[layout])
  alive = {var: equation for var in [*results,
                                     *timestamps] for var, equation in behind(var).items()}.values()
  sums = [set().union(*map(behind, equation.invars)) for equation in alive
          if equation is not None and name_of(equation) in SUMS]
  entries = [i for i, mark in enumerate(marks) if mark.kind == "enter"]
  assert entries
  for i, later in itertools.zip_longest(entries, entries[1:]):
    assert marks[i + 1].kind == "exit" and timestamps[i] in behind(timestamps[i + 1])
    # What waits for the exit, too, is of a later group. What nobody reads, XLA drops.
    own = [waited for waited in sums if timestamps[i] in waited and timestamps[i + 1] not in waited]
    said = (f"Collective {marks[i].collective} can start before its entry timestamp"
            in " ".join(notices))
    assert bool(own) != said
    # Only a group of nothing but products of matrices can't be held, and even that is if it is the
    # last.
    assert (not said or later
            and (step, marks[i].collective) in [(sharpness_aware, 0), (with_a_norm, 2)])
