"""Device memory in segments of a fixed size (cudaMalloc's): only these have handles with which others open them.

Segments that grow are made of pages, which change their owner by file descriptors alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from offload.torch_private import torch_internals

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@contextmanager
def fixed_segments() -> Iterator[None]:
    """Makes the allocator take new memory of a GPU in fixed segments, also where the environment lets segments grow.

    The settings of the environment are in force again afterwards.
    """
    settings = next(filter(None, map(os.environ.get, VARIABLES)), "")
    if "expandable_segments:True" not in settings:
        yield
        return
    torch_internals.set_allocator("expandable_segments:False")
    try:
        yield
    finally:
        torch_internals.set_allocator(settings)
