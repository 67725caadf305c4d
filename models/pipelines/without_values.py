"""A pipeline whose VAE and text encoders have no weights, so that its calls are known before anything is loaded.

Text encoders run on the meta device, which tells the shapes of their results, and answer with made-up numbers of these
shapes. All other code of the pipeline runs as it is, on real tensors: it may drop padding by a mask, or ask for values.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from models.json_files import read_object
from models.library_dtypes import default_dtype, keep_float32, kept_by_diffusers
from models.pipelines.encoded import INDEX
from models.pipelines.recording import CPU
from models.quiet_imports import hide_bars, without_remarks

PARTS = ("text_encoder", "vae")
# Different numbers for different tokens, from 0 to 1.
TOKENS = 97


def parts_without_values(
    folder: Path,
    dtype: torch.dtype,
    prefixes: tuple[str, ...] = PARTS,
    vae_dtype: torch.dtype | None = None,
) -> dict[str, nn.Module]:
    """Returns the text encoders and the VAE of a pipeline by name, on the meta device, as `open_pipeline` loads them.

    Of these only the ones whose names begin with one of `prefixes`.

    Raises errors of any type for parts that cannot be made.
    """
    index, parts = read_object(folder / INDEX, "download the pipeline again"), {}
    with without_remarks():
        for name in (name for name in index if name.startswith(prefixes) and isinstance(index[name][0], str)):
            library, kind = index[name]
            made = getattr(importlib.import_module(library), kind)
            hide_bars()
            if library == "diffusers":
                its_dtype = (vae_dtype if name == "vae" else None) or dtype
                with torch.device("meta"), default_dtype(its_dtype):
                    parts[name] = made.from_config(made.load_config(folder / name))
                keep_float32(parts[name], kept_by_diffusers(made), its_dtype)
            else:
                options = {"dtype": dtype, "device_map": "meta", "local_files_only": True}
                parts[name] = made.from_pretrained(folder / name, **options)
            parts[name].requires_grad_(False).eval()
    return parts


@dataclass(frozen=True)
class EncoderForward:
    """A forward of a text encoder without values. `arguments` and `keywords` have real integers and masks."""

    encoder: nn.Module
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]

    @property
    def tokens(self) -> Tensor:
        """The numbers of the tokens, [B, length]."""
        given = (self.keywords.get("input_ids"), *tree_leaves((self.arguments, self.keywords)))
        return next(each for each in given if isinstance(each, Tensor))

    def __call__(self) -> Any:
        """Runs the encoder; floating-point tensors are on the meta device."""
        with _KnownIntegers():
            return self.encoder(*self.arguments, **self.keywords)

    def answer(self, known: dict[tuple, Any]) -> Any:
        """Returns what the encoder would, on the CPU, with numbers that depend on the tokens alone.

        Their shapes are those of `known` results, to which it adds: they depend on how many tokens there are, and on
        all else that the encoder is given, as a mask of padding.
        """
        tokens = self.tokens
        given = tree_leaves((self.arguments, self.keywords))
        seen = [
            each if not isinstance(each, Tensor) else each.shape if each is tokens or each.is_meta else each.tolist()
            for each in given
        ]
        key = self.encoder, repr(seen)
        if key not in known:
            with _KnownIntegers():
                known[key] = type(self.encoder).forward(self.encoder, *self.arguments, **self.keywords)
        mask = self.keywords.get("attention_mask")
        # Padding to a common length is no part of a text.
        texts = (tokens if mask is None else tokens * mask).sum(dim=1)

        def values(tensor: Tensor) -> Tensor:
            numbers = tokens if tensor.shape[:2] == tokens.shape else texts
            numbers = ((numbers % TOKENS + 1) / TOKENS).to(tensor.dtype)
            return numbers.view(*numbers.shape, *[1] * (tensor.ndim - numbers.ndim)).expand(tensor.shape).clone()

        return tree_map_only(Tensor, values, known[key])


@contextmanager
def answering(encoders: Sequence[nn.Module]) -> Iterator[list[EncoderForward]]:
    """Has text encoders on the meta device answer without values inside the block.

    Yields the list of their forwards, which grows: one for each encoder and shape of tokens.
    """
    forwards: list[EncoderForward] = []
    known: dict[tuple, Any] = {}

    def forward(encoder: nn.Module, *arguments: Any, **keywords: Any) -> Any:
        found = EncoderForward(encoder, arguments, keywords)
        if not any(each.encoder is encoder and each.tokens.shape == found.tokens.shape for each in forwards):
            forwards.append(found)
        return found.answer(known)

    with ExitStack() as stack:
        for encoder in encoders:
            stack.enter_context(patch.object(encoder, "forward", partial(forward, encoder)))
        yield forwards


class _KnownIntegers(TorchDispatchMode):
    """Computes integers and masks on the CPU, with values, and all else on the meta device.

    An encoder decides by them: whether it needs a mask, which place a token has.
    """

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(each, Tensor) and each.is_meta for each in tree_leaves((args, kwargs))):
            args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), (args, kwargs))
            return function(*args, **kwargs)
        found = function(*args, **kwargs)
        if isinstance(found, Tensor) and found.is_meta and not found.is_floating_point():
            # Made on the device of the encoder, or moved there.
            found = function(*args, **kwargs | {"device": CPU})
        if isinstance(found, Tensor) and not found.is_meta and not found._is_view():
            # Counted where memory is, for as long as this one lives.
            found.on_meta = torch.empty_like(found, device="meta")
        return found
