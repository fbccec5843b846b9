"""What is taken for the step of a program that does not say."""

import pytest

from jaxpace.record.ring.finding import Step, find


def found(order, seconds, match=""):
  step = find(order, seconds, match)
  return None if step is None else (step.programs, step.cut, step.after)


@pytest.mark.parametrize("order, seconds, expected", [
    (["train"] * 5, {"train": 1.0}, (("train",), "train", False)),
    # what runs once is no step, however long it takes
    (["compute", *["train"] * 5], {"compute": 9.0, "train": 1.0}, (("train",), "train", False)),
    # two programs in turn, with an evaluation now and then
    ((["grad", "update"] * 5 + ["loss"]) * 3, {"grad": 3.0, "update": 1.0, "loss": 1.0},
     (("grad", "update"), "grad", False)),
    # accumulation: four gradients, an update
    ((["grad"] * 4 + ["update"]) * 4, {"grad": 4.0, "update": 1.0},
     (("grad", "update"), "update", True)),
    # of more gradients, after which the update takes little
    ((["grad"] * 40 + ["update"]) * 4, {"grad": 4.0, "update": 0.01},
     (("grad", "update"), "update", True)),
    ((["first", "micro", "micro", "update"]) * 4, {"first": 2.0, "micro": 4.0, "update": 2.0},
     (("micro", "first", "update"), "first", False)),
    # parameters were placed in the same way as batches are, before the first step
    (["place"] * 9 + ["place", "grad", "update"] * 5, {"place": 1.0, "grad": 4.0, "update": 2.0},
     (("grad", "place", "update"), "place", False)),
    # an evaluation is none, though it takes longer
    (["train", "eval_step"] * 5, {"train": 1.0, "eval_step": 9.0}, (("train",), "train", False)),
    (["eval_step"] * 5, {"eval_step": 9.0}, (("eval_step",), "eval_step", False)),
    # nor does a word make one of what says first that it is the step
    (["train_step_with_metrics", "norm"] * 5, {"train_step_with_metrics": 9.0, "norm": 1.0},
     (("train_step_with_metrics", "norm"), "train_step_with_metrics", False)),
    (["init_train_state", "norm"] * 5, {"init_train_state": 9.0, "norm": 1.0},
     (("norm",), "norm", False)),
    # averaging a loss is no part of the step
    (["train", "mean"] * 5, {"train": 9.0, "mean": 0.1}, (("train",), "train", False)),
    # nor is a copy of the parameters, now and then
    ((["learn"] * 50 + ["update_target"]) * 4, {"learn": 9.0, "update_target": 0.1},
     (("learn",), "learn", False)),
    ((["learn"] * 5 + ["ema_update"]) * 4, {"learn": 9.0, "ema_update": 3.0},
     (("learn",), "learn", False)),
    # what is rarer than accumulation is beside the step, however regular
    ((["train"] * 50 + ["valuation"]) * 4, {"train": 9.0, "valuation": 3.0},
     (("train",), "train", False)),
    (["train"] * 2, {"train": 1.0}, None),
    # what JAX runs to gather values of all processes is no step, unless nothing else ran
    (["train", *["_identity_fn"] * 9], {"train": 0.1, "_identity_fn": 9.0}, None),
    (["_psum"] * 9 + ["train"] * 3, {"train": 0.1, "_psum": 9.0}, (("train",), "train", False)),
    (["_reduce_all"] * 9 + ["train"] * 3, {"train": 0.1, "_reduce_all": 9.0},
     (("train",), "train", False)),
    (["_psum"] * 9 + ["eval_step"] * 3, {"eval_step": 0.1, "_psum": 9.0},
     (("eval_step",), "eval_step", False)),
    (["_identity_fn"] * 5, {"_identity_fn": 9.0}, (("_identity_fn",), "_identity_fn", False)),
    ([], {}, None),
])
def test_the_step_is_what_repeats_and_takes_most_of_the_time(order, seconds, expected):
  assert found(order, seconds) == expected


