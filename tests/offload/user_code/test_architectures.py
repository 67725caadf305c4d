"""Architectures that people train, tiny: under the modes they equal the resident model bit for bit.

Each meets one of the modes in every run; the other pairs are slow tests. On a GPU all run
(tests/offload/gpu/test_architectures.py).
"""

import socket

import pytest

from offload.blocks import find_blocks
from tests.offload.helpers.architecture_cases import ARCHITECTURES, MODES, built, check


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("these tests need no network")

    monkeypatch.setattr(socket.socket, "connect", refuse)


CASES = [
    pytest.param(name, mode, marks=() if (row + column) % len(MODES) == 0 else pytest.mark.slow)
    for row, name in enumerate(ARCHITECTURES)
    for column, mode in enumerate(MODES)
]


@pytest.mark.sampled
@pytest.mark.parametrize(("name", "mode"), CASES)
def test_trains_as_it_does_resident(name: str, mode: str):
    """The stream checker also sees operations that read weights in host memory, which a GPU would refuse."""
    check(name, mode)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_blocks_that_are_found_are_most_of_the_model(name: str):
    """The bound is for tiny models: embeddings are a small part of a real one."""
    model = built(name)
    sizes = {p: p.nbytes for p in model.parameters()}
    within = {p for _, block in find_blocks(model) for p in block.parameters()}
    assert sum(sizes[p] for p in within) > 0.55 * sum(sizes.values())
