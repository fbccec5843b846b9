"""Slow hosts and links in made-up times; healthy ones blame nobody."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from jaxpace.diagnose.links import infer
from jaxpace.live import probe
from tests.quick import examples, long


def times(n, seed=0, noise=0.06):
  found = 10e-3 * np.exp(np.random.default_rng(seed).normal(0, noise, (n, n)))
  np.fill_diagonal(found, np.nan)
  return found


def names(n, per_host=1):
  return [f"h{i // per_host}" for i in range(n)]


def slow(seconds, kind, ratio):
  if kind in ("host", "sender"):
    seconds[1, :] *= ratio
  if kind in ("host", "receiver"):
    seconds[:, 1] *= ratio
  if kind in ("link", "direction"):
    seconds[1, 2] *= ratio
  if kind == "link":
    seconds[2, 1] *= ratio
  return seconds


@pytest.mark.parametrize("n", [4, 16])
@pytest.mark.parametrize("kind", ["host", "sender", "receiver", "link"])
def test_what_is_slow_is_named_with_its_ratio(n, kind):
  ratio = 4.0 if kind == "link" else 2.5
  for seed in range(4):
    culprits, cannot_tell = infer(slow(times(n, seed), kind, ratio), names(n))
    assert [(c.kind, c.hosts[0]) for c in culprits] == [(kind, "h1")], (seed, culprits)
    assert culprits[0].ratio == pytest.approx(ratio, rel=0.2) and culprits[0].confidence > 0.9
    assert "h1" in culprits[0].sentence() and not cannot_tell


def test_two_slow_hosts_are_both_named():
  seconds = times(8)
  for h in (1, 5):
    seconds[h, :] = np.maximum(seconds[h, :], 30e-3)
    seconds[:, h] = np.maximum(seconds[:, h], 30e-3)
  assert {c.hosts[0] for c in infer(seconds, names(8))[0]} == {"h1", "h5"}


@pytest.mark.parametrize("n", [3, 4, *long(8)])
def test_healthy_noise_blames_at_most_one_in_a_hundred(n):
  wrong = sum(bool(infer(times(n, seed, noise), names(n))[0]) for seed in range(50)
              for noise in (0.05, 0.2))
  assert wrong <= 1


def test_many_hypotheses_have_their_price_under_heavy_tails():
  odd = [np.exp(0.4 * np.random.default_rng(seed).standard_t(3, (4, 4))) for seed in range(60)]
  assert sum(bool(infer(seconds, names(4))[0]) for seconds in odd) <= 2


def test_several_processes_on_a_host_and_quicker_links_inside():
  seconds = times(8)
  host = np.arange(8) // 2
  inside = host[:, None] == host[None, :]
  seconds[inside] /= 10
  assert not infer(seconds, names(8, 2))[0]
  seconds[(host[:, None] == 2) ^ (host[None, :] == 2)] *= 3
  found, _ = infer(seconds, names(8, 2))
  assert [(c.kind, c.hosts, c.processes) for c in found] == [("host", ("h2",), (4, 5))]


def test_what_cant_be_told():
  found, why = infer(np.array([[np.nan, 1.0], [5.0, np.nan]]), ["a", "b"])
  assert not found and "two processes" in why
  found, _ = infer(times(4), ["a", "a", "b", "b"])
  assert not found
  few = times(6)
  few[1:, :] = np.nan
  assert "not measured in time" in infer(few, names(6))[1]


def test_a_half_measured_probe_still_names_the_host():
  seconds = slow(times(8), "host", 3.0)
  seconds[np.random.default_rng(1).random((8, 8)) < 0.3] = np.nan
  assert [(c.kind, c.hosts[0]) for c in infer(seconds, names(8))[0]] == [("host", "h1")]


@hypothesis.given(st.integers(2, 7), st.integers(0, 1000), st.floats(0, 3), st.integers(1, 3))
@hypothesis.settings(max_examples=examples(40))
def test_any_times_give_an_answer(n, seed, noise, per_host):
  seconds = times(n, seed, noise)
  seconds[np.random.default_rng(seed).random((n, n)) < 0.2] = [np.nan, np.inf, 0.0, -1.0][seed % 4]
  found, _ = infer(seconds, names(n, per_host))
  assert all(0 < c.confidence <= 1 and c.ratio >= 1.3 for c in found)


@hypothesis.given(st.integers(2, 12), st.booleans(), st.integers(0, 5))
def test_every_ordered_pair_once_and_no_end_twice_in_a_round(ends, at_once, seed):
  rounds = probe.rounds(ends, at_once, seed)
  pairs = [pair for one in rounds for pair in one]
  assert sorted(pairs) == [(a, b) for a in range(ends) for b in range(ends) if a != b]
  for one in rounds:
    places = [end for pair in one for end in pair]
    assert len(set(places)) == len(places)
  assert len(rounds) == (2 * (ends - 1 + ends % 2) if at_once else ends * (ends - 1))
