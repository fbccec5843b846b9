"""The reference that plays every message: against sums by hand and SimGrid; and the page of
errors."""

import pytest

from experiments.measure import message_reference as reference
from experiments.measure import simgrid_reference, simulation_accuracy

RATE = 10e9


def two_jobs(latency=0.0):
  """Four ranks of each job in both racks of eight; the trunk carries two cards' worth."""
  fabric = reference.Fabric(nodes=16, card_rate=12.5e9, rack=8, uplink_rate=25e9,
                            rack_latency=latency, spine_latency=latency)
  jobs = []
  for j in range(2):
    ranks = (*range(4 * j, 4 * j + 4), *range(8 + 4 * j, 12 + 4 * j))
    jobs.append(reference.Job(ranks, reference.recursive_doubling(ranks, 1e8),
                              [dict.fromkeys(ranks, 10e-3)] * 3))
  return fabric, jobs


def test_two_jobs_on_a_trunk_as_by_hand():
  """10 + 8 + 8 + 4 x 8 ms."""
  for job in reference.play(*two_jobs()):
    assert [max(step.values()) for step in job] == pytest.approx([58e-3, 116e-3, 174e-3])


def test_a_rank_waits_for_its_own_partners_alone():
  """Ranks 0 and 1 exchange while 2 is late; 2 and 3 only then, and 0 with 2 last."""
  ranks = (0, 1, 2, 3)
  job = reference.Job(ranks, reference.recursive_doubling(ranks, RATE * 1e-3),
                      [{0: 0.0, 1: 0.0, 2: 5e-3, 3: 0.0}])
  done = reference.play(reference.Fabric(nodes=4, card_rate=RATE), [job])[0][0]
  assert done == pytest.approx(dict.fromkeys(ranks, 7e-3))
  other = job._replace(rounds=job.rounds[:1])
  assert reference.play(reference.Fabric(nodes=4, card_rate=RATE), [other])[0][0] == pytest.approx(
      {0: 1e-3, 1: 1e-3, 2: 6e-3, 3: 6e-3})


def test_ranks_beyond_a_power_of_two_hand_theirs_to_a_neighbour():
  """Six ranks, as in MPICH: 0 and 2 hand in to 1 and 3, which exchange with 4 and 5."""
  inward, first, second, outward = (
      {(message.source, message.target) for message in part}
      for part in reference.recursive_doubling(range(6), 1.0))
  assert inward == {(0, 1), (2, 3)} and outward == {(1, 0), (3, 2)}
  assert first == {(1, 3), (3, 1), (4, 5), (5, 4)}
  assert second == {(1, 4), (4, 1), (3, 5), (5, 3)}


def test_a_ring_and_a_chain_of_pieces_take_what_their_closed_forms_say():
  ranks = tuple(range(5))
  fabric = reference.Fabric(nodes=5, card_rate=RATE, rack_latency=1e-5)
  job = reference.Job(ranks, reference.ring(ranks, 1e8), [dict.fromkeys(ranks, 0.0)])
  assert max(reference.play(fabric, [job])[0][0].values()) == pytest.approx(8 * (1e-5 + 2e7 / RATE))
  # 0 -> 1 -> 2 in four pieces: (4 + 2 - 1) times a piece.
  chunks = [reference.Chunk(reference.Message(hop, hop + 1, 1e6),
                            (2 * piece + hop - 1,) if hop else (), hop)
            for piece in range(4) for hop in range(2)]
  assert reference.play_chunks(fabric, chunks) == pytest.approx(5 * (1e-5 + 1e6 / RATE))


def test_every_rank_of_a_double_tree_is_reached_by_every_piece():
  chunks = reference.double_tree(9, 1.0, 3)
  assert len(chunks) == 2 * 2 * 8 * 3
  assert sum(chunk.message.bytes for chunk in chunks) == pytest.approx(2 * 8)
  for way in ("up", "down"):
    assert {chunk.lane[2] for chunk in chunks if chunk.lane[1] == way} == set(range(9))


def test_simgrid_is_asked_where_it_is_there_and_left_out_where_not():
  """Its figures, where it is installed, are the reference's."""
  fabric, jobs = two_jobs(8e-6)
  chosen = [case for case in simulation_accuracy.cases()
            if case.about == "1 MB, 8 nodes, one switch"][:1]
  row, = simulation_accuracy.measure(chosen)
  assert (row["simgrid_s"] is not None) == simgrid_reference.there()
  if simgrid_reference.there():
    assert row["simgrid_s"] == pytest.approx(row["reference_s"], rel=1e-4)
    theirs, ours = simgrid_reference.play(fabric, jobs), reference.play(fabric, jobs)
    assert [max(step.values()) for step in theirs[0]] == pytest.approx(
        [max(step.values()) for step in ours[0]], rel=1e-6)


@pytest.mark.long
def test_the_page_has_the_errors_of_each_kind():
  case = next(case for case in simulation_accuracy.cases()
              if case.about.startswith("recursive_doubling, 4:1, alike"))
  rows = simulation_accuracy.measure([case])
  assert rows[0]["package_s"] == pytest.approx(rows[0]["reference_s"], rel=1e-4)
  figures = {"command": "c", "date": "d", "load_average_at_start": 0.0, "cases": rows,
             "machine": {"cores": 1, "platform": "p", "jax": "j", "python": "3"}}
  text = "\n".join(simulation_accuracy.page(figures))
  assert "| two jobs on a trunk | 1 | +0.00 % to +0.00 % |" in text
  assert "58.0" in text
