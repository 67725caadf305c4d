"""Imports packages that remark on what this machine lacks, without the remarks.

torchao and bitsandbytes print, log and warn about kernels for other machines, none of which are used here, and
transformers, diffusers and peft import them wherever they are installed.
"""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress

# The second is a part that transformers imports.
QUANTISERS = ("torchao", "torchao.prototype.safetensors.safetensors_support", "bitsandbytes")


@contextmanager
def without_remarks() -> Iterator[None]:
    """Silences logs up to warnings, Python's warnings, and prints."""
    shown = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with redirect_stdout(None), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(shown)


def import_quantisers() -> None:
    """Imports what is installed of torchao and bitsandbytes, before another library does."""
    for package in QUANTISERS:
        # One that cannot be imported is reported where it is needed.
        with without_remarks(), suppress(Exception):
            importlib.import_module(package)
