"""The closed forms of collectives against the messages that the algorithms send, counted one by
one."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpace.costs.alpha_beta import coefficients, seconds


def doubling(ranks):
  """Exchanges of everything, in pairs: (messages after one another, vectors sent after one
  another)."""
  core, knows = 1 << int(math.log2(ranks)), [{r} for r in range(ranks)]
  exchanges = 0
  if core < ranks:
    for r in range(core, ranks):
      knows[r - core] |= knows[r]
    exchanges += 1
  distance = 1
  while distance < core:
    knows = [knows[r] | knows[r ^ distance] if r < core else knows[r] for r in range(ranks)]
    distance, exchanges = 2 * distance, exchanges + 1
  if core < ranks:
    for r in range(core, ranks):
      knows[r] = knows[r - core]
    exchanges += 1
  assert all(k == set(range(ranks)) for k in knows)
  return exchanges, exchanges


def bruck(ranks):
  """All-gather: in round k every rank sends what it has, or as much as is missing, to the rank 2^k
  before it."""
  has, messages, blocks = [[r] for r in range(ranks)], 0, 0
  while len(has[0]) < ranks:
    held = len(has[0])
    number = min(held, ranks - held)
    sent = [own[:number] for own in has]
    has = [own + sent[(r + held) % ranks] for r, own in enumerate(has)]
    messages, blocks = messages + 1, blocks + number
  assert all(sorted(own) == list(range(ranks)) for own in has)
  return messages, blocks / ranks


def ring(ranks):
  """All-gather: every rank passes on the block that it got last."""
  has, messages = [[r] for r in range(ranks)], 0
  while len(has[0]) < ranks:
    has, messages = [[*own, has[r - 1][-1]] for r, own in enumerate(has)], messages + 1
  assert all(sorted(own) == list(range(ranks)) for own in has)
  return messages, messages / ranks


@given(ranks=st.integers(2, 130))
def test_as_many_messages_and_bytes_as_are_sent(ranks):
  assert coefficients("all_reduce", "doubling", ranks) == doubling(ranks)
  for kind in ("all_gather", "reduce_scatter"):  # one is the other, played backwards
    assert coefficients(kind, "tree", ranks) == pytest.approx(bruck(ranks))
    assert coefficients(kind, "ring", ranks) == pytest.approx(ring(ranks))
  assert coefficients("all_reduce", "ring", ranks) == pytest.approx([2 * x for x in ring(ranks)])


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_halving_and_doubling_is_both_halves_on_powers_of_two(ranks):
  halves = coefficients("all_gather", "tree", ranks)
  assert coefficients("all_reduce", "halving", ranks) == pytest.approx([2 * x for x in halves])


def test_two_trees_send_half_of_the_bytes_each_up_and_down():
  """A rank of either tree receives from two below it, but for the only one of two ranks."""
  assert ([coefficients("all_reduce", "tree", ranks) for ranks in (2, 4, 8)]
          == [(2, 1.0), (4, 2.0), (6, 2.0)])


def test_one_rank_sends_nothing_and_what_is_unknown_is_refused():
  assert seconds("all_reduce", "ring", 1, 1e9, 1.0, 1.0) == 0
  assert seconds("shift", "ring", 5, 100.0, 2.0, 0.5) == 52
  with pytest.raises(ValueError, match="no all_reduce by magic"):
    coefficients("all_reduce", "magic", 4)
