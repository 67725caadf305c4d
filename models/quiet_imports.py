"""Uses packages without their remarks and progress bars, which say nothing of a run.

torchao and bitsandbytes print, log and warn about kernels for other machines, none of which are used here, and
transformers, diffusers and peft import them wherever they are installed. transformers and diffusers show bars while
they load a pipeline, and log a line for each long text.
"""

from __future__ import annotations

import importlib
import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from unittest.mock import patch

import torch

# The second is a part that transformers imports.
QUANTISERS = ("torchao", "torchao.prototype.safetensors.safetensors_support", "bitsandbytes")
LIBRARIES = ("transformers", "diffusers")


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
        if package in sys.modules:
            continue
        # One that cannot be imported is reported where it is needed.
        with without_remarks(), suppress(Exception), ExitStack() as stack:
            if package == "bitsandbytes":
                # Its functions for devices without its kernels: to compile them imports all of torch's compiler.
                stack.enter_context(patch.object(torch, "compile", lambda function, **_: function))
            importlib.import_module(package)


def hide_bars() -> None:
    """Switches off the progress bars of transformers and diffusers, as far as they are imported.

    Downloads keep theirs, which transformers would switch off too.
    """
    from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars

    were_hidden = are_progress_bars_disabled()
    for library in LIBRARIES:
        if (module := sys.modules.get(f"{library}.utils.logging")) is not None:
            module.disable_progress_bar()
    if not were_hidden:
        enable_progress_bars()


class _Collector(logging.Handler):
    """Keeps each message once, in order."""

    def __init__(self):
        super().__init__()
        self.messages: dict[str, None] = {}

    def emit(self, record: logging.LogRecord) -> None:
        self.messages[record.getMessage()] = None


@contextmanager
def remarks_collected() -> Iterator[list[str]]:
    """Yields a list that has, behind the block, what transformers and diffusers logged in it, and showed nobody."""
    collector, remarks = _Collector(), []
    loggers = [logging.getLogger(library) for library in LIBRARIES]
    before = [(each.handlers, each.propagate) for each in loggers]
    for each in loggers:
        each.handlers, each.propagate = [collector], False
    try:
        yield remarks
    finally:
        for each, (handlers, propagate) in zip(loggers, before, strict=True):
            each.handlers, each.propagate = handlers, propagate
        remarks += collector.messages
