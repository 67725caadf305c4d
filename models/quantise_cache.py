"""A file of quantised weights beside the weights that they were made from.

It is a safetensors file under another suffix, so that no program takes it for a shard. Its name has the format, the
dtype of the weights and a digest of the layers; its header has a digest of the weights that it was made from.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from models.quantise import QuantisedWeight, is_settled, stored_tensors
from models.safetensors_files import StoredTensor, open_file, read_headers, read_into, read_offsets, write_tensors
from models.weights import checkpoint_files
from models.whole_folder import write_file

SUFFIX = ".quantised"
SOURCE = "source"
# The bytes of each tensor, at its start and at its end, that are in the digest.
SAMPLED_BYTES = 4096


@dataclass(frozen=True)
class CacheFile:
    """The cache of the quantised weights of one model: `path`, whether it is there or not.

    `source` is the digest of the weights beside it.
    """

    path: Path
    source: str

    @classmethod
    def beside(cls, weights: Path, model: nn.Module) -> CacheFile:
        """Returns the cache for `model` beside `weights`, a file or folder of safetensors.

        Raises ValueError or FileNotFoundError, as `checkpoint_files` does.
        """
        files = sorted(checkpoint_files(weights))
        layers = list(quantised_weights(model))
        first = layers[0][1]
        names = hashlib.sha256("\n".join(name for name, _ in layers).encode()).hexdigest()[:8]
        dtype = str(first.dtype).removeprefix("torch.")
        arguments = "".join(f"-{key}{value}" for key, value in vars(first.format).items())
        return cls(files[0].parent / f"{first.format.name}{arguments}-{dtype}-{names}{SUFFIX}", source_digest(files))

    @property
    def exists(self) -> bool:
        return self.path.is_file()

    def check(self) -> None:
        """Raises ValueError in one line if the file is there and was made from other weights."""
        if not self.exists:
            return
        with open_file(self.path) as handle:
            found = (handle.metadata() or {}).get(SOURCE)
        if found != self.source:
            raise ValueError(f"{self.path} was made from other weights than those beside it: remove it")

    @torch.no_grad()
    def read(self, model: nn.Module) -> None:
        """Fills the quantised weights of `model`, but for settled ones.

        Raises ValueError, and changes nothing, if the file does not fit.
        """
        stored = self.checked(model)
        targets = {}
        for name, weight in quantised_weights(model):
            if not is_settled(weight):
                targets |= stored_tensors(name, weight)
        read_into(targets, stored)

    def checked(self, model: nn.Module) -> dict[str, StoredTensor]:
        """Returns the entries of the file. Raises ValueError if it does not fit the model, meta device or not."""
        stored = read_headers([self.path])
        for weight_name, weight in quantised_weights(model):
            for name, tensor in stored_tensors(weight_name, weight).items():
                if name not in stored or stored[name].shape != tuple(tensor.shape):
                    raise ValueError(f"{self.path} has no tensor {name} of this model: remove it")
        return stored

    def write(self, model: nn.Module) -> None:
        """Writes the quantised weights of `model`: aside first, so that a file under this name is whole.

        Raises OSError.
        """
        tensors = {}
        for name, weight in quantised_weights(model):
            tensors |= stored_tensors(name, weight)
        aside = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        try:
            write_file(aside, lambda write: write_tensors(write, tensors, {SOURCE: self.source}))
            aside.replace(self.path)
        finally:
            aside.unlink(missing_ok=True)


def quantised_weights(model: nn.Module) -> Iterator[tuple[str, QuantisedWeight]]:
    """Yields the quantised weights of `model` with their names; shared ones once."""
    yield from ((name, each) for name, each in model.named_parameters() if isinstance(each, QuantisedWeight))


def source_digest(files: list[Path]) -> str:
    """Returns a digest of safetensors files: of their names and sizes, their headers, and both ends of each tensor.

    To read all of a large model would take longer than to quantise it.
    """
    digest = hashlib.sha256()
    for path in files:
        offsets = read_offsets(path)
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            header = file.read(int.from_bytes(file.read(8), "little"))
            digest.update(f"{path.name} {size} {len(header)}\n".encode() + header)
            for start, end in offsets.values():
                for place in (start, max(start, end - SAMPLED_BYTES)):
                    file.seek(place)
                    digest.update(file.read(min(SAMPLED_BYTES, end - start)))
    return digest.hexdigest()
