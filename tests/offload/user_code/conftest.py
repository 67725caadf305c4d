"""A fixture for scenarios that run on the CPU, and once more on a GPU where there is one."""

from __future__ import annotations

import pytest
import torch

from tests.offload.helpers import user_code

ON_A_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=ON_A_GPU)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(user_code, "DEVICE", request.param)
    return request.param
