"""Writes a timeline as Perfetto's protobuf, by Perfetto's own package."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxpace.reporting.json_file import UnwritableError
from jaxpace.reporting.timeline.slices import JOB, UNKNOWN, Timeline

_SEQUENCE = 1
_PACKETS = 20_000


class MissingPackageError(UnwritableError):
  """The package `perfetto` is not installed; the message says how to get it."""


def messages() -> Any:
  """Perfetto's message types.

  Raises:
    MissingPackageError: the package is not installed.
  """
  try:
    from perfetto.protos.perfetto.trace import perfetto_trace_pb2
  except ImportError as error:
    raise MissingPackageError("Perfetto's trace format needs its package: pip install 'jaxpace[timeline]'. "
                              "`--chrome FILE` needs none and opens in Perfetto as well.") from error
  return perfetto_trace_pb2


def encode(timeline: Timeline) -> Iterator[bytes]:
  """Yields the trace in pieces, to be written one after the other.

  Raises:
    MissingPackageError: the package `perfetto` is not installed.
  """
  types = messages()
  trace = types.Trace()
  _describe(timeline, types, trace)
  yield trace.SerializeToString()
  yield from _slices(timeline, types)
  yield from _counters(timeline, types)


def _uuid(track: int) -> int:
  return track + 1


def _describe(timeline: Timeline, types: Any, trace: Any) -> None:
  """Clears the sequence's state, interns the names and describes the tracks."""
  first = trace.packet.add()
  first.trusted_packet_sequence_id = _SEQUENCE
  first.sequence_flags = types.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
  first.first_packet_on_sequence = True
  for i, name in enumerate(timeline.names):
    first.interned_data.event_names.add(iid=i + 1, name=name)
  heads: dict[int, int] = {}
  for i, track in enumerate(timeline.tracks):
    packet = trace.packet.add()
    packet.trusted_packet_sequence_id = _SEQUENCE
    descriptor = packet.track_descriptor
    descriptor.uuid = _uuid(i)
    descriptor.sibling_order_rank = i
    if track.thread is not None:
      descriptor.parent_uuid, descriptor.name = _uuid(heads[track.process]), track.name
      continue
    heads[track.process] = i
    descriptor.child_ordering = types.TrackDescriptor.EXPLICIT
    if track.process in (JOB, UNKNOWN):
      descriptor.name = track.name
    else:
      descriptor.process.pid, descriptor.process.process_name = track.process, track.name
  for i, name in enumerate(timeline.counters):
    packet = trace.packet.add()
    packet.trusted_packet_sequence_id = _SEQUENCE
    packet.track_descriptor.uuid = _uuid(len(timeline.tracks) + i)
    packet.track_descriptor.parent_uuid = _uuid(0)
    packet.track_descriptor.name = name
    packet.track_descriptor.counter.SetInParent()


def _slices(timeline: Timeline, types: Any) -> Iterator[bytes]:
  begins, ends = types.TrackEvent.TYPE_SLICE_BEGIN, types.TrackEvent.TYPE_SLICE_END
  needs = types.TracePacket.SEQ_NEEDS_INCREMENTAL_STATE
  leaving, arriving = flow_ends(timeline)
  trace = types.Trace()
  number = 0
  opened: list[tuple[int, int]] = []  # end and track of the slices begun

  def close(until: int | None) -> None:
    while opened and (until is None or opened[-1][0] <= until):
      end, uuid = opened.pop()
      packet = trace.packet.add(timestamp=end, trusted_packet_sequence_id=_SEQUENCE)
      event = packet.track_event
      event.type, event.track_uuid = ends, uuid

  track = -1
  columns = (timeline.track, timeline.begin, timeline.end, timeline.name)
  for i, (own, begin, end, name) in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
    if own != track:
      close(None)
      track = own
    close(begin)
    packet = trace.packet.add(timestamp=begin, trusted_packet_sequence_id=_SEQUENCE, sequence_flags=needs)
    event = packet.track_event
    event.type, event.track_uuid, event.name_iid = begins, _uuid(own), name + 1
    if i in leaving:
      event.flow_ids.extend(leaving[i])
    if i in arriving:
      event.terminating_flow_ids.extend(arriving[i])
    if i in timeline.details:
      _annotate(event, timeline.details[i])
    opened.append((end, _uuid(own)))
    number += 1
    if number >= _PACKETS:
      yield trace.SerializeToString()
      trace, number = types.Trace(), 0
  close(None)
  yield trace.SerializeToString()


def flow_ends(timeline: Timeline) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
  """Ids of the flows, from 1, that leave each slice and that arrive there."""
  leaving: dict[int, list[int]] = {}
  arriving: dict[int, list[int]] = {}
  for number, flow in enumerate(timeline.flows, 1):
    leaving.setdefault(flow.begin, []).append(number)
    arriving.setdefault(flow.end, []).append(number)
  return leaving, arriving


def _annotate(event: Any, details: dict[str, str | int | float]) -> None:
  for name, value in details.items():
    annotation = event.debug_annotations.add(name=name)
    if isinstance(value, str):
      annotation.string_value = value
    elif isinstance(value, int):
      annotation.int_value = value
    else:
      annotation.double_value = value


def _counters(timeline: Timeline, types: Any) -> Iterator[bytes]:
  trace = types.Trace()
  for i, (at, values) in enumerate(timeline.counters.values()):
    order = np.argsort(at, kind="stable")
    for time, value in zip(at[order].tolist(), values[order].tolist(), strict=True):
      packet = trace.packet.add(timestamp=max(time, 0), trusted_packet_sequence_id=_SEQUENCE)
      packet.track_event.type = types.TrackEvent.TYPE_COUNTER
      packet.track_event.track_uuid = _uuid(len(timeline.tracks) + i)
      packet.track_event.double_counter_value = value
  yield trace.SerializeToString()
