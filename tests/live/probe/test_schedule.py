"""Every pair once, nobody in two places."""

import hypothesis
import hypothesis.strategies as st

from jaxpace.live.probe import measure


@hypothesis.given(st.integers(2, 12), st.booleans(), st.integers(0, 5))
def test_every_ordered_pair_once_and_no_end_twice_in_a_round(ends, at_once, seed):
  rounds = measure.rounds(ends, at_once, seed)
  pairs = [pair for one in rounds for pair in one]
  assert sorted(pairs) == [(a, b) for a in range(ends) for b in range(ends) if a != b]
  for one in rounds:
    places = [end for pair in one for end in pair]
    assert len(set(places)) == len(places)
  assert len(rounds) == (2 * (ends - 1 + ends % 2) if at_once else ends * (ends - 1))
