"""Seeds depend on their key alone."""

import pytest
import torch

from training.seeds import seed_of, seed_torch


def test_each_key_has_a_seed_of_its_own():
    seeds = {seed_of(seed, step, index) for seed in range(3) for step in range(12) for index in range(12)}
    assert len(seeds) == 3 * 12 * 12
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert seed_of(1, "evaluation", 0) == seed_of(1, "evaluation", 0) != seed_of(1, 0)


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", [0, 7, 2**63 - 1])
def test_torch_draws_as_after_its_own_function(seed: int, device: str):
    def drawn(seed_with) -> list[torch.Tensor]:
        torch.rand(3, device=device)
        seed_with(seed)
        return [torch.randn(5, device=place) for place in ("cpu", device)]

    for own, expected in zip(drawn(seed_torch), drawn(torch.manual_seed), strict=True):
        assert torch.equal(own, expected)
    assert torch.initial_seed() == seed
