"""A fixture for scenarios that run on the CPU, and once more on a GPU where there is one."""

import pytest
import torch

from tests.offload.helpers import user_code

# Not skipped where there is none: hundreds of tests have this fixture.
GPUS = [pytest.param("cuda", marks=pytest.mark.gpu)] if torch.cuda.is_available() else []


@pytest.fixture(params=["cpu", *GPUS])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(user_code, "DEVICE", request.param)
    return request.param
