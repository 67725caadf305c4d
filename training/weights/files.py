"""The weights that a run starts from: found before anything is planned, downloaded when they are needed."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from models.adapter_files import CONFIG_FILE as ADAPTER_CONFIG_FILE
from models.json_files import read_object
from models.safetensors_files import open_file, read_headers, tensor_pieces
from models.weights import checkpoint_files
from training.data.hub_client import HubName
from training.errors import UserError, as_user_error
from training.runs.checkpoint_files import MANIFEST_FILE, STATE_FILE, WEIGHTS_STEM, refuse_run
from training.runs.files import home_expanded

KEY = "model.weights"
# No other file of a repository is used, above all none that is unpickled.
PATTERNS = ("*.safetensors", "*.safetensors.index.json")
# Copies of the same weights in other dtypes or forms, which are not loaded.
COPIES = ("*.fp16.*", "*.bf16.*", "*.non_ema.*", "*.fp16-*", "*.non_ema-*", "consolidated*")
# Where a repository has a model: by itself, or as a part of a diffusion pipeline.
PARTS = ("", "transformer/", "unet/")
CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
# What else a model comes with, beside its tokenizer: small files, which no weights need.
PICTURES_FILE = "preprocessor_config.json"
SMALL_FILES = [GENERATION_FILE, PICTURES_FILE]
CONFIG_FILES = [f"{part}{CONFIG_FILE}" for part in PARTS]
# The stems of the weight files of transformers and of diffusers.
STEMS = ("model", "diffusion_pytorch_model")


def part_of(names: Iterable[str]) -> str | None:
    """Returns in which of PARTS the files of a repository have a model's configuration; None: in none."""
    known = set(names)
    return next((part for part in PARTS if f"{part}{CONFIG_FILE}" in known), None)


def weight_files_in(folder: Path) -> list[Path]:
    """Returns the safetensors files of a model in a folder, or of the model in a pipeline's folder; [] for none.

    Raises ValueError for a damaged index.
    """
    own = folder / part_in(folder)
    for stem in STEMS:
        for name in (f"{stem}.safetensors", f"{stem}.safetensors.index.json"):
            if (own / name).is_file():
                return list(checkpoint_files(own / name))
    return list(checkpoint_files(own)) if any(own.glob("*.safetensors")) else []


def weight_files(path: Path) -> list[Path]:
    """Returns the safetensors files of `path`: a file, an index, a folder. Raises FileNotFoundError or ValueError."""
    return (path.is_dir() and weight_files_in(path)) or list(checkpoint_files(path))


def nonfinite_weight(path: Path) -> str | None:
    """Returns the name of the first tensor in the files of `path` with a value that is not finite; None for none."""
    for name, stored in read_headers(weight_files(path)).items():
        with open_file(stored.file) as handle:
            if not all(piece.float().isfinite().all() for _, piece in tensor_pieces(handle, name)):
                return name
    return None


def _as_adapter(path: Path, given: str) -> str:
    """Returns the overrides that begin with the adapter in a folder."""
    try:
        values = read_object(path / ADAPTER_CONFIG_FILE, "")
    except ValueError:  # what is wrong with it, its own key says
        values = {}
    option = "dora" if values.get("use_dora") else "rslora" if values.get("use_rslora") else "lora"
    knobs = {"r": "rank", "lora_alpha": "alpha"}
    settings = [f"adapter.{knob}={values[key]}" for key, knob in knobs.items() if key in values]
    for key, knob in (("target_modules", "targets"), ("modules_to_save", "modules_to_save")):
        if isinstance(names := values.get(key), list):
            settings.append(f"'adapter.{knob}=[{','.join(sorted(names))}]'")
    return " ".join([f"adapter={option}", *settings, f"adapter.weights={given}"])


def part_in(folder: Path) -> str:
    """Returns in which of PARTS a local folder has a model's configuration; "" if in none."""
    return next((part for part in PARTS if (folder / part / CONFIG_FILE).is_file()), "")


