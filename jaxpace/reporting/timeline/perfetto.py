"""Writes a timeline as Perfetto's protobuf, by Perfetto's own package."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxpace.reporting.json_file import UnwritableError
from jaxpace.reporting.timeline.slices import Timeline

_SEQUENCE = 1


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
    raise MissingPackageError("Perfetto's trace format needs its package: pip install "
                              "'jaxpace[timeline]'. `--chrome FILE` needs none and opens in "
                              "Perfetto as well.") from error
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
    descriptor.uuid, descriptor.name = _uuid(i), track.name
    descriptor.sibling_order_rank = len(timeline.counters) + i
    if track.thread is not None:
      descriptor.parent_uuid = _uuid(heads[track.process])
      continue
    if i:
      # Below the job: what is at the top Perfetto sorts by name, and `process` descriptors by what
      # they do.
      descriptor.parent_uuid = _uuid(0)
    heads[track.process] = i
    descriptor.child_ordering = types.TrackDescriptor.EXPLICIT
  for i, name in enumerate(timeline.counters):
    packet = trace.packet.add()
    packet.trusted_packet_sequence_id = _SEQUENCE
    packet.track_descriptor.uuid = _uuid(len(timeline.tracks) + i)
    packet.track_descriptor.parent_uuid = _uuid(0)
    packet.track_descriptor.name = name
    packet.track_descriptor.sibling_order_rank = i
    packet.track_descriptor.counter.SetInParent()


def _slices(timeline: Timeline, types: Any) -> Iterator[bytes]:
  leaving, arriving = flow_ends(timeline)
  # One message for all begins and one for all ends, filled anew: making each would take several
  # times as long.
  opening, closing = types.Trace(), types.Trace()
  begun = opening.packet.add(trusted_packet_sequence_id=_SEQUENCE,
                             sequence_flags=types.TracePacket.SEQ_NEEDS_INCREMENTAL_STATE)
  ended = closing.packet.add(trusted_packet_sequence_id=_SEQUENCE)
  begin_event, end_event = begun.track_event, ended.track_event
  begin_event.type, end_event.type = (types.TrackEvent.TYPE_SLICE_BEGIN,
                                      types.TrackEvent.TYPE_SLICE_END)
  opened: list[int] = []  # ends of the slices begun on the current track
  columns = (timeline.track, timeline.begin, timeline.end, timeline.name)
  track = -1
  for i, (own, begin, end, name) in enumerate(zip(*(column.tolist() for column in columns),
                                                  strict=True)):
    while opened and (own != track or opened[-1] <= begin):
      ended.timestamp = opened.pop()
      yield closing.SerializeToString()
    if own != track:
      track = own
      begin_event.track_uuid = end_event.track_uuid = _uuid(own)
    begun.timestamp, begin_event.name_iid = begin, name + 1
    special = i in leaving or i in arriving or i in timeline.details
    if special:
      begin_event.flow_ids.extend(leaving.get(i, ()))
      begin_event.terminating_flow_ids.extend(arriving.get(i, ()))
      _annotate(begin_event, timeline.details.get(i, {}))
    yield opening.SerializeToString()
    if special:
      for field in ("flow_ids", "terminating_flow_ids", "debug_annotations"):
        begin_event.ClearField(field)
    opened.append(end)
  for end in reversed(opened):
    ended.timestamp = end
    yield closing.SerializeToString()


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
