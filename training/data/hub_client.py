"""Models on the Hugging Face Hub: names, downloads, and requests whose failures are explained in a line."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

from training.errors import UserError, as_user_error, first_line

# Without network the client alone would retry for half a minute.
TIMEOUT_S = 5.0


class HubName(NamedTuple):
    """The name of a model on the Hub, and the branch, tag or commit that is taken; None: the newest."""

    name: str
    revision: str | None = None

    def __str__(self) -> str:
        return self.name if self.revision is None else f"{self.name}@{self.revision}"

    @classmethod
    def of(cls, given: str) -> Self | None:
        """Reads OWNER/NAME or OWNER/NAME@REVISION; None for anything else. A path of two parts looks the same."""
        found = re.fullmatch(r"([\w-][\w.-]*/[\w.-]+)(?:@([\w][\w./-]*))?", given)
        return found and cls(*found.groups())

    def by_hand(self, key: str) -> str:
        """Returns what to do where the Hub cannot be reached, for the key that the name was given for."""
        revision = f" --revision {self.revision}" if self.revision else ""
        command = f"hf download {self.name}{revision} --local-dir DIR"
        return f"or run `{command}` where there is a network, and give {key}=DIR"

    def files(self, key: str) -> list[str]:
        """Asks the Hub which files the model has. `key` was given the name. Raises UserError if there is no answer."""
        from huggingface_hub import HfApi

        request = partial(HfApi().model_info, revision=self.revision)
        info = ask_hub(request, self.name, self._given(key), "model", self.by_hand(key))
        return [entry.rfilename for entry in info.siblings or ()]

    def lacks(self, key: str, what: str) -> UserError:
        """Returns the error for a model on the Hub without files that are needed."""
        return UserError(f"{self._given(key)}: that model has no {what}")

    def folder(self, key: str, patterns: list[str], **options: Any) -> Path:
        """Returns the folder in the client's cache with the files that match `patterns`, downloaded if need be.

        `key` was given the name. Raises UserError if the download fails.
        """
        # The client's errors have no common base class.
        with as_user_error(f"{key}={self}: the download failed (", Exception, after=f"); {self.by_hand(key)}"):
            return self._snapshot(patterns, **options)

    def cached_folder(self, patterns: list[str], **options: Any) -> Path | None:
        """Returns that folder without asking the Hub; None if nothing of it is in the client's cache."""
        try:
            return self._snapshot(patterns, local_files_only=True, **options)
        except (OSError, ValueError):
            return None

    def _given(self, key: str) -> str:
        return f"{key}={self}: no such file or folder here; as a name on the Hub"

    def _snapshot(self, patterns: list[str], **options: Any) -> Path:
        from huggingface_hub import constants, snapshot_download

        options = {"cache_dir": constants.HF_HUB_CACHE} | options
        return Path(snapshot_download(self.name, revision=self.revision, allow_patterns=patterns, **options))


def refuse_keys_of_hub(name: str, **given: str | None) -> None:
    """Raises UserError for a key of dataset that is given and has no effect, because `name` is on this machine."""
    for key, value in given.items():
        if value is not None:
            raise UserError(f"dataset.{key}={value}: has no effect on dataset.name={name}, a local one: leave it out")


def ask_for_dataset(name: str, revision: str | None, otherwise: str) -> None:
    """Raises UserError if the Hub does not answer, or has no dataset of this name and revision; see `ask_hub`."""
    from huggingface_hub import HfApi

    given = f"dataset.name={name}" + (f" dataset.revision={revision}" if revision else "")
    ask_hub(partial(HfApi().dataset_info, revision=revision), name, given, "dataset", otherwise)


def ask_hub(request: Callable[..., Any], name: str, given: str, kind: str, otherwise: str) -> Any:
    """Calls `request(name, timeout=...)` of the Hub's client and returns its answer.

    A message begins with `given`, the key with its value. `kind` is what `name` names, such as a dataset. `otherwise`
    is what to do without the Hub. Raises UserError without a network, if the repository or revision does not exist, or
    if the user has no permission.
    """
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        return request(name, timeout=TIMEOUT_S)
    except GatedRepoError as error:
        raise UserError(
            f"{given}: needs its owner's permission; ask for it on huggingface.co, then set HF_TOKEN"
        ) from error
    except (HFValidationError, RepositoryNotFoundError) as error:
        raise UserError(
            f"{given}: no such {kind} on the Hub; check the spelling (OWNER/NAME), and set HF_TOKEN if it is private"
        ) from error
    except RevisionNotFoundError as error:
        raise UserError(f"{given}: that {kind} has no such revision: give a branch, a tag or a commit of it") from error
    except Exception as error:  # each release of the client may use another HTTP library, with other errors
        raise UserError(
            f"{given}: the Hugging Face Hub did not answer ({first_line(error)}); check the network, {otherwise}"
        ) from error
