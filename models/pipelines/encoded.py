"""EncodedFolder: what the text encoders and the VAE of a pipeline have made, kept for all later runs.

It is below $XDG_CACHE_HOME/lightering/encoded (else ~/.cache/...), in a folder for each pipeline, precision and release
of the libraries: safetensors files named by what they are made of (a picture, a caption), and a file for the network's
call at each shape of latents.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch
from uuid import uuid4

import torch
from torch import Tensor

from models.json_files import read_object
from models.pipelines.calls import NetworkCall
from models.quantise_cache import source_digest

# What the results do not depend on; of the network and the scheduler, the pipeline asks for their configurations.
OTHERS = ("feature_extractor", "safety_checker")
CONFIGURED = {"transformer": "config.json", "unet": "config.json", "scheduler": "scheduler_config.json"}
# How a pipeline calls its parts, and what they compute, is in these.
LIBRARIES = ("diffusers", "transformers")
# Bytes at the end of a file that are read: the end of a torch archive lists the checksums of its tensors.
END = 1 << 26
INDEX = "model_index.json"
# Of the files; those of another one are not read.
VERSION = 7
# The calls of plans that are being made, by the path of the folder and the shape of latents.
_planned: dict[Path, dict[tuple[int, ...], NetworkCall]] = {}


class EncodedFolder:
    """The results of the pipeline in `pipeline`, a folder, in `dtype`; `overrides` are those of its network."""

    def __init__(self, pipeline: Path, dtype: torch.dtype, overrides: Mapping[str, Any] | None = None):
        self.pipeline = pipeline
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        name = f"{digest_of(pipeline, overrides)[:16]}-{str(dtype).removeprefix('torch.')}-{VERSION}"
        self.path = cache / "lightering" / "encoded" / name

    def has(self, key: str) -> bool:
        """Tells whether there are tensors of that key, in a whole file."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self._file(key), "pt"):
                return True
        except (FileNotFoundError, SafetensorError):
            return False

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
        return _loaded(self._prompt_file(prompt))

    def write_call(self, call: NetworkCall) -> None:
        """Keeps the network's call for latents of one shape."""
        _save(self._call_file(call.noise), call.state())

    def call_of(self, noise: Sequence[int]) -> NetworkCall | None:
        """Returns the network's call for latents of the shape `noise`; None: it was not asked for yet."""
        if found := _planned.get(self.path, {}).get(tuple(noise)):
            return found
        found = _loaded(self._call_file(noise))
        return found and NetworkCall.from_state(found)

    def calls(self) -> list[NetworkCall]:
        """Returns all that are known, the one of the largest latents first."""
        calls = [NetworkCall.from_state(found) for file in self.path.glob("call-*.pt") if (found := _loaded(file))]
        calls = {call.noise: call for call in calls} | _planned.get(self.path, {})
        return sorted(calls.values(), key=lambda call: (-torch.Size(call.noise).numel(), call.noise))

    def planned(self, calls: Sequence[NetworkCall]) -> AbstractContextManager:
        """Has `calls` known inside the block, and not kept: those that a plan has asked for without values."""
        return patch.dict(_planned, {self.path: {call.noise: call for call in calls}})

    def _file(self, key: str) -> Path:
        return self.path / f"{key}.safetensors"

    def _prompt_file(self, prompt: str) -> Path:
        return self.path / f"prompt-{hashlib.sha256(prompt.encode()).hexdigest()}.pt"

    def _call_file(self, noise: Sequence[int]) -> Path:
        return self.path / f"call-{'x'.join(map(str, noise))}.pt"


def _loaded(path: Path) -> Any:
    """Returns what `_save` was given; None if there is no file, or only the beginning of one."""
    return torch.load(path, weights_only=True) if zipfile.is_zipfile(path) else None


def _save(path: Path, value: Any) -> None:
    content = io.BytesIO()
    torch.save(value, content)
    _write(path, content.getvalue())


def _write(path: Path, content: bytes) -> None:
    # Nobody reads half a file, and two runs may write the same one, in containers with the same process number.
    partial = path.with_suffix(f".{uuid4().hex}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(content)
        partial.replace(path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        message = f"cannot write {path}: {error.strerror}: make room there, or set XDG_CACHE_HOME to another folder"
        raise ValueError(message) from error


def digest_of(pipeline: Path, overrides: Mapping[str, Any] | None = None) -> str:
    """Returns the SHA-256 of what decides the results: libraries, configurations, tokenizers, samples of weights."""
    digest, weights = hashlib.sha256((pipeline / INDEX).read_bytes()), []
    made_by = [[version(library) for library in LIBRARIES], dict(overrides or {})]
    digest.update(json.dumps(made_by, sort_keys=True, default=list).encode())
    for folder in sorted(pipeline.iterdir()):
        if not folder.is_dir() or folder.name in OTHERS or folder.name.startswith("."):
            continue
        if name := CONFIGURED.get(folder.name):
            found = read_object(folder / name, "download the pipeline again")
            # Others tell where it is from.
            told = {key: value for key, value in found.items() if key == "_class_name" or not key.startswith("_")}
            digest.update(json.dumps(told, sort_keys=True).encode())
            continue
        for file in sorted(folder.iterdir()):
            if file.suffix == ".safetensors":
                weights.append(file)
            elif file.is_file() and not file.name.startswith("."):
                with file.open("rb") as content:
                    content.seek(max(0, file.stat().st_size - END))
                    digest.update(file.name.encode() + content.read())
    if weights:
        digest.update(source_digest(weights).encode())
    return digest.hexdigest()
