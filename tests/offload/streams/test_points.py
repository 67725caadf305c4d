"""A stream that waits for several others."""

from __future__ import annotations

import pytest
import torch

from offload.streams.points import Points
from offload.streams.stream_checker import CheckedStream, CheckedStreams, StreamOrderError


class Part:
    """Something that a stream makes, as the stream checker knows it."""


def test_a_stream_waits_for_what_all_have_made_until_the_mark():
    streams, side = CheckedStreams(torch.device("cpu")), CheckedStream("side")
    points, parts, later = Points(streams), [Part(), Part(), Part()], Part()
    for part, stream in zip(parts, (streams.compute, side, streams.compute), strict=True):
        with streams.on(stream):
            points.note()
            streams.writes(streams.compute, part, "a part")
    points.record()
    streams.writes(streams.compute, later, "what comes later")
    points.hold_up(streams.gather)
    for part in parts:
        streams.reads(streams.gather, part, "a sum")
    with pytest.raises(StreamOrderError):
        streams.reads(streams.gather, later, "a sum")


def test_streams_that_are_forgotten_hold_up_nothing():
    streams, part = CheckedStreams(torch.device("cpu")), Part()
    points = Points(streams)
    points.note()
    streams.writes(streams.compute, part, "a part")
    points.record()
    points.clear()
    points.hold_up(streams.gather)
    with pytest.raises(StreamOrderError):
        streams.reads(streams.gather, part, "a sum")
