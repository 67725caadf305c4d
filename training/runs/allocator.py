"""Configures torch's allocator of GPU memory, before torch is imported: segments that grow, in place of fixed ones.

Tensors of many sizes leave pieces in fixed segments that no later tensor fits into. Segments that grow are pages which
the allocator maps one behind the other, so free pages serve any size. This file needs the standard library alone.
"""

from __future__ import annotations

import os

SETTING = "expandable_segments:True"
NAME = "PYTORCH_ALLOC_CONF"
# The name of older releases, and of builds for AMD's GPUs.
OTHER_NAMES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
ADVICE = f"{NAME}={SETTING} before the command joins free pieces of memory"


def expand_segments() -> None:
    """Makes segments grow in this process and those it starts, unless the user has configured the allocator."""
    if not any(os.environ.get(name) for name in (NAME, *OTHER_NAMES)):
        os.environ[NAME] = SETTING


def segments_expand() -> bool:
    """Tells whether the allocator is configured so."""
    return any(SETTING in os.environ.get(name, "") for name in (NAME, *OTHER_NAMES))
