"""The weights that a run starts from: found before anything is planned, downloaded when they are needed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from models.weights import checkpoint_files
from training.errors import UserError, first_line
from training.hub_client import ask_hub
from training.runs.paths import home_expanded

KEY = "model.weights"
# The names of repositories on the Hub; a path of two parts looks the same.
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
# No other file of a repository is used, above all none that is unpickled.
PATTERNS = ("*.safetensors", "*.safetensors.index.json")


@dataclass(frozen=True)
class ModelWeights:
    """The value of `model.weights`: a local file or folder, or the name of a model on the Hugging Face Hub.

    `cache` is where the Hub's client keeps files; the client of a dataset may use another place later.
    """

    given: str
    hub_name: str | None = None
    cache: str | None = None

    @classmethod
    def find(cls, given: str, *, ask: bool = True) -> ModelWeights:
        """Finds the weights without reading or downloading them. `ask` False does not ask the Hub either.

        Raises UserError naming the value, if neither is there: a file or folder of safetensors, or such a model.
        """
        path = home_expanded(KEY, given)
        if path.exists():
            try:
                checkpoint_files(path)
            except ValueError as error:
                raise UserError(f"{KEY}={given}: {error}") from error
            return cls(given)
        if not HUB_NAME.fullmatch(given):
            raise UserError(
                f"{KEY}={given}: does not exist: give a .safetensors file, a folder of them, or the name of a model on"
                " the Hugging Face Hub (OWNER/NAME)"
            )
        from huggingface_hub import HfApi, constants

        found = cls(given, given, constants.HF_HUB_CACHE)
        if ask and not found._is_cached():
            found._check(HfApi())
        return found

    def path(self) -> Path:
        """Returns the local file or folder. Downloads a model of the Hub, unless its files are in the client's cache.

        Raises UserError if the download fails.
        """
        if self.hub_name is None:
            return home_expanded(KEY, self.given)
        from huggingface_hub import snapshot_download

        try:
            return Path(snapshot_download(self.hub_name, allow_patterns=list(PATTERNS), cache_dir=self.cache))
        except Exception as error:  # the client's errors have no common base class
            raise UserError(
                f"{KEY}={self.given}: the download failed ({first_line(error)}); {self._by_hand}"
            ) from error

    @property
    def _by_hand(self) -> str:
        command = f"hf download {self.given} --local-dir DIR"
        return f"or run `{command}` where there is a network, and give {KEY}=DIR"

    def _is_cached(self) -> bool:
        from huggingface_hub import snapshot_download

        try:
            folder = snapshot_download(self.hub_name, cache_dir=self.cache, local_files_only=True)
            return all(file.is_file() for file in checkpoint_files(Path(folder)))
        except (
            OSError,
            ValueError,
        ):  # not there, or not complete
            return False

    def _check(self, api) -> None:
        given = f"{KEY}={self.given}: no such file or folder here; as a name on the Hub"
        info = ask_hub(api.model_info, self.hub_name, given, "model", self._by_hand)
        if not any(entry.rfilename.endswith(".safetensors") for entry in info.siblings or ()):
            raise UserError(f"{given}: that model has no .safetensors file: choose one that has")
