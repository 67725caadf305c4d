"""EncodedFolder: what the text encoders and the VAE of a pipeline have made, kept for all later runs.

It is below $XDG_CACHE_HOME/lightering/encoded (else ~/.cache/...), in a folder for each pipeline and precision:
safetensors files named by what they are made of (a picture, a caption), and a file for the network's call at each shape
of latents.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.pipelines.calls import NetworkCall
from models.quantise_cache import source_digest

# What the results do not depend on.
OTHERS = ("transformer", "unet", "scheduler", "feature_extractor", "safety_checker")
INDEX = "model_index.json"
# Of the files; those of another one are not read.
VERSION = 5
# The calls of plans that are being made, by the path of the folder and the shape of latents.
_planned: dict[Path, dict[tuple[int, ...], NetworkCall]] = {}


class EncodedFolder:
    """The results of the pipeline in `pipeline`, a folder, in `dtype`."""

    def __init__(self, pipeline: Path, dtype: torch.dtype):
        self.pipeline = pipeline
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        name = f"{digest_of(pipeline)[:16]}-{str(dtype).removeprefix('torch.')}-{VERSION}"
        self.path = cache / "lightering" / "encoded" / name

    def has(self, key: str) -> bool:
        """Tells whether there are tensors of that key."""
        return self._file(key).is_file()

    def write(self, key: str, tensors: Mapping[str, Tensor]) -> None:
        """Keeps tensors by their names."""
        # Not at the top: composing imports the tasks, and these import this file.
        from safetensors.torch import save

        _write(self._file(key), save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}))

    def read(self, key: str) -> dict[str, Tensor]:
        """Returns what `write` was given, on the CPU."""
        from safetensors.torch import load_file

        return load_file(self._file(key))

    def write_prompt(self, prompt: str, encoded: Sequence[Any]) -> None:
        """Keeps what the pipeline's `encode_prompt` returned for a prompt of samples: tensors, and None, in tuples."""
        _save(self._prompt_file(prompt), list(encoded))

    def prompt_of(self, prompt: str) -> list[Any] | None:
        """Returns what `write_prompt` was given for `prompt`; None if it was not."""
        file = self._prompt_file(prompt)
        return torch.load(file, weights_only=True) if file.is_file() else None

    def write_call(self, call: NetworkCall) -> None:
        """Keeps the network's call for latents of one shape."""
        _save(self._call_file(call.noise), call.state())

    def call_of(self, noise: Sequence[int]) -> NetworkCall | None:
        """Returns the network's call for latents of the shape `noise`; None: it was not asked for yet."""
        if found := _planned.get(self.path, {}).get(tuple(noise)):
            return found
        file = self._call_file(noise)
        return NetworkCall.from_state(torch.load(file, weights_only=True)) if file.is_file() else None

    def calls(self) -> list[NetworkCall]:
        """Returns all that are known, the one of the largest latents first."""
        files = self.path.glob("call-*.pt")
        calls = [NetworkCall.from_state(torch.load(file, weights_only=True)) for file in files]
        calls = {call.noise: call for call in calls} | _planned.get(self.path, {})
        return sorted(calls.values(), key=lambda call: (-torch.Size(call.noise).numel(), call.noise))

    @contextmanager
    def planned(self, calls: Sequence[NetworkCall]) -> Iterator[None]:
        """Has `calls` known inside the block, and not kept: those that a plan has asked for without values."""
        _planned[self.path] = {call.noise: call for call in calls}
        try:
            yield
        finally:
            del _planned[self.path]

    def _file(self, key: str) -> Path:
        return self.path / f"{key}.safetensors"

    def _prompt_file(self, prompt: str) -> Path:
        return self.path / f"prompt-{hashlib.sha256(prompt.encode()).hexdigest()}.pt"

    def _call_file(self, noise: Sequence[int]) -> Path:
        return self.path / f"call-{'x'.join(map(str, noise))}.pt"


def _save(path: Path, value: Any) -> None:
    content = io.BytesIO()
    torch.save(value, content)
    _write(path, content.getvalue())


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Nobody reads half a file, and two runs may write the same one.
    partial = path.with_suffix(f".{os.getpid()}.partial")
    partial.write_bytes(content)
    partial.replace(path)


def digest_of(pipeline: Path) -> str:
    """Returns the SHA-256 of what decides the results: weights by samples of their bytes, all other files in full."""
    digest, weights = hashlib.sha256((pipeline / INDEX).read_bytes()), []
    for folder in sorted(pipeline.iterdir()):
        if not folder.is_dir() or folder.name in OTHERS or folder.name.startswith("."):
            continue
        for file in sorted(folder.iterdir()):
            if file.suffix == ".safetensors":
                weights.append(file)
            elif file.is_file() and file.suffix in (".json", ".txt", ".model", ".jinja"):
                digest.update(file.name.encode() + file.read_bytes())
    if weights:
        digest.update(source_digest(weights).encode())
    return digest.hexdigest()
