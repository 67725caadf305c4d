"""Seeds of random numbers that depend on names and numbers alone, not on what was drawn before."""

from __future__ import annotations

import hashlib

import torch


def seed_of(*key: int | str) -> int:
    """Returns the seed of `key`, such as (seed of the run, step, microbatch): 63 bits, different for every key."""
    digest = hashlib.blake2b(" ".join(map(str, key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


def seed_torch(seed: int) -> None:
    """Seeds the generators of the CPU and of the GPUs, as `torch.manual_seed` does.

    That also notes the seed, with a formatted stack, for each kind of device that is not in use: a millisecond in which
    a GPU waits at the start of a step.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
