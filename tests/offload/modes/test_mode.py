"""The contract: a module has one mode at a time, and a mode that overrides nothing leaves the model resident."""

from dataclasses import dataclass, fields

import pytest
import torch
from torch import nn

from offload.knobs import KnobError, explanations, knob
from offload.modes.activation_mode import ActivationMode
from offload.modes.bounce_linear import BounceLinear
from offload.modes.layer_stream import LayerStream
from offload.modes.mode import Mode, attaching
from offload.modes.none import Resident
from offload.streams import registry
from offload.streams.stream_checker import CheckedStreams
from offload.streams.transfer import Counters
from tests.offload.helpers.models import Stack, same_as_resident, stack_inputs, under, with_copy
from tests.offload.helpers.modes import mode_classes, small


@pytest.fixture
def model() -> nn.Module:
    return nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2))


def test_a_module_inside_or_around_an_attached_one_is_refused_by_its_name(model: nn.Module, streams: registry.Streams):
    with attaching(model[0], LayerStream(), streams) as release:
        pass
    for other, name in ((model[0], "Sequential"), (model[0][0], "Linear"), (model, "0"), (nn.Sequential(model), "0.0")):
        with (
            pytest.raises(
                RuntimeError, match=rf"^{name} is attached already, to the mode layer_stream: detach"
            ) as found,
            attaching(other, Resident(), streams),
        ):
            pass
        assert "\n" not in str(found.value)
    # Nothing was noted of those that were refused.
    with attaching(model[1], Resident(), streams) as release_other:
        release_other()
    release()
    with attaching(model, Resident(), streams) as release:
        release()


def test_an_exception_while_attaching_releases(model: nn.Module, streams: registry.Streams):
    with pytest.raises(ZeroDivisionError), attaching(model, Resident(), streams):
        raise ZeroDivisionError
    with attaching(model, Resident(), streams) as release:
        pass
    with pytest.raises(RuntimeError, match="to the mode none"), attaching(model, LayerStream(), streams):
        pass
    release()


def test_a_device_in_place_of_its_streams_is_refused(model: nn.Module):
    for mode in (Resident(), BounceLinear()):
        with pytest.raises(TypeError, match=r"^attach to 'cpu': give the streams of a device, as offload.acquire"):
            mode.attach(model, "cpu")


MODES = sorted(mode_classes())


def test_every_file_of_a_mode_is_found():
    assert {"none", "bounce_linear", "layer_stream", "shard_offload", "tensor_swap", "save_on_cpu"} <= set(MODES)
    assert not {"mode", "weight_mode", "activation_mode"} & set(MODES)


@pytest.mark.parametrize("name", MODES)
class TestEveryMode:
    def test_computes_the_numbers_of_the_resident_model(self, name: str):
        same_as_resident(Stack(), small(name), microbatches=1)

    def test_explains_every_knob_itself(self, name: str):
        mode = mode_classes()[name]
        alone = type(name, (), {"__doc__": mode.__doc__})
        assert explanations(alone).keys() == {field.name for field in fields(mode)}

    def test_says_what_it_holds_before_it_attaches(self, name: str):
        model = Stack()
        plan = small(name).footprint(model)
        # Every parameter is in one place, and the model is as before.
        assert {*plan.resident, *(p for unit in plan.trained for p in unit)} == set(model.parameters())
        assert len(plan.resident) + sum(map(len, plan.trained)) == len(list(model.parameters()))
        assert not any("forward" in vars(module) for module in model.modules())

    def test_serves_several_models_and_each_model_has_one_mode(self, name: str):
        mode, first, second = small(name), Stack(), Stack()
        with under(mode, first), under(mode, second) as attached:
            with pytest.raises(RuntimeError, match="is attached already, to the mode"):
                mode.attach(first, CheckedStreams(torch.device("cpu")))
            with attached.step():
                second(stack_inputs(0, 0)).sum().backward()

    def test_has_no_gradients_in_inference_and_the_numbers_of_the_resident_model(self, name: str):
        model, resident = with_copy(Stack())
        expected = [resident(stack_inputs(0, index)).detach() for index in range(3)]
        with under(small(name), model) as attached:
            with attached.inference():
                found = [model(stack_inputs(0, index)) for index in range(3)]
            assert torch.is_grad_enabled()
            assert attached.counters().d2h_bytes == 0
        assert not any(tensor.requires_grad for tensor in found)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))

    def test_counts_what_it_copies(self, name: str):
        model, mode = Stack(), small(name)
        with under(mode, model) as attached:
            before = attached.counters()
            with attached.step():
                model(stack_inputs(0, 0)).sum().backward()
            moved = attached.counters() - before
        assert (moved.d2h_bytes > 0) == (name != "none")


def test_a_mode_that_overrides_nothing_is_the_resident_one():
    @dataclass(kw_only=True, eq=False)
    class Nothing(Mode):
        pass

    mode, model = Nothing(), Stack().to("meta")
    with under(mode, model) as attached:
        assert all(p.device.type == "cpu" for p in model.parameters())
        assert attached.counters() == Counters()
        assert attached.gradient_norms() == {}
    same_as_resident(Stack(dropout=0.2), Nothing())
    assert not mode.recomputes


def test_knobs_are_checked_one_by_one_and_then_together():
    @dataclass(kw_only=True, eq=False)
    class Ordered(Mode):
        low: int = knob(0, at_least=0)
        high: int = knob(9)

        def check(self) -> None:
            if self.low > self.high:
                raise KnobError("low", self.low, f"must be at most high={self.high}")

    assert Ordered(low=3).low == 3
    for knobs, message in (({"low": -1, "high": -2}, "low=-1: must be at least 0"), ({"low": 10}, "at most high=9")):
        with pytest.raises(KnobError, match=message):
            Ordered(**knobs)


def test_two_modes_are_never_equal():
    assert Mode() != Mode()
    assert len({Mode(), Mode()}) == 2


def test_activation_modes_stand_on_every_other_mode():
    over = [mode for mode in mode_classes().values() if issubclass(mode, ActivationMode)]
    assert over
    for mode in over:
        for name in MODES:
            if not issubclass(mode_classes()[name], ActivationMode):
                with under(mode(small(name)), model := Stack()) as attached, attached.step():
                    model(stack_inputs(0, 0)).sum().backward()
                assert all(torch.isfinite(p.grad).all() for p in model.parameters())