def trained(order, seconds, differentiated, match=""):
  step = find(order, seconds, match, set(differentiated))
  return step.programs, step.cut, step.after


def test_the_step_is_a_program_that_computes_gradients():
  # An evaluation whose name does not say so takes longer, be it now and then or in every step.
  order, seconds = ["fit"] * 4 + ["forward"] * 8, {"fit": 1.0, "forward": 9.0}
  assert trained(order * 3, seconds, ["fit"]) == (("fit",), "fit", False)
  assert trained(["fit", "forward"] * 9, seconds, ["fit"]) == (("fit", "forward"), "fit", False)
  assert find(order * 3, seconds, "", {"fit"}).fraction == 1.0
  # Nobody differentiates, or what does takes next to nothing: what takes most of the time.
  assert trained(order * 3, seconds, []) == (("forward",), "forward", False)
  assert trained(order * 3, seconds | {"fit": 0.1}, ["fit"]) == (("forward",), "forward", False)
  assert trained(order * 3, seconds, ["fit"], "forw") == (("forward",), "forward", False)


def test_two_programs_that_compute_gradients_make_one_step_though_one_runs_more_often():
  seconds = {"discriminate": 4.0, "g_step": 1.0}
  both = ["discriminate", "g_step"]
  order = ["discriminate", "discriminate", "g_step"] * 5
  assert trained(order, seconds, both) == (tuple(both), "g_step", True)
  step = find(order, seconds, "", set(both))
  assert step.why.startswith("discriminate (2 times) and g_step, which repeat in turn")
  assert step.steps(order) == ([(3 * k, 3 * k + 3) for k in range(5)], 15)
  # One that does not may as well be an evaluation.
  assert trained(order, seconds, both[:1]) == (("discriminate",), "discriminate", False)


def test_where_no_program_that_trains_takes_half_of_the_time_any_of_them_is_a_step():
  tasks = {"recall": 3.0, "rank": 2.5, "count": 2.0}
  order = [(*tasks, "eval")[int(place)] for place in "010221301200122011020"]
  step = find(order, tasks | {"eval": 9.0}, "", set(tasks))
  assert (step.programs, step.cut, step.fraction) == (tuple(tasks), "", 1.0)
  assert step.steps(order) == ([(at, at + 1) for at in range(21) if at != 6], 21)
  # Those of a curriculum run one after the other.
  assert find([name for name in tasks for _ in range(5)], tasks, "", set(tasks)).programs == (
      "recall",)


def test_a_pattern_overrides():
  order, seconds = ["train", "eval_step"] * 5, {"train": 9.0, "eval_step": 1.0}
  assert found(order, seconds, "eval*") == (("eval_step",), "eval_step", False)
  assert found(order, seconds, "val") == (("eval_step",), "eval_step", False)
  assert found(order, seconds, "rain") == (("train",), "train", False)
  assert found(order, seconds, "other") is None


def test_executions_are_cut_into_steps():
  alone = Step(("train",), "train", False, "")
  assert alone.steps(["init", "train", "train", "eval"]) == ([(1, 2), (2, 3)], 4)
  pair = Step(("grad", "update"), "grad", False, "")
  assert pair.steps(["grad", "update", "eval", "grad", "update"]) == ([(0, 3)], 3)
  assert pair.steps(["grad", "update"], last=True) == ([(0, 2)], 2)
  assert pair.steps(["grad"], last=True) == ([], 0)
  # Parameters and batches of an evaluation are placed as well.
  fed = Step(("train", "place"), "place", False, "")
  assert fed.steps(["place", "place", "train", "place", "eval", "place", "train", "place"]) == (
      [(1, 3), (5, 7)], 7)
  assert fed.steps(["place", "place", "train"], last=True) == ([(1, 3)], 3)
  many = Step(("grad", "update"), "update", True, "")
  assert many.steps(["grad", "grad", "update", "grad"]) == ([(0, 3)], 3)
  assert many.steps([]) == ([], 0)
