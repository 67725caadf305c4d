"""The modules of torch's own database of them, each under every mode, equal to the resident module on a GPU.

Both run with kernels that repeat bit for bit. Where torch has none for a module, the test is skipped with its reason.
"""

import pytest
from torch.testing._internal.common_modules import ModuleInfo

from tests.offload.helpers.late import ON_A_GPU
from tests.offload.helpers.torch_modules import MODULES, check

# Its gradient is added with atomics where windows overlap, and torch does not say so.
NOT_DETERMINISTIC = {"nn.AdaptiveMaxPool3d"}

pytestmark = [*ON_A_GPU, pytest.mark.usefixtures("deterministic")]


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("info", MODULES, ids=lambda info: info.name)
def test_a_module_trains_as_it_does_resident(info: ModuleInfo):
    if info.name in NOT_DETERMINISTIC:
        pytest.skip(f"{info.name} has no deterministic kernel")
    try:
        check(info, "cuda")
    except RuntimeError as error:
        # The resident module runs first, so the refusal is torch's own.
        if "deterministic" not in str(error):
            raise
        pytest.skip(str(error).partition(". ")[0])
