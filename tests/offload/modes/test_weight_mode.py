"""The knobs that all modes which stream weights have, and what becomes of them."""

import pytest
from torch import nn

from offload.knobs import KnobError
from offload.modes.bounce_linear import BounceLinear
from offload.modes.layer_stream import LayerStream
from offload.modes.shard_offload import ShardOffload
from offload.modes.weight_mode import WeightMode
from tests.offload.helpers.models import Stack, same_as_resident, stack_inputs, under

MODES = (BounceLinear, LayerStream, ShardOffload)


def test_a_mode_says_where_it_cuts():
    with pytest.raises(TypeError, match="cut_points"):
        WeightMode()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"outside": "device"}, "outside=device: must be resident or stream"),
        ({"slots": 0}, "slots=0: must be at least 1"),
        ({"slots": 2, "prefetch": 2}, "prefetch=2: must be below slots=2, because the unit that computes"),
        ({"prefetch": -1}, "prefetch=-1: must be at least 0"),
        ({"resident": "some"}, "resident=some: must be a number of units"),
        ({"resident": "101%"}, "resident=101%: must be a number of units"),
        ({"resident": "nan%"}, "resident=nan%: must be a number of units"),
        ({"resident": -1}, "resident=-1: must be a number of units"),
        ({"pin": "yes"}, "pin=yes: must be auto or off"),
    ],
)
def test_knobs_that_fit_no_model_are_refused_when_the_mode_is_made(mode: type, knobs: dict, message: str):
    with pytest.raises(KnobError) as caught:
        mode(**knobs)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("call", ["footprint", "attach"])
@pytest.mark.parametrize(
    ("mode", "message"),
    [
        (LayerStream(resident=99), "resident=99: the model has 4 units"),
        (LayerStream(layers="model.layers"), "layers=model.layers: no list of blocks there"),
        (ShardOffload(layers="head"), "layers=head: no list of blocks there"),
        (ShardOffload(shards=5), "shards=5: must be between 1 and the number of blocks, 4"),
    ],
)
def test_knobs_that_do_not_fit_the_model_are_refused_by_footprint_and_attach(mode, message: str, call: str):
    with pytest.raises(KnobError) as caught:
        getattr(mode, call)(Stack(), *([None] if call == "attach" else []))
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("mode", MODES)
def test_what_trains_beside_frozen_weights_may_stay_on_the_device(mode: type):
    model = Stack().requires_grad_(False)
    for block in model.blocks:
        block.up.bias.requires_grad_(True)
    small = sum(block.up.bias.nbytes for block in model.blocks)
    stays, streams = mode(trained="device").footprint(model), mode().footprint(model)
    assert stays.units == streams.units
    assert streams.d2h_bytes > stays.d2h_bytes == 0
    assert (stays.resident_gradient_bytes, stays.resident_bytes) == (small, streams.resident_bytes + small)
    same_as_resident(model, mode(trained="device"))


@pytest.mark.parametrize("mode", MODES)
def test_what_trains_stays_only_beside_frozen_weights(mode: type):
    with pytest.raises(KnobError, match=r"^trained=device: nothing of the model is frozen, so nothing would stream"):
        mode(trained="device").footprint(Stack())
    with pytest.raises(KnobError, match=r"^trained=host: must be stream or device$"):
        mode(trained="host")


def test_layers_that_are_used_together_need_a_slot_each():
    model = nn.MultiheadAttention(8, 2)
    model.add_module("inner", nn.Linear(8, 8))

    class Nested(WeightMode):
        def cut_points(self, model):
            from offload.weights.units.partition import CutPoint

            return [CutPoint("outer", model, deep=False), CutPoint("inner", model.inner)]

    with pytest.raises(KnobError, match="slots=1: must be at least 2, because outer and inner are used together"):
        Nested(slots=1).footprint(model)
    assert Nested(slots=2).footprint(model).units == 2


@pytest.mark.parametrize(
    ("amount", "streamed"), [(0, 4), ("2", 2), ("50%", 2), ("512B", 4), ("6KiB", 3), ("0.015MiB", 1), (4, 0)]
)
def test_resident_is_a_count_a_share_or_bytes(amount: str | int, streamed: int):
    """Four blocks of 5 KiB."""
    assert LayerStream().footprint(Stack()).largest_unit_bytes == 5 * 2**10
    assert LayerStream(resident=amount).footprint(Stack()).units == streamed


def test_slots_beyond_the_units_take_no_memory():
    few, many = LayerStream(slots=4).footprint(Stack()), LayerStream(slots=40).footprint(Stack())
    assert few.slot_bytes == many.slot_bytes


@pytest.mark.parametrize("prefetch", [0, 1, None])
def test_prefetch_is_how_many_units_come_ahead(prefetch: int | None):
    model, mode = Stack(depth=8), LayerStream(slots=3, prefetch=prefetch)
    came = []
    with under(mode, model) as attached:
        # The first ones fill the slots, however many are fetched ahead later.
        model.blocks[4].register_forward_hook(lambda *_: came.append(attached.counters().h2d_bytes))
        for _ in range(2):
            before = attached.counters().h2d_bytes
            with attached.step():
                model(stack_inputs(0, 0)).sum().backward()
            model.zero_grad()
    unit = mode.footprint(model).largest_unit_bytes
    assert came[1] - before == unit * (5 + (2 if prefetch is None else prefetch))


@pytest.mark.parametrize("mode", MODES)
def test_an_include_that_leaves_nothing_is_refused(mode: type[WeightMode]):
    with pytest.raises(KnobError, match=r"^include=\['nothing\*'\]: leaves none of .*, ... to stream: name "):
        mode(include=["nothing*"]).footprint(Stack())
    with pytest.raises(KnobError, match=r"to stream: name some of these that exclude=\['\*'\] leaves$"):
        mode(include=["*"], exclude=["*"]).footprint(Stack())


@pytest.mark.parametrize("key", ["include", "exclude"])
def test_a_pattern_that_is_no_list_is_refused_and_not_taken_letter_by_letter(key: str):
    with pytest.raises(KnobError, match=rf"^{key}=layers\.\*: must be a list, such as \['layers\.\*'\]$"):
        LayerStream(**{key: "layers.*"})
