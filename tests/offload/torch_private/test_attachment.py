"""A module has one mode at a time, and modules around it and inside it count."""

from __future__ import annotations

import pytest
from torch import nn

from offload.modes.bounce_linear import BounceLinear
from offload.modes.none import Resident
from offload.streams import registry
from offload.torch_private.attachment import Attachment, attaching


@pytest.fixture
def model() -> nn.Module:
    return nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2))


def test_a_module_inside_or_around_an_attached_one_is_refused_by_its_name(model: nn.Module):
    attachment = Attachment(model[0], "layer_stream")
    for other, name in ((model[0], "Sequential"), (model[0][0], "Linear"), (model, "0"), (nn.Sequential(model), "0.0")):
        with pytest.raises(
            RuntimeError, match=rf"^{name} is attached already, to the mode layer_stream: detach"
        ) as found:
            Attachment(other, "none")
        assert "\n" not in str(found.value)
    # Nothing was noted of those that were refused.
    Attachment(model[1], "none").release()
    attachment.release()
    Attachment(model, "none").release()


def test_an_exception_while_attaching_releases(model: nn.Module, streams: registry.Streams):
    with pytest.raises(ZeroDivisionError), attaching(model, Resident(), streams):
        raise ZeroDivisionError
    with attaching(model, Resident(), streams) as attachment:
        pass
    with pytest.raises(RuntimeError, match="to the mode none"):
        Attachment(model, "other")
    attachment.release()


def test_a_device_in_place_of_its_streams_is_refused(model: nn.Module):
    for mode in (Resident(), BounceLinear()):
        with pytest.raises(TypeError, match=r"^attach to 'cpu': give the streams of a device, as offload.acquire"):
            mode.attach(model, "cpu")
