"""The modules of torch's own database of them, each under every mode, equal to the resident module bit for bit."""

import pytest
from torch.testing._internal.common_modules import ModuleInfo

from offload.modes.layer_stream import LayerStream
from tests.offload.helpers.torch_modules import LAZY, MODULES, built, check, samples


@pytest.mark.sampled
@pytest.mark.parametrize("info", MODULES, ids=lambda info: info.name)
def test_a_module_trains_as_it_does_resident(info: ModuleInfo):
    check(info)


@pytest.mark.parametrize("info", LAZY, ids=lambda info: info.name)
def test_a_module_without_shapes_is_refused(info: ModuleInfo):
    with pytest.raises(ValueError, match="has no shape yet: run the model once"):
        LayerStream().footprint(built(info, samples(info)[0]))
