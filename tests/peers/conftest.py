"""Tests of peers on a GPU are skipped where there is none."""

import pytest
import torch


@pytest.fixture(autouse=True)
def gpu(request: pytest.FixtureRequest):
    if request.node.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
