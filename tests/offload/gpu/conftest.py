"""For tests that compare two runs on a GPU bit for bit."""

import os
from collections.abc import Iterator

import pytest
import torch

# Read when cuBLAS starts: without it its kernels do not repeat.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Makes torch refuse operations for which it has no kernel that repeats."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
