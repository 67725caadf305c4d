"""Seeds of random numbers that depend on names and numbers alone, not on what was drawn before."""

from __future__ import annotations

import hashlib


def seed_of(*key: int | str) -> int:
    """Returns the seed of `key`, such as (seed of the run, step, microbatch): 63 bits, different for every key."""
    digest = hashlib.blake2b(" ".join(map(str, key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1
