"""Opens the folder of a pipeline of diffusers around a network of our own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from models.json_files import read_object
from models.lora_files import prefix_of
from models.pipelines.encoded import INDEX
from models.quiet_imports import hide_bars, without_remarks


def open_pipeline(
    folder: Path,
    network: nn.Module,
    dtype: torch.dtype,
    *,
    without_text_encoders: bool = False,
    vae_dtype: torch.dtype | None = None,
    parts: Mapping[str, nn.Module | None] = MappingProxyType({}),
) -> Any:
    """Returns the pipeline in `folder` with `network` as its transformer or UNet; all else has its values, in `dtype`.

    Args:
        parts: take the places of its own, by name.
        vae_dtype: that of the VAE, if another.

    Raises ValueError in one line for a folder that diffusers cannot open.
    """
    with without_remarks():
        import diffusers

        # Asked of its own class, diffusers does not load a network that it is given.
        index = read_object(folder / INDEX, "download the pipeline again")
        # It would stay on the host, and make samples black.
        unused = {name: None for name in index if name == "safety_checker"}
        kind, given = getattr(diffusers, index["_class_name"]), {prefix_of(network): network, **unused, **parts}
        hide_bars()
        if without_text_encoders:
            given |= {part: None for part in index if part.startswith("text_encoder")}
        try:
            dtypes = {"default": dtype, "vae": vae_dtype or dtype}
            pipeline = kind.from_pretrained(folder, torch_dtype=dtypes, local_files_only=True, **given)
            _check_tokenizers(pipeline)
            return pipeline
        # Each of its parts may raise errors of any type.
        except Exception as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ValueError(f"diffusers cannot open the pipeline: {reason}") from error


def encoders_of(pipeline: Any, network: nn.Module) -> tuple[list[nn.Module], nn.Module]:
    """Returns the text encoders of a pipeline, and its VAE. Raises ValueError where it has none."""
    modules = {name: part for name, part in pipeline.components.items() if isinstance(part, nn.Module)}
    texts = [part for name, part in modules.items() if "text" in name and part is not network]
    if "vae" not in modules or not texts:
        raise ValueError(f"{type(pipeline).__name__} has no VAE or no text encoder: it makes no pictures of captions")
    return texts, modules["vae"]


def _check_tokenizers(pipeline: Any) -> None:
    """Raises ValueError for a tokenizer without words, which transformers makes of a folder without its files."""
    for name, part in pipeline.components.items():
        if name.startswith("tokenizer") and part is not None and part("a cat").input_ids == part("a dog").input_ids:
            raise ValueError(f"{name} has no vocabulary: download the pipeline again")
