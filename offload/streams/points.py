"""A point of each of several streams, at which work that they share is done."""

from __future__ import annotations

from offload.streams.registry import Event, Stream, Streams


class Points:
    """Streams on which parts of something are made, and, once all parts are queued, a point of each.

    Autograd runs an operation of backward on the stream of its forward, so the gradients of one layer may be made on
    several.
    """

    def __init__(self, streams: Streams):
        self._streams = streams
        self._events: dict[Stream, Event] = {}

    def note(self) -> None:
        """Notes that the stream on which kernels are launched now makes a part."""
        if self._streams.compute not in self._events:
            self._events[self._streams.compute] = self._streams.event()

    def record(self) -> None:
        """Marks where each stream is now."""
        for stream, event in self._events.items():
            event.record(stream)

    def hold_up(self, stream: Stream) -> None:
        """Makes `stream` wait for what was marked last."""
        for event in self._events.values():
            stream.wait_event(event)

    def clear(self) -> None:
        """Forgets the streams."""
        self._events.clear()
