"""The order of use is learned from one step and expected in the next, if that saves the same spans."""

from __future__ import annotations

from types import SimpleNamespace

from offload.activations.policy import SpanRecord
from offload.activations.use_order import UseOrder


class Span(SimpleNamespace):
    """Stands in for a swapped span, of which the order knows the record alone."""

    def __init__(self, index: int, nbytes: int = 10, used_at: int | None = None):
        super().__init__(record=SpanRecord(index, nbytes, saved_at=index, used_at=used_at))


def learned(*used_at: int | None) -> UseOrder:
    """The order after a step whose spans were used at these times."""
    order = UseOrder()
    order.learn([Span(index, used_at=time).record for index, time in enumerate(used_at)])
    return order


def test_spans_come_in_the_order_of_the_step_before():
    order, spans = learned(12, 11, 13), [Span(index) for index in range(3)]
    order.expect(spans)
    assert list(order.after(spans[1].record)) == [spans[0], spans[2]]
    assert list(order.after(spans[0].record)) == [spans[2]]
    assert list(order.after(spans[2].record)) == []


def test_spans_that_stayed_on_the_device_have_a_place_in_the_order_too():
    order, spans = learned(11, 12, 13), [Span(1), Span(2)]
    order.expect(spans)
    assert list(order.after(Span(0).record)) == spans


def test_a_dead_span_is_none():
    order, spans = learned(11, 12, 13), [Span(index) for index in range(3)]
    order.expect(spans)
    del spans[1]
    assert list(order.after(spans[0].record)) == [None, spans[1]]


def test_the_first_step_knows_no_order():
    order, span = UseOrder(), Span(0)
    order.expect([span])
    assert order.after(span.record) is None
    order.learn([])
    order.expect([span])
    assert order.after(span.record) is None


def test_a_span_of_another_size_or_one_that_was_not_used_ends_the_order():
    spans = [Span(0), Span(1, nbytes=99)]
    order = learned(11, 12)
    order.expect(spans)
    assert order.after(spans[0].record) is None
    order = learned(11, None)
    order.expect([spans[0], Span(1)])
    assert order.after(spans[0].record) is None


def test_a_record_that_the_step_before_did_not_have_tells_nothing():
    order, spans = learned(11, 12), [Span(0), Span(1)]
    order.expect(spans)
    assert order.after(Span(2).record) is None
