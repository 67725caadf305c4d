"""Seeds depend on their key alone."""

from __future__ import annotations

from training.seeds import seed_of


def test_each_key_has_a_seed_of_its_own():
    seeds = {seed_of(seed, step, index) for seed in range(3) for step in range(12) for index in range(12)}
    assert len(seeds) == 3 * 12 * 12
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert seed_of(1, "evaluation", 0) == seed_of(1, "evaluation", 0) != seed_of(1, 0)
