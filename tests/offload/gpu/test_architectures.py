"""Architectures that people train, tiny: each under every mode equals the resident model on a GPU bit for bit.

Both run with kernels that repeat bit for bit. Where torch has none for an operation of an architecture, the test is
skipped with torch's reason.
"""

import functools

import pytest

from offload.modes.none import Resident
from tests.offload.helpers.architecture_cases import ARCHITECTURES, MODES, built, check
from tests.offload.helpers.foreign import run_steps
from tests.offload.helpers.late import ON_A_GPU
from tests.offload.helpers.models import under

pytestmark = [*ON_A_GPU, pytest.mark.usefixtures("deterministic")]


@functools.cache
def refusal(name: str) -> str | None:
    """Returns why torch cannot run the resident model with kernels that repeat; None if it can."""
    model, mode = built(name), Resident()
    try:
        with under(mode, model, "cuda") as attached:
            run_steps(model, [((), ARCHITECTURES[name].inputs())], attached, device="cuda")
    except RuntimeError as error:
        if "deterministic implementation" not in str(error):
            raise
        return str(error).partition(". ")[0]
    return None


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_trains_as_it_does_resident(name: str, mode: str):
    package = ARCHITECTURES[name].package
    pytest.importorskip(package, reason=f"needs {package}")
    if reason := refusal(name):
        pytest.skip(reason)
    check(name, mode, "cuda")
