"""Finds the places of a model's parameters in safetensors files, where their bytes are the same there and in memory."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor, nn

from models.quantise import QuantisedWeight, stored_tensors
from models.quantise_cache import CacheFile, quantised_weights
from models.safetensors_files import DTYPE_NAMES, StoredTensor, read_offsets
from models.weights import has_own_names, matched_weights


@dataclass(frozen=True)
class Place:
    """Bytes of `file`: from `offset` on, `nbytes`."""

    file: Path
    offset: int
    nbytes: int


@dataclass
class Places:
    """`found` has the places of a parameter, one for each plain tensor that it consists of.

    `reasons` says of the others why their bytes are not in the files.
    """

    found: dict[Tensor, list[Place]] = field(default_factory=dict)
    reasons: dict[Tensor, str] = field(default_factory=dict)


def find_places(model: nn.Module, path: Path, cache: CacheFile | None = None) -> Places:
    """Returns where the parameters of `model` are in the files at `path`; quantised ones in `cache`, if it is there.

    It reads headers, so the model may be on the meta device. A parameter of another dtype than its stored values has no
    place, nor has one that is made of several stored ones. Raises ValueError or FileNotFoundError where the files do
    not fit the model.
    """
    by_library = None if has_own_names(model, path) else getattr(model, "matched", None)
    matched, stored = matched_weights(model, path) if by_library is None else by_library(path)
    # The header of each file is read once.
    places, offsets_in = Places(), functools.cache(read_offsets)

    def place_of(name: str, stored: Mapping[str, StoredTensor]) -> Place:
        file = stored[name].file
        begin, end = offsets_in(file)[name]
        return Place(file, begin, end - begin)

    for parameter in model.parameters():
        places.reasons[parameter] = "are made of several stored tensors, or are not in the files"
    for name, tensor in matched.items():
        dtype = stored[name].dtype
        if dtype != DTYPE_NAMES.get(tensor.dtype):
            places.reasons[tensor] = f"are {dtype} in the files, and {tensor.dtype} here"
        elif not isinstance(tensor, QuantisedWeight):
            places.found[tensor] = [place_of(name, stored)]
    entries = cache.checked(model) if cache is not None and cache.exists else None
    for name, weight in quantised_weights(model):
        places.reasons[weight] = "are quantised by this run: the file that it leaves serves the next run"
        if entries is not None:
            places.found[weight] = [place_of(each, entries) for each in stored_tensors(name, weight)]
    for tensor in places.found:
        places.reasons.pop(tensor, None)
    return places