def _wanted(part: str) -> tuple[list[str], list[str]]:
    """Returns the client's patterns for the files of a model's weights, and for those that are left out."""
    # The other folders of a repository have other models, and the same one in other forms.
    others = [*COPIES] if part else [*COPIES, "*/*"]
    return [f"{part}{pattern}" for pattern in (*PATTERNS, CONFIG_FILE)], others


@dataclass(frozen=True)
class ModelWeights:
    """The value of `model.weights`: a local file or folder, or the name of a model on the Hugging Face Hub.

    `cache` is the Hub client's cache when the weights were found: a dataset may set another one later. `part` is the
    one of PARTS, the folders of a pipeline, that has the weights.
    """

    given: str
    on_hub: HubName | None = None
    cache: str | None = None
    part: str = ""

    @classmethod
    def find(cls, given: str, *, ask: bool = True) -> Self:
        """Finds the weights without reading them; with `ask` False without the network. Raises UserError for none."""
        path = home_expanded(KEY, given)
        if path.exists():
            refuse_run(KEY, given, path)
            models = (file for stem in STEMS for file in path.glob(f"{stem}*.safetensors"))
            if (path / ADAPTER_CONFIG_FILE).is_file() and not any(models):
                raise UserError(
                    f"{KEY}={given}: has an adapter and no model: give it as {_as_adapter(path, given)}, and its base"
                    f" as {KEY}"
                )
            # A checkpoint of a run has other safetensors files, which must not be taken for the model.
            of_run = (path / MANIFEST_FILE).is_file() and (path / STATE_FILE).is_file()
            if of_run and not any(path.glob(f"{WEIGHTS_STEM}*")):
                raise UserError(
                    f"{KEY}={given}: the files of the model are missing from this checkpoint: choose another checkpoint"
                )
            with as_user_error(f"{KEY}={given}: "):
                weight_files(path)
            return cls(given)
        on_hub = HubName.of(given)
        if on_hub is None:
            raise UserError(
                f"{KEY}={given}: does not exist: give a .safetensors file, a folder of them, or the name of a model on"
                " the Hugging Face Hub (OWNER/NAME, or OWNER/NAME@REVISION)"
            )
        from huggingface_hub import constants

        found = cls(given, on_hub, constants.HF_HUB_CACHE)
        part = found._cached_part()
        if part is None:
            part = found._part_on_the_hub() if ask else ""
        return replace(found, part=part)

    def path(self) -> Path:
        """Returns the local file or folder, downloaded unless it is in the cache. Raises UserError if that fails."""
        if self.on_hub is None:
            return home_expanded(KEY, self.given)
        patterns, others = _wanted(self.part)
        small = SMALL_FILES if self._cached_part() is None else []
        return self.on_hub.folder(KEY, patterns + small, ignore_patterns=others, cache_dir=self.cache)

    def local_path(self) -> Path:
        """Returns the local file or folder. Raises UserError for one of the Hub that is not in the client's cache."""
        if self.on_hub is not None and self._cached_part() is None:
            by_hand = self.on_hub.by_hand(KEY)
            raise UserError(f"{KEY}={self.given}: is not in the cache of the Hub's client yet; {by_hand}")
        return self.path()

    def _cached_part(self) -> str | None:
        """Returns the part whose weights are in the client's cache; None if there are none, or not all."""
        # The client looks whether all files of these patterns are there.
        folder = self.on_hub.cached_folder(CONFIG_FILES, cache_dir=self.cache)
        if folder is None:
            return None
        part = part_in(folder)
        patterns, others = _wanted(part)
        folder = self.on_hub.cached_folder(patterns, ignore_patterns=others, cache_dir=self.cache)
        try:
            files = [] if folder is None else weight_files_in(folder)
        except ValueError:  # an index that is not complete
            return None
        return part if files and all(file.is_file() for file in files) else None

    def _part_on_the_hub(self) -> str:
        """Asks the Hub for the model's files. Raises UserError if there are no weights among them."""
        names = self.on_hub.files(KEY)
        part = part_of(names) or ""
        if not any(re.fullmatch(rf"{part}[^/]*\.safetensors", name) for name in names):
            raise self.on_hub.lacks(KEY, ".safetensors file: choose one that has")
        return part
